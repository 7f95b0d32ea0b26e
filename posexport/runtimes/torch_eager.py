"""PyTorch eager, on the CPU or a GPU: the block of an artifact, rebuilt from the file's own spec and weights.

Options:

- `device`: "cpu" or "cuda".
- `dtype`: the artifact's own, or "fp64" for the float64 reference of all comparisons (the same rounded weights and
  inputs, everything else in double precision).
- `fp32_angles`: in fp64, round angles as fp32 rounds them.
- `original`: take the weights of this original (posexport.artifact.original) instead of the file's own; the file must
  be an export of it.
- `streamed`: load the weights of one layer at a time, again for each run. Then a stack needs no memory for all of them,
  and can't be timed.
- `last_bits`: with `streamed`, change the last bits of weights, drawn from this seed.
- `compiled`: by torch.compile, again for each shape, as in a deployment.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from posexport.artifact.onnx_artifact import Artifact, read_onnx
from posexport.custom_ops.angles import fp32_angles
from posexport.errors import RequestError, RuntimeMissingError, check_known
from posexport.machine import available, size_text
from posexport.models.block import Block, Streamed, build_block
from posexport.models.weights import TORCH_DTYPES, bytes_of
from posexport.runtimes import base, gpu_missing
from posexport.runtimes.base import Arrays, check_onnx_file
from posexport.runtimes.compile_cache import claim_compile_cache
from posexport.runtimes.cuda import by_torch_events
from posexport.runtimes.tensors import to_numpy, to_torch
from posexport.spec.contract import graph_inputs, graph_outputs
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    from posexport.artifact.original import Original

_DEVICES = ("cpu", "cuda")


class _Runner:
    def __init__(self, spec: Spec, dtype: torch.dtype, device: torch.device) -> None:
        self._spec, self._dtype, self._device = spec, dtype, device

    def describe(self) -> dict[str, str]:
        cuda = self._device.type == "cuda"
        name = torch.cuda.get_device_name(self._device) if cuda else f"CPU ({platform.machine()})"
        return {"engine": "torch", "version": str(torch.__version__), "device": name}

    def _bind(self, inputs: Arrays) -> tuple[torch.Tensor, ...]:
        tensors = (to_torch(inputs[name]) for name in graph_inputs(self._spec))
        return tuple(t.to(self._device, self._dtype if t.is_floating_point() else None) for t in tensors)


class TorchRunner(_Runner):
    """A block of posexport on one device."""

    def __init__(self, block: Block, dtype: torch.dtype, device: torch.device, compiled: bool = False) -> None:
        super().__init__(block.spec, dtype, device)
        self._block = block.to(device)
        if compiled:
            claim_compile_cache()
            torch._dynamo.config.cache_size_limit = max(64, torch._dynamo.config.cache_size_limit)
            self._block.compile(dynamic=False)

    def run(self, inputs: Arrays) -> Arrays:
        with torch.inference_mode():
            outputs = self._block(*self._bind(inputs))
        values = outputs if isinstance(outputs, tuple) else (outputs,)
        return {name: to_numpy(value) for name, value in zip(graph_outputs(self._spec), values, strict=True)}

    def prepare(self, inputs: Arrays) -> Callable[[], float]:
        bound = self._bind(inputs)
        return timed(lambda: self._block(*bound), self._device)


class StreamedRunner(_Runner):
    """A block of posexport with only the weights of one layer in memory."""

    def __init__(
        self,
        artifact: Artifact,
        dtype: torch.dtype,
        device: torch.device,
        original: Original | None = None,
        rounds_angles: bool = False,
        last_bits: int | None = None,
    ) -> None:
        super().__init__(artifact.spec, dtype, device)
        self._angles = fp32_angles if rounds_angles else nullcontext
        weights = artifact.weights() if original is None else original.tensors(artifact.spec)
        if last_bits is not None:
            weights = _LastBitsChanged(weights, last_bits)
        with self._angles():
            self._block = Streamed(artifact.spec, weights, dtype, device)

    def run(self, inputs: Arrays) -> Arrays:
        return next(self.run_all([inputs]))[1]

    def run_all(self, inputs: Sequence[Arrays]) -> Iterator[tuple[int, Arrays]]:
        """The number and the outputs of each set of inputs. Weights are read once for all of them."""
        with self._angles():
            for number, outputs in enumerate(self._block.run(map(self._bind, inputs))):
                yield number, {name: to_numpy(value) for name, value in outputs.items()}

    def prepare(self, inputs: Arrays) -> Callable[[], float]:
        raise RequestError("torch can't be timed while it reads weights layer by layer: drop the option streamed.")


def last_bits_changed(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A tensor with each number replaced by the next one of its dtype, above or below; zeros stay."""
    bits = tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    steps = torch.randint(2, tensor.shape, generator=generator, dtype=bits.dtype) * 2 - 1
    return torch.where(tensor == 0, tensor, (bits + steps).view(tensor.dtype))


class _LastBitsChanged(Mapping[str, torch.Tensor]):
    """Weights whose last bits are changed."""

    def __init__(self, weights: Mapping[str, torch.Tensor], seed: int) -> None:
        self._weights, self._generator = weights, torch.Generator().manual_seed(seed)

    def __getitem__(self, name: str) -> torch.Tensor:
        return last_bits_changed(self._weights[name], self._generator)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def timed(call: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """A call that runs `call` once without gradients and returns its seconds; on a GPU, by CUDA events."""
    if device.type != "cuda":
        return torch.inference_mode()(base.timed(call))
    return by_torch_events(torch.inference_mode()(call), torch.cuda.current_stream(device))


def load(path: Path, options: Mapping[str, Any]) -> TorchRunner | StreamedRunner:
    """Rebuild the block of the `.onnx` artifact at `path`.

    Raises RequestError for any other file, for wrong options and for weights that don't fit into memory,
    RuntimeMissingError if the GPU can't be used.
    """
    allowed_options = ("device", "dtype", "fp32_angles", "last_bits", "original", "streamed", "compiled")
    check_onnx_file("torch", path, options, allowed_options)
    for name, allowed in (("device", _DEVICES), ("dtype", tuple(TORCH_DTYPES))):
        if options.get(name) is not None:
            check_known(f"{name} of torch", options[name], allowed)
    device = torch.device(options.get("device") or "cpu")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            why = gpu_missing() or f"this torch ({torch.__version__}) has no CUDA: install a build that has"
            raise RuntimeMissingError(f"torch can't use the GPU, {why}.")
        torch.backends.cuda.matmul.allow_tf32 = False  # fp32 means fp32
    artifact = read_onnx(path)
    name = options.get("dtype") or artifact.spec.dtype
    dtype = getattr(torch, TORCH_DTYPES[name])
    original = None
    if options.get("original") is not None:
        from posexport.artifact.original import Original

        original = Original(**options["original"])
    if options.get("streamed"):
        rounds_angles = bool(options.get("fp32_angles"))
        return StreamedRunner(artifact, dtype, device, original, rounds_angles, options.get("last_bits"))
    if original is not None:
        raise RequestError("torch takes an original's weights layer by layer alone: give the option streamed too.")
    needed, free = bytes_of(artifact.spec, name), available()
    if needed > free:
        raise RequestError(
            f"torch would hold {size_text(needed)} of weights of {path.name!r} and {size_text(free)} of memory are "
            "free: take fewer layers, or leave torch out."
        )
    block = build_block(artifact.spec, artifact.weights(), dtype)
    return TorchRunner(block, dtype, device, bool(options.get("compiled")))
