"""A torch module, with inputs and outputs by the names of an ONNX file that was made from it.

Options:

- `module`: FILE.py:NAME (posexport.runtimes.module_file), whose file is run, or the folder of a checkpoint, whose whole
  model transformers builds (posexport.runtimes.checkpoint_module).
- `wide` (default true): in float64, whatever dtypes the module names, as a reference.
- `dtype`: the dtype of its weights if it is not `wide`, by default its own.
- `last_bits`: a seed. Weights differ in their last bits, which shows the possible effect of rounding.
- `layers` (default false): the hidden states of its layers (posexport.runtimes.layer_states) in place of its outputs.

Inputs and outputs of the file are those of the module with the same names or, if it has none of these names, those in
its order.

The large weights of a checkpoint stay mapped files. They are converted when they are read, for several sets of inputs
at once, so that only one of them is in memory in float64.
"""

from __future__ import annotations

import copy
import inspect
import platform
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from posexport.artifact.graph_file import read_graph
from posexport.artifact.passing_dtypes import passing_dtypes_of
from posexport.errors import RequestError, check_known, shown
from posexport.models.weights import TORCH_DTYPES
from posexport.runtimes.base import Arrays, check_onnx_file
from posexport.runtimes.checkpoint_module import CheckpointModule, load_checkpoint
from posexport.runtimes.layer_states import layer_states
from posexport.runtimes.lockstep import GetWeight, in_lockstep, make_each
from posexport.runtimes.module_file import UserModule, load_module
from posexport.runtimes.module_reference import checkpoint_of
from posexport.runtimes.module_values import Bound, bind, outputs_of, replaced, tensors_of
from posexport.runtimes.tensors import to_numpy, to_torch
from posexport.runtimes.torch_eager import last_bits_changed, timed

OPTIONS = ("module", "wide", "dtype", "last_bits", "layers")

Module = UserModule | CheckpointModule

_WIDE = {torch.float32: torch.float64, torch.float16: torch.float64, torch.bfloat16: torch.float64}
_WIDE |= {torch.complex64: torch.complex128, torch.complex32: torch.complex128}

_HALF = {10: torch.float16, 16: torch.bfloat16}
"""ONNX's numbers of element types."""


LARGE = 2**16
"""From this number of elements on, a checkpoint's weight is converted when it is read."""


