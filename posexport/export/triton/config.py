"""config.pbtxt of a model in a Triton repository, built with Triton's protobuf classes and written as their text.

The classes come with tritonclient (the extra `triton`), which is imported only when needed.
Source: model_config.proto, https://github.com/triton-inference-server/common/blob/main/protobuf/model_config.proto
"""

from __future__ import annotations

from typing import Any

from posexport.errors import RequestError, RuntimeMissingError, plain
from posexport.export.triton.batching import Batching
from posexport.export.triton.served_artifact import BACKENDS, ServedArtifact
from posexport.runtimes.installation import install_command

TYPES = {"fp32": "TYPE_FP32", "fp16": "TYPE_FP16", "bf16": "TYPE_BF16", "fp64": "TYPE_FP64", "bool": "TYPE_BOOL"}
TYPES |= {f"{kind}{bits}": f"TYPE_{kind.upper()}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
TYPES |= {"string": "TYPE_STRING"}
"""Triton's names of dtypes. Dtypes that posexport has no name for have onnx's name in lower case."""

KINDS = {None: "KIND_AUTO", True: "KIND_GPU", False: "KIND_CPU"}
"""The kind of an instance for --gpu (True) and --cpu (False). With None, Triton uses GPUs if there are any."""


def schema() -> tuple[Any, Any]:
    """(model_config_pb2, google.protobuf.text_format); RuntimeMissingError if tritonclient isn't installed."""
    try:
        from google.protobuf import text_format
        from tritonclient.grpc import model_config_pb2
    except ImportError as error:
        raise RuntimeMissingError(
            f"Triton's schema is not installed ({error}): {install_command('posexport[triton]')}."
        ) from None
    return model_config_pb2, text_format


def config_of(
    name: str, artifact: ServedArtifact, batching: Batching, gpu: bool | None = None, instances: int = 1
) -> Any:
    """The ModelConfig message of a model, with this number of `instances` for each device that `gpu` allows."""
    pb, _ = schema()
    platform, file = BACKENDS[artifact.backend]
    config = pb.ModelConfig(
        name=name, platform=platform, backend=artifact.backend, default_model_filename=file,
        max_batch_size=batching.max_batch_size,
    )  # fmt: skip
    config.version_policy.latest.num_versions = 1
    for target, values in ((config.input, artifact.inputs), (config.output, artifact.outputs)):
        for tensor, (shape, dtype) in values.items():
            listed = shape[1:] if batching.max_batch_size else shape  # Triton adds the batch
            entry = target.add(name=tensor, data_type=TYPES[dtype])
            entry.dims.extend([dim if isinstance(dim, int) else -1 for dim in listed] or [1])
            if not listed:  # dims may not be empty: clients send [batch, 1], the graph gets [batch]
                entry.reshape.SetInParent()
    plan = artifact.backend == "tensorrt"
    group = config.instance_group.add(kind=KINDS[True if plan else gpu], count=instances)
    if plan:
        group.profile.append("0")  # posexport's plans have one optimization profile
    if batching.joined:
        config.dynamic_batching.preferred_batch_size.extend(batching.preferred)
    _warm_up(config, artifact)
    return config


def text_of(config: Any, comments: list[str]) -> bytes:
    """The message as config.pbtxt, under comments of one line each."""
    _, text_format = schema()
    head = "".join(f"# {plain(line, kept='')}\n" for line in comments)  # the lines may contain names from a file
    body: str = text_format.MessageToString(config)
    return f"{head}\n{body}".encode()


def read_config(text: bytes) -> Any:
    """config.pbtxt as a message; RequestError if it does not fit Triton's schema."""
    pb, text_format = schema()
    try:
        return text_format.Parse(text.decode(), pb.ModelConfig())
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise RequestError(f"config.pbtxt is not a model configuration of Triton: {error}.") from None


def _warm_up(config: Any, artifact: ServedArtifact) -> None:
    """Add one request of the usual shape before a model is ready: in it, engines allocate memory and choose kernels."""
    if not artifact.usual:
        return
    most = config.max_batch_size
    shapes = {name: shape[1:] if most else shape for name, shape in artifact.usual.items()}
    if any(dim < 1 for shape in shapes.values() for dim in shape):
        return  # an empty cache: Triton can't warm up with empty tensors
    rows = next(iter(artifact.usual.values()))[0] if most else 1
    sample = config.model_warmup.add(name="usual shape", batch_size=min(rows, most or 1), count=1)
    for name, shape in shapes.items():
        entry = sample.inputs[name]
        entry.data_type, entry.zero_data = TYPES[artifact.inputs[name][1]], True
        entry.dims.extend(shape or [1])
