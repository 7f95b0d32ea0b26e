"""config.pbtxt of a model in a Triton repository, built with Triton's protobuf classes and written as their text.

The classes come with tritonclient (the extra `triton`), which is imported only when needed.
Source: model_config.proto, https://github.com/triton-inference-server/common/blob/main/protobuf/model_config.proto
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from posexport.errors import RequestError, RuntimeMissingError
from posexport.export.triton.batching import Batching
from posexport.runtimes.installation import install_command
from posexport.spec.contract import Values

BACKENDS = {"onnxruntime": ("onnxruntime_onnx", "model.onnx"), "tensorrt": ("tensorrt_plan", "model.plan")}
"""Backend to (platform, file name)."""

TYPES = {"fp32": "TYPE_FP32", "fp16": "TYPE_FP16", "bf16": "TYPE_BF16", "int64": "TYPE_INT64"}
"""Triton's names of dtypes."""

KINDS = {None: "KIND_AUTO", True: "KIND_GPU", False: "KIND_CPU"}
"""The kind of an instance for --gpu (True) and --cpu (False). With None, Triton uses GPUs if there are any."""


@attrs.frozen(kw_only=True)
class Served:
    """What the configuration says about one model. `usual` holds for each input the shape that it is tuned for."""

    name: str
    backend: str
    inputs: Values
    outputs: Values
    usual: Mapping[str, Sequence[int]]
    batching: Batching
    gpu: bool | None = None
    instances: int = 1


def schema() -> tuple[Any, Any]:
    """(model_config_pb2, google.protobuf.text_format); RuntimeMissingError where tritonclient isn't installed."""
    try:
        from google.protobuf import text_format
        from tritonclient.grpc import model_config_pb2
    except ImportError as error:
        raise RuntimeMissingError(
            f"Triton's schema is not installed ({error}): {install_command('posexport[triton]')}."
        ) from None
    return model_config_pb2, text_format


def config_of(served: Served) -> Any:
    """The ModelConfig message of a model."""
    pb, _ = schema()
    platform, file = BACKENDS[served.backend]
    config = pb.ModelConfig(
        name=served.name, platform=platform, backend=served.backend, default_model_filename=file,
        max_batch_size=served.batching.max_batch_size,
    )  # fmt: skip
    config.version_policy.latest.num_versions = 1
    for target, values in ((config.input, served.inputs), (config.output, served.outputs)):
        for name, (shape, dtype) in values.items():
            _add(target.add(), name, _dims(served, shape), dtype)
    group = config.instance_group.add(kind=KINDS[served.gpu], count=served.instances)
    if served.backend == "tensorrt":
        group.profile.append("0")  # posexport's plans have one optimization profile
    if served.batching.joined:
        config.dynamic_batching.preferred_batch_size.extend(served.batching.preferred)
    _warm_up(config, served)
    return config


def text_of(config: Any, comments: list[str]) -> bytes:
    """The message as config.pbtxt, under comments."""
    _, text_format = schema()
    head = "".join(f"# {line}\n" for line in comments)
    body: str = text_format.MessageToString(config)
    return f"{head}\n{body}".encode()


def read_config(text: bytes) -> Any:
    """config.pbtxt as a message; RequestError where it does not fit Triton's schema."""
    pb, text_format = schema()
    try:
        return text_format.Parse(text.decode(), pb.ModelConfig())
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise RequestError(f"config.pbtxt is not a model configuration of Triton: {error}.") from None


def _dims(served: Served, shape: tuple[str | int, ...]) -> list[int]:
    """A graph's shape, without the batch where Triton adds it; -1 for a dynamic dimension."""
    listed = shape[1:] if served.batching.max_batch_size else shape
    return [dim if isinstance(dim, int) else -1 for dim in listed]


def _add(entry: Any, name: str, dims: list[int], dtype: str) -> None:
    entry.name, entry.data_type = name, TYPES[dtype]
    entry.dims.extend(dims or [1])
    if not dims:  # dims may not be empty: clients send [batch, 1], the graph gets [batch]
        entry.reshape.SetInParent()


def _warm_up(config: Any, served: Served) -> None:
    """Add one request of the usual shape before a model counts as ready: engines allocate and choose kernels in it."""
    most = served.batching.max_batch_size
    shapes = {name: shape[1:] if most else shape for name, shape in served.usual.items()}
    if any(dim < 1 for shape in shapes.values() for dim in shape):
        return  # an empty cache: Triton can't warm up with empty tensors
    rows = next(iter(served.usual.values()))[0] if most else 1
    sample = config.model_warmup.add(name="usual shape", batch_size=min(rows, most or 1), count=1)
    for name, shape in shapes.items():
        entry = sample.inputs[name]
        entry.data_type, entry.zero_data = TYPES[served.inputs[name][1]], True
        entry.dims.extend(shape or [1])
