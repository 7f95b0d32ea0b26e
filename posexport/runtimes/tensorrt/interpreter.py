"""TensorRT's import of an ONNX file, evaluated on the CPU in float64 without TensorRT's kernels.

TensorRT's parser reads the file, and torch evaluates the layers of the resulting network one by one (`layers`). So a
node that TensorRT confuses with another operator, or an attribute that it ignores, gives a wrong value on any machine.
Casts round whole numbers to their type, and angles in half precision are rounded, so positions and angles that a file
casts to half precision show. Beyond the type's range, casts give infinity. Other roundings to half precision and errors
of kernels do not show. Products and sums in fp32 are rounded to fp32: the angle of a far position is a rounded product
in every runtime.

Nothing is guessed: a layer, or a mode of a layer, whose meaning is not certain raises RuntimeMissingError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import torch

from posexport.artifact.weights_on_disk import read_with_weights_on_disk
from posexport.errors import RequestError, RuntimeMissingError
from posexport.runtimes.base import Arrays, check_onnx_file
from posexport.runtimes.installation import install_command
from posexport.runtimes.tensorrt import api
from posexport.runtimes.tensorrt.layers import LAYERS
from posexport.runtimes.tensorrt.refusals import check_read, parser_error
from posexport.runtimes.tensorrt.values import DTYPES, CannotEvaluate, fits, widened
from posexport.runtimes.tensors import to_numpy, to_torch

NAME = "tensorrt-import"

_INT32 = torch.iinfo(torch.int32)

_ROUNDED = ("ELEMENTWISE", "REDUCE")
"""Layers whose fp32 results are rounded to fp32."""

_HALF = ("HALF", "BF16")
"""Types of half precision, to which angles are rounded."""

_MOVES = ("CAST", "IDENTITY", "SHUFFLE", "SLICE", "UNSQUEEZE", "SQUEEZE", "CONCATENATION")
"""Layers that pass angles on."""

_KEPT_BYTES = 2**30
"""The most bytes of weights that are kept in float64: reading them again takes a quarter of a run's time."""


