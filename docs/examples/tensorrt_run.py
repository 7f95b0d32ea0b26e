"""TensorRT, or TensorRT for RTX, in Python: open a plan (or build an ONNX file) and run it.

    posexport export --encoding rope --dtype fp16 -o block.onnx
    posexport compile block.onnx --profile seq=1:196:1024
    python tensorrt_run.py block.plan --seq 196

It needs numpy, polygraphy (for device memory) and tensorrt or tensorrt_rtx. A plan opens only in the version that
built it. An ONNX file is built first, for --seq alone. It exits with code 3 where there is no TensorRT or no GPU.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np


class NotRun(Exception):
    """Something that the example needs is missing."""


def check_file(path: Path) -> None:
    """ValueError for a file that is neither a plan nor an ONNX file, before any engine is imported."""
    maker = {".plan": "posexport compile", ".onnx": "posexport export"}.get(path.suffix)
    if maker is None:
        raise ValueError(f"{path} is neither .plan nor .onnx: give what posexport compile or export wrote")
    if not path.is_file():
        raise ValueError(f"{path} does not exist: make it with {maker}")
    with path.open("rb") as file:
        if path.suffix == ".plan" and b"\0" not in file.read(64):  # plans have zero bytes in their head, text has none
            raise ValueError(f"{path} is no plan: make it with {maker}")


def load_engine() -> Any:
    """The module `tensorrt` or `tensorrt_rtx`: they share what is used here."""
    for name in ("tensorrt", "tensorrt_rtx"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise NotRun("neither tensorrt nor tensorrt_rtx can be imported")


def build(trt: Any, logger: Any, path: Path, sizes: dict[str, int]) -> Any:
    """The plan of an ONNX file, for one size of each dimension: `sizes` by name."""
    builder = None
    with contextlib.suppress(TypeError, RuntimeError):  # its binding raises where the library returns no builder
        builder = trt.Builder(logger)
    if builder is None:
        raise NotRun("this TensorRT builds on a GPU only")
    typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)  # later versions have no other networks
    network = builder.create_network(0 if typed is None else 1 << int(typed))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        raise ValueError(f"{path} can't be parsed: {parser.get_error(0).desc()}")
    config, profile = builder.create_builder_config(), builder.create_optimization_profile()
    config.clear_flag(trt.BuilderFlag.TF32)  # it is on unless cleared, and rounds fp32 inputs to 11 bits
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        shape = shape_for(tensor.name, tensor.shape, sizes)
        profile.set_shape(tensor.name, shape, shape, shape)
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise ValueError(f"{path} can't be built")
    return plan


def shape_for(name: str, shape: Any, sizes: dict[str, int]) -> tuple[int, ...]:
    """The shape of an input at these sizes: [batch, seq, ...] by the contract of the names."""
    if name not in ("hidden_states", "position_ids", "attention_mask"):
        raise ValueError(f"input {name} is not one that this example fills")
    return tuple(size if size != -1 else sizes[dim] for size, dim in zip(shape, ("batch", "seq", "rest"), strict=False))


def fill(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Made-up values: positions 0, 1, 2 ... along each sequence, a mask that hides nothing, random states."""
    if name == "position_ids":
        steps = np.arange(shape[1]).reshape(1, -1, *(1 for _ in shape[2:]))
        return np.ascontiguousarray(np.broadcast_to(steps, shape), dtype)
    if name == "attention_mask":
        return np.ones(shape, dtype)
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def need_gpu() -> None:
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        raise NotRun("no GPU: there is no NVIDIA driver") from None
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        raise NotRun("no GPU: the NVIDIA driver shows no device")


def load_cuda() -> Any:
    """polygraphy's device memory and streams, which need the CUDA runtime library."""
    from polygraphy import cuda
    from polygraphy.exception import PolygraphyException

    try:
        cuda.wrapper()
    except (OSError, PolygraphyException):
        raise NotRun("the CUDA runtime library can't be loaded: name its folder in LD_LIBRARY_PATH") from None
    return cuda


def numpy_type(trt: Any, engine: Any, name: str) -> Any:
    dtype = engine.get_tensor_dtype(name)
    if dtype == trt.DataType.BF16:
        raise ValueError(f"{name} is bf16, which numpy lacks: export with --dtype fp16 for this example")
    return trt.nptype(dtype)


def run(trt: Any, logger: Any, plan: Any, sizes: dict[str, int]) -> dict[str, np.ndarray[Any, Any]]:
    """The outputs for made-up inputs at these sizes."""
    need_gpu()
    cuda = load_cuda()
    runtime = trt.Runtime(logger)  # must live as long as the engine
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise ValueError("the plan can't be opened: it takes the version and a GPU that it was built for")
    context, stream = engine.create_execution_context(), cuda.Stream()
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    ins = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
    device = {}
    for name in ins:
        array = fill(name, shape_for(name, engine.get_tensor_shape(name), sizes), numpy_type(trt, engine, name))
        device[name] = cuda.DeviceArray(array.shape, array.dtype).copy_from(array, stream)
        context.set_input_shape(name, array.shape)
    for name in set(names) - set(ins):  # once all inputs have shapes, outputs have too
        device[name] = cuda.DeviceArray(tuple(context.get_tensor_shape(name)), np.dtype(numpy_type(trt, engine, name)))
    for name in names:
        context.set_tensor_address(name, device[name].ptr)
    if not context.execute_async_v3(stream.ptr):
        raise ValueError("the plan did not run")
    stream.synchronize()
    outputs = {name: device[name].numpy() for name in names if name not in ins}
    for array in device.values():
        array.free()
    return outputs


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a plan, or an ONNX file built on the fly.")
    parser.add_argument("model", type=Path, help="block.plan or block.onnx")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=196)
    options = parser.parse_args()
    sizes = {"batch": options.batch, "seq": options.seq}
    try:
        check_file(options.model)
        if min(sizes.values()) < 1:
            raise ValueError("--batch and --seq must be 1 or more")
        trt = load_engine()
        logger = trt.Logger(trt.Logger.ERROR)
        onnx = options.model.suffix == ".onnx"
        plan = build(trt, logger, options.model, sizes) if onnx else options.model.read_bytes()
        if onnx:
            print(f"built {memoryview(plan).nbytes} bytes with {trt.__name__} {trt.__version__}")
        for name, array in run(trt, logger, plan, sizes).items():
            print(f"{name} {array.shape} of norm {np.linalg.norm(array.astype(np.float64)):.6f}")
    except NotRun as reason:
        print(f"not run: {reason}", file=sys.stderr)
        return 3
    except (OSError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