class _Wide(TorchDispatchMode):
    """Operators get double precision in place of every other: casts to others do nothing, but for those to the
    `passing` dtypes (posexport.artifact.passing_dtypes) of values that follow from whole numbers alone."""

    def __init__(self, get_weight: GetWeight, passing: frozenset[torch.dtype] = frozenset()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._get_weight, self._passing = get_weight, passing
        self._plain: dict[int, weakref.ref[Tensor]] = {}  # floats that follow from whole numbers alone

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.embedding.default:  # only the rows that are looked up are converted
            return self._widened(func(*args, **kwargs or {}))
        plain = all(self._is_plain(value) for value in tree_leaves((args, kwargs)))
        args, kwargs = tree_map(partial(self._widened, plain=plain), (args, kwargs or {}))
        made = func(*args, **kwargs)
        for value in tree_leaves(made):
            if not plain:
                self._plain.pop(id(value), None)
            elif isinstance(value, Tensor) and value.is_floating_point():
                self._plain[id(value)] = weakref.ref(value)
        return made

    def _is_plain(self, value: Any) -> bool:
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            return True
        known = self._plain.get(id(value))
        return known is not None and known() is value

    def _widened(self, value: Any, plain: bool = False) -> Any:
        if isinstance(value, torch.dtype):
            return value if plain and value in self._passing else _WIDE.get(value, value)
        if not isinstance(value, Tensor) or value.dtype not in _WIDE:
            return value
        if value.dtype in self._passing and self._is_plain(value):
            return value
        kind = _WIDE[value.dtype]
        if isinstance(value, torch.nn.Parameter) and value.numel() >= LARGE:
            return self._get_weight(value, lambda: value.to(kind))
        return value.to(kind)


@contextmanager
def double_by_default() -> Iterator[None]:
    """A context in which tensors that torch makes without a dtype are float64, in every thread."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


class ModuleRunner:
    """A module whose inputs and outputs have the names of a file."""

    def __init__(
        self,
        user: Module,
        inputs: Sequence[str],
        outputs: Sequence[str],
        dtype: torch.dtype | None,
        wide: bool,
        layers: bool = False,
        passing: frozenset[torch.dtype] = frozenset(),
    ) -> None:
        self._user, self._output_names, self._wide, self._layers = user, outputs, wide, layers
        self._passing = passing
        self._bound = bind(user.module, _template(user, inputs))
        own = tensors_of(self._bound)
        self._order = paired(f"{user.reference!r} takes", own, "inputs", inputs)
        self._dtypes = [dtype or tensor.dtype for tensor in own.values()]

    def run(self, inputs: Arrays) -> Arrays:
        """Outputs by the file's names, in float64 if the runner is `wide`."""
        with double_by_default() if self._wide else nullcontext():
            return self._outputs_of(inputs, make_each)

    def run_all(self, inputs: Sequence[Arrays]) -> Iterator[tuple[int, Arrays]]:
        """The number and the outputs of each set of inputs as it ends."""
        if not self._wide or self._layers or isinstance(self._user, UserModule):
            yield from enumerate(map(self.run, inputs))
            return
        with double_by_default():
            yield from in_lockstep([partial(self._outputs_of, arrays) for arrays in inputs])

    def _outputs_of(self, inputs: Arrays, get_weight: GetWeight) -> Arrays:
        bound = self._filled(inputs)
        mode = _Wide(get_weight, self._passing) if self._wide else nullcontext()
        watched = layer_states(self._user.module) if self._layers else nullcontext()
        with torch.no_grad(), self._user.running("running"), mode, watched as states:
            value = self._user.module(*bound.args, **bound.kwargs)
        if states is not None:
            return {name: to_numpy(state) for name, state in states.items()}
        named = outputs_of(value)
        given = self._user.setting("output_names")
        names = list(given) if isinstance(given, list | tuple) and len(given) == len(named) else list(named)
        tensors = dict(zip(names, named.values(), strict=True))
        order = paired(f"{self._user.reference!r} returns", tensors, "outputs", self._output_names)
        return {name: to_numpy(tensors[own]) for own, name in zip(tensors, order, strict=True)}

    def prepare(self, inputs: Arrays) -> Callable[[], float]:
        bound = self._filled(inputs)
        return timed(lambda: self._user.module(*bound.args, **bound.kwargs), torch.device("cpu"))

    def describe(self) -> dict[str, str]:
        engine = f"torch, {self._user.label}" + (" in float64" if self._wide else "")
        return {"engine": engine, "version": str(torch.__version__), "device": f"CPU ({platform.machine()})"}

    def _filled(self, inputs: Arrays) -> Bound:
        tensors = []
        for name, dtype in zip(self._order, self._dtypes, strict=True):
            tensor = to_torch(inputs[name])
            tensors.append(tensor.to(dtype) if tensor.is_floating_point() and dtype.is_floating_point else tensor)
        left = iter(tensors)
        arguments = {name: replaced(value, left) for name, value in self._bound.arguments.items()}
        return Bound(self._bound.signature, arguments)


def _template(user: Module, names: Sequence[str]) -> Any:
    """Inputs with the structure that the module takes: its example, or a tensor for each parameter that it needs."""
    example = user.setting("example_inputs")
    if example is not None:
        return example
    parameters = inspect.signature(user.module.forward).parameters.values()
    needed = [p.name for p in parameters if p.name in names or p.default is p.empty]
    floats = [tensor.dtype for tensor in user.module.parameters() if tensor.is_floating_point()]
    dtype = floats[0] if floats else torch.get_default_dtype()
    return {name: torch.empty(0, dtype=dtype) for name in needed}


def paired(who: str, own: Iterable[str], what: str, names: Sequence[str]) -> list[str]:
    """The file's name for each name of the module: the same, or by order if the file has none of the module's names."""
    own = list(own)
    if {*own} == {*names}:
        return own
    if not {*own} & {*names} and len(own) == len(names):
        return list(names)
    listed = [", ".join(map(shown, each)) or "none" for each in (own, names)]
    raise RequestError(f"{who} {listed[0]}, and the file has the {what} {listed[1]}: both must be the same.")


_kept: dict[tuple[object, ...], Module] = {}
"""The module that was loaded last, and its copies in other dtypes: cases come one by one."""


@lru_cache(maxsize=1)
def _known(path: Path, modified: int, size: int) -> tuple[list[str], list[str], frozenset[torch.dtype]]:
    """The names of inputs and outputs of the file at `path`, which had this time and size, and its passing dtypes."""
    graph = read_graph(path)
    passing = frozenset(_HALF[kind] for kind in passing_dtypes_of(graph.model))
    return list(graph.inputs()), list(graph.outputs()), passing


def load(path: Path, options: Mapping[str, Any]) -> ModuleRunner:
    """Run the module's file and give it the names of the `.onnx` file at `path`.

    RequestError for what goes wrong in it, for names that differ from the file's, and for wrong options.
    """
    check_onnx_file("the module", path, options, OPTIONS)
    reference, dtype, seed = (options.get(name) for name in ("module", "dtype", "last_bits"))
    if not isinstance(reference, str):
        raise RequestError("no module was given: give FILE.py:NAME.")
    if dtype is not None:
        check_known("dtype of the module", dtype, tuple(TORCH_DTYPES))
    dtype = "fp64" if dtype is None and options.get("wide", True) else dtype
    kind = None if dtype is None else getattr(torch, TORCH_DTYPES[dtype])
    source = (
        reference,
        None if checkpoint_of(reference) is None else path,
    )  # a checkpoint has a module for each of its files
    if (source, None, None) not in _kept:
        _kept.clear()
        _kept[source, None, None] = _load(reference, path)
    key = (source, dtype, seed)
    user = _kept[key] if key in _kept else _copied(_kept[source, None, None], kind, seed)
    if seed is None:
        _kept[key] = user
    status = path.stat()
    inputs, outputs, passing = _known(path, status.st_mtime_ns, status.st_size)
    return ModuleRunner(user, inputs, outputs, kind, dtype == "fp64", bool(options.get("layers")), passing)


def _load(reference: str, path: Path) -> Module:
    """The module that a reference names."""
    checkpoint = checkpoint_of(reference)
    return load_module(reference) if checkpoint is None else load_checkpoint(checkpoint, read_graph(path))


def _copied(user: Module, dtype: torch.dtype | None, seed: int | None) -> Module:
    """A copy of a module in a dtype, or with changed last bits of weights.

    Weights of a checkpoint that need no change, or that are converted when they are read, are not copied.
    """
    shared = [] if seed is not None or isinstance(user, UserModule) else list(_shared(user.module, dtype))
    with user.running("copying"):
        module = copy.deepcopy(user.module, {id(weight): weight for weight in shared})
    kept = user.constants if dtype != torch.float64 else frozenset()
    module = module if dtype is None else _in_dtype(module, dtype, kept, shared)
    if seed is not None:  # in its new dtype: last bits of another dtype would be rounded away
        generator = torch.Generator().manual_seed(seed)
        for tensor in module.parameters():
            if tensor.is_floating_point():
                tensor.data = last_bits_changed(tensor.data, generator)
    return attrs.evolve(user, module=module)


def _shared(module: torch.nn.Module, dtype: torch.dtype | None) -> Iterator[torch.nn.Parameter]:
    """The weights that already have the dtype and, for float64, those that are large."""
    for weight in module.parameters():
        if weight.dtype == dtype or (dtype == torch.float64 and weight.numel() >= LARGE):
            yield weight


def _in_dtype(
    module: torch.nn.Module, dtype: torch.dtype, kept: frozenset[str], shared: Sequence[Tensor]
) -> torch.nn.Module:
    """The module with floating-point weights in a dtype, except `shared` weights and `kept` buffers.

    Complex weights become complex128 for float64 and complex64 otherwise: `module.to` would drop their imaginary parts.
    """
    parts = torch.complex128 if dtype == torch.float64 else torch.complex64
    buffers = [buffer for name, buffer in module.named_buffers() if name not in kept]
    left = {id(weight) for weight in shared}
    for tensor in (*module.parameters(), *buffers):
        if id(tensor) not in left and (tensor.is_floating_point() or tensor.is_complex()):
            tensor.data = tensor.data.to(parts if tensor.is_complex() else dtype)
    return module