@attrs.frozen(kw_only=True, eq=False)
class Node:
    """One layer. `inputs` and `outputs` are names of tensors (None for an absent input).

    `choice` is the condition of a layer that selects its first or its second input; the other input is not evaluated.
    """

    name: str
    kind: str
    layer: Any
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    choice: str | None = None

    def cannot_evaluate(self, why: str) -> RuntimeMissingError:
        """The error for a layer whose meaning is not certain."""
        return RuntimeMissingError(f"{NAME} can't evaluate layer {self.name!r} ({self.kind}): {why}.")

    def required(self, values: Mapping[str, torch.Tensor]) -> list[str]:
        """The tensors that the layer needs, as far as `values` tell: the condition decides which input is needed."""
        if self.choice is None:
            return [name for name in self.inputs if name is not None]
        if self.choice not in values:
            return [self.choice]
        return [str(self.inputs[0 if bool(values[self.choice]) else 1])]

    def evaluate(self, values: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Its outputs; RuntimeMissingError if they aren't certain, RuntimeError for inputs that TensorRT rejects."""
        try:
            if self.choice is not None:
                result: Any = values[self.required(values)[0]]
            else:
                inputs = (None if name is None else values[name] for name in self.inputs)
                result = LAYERS[self.kind][1](self.layer, *inputs)
        except CannotEvaluate as error:
            raise self.cannot_evaluate(str(error)) from None
        except (ArithmeticError, IndexError, RuntimeError, TypeError, ValueError) as error:
            message = " ".join(str(error).split())
            raise RuntimeError(f"layer {self.name!r} ({self.kind}) can't take its inputs: {message}") from None
        outputs = result if isinstance(result, tuple) else (result,)
        if self.kind in _ROUNDED and self.layer.get_output(0).dtype.name == "FLOAT":
            outputs = tuple(value.float().double() for value in outputs)
        for index, value in enumerate(outputs):
            declared = self.layer.get_output(index)
            if not fits(value, declared):
                raise self.cannot_evaluate(
                    f"its output is {value.dtype} {list(value.shape)}, and TensorRT declares "
                    f"{declared.dtype.name} {list(declared.shape)}"
                )
            if declared.dtype.name == "INT32" and bool(((value < _INT32.min) | (value > _INT32.max)).any()):
                raise self.cannot_evaluate("its output overflows INT32")
        return outputs


class ImportRunner:
    """One parsed network. `owners` are the objects that own it and its weights."""

    def __init__(self, trt: Any, network: Any, *owners: Any) -> None:
        self._trt, self._network, self._owners = trt, network, owners
        self._nodes = _nodes(trt, network)
        self._producers: dict[str, Node] = {}
        for node in self._nodes:
            for name in node.outputs:
                if name in self._producers:
                    raise node.cannot_evaluate(f"another layer has the output {name!r} too")
                self._producers[name] = node
        self._outputs = [network.get_output(index) for index in range(network.num_outputs)]
        self._inputs = [network.get_input(index) for index in range(network.num_inputs)]
        self._weights: dict[Node, tuple[torch.Tensor, ...]] = {}
        self._room = _KEPT_BYTES
        self._angles = _angles(self._nodes)
        self._uses = Counter(name for node in self._nodes for name in (*node.inputs, node.choice) if name is not None)

    def run(self, inputs: Arrays) -> Arrays:
        values: dict[str, torch.Tensor] = {}
        for tensor in self._inputs:
            if tensor.name not in inputs:
                raise ValueError(f"the input {tensor.name!r} is missing")
            values[tensor.name] = widened(to_torch(inputs[tensor.name]))
            if not fits(values[tensor.name], tensor):
                raise ValueError(f"the input {tensor.name!r} must be {tensor.dtype.name} {list(tensor.shape)}")
        with torch.no_grad():
            return self._filled(values)

    def _filled(self, values: dict[str, torch.Tensor]) -> Arrays:
        """Evaluate the layers that outputs and assertions need, and return the outputs.

        Layers are evaluated when their inputs are available, not in the network's order. Unselected branches are
        skipped. Values that are not read again are dropped.
        """
        unread = Counter(self._uses)
        wanted = {tensor.name: DTYPES[tensor.dtype.name] for tensor in self._outputs}
        found = {name: to_numpy(values[name].to(dtype)) for name, dtype in wanted.items() if name in values}
        stack = [node for node in self._nodes if not node.outputs and node.inputs and node.kind == "ASSERTION"]
        stack += [self._producers[name] for name in wanted if name in self._producers]
        done: set[Node] = set()
        while stack:
            node = stack[-1]
            missing = [] if node in done else [name for name in node.required(values) if name not in values]
            if missing:
                stack += [self._producers[name] for name in missing]
                continue
            stack.pop()
            if node in done:
                continue
            done.add(node)
            values.update(zip(node.outputs, self._evaluated(node, values), strict=True))
            found |= {name: to_numpy(values[name].to(wanted[name])) for name in node.outputs if name in wanted}
            read = [name for name in (*node.inputs, node.choice) if name is not None]
            unread.subtract(read)
            for name in (*read, *node.outputs):
                if not unread[name]:
                    values.pop(name, None)
        return {name: found[name] for name in wanted}

    def _evaluated(self, node: Node, values: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if node in self._weights:
            return self._weights[node]
        declared = [node.layer.get_output(index).dtype.name for index in range(len(node.outputs))]
        outputs = tuple(
            value.to(DTYPES[dtype]).double() if name in self._angles and dtype in _HALF else value
            for name, dtype, value in zip(node.outputs, declared, node.evaluate(values), strict=True)
        )
        size = sum(tensor.nbytes for tensor in outputs)
        if node.kind == "CONSTANT" and size <= self._room:
            self._weights[node] = outputs
            self._room -= size
        return outputs

    def prepare(self, inputs: Arrays) -> Callable[[], float]:
        raise RequestError(f"{NAME} runs no kernels, so there is nothing to time: time tensorrt or tensorrt-rtx.")

    def describe(self) -> dict[str, str]:
        engine = self._trt.__name__.replace("_", "-")
        device = "import only, evaluated in float64 on the CPU: kernels were not run"
        return {"engine": f"{engine} parser", "version": self._trt.__version__, "device": device}


def _angles(nodes: Sequence[Node]) -> set[str]:
    """The tensors of which a cosine or sine is computed, also after they are moved or cast."""
    angles = set[str]()
    for node in reversed(nodes):  # readers first
        turns = node.kind == "UNARY" and node.layer.op.name in ("COS", "SIN")
        if turns or (node.kind in _MOVES and angles.intersection(node.outputs)):
            angles.update(name for name in node.inputs if name is not None)
    return angles


def _nodes(trt: Any, network: Any) -> list[Node]:
    """Every layer, downcast to its class; RuntimeMissingError for a layer of an unknown kind."""
    nodes = []
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        tensors = [layer.get_input(at) for at in range(layer.num_inputs)]
        node = Node(
            name=layer.name,
            kind=layer.type.name,  # before the cast, because `type` of an activation means something else
            layer=layer,
            inputs=tuple(None if tensor is None else str(tensor.name) for tensor in tensors),
            outputs=tuple(str(layer.get_output(at).name) for at in range(layer.num_outputs)),
        )
        if node.kind not in LAYERS:
            raise node.cannot_evaluate("its kind is not known")
        for at in range(layer.num_outputs):
            if layer.get_output(at).dtype.name not in DTYPES:
                raise node.cannot_evaluate(f"its output is {layer.get_output(at).dtype.name}")
        layer.__class__ = getattr(trt, LAYERS[node.kind][0])
        nodes.append(node)
    conditions = [(node.layer.conditional, node.inputs[0]) for node in nodes if node.kind == "CONDITION"]
    for at, node in enumerate(nodes):
        if node.kind == "CONDITIONAL_OUTPUT":
            (choice,) = [name for conditional, name in conditions if conditional is node.layer.conditional]
            nodes[at] = attrs.evolve(node, choice=choice)
    return nodes


def _engine() -> tuple[str, Any]:
    """The runtime whose parser is used, and its module: TensorRT for RTX if it is installed, otherwise TensorRT."""
    for name in ("tensorrt-rtx", "tensorrt"):
        if find_spec(api.BUILDERS[name].package) is not None:
            return name, api.load(name)
    raise RuntimeMissingError(f"{NAME} can't run here, not installed: {install_command('posexport[rtx]')}.")


def load(path: Path, options: Mapping[str, Any]) -> ImportRunner:
    """Parse the `.onnx` file at `path` with its external data; there are no options.

    Raises RequestError with the parser's first error, RuntimeMissingError for a layer that can't be evaluated.
    """
    check_onnx_file(NAME, path, options)
    name, trt = _engine()
    log = api.make_log(trt)
    try:
        builder = api.create(trt.Builder, log)
    except Exception as error:  # TensorRT needs a GPU to start, TensorRT for RTX does not
        raise RuntimeMissingError(f"{name} can't start here: {'; '.join(log.errors()) or error}.") from error
    network = api.make_network(trt, builder)
    parser = trt.OnnxParser(network, log)
    graph = read_with_weights_on_disk(path)  # the parser reads its weights from the disk, once
    check_read(NAME, str(path), graph.model)
    if not parser.parse(graph.model.SerializeToString(), str(path)):
        raise parser_error(NAME, str(path), parser, graph.model)
    return ImportRunner(trt, network, parser, builder, log)
