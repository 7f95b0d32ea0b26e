"""PyTorch eager, on the CPU or a GPU: the block of an artifact, rebuilt from the file's own spec and weights.

Options: `device` ("cpu" or "cuda"); `dtype`: the artifact's own, or "fp64" for the float64 reference of all comparisons
(the same rounded weights and inputs, everything else in double precision); `streamed`: hold the weights of one layer at
a time, read anew for each run, so that a stack needs no memory for all of them. It can't be timed then.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from posexport.artifact.onnx_artifact import Artifact, read_onnx
from posexport.errors import RequestError, RuntimeMissingError, unknown
from posexport.machine import available
from posexport.models.block import Block, build_block
from posexport.models.streamed import Streamed
from posexport.models.weights import TORCH_DTYPES, bytes_of
from posexport.runtimes import gpu_missing
from posexport.runtimes.base import Arrays, check_options
from posexport.runtimes.tensors import to_numpy, to_torch
from posexport.spec.contract import graph_inputs, graph_outputs
from posexport.spec.spec import Spec

_DEVICES = ("cpu", "cuda")


class TorchRunner:
    """A block of ours on one device."""

    def __init__(self, block: Block, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._block = block.to(device)

    def run(self, inputs: Arrays) -> Arrays:
        with torch.inference_mode():
            made = self._block(*self._bind(inputs))
        values = made if isinstance(made, tuple) else (made,)
        return {name: to_numpy(value) for name, value in zip(graph_outputs(self._block.spec), values, strict=True)}

    def prepare(self, inputs: Arrays) -> Callable[[], float]:
        bound = self._bind(inputs)
        return timed(lambda: self._block(*bound), self._device)

    def compile(self) -> None:
        """Compile the block in place by torch.compile, for each shape anew as a deployment would."""
        torch._dynamo.config.cache_size_limit = max(64, torch._dynamo.config.cache_size_limit)
        self._block.compile(dynamic=False)

    def describe(self) -> dict[str, str]:
        return _describe(self._device)

    def _bind(self, inputs: Arrays) -> tuple[torch.Tensor, ...]:
        return _bind(self._block.spec, inputs, self._dtype, self._device)


class StreamedRunner:
    """A block of ours of whose weights those of one layer are in memory."""

    def __init__(self, artifact: Artifact, dtype: torch.dtype, device: torch.device) -> None:
        self._spec, self._dtype, self._device = artifact.spec, dtype, device
        self._block = Streamed(artifact.spec, artifact.weights(), dtype, device)

    def run(self, inputs: Arrays) -> Arrays:
        return self.run_all([inputs])[0]

    def run_all(self, inputs: Sequence[Arrays]) -> list[Arrays]:
        """`run` for several sets of inputs, for which weights are read once."""
        made = self._block.run([_bind(self._spec, arrays, self._dtype, self._device) for arrays in inputs])
        return [{name: to_numpy(value) for name, value in outputs.items()} for outputs in made]

    def prepare(self, inputs: Arrays) -> Callable[[], float]:
        raise RequestError("torch can't be timed while it reads weights layer by layer: drop the option streamed.")

    def describe(self) -> dict[str, str]:
        return _describe(self._device)


def _describe(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    return {"engine": "torch", "version": str(torch.__version__), "device": name}


def _bind(spec: Spec, inputs: Arrays, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    tensors = (to_torch(inputs[name]) for name in graph_inputs(spec))
    return tuple(t.to(device, dtype if t.is_floating_point() else None) for t in tensors)


def timed(call: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """A call that runs `call` once without gradients and returns its seconds: by CUDA events on a GPU."""

    def on_cpu() -> float:
        with torch.inference_mode():
            start = time.perf_counter()
            call()
            return time.perf_counter() - start

    def on_gpu() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.inference_mode(), torch.cuda.device(device):
            torch.cuda.synchronize()
            start.record()
            call()
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return on_gpu if device.type == "cuda" else on_cpu


def load(path: Path, options: Mapping[str, Any]) -> TorchRunner | StreamedRunner:
    """Rebuild the block of the `.onnx` artifact at `path`.

    Raises RequestError for any other file, for wrong options and for weights that memory has no room for,
    RuntimeMissingError where the GPU can't be used.
    """
    check_options("torch", options, ("device", "dtype", "streamed"))
    if path.suffix != ".onnx":
        raise RequestError(
            f"torch runs the block of an .onnx artifact, not {path.name!r}: give the .onnx it came from."
        )
    for name, allowed in (("device", _DEVICES), ("dtype", TORCH_DTYPES)):
        if options.get(name) is not None and options[name] not in allowed:
            raise unknown(f"{name} of torch", str(options[name]), allowed)
    device = torch.device(options.get("device") or "cpu")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            why = gpu_missing() or f"this torch ({torch.__version__}) has no CUDA: install a build that has"
            raise RuntimeMissingError(f"torch can't use the GPU, {why}.")
        torch.backends.cuda.matmul.allow_tf32 = False  # fp32 means fp32
    artifact = read_onnx(path)
    name = options.get("dtype") or artifact.spec.dtype
    dtype = getattr(torch, TORCH_DTYPES[name])
    if options.get("streamed"):
        return StreamedRunner(artifact, dtype, device)
    needed, free = bytes_of(artifact.spec, name), available()
    if needed > free:
        raise RequestError(
            f"torch would hold {needed / 1e9:.1f} GB of weights of {path.name!r} and {free / 1e9:.1f} GB of memory are "
            "free: take fewer layers, or leave torch out."
        )
    return TorchRunner(build_block(artifact.spec, artifact.weights(), dtype), dtype, device)
