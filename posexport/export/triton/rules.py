"""What Triton requires of a model configuration beyond its schema, checked against the model itself.

The protobuf schema says which fields exist. These rules are what Triton's server checks when it loads a model, and what
its two backends compare with the file. A model that breaks one is "UNAVAILABLE" at start-up.
Source: ValidateModelConfig and ValidateIOShape in triton-inference-server/core, model_config_utils.cc;
CompareDimsSupported in onnxruntime_backend; GenerateWarmupData and Normalize in core.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from posexport.export.triton.config import TYPES, schema
from posexport.export.triton.served_artifact import BACKENDS, UNSERVED
from posexport.spec.contract import Values


def problems(config: Any, folder: str, inputs: Values, outputs: Values) -> list[str]:
    """The rules that `config` breaks for a model with these `inputs` and `outputs` in the model folder `folder`."""
    return [
        *_about_model(config, folder),
        *_about_tensors("input", config, config.input, inputs),
        *_about_tensors("output", config, config.output, outputs),
        *_about_batches(config, {**inputs, **outputs}),
        *_about_instances(config),
        *_about_warmup(config),
    ]


def _about_model(config: Any, folder: str) -> Iterator[str]:
    if config.name != folder:
        yield f"name is {config.name!r} in the folder {folder!r}: they must be the same"
    platform, file = BACKENDS.get(config.backend, ("", ""))
    if not platform:
        yield f"backend is {config.backend!r}, known are {', '.join(BACKENDS)}"
    elif config.platform != platform:
        yield f"platform is {config.platform!r}, with backend {config.backend} it must be {platform!r}"
    if config.default_model_filename != file:
        yield f"default_model_filename is {config.default_model_filename!r}, the file is {file!r}"
    if config.max_batch_size < 0:
        yield f"max_batch_size is {config.max_batch_size}"
    if config.version_policy.WhichOneof("policy_choice") is None:
        yield "version_policy is missing"


def _about_tensors(kind: str, config: Any, entries: Any, values: Values) -> Iterator[str]:
    pb, _ = schema()
    names = [entry.name for entry in entries]
    if sorted(names) != sorted(values):
        yield f"{kind}s are {names}, the model's are {list(values)}"
        return
    for entry in entries:
        shape, dtype = values[entry.name]
        where = f"{kind} {entry.name!r}"
        if dtype in UNSERVED.get(config.backend, ()):
            yield f"{where} is {dtype}, which the {config.backend} backend doesn't take"
        if pb.DataType.Name(entry.data_type) != TYPES[dtype]:
            yield f"{where} has {pb.DataType.Name(entry.data_type)}, the model has {TYPES[dtype]}"
        if not entry.dims:
            yield f"{where} has no dims"
        dims, given = list(entry.dims), list(entry.reshape.shape) if entry.HasField("reshape") else list(entry.dims)
        if any(dim < 1 and dim != -1 for dim in (*dims, *given)):
            yield f"{where} has dims {dims}: each must be 1 or more, or -1"
        if entry.HasField("reshape") and not given and not config.max_batch_size:
            yield f"{where} is reshaped to nothing without a batch"
        if entry.HasField("reshape") and (_runs(dims) != _runs(given)):
            yield f"{where} has dims {dims} and is reshaped to {given}: their sizes differ"
        whole = [*([-1] if config.max_batch_size else []), *given]
        expected = [dim if isinstance(dim, int) else -1 for dim in shape]
        if whole != expected:
            yield f"{where} has the whole shape {whole}, the model has {expected}"


def _runs(dims: list[int]) -> list[int]:
    """The products of the fixed dimensions between dynamic ones."""
    runs: list[list[int]] = [[]]
    for dim in dims:
        if dim == -1:
            runs.append([])
        else:
            runs[-1].append(dim)
    return [prod(run) for run in runs]


def _about_batches(config: Any, values: Values) -> Iterator[str]:
    fixed = [name for name, (shape, _) in values.items() if not isinstance(next(iter(shape), None), str)]
    if config.max_batch_size and fixed:
        yield f"max_batch_size is {config.max_batch_size}, the first dimension of {', '.join(fixed)} is fixed"
    if config.HasField("dynamic_batching"):
        if not config.max_batch_size:
            yield "dynamic_batching is there with max_batch_size 0"
        wrong = [size for size in config.dynamic_batching.preferred_batch_size if not 0 < size <= config.max_batch_size]
        if wrong:
            yield f"preferred_batch_size {wrong} is not from 1 to max_batch_size"


def _about_instances(config: Any) -> Iterator[str]:
    pb, _ = schema()
    if not config.instance_group:
        yield "instance_group is missing"
    for group in config.instance_group:
        kind = pb.ModelInstanceGroup.Kind.Name(group.kind)
        if group.count < 1:
            yield f"an instance_group has count {group.count}"
        if config.backend == "tensorrt" and kind != "KIND_GPU":
            yield f"an instance_group has {kind}: plans run on GPUs only"
        if kind == "KIND_CPU" and group.gpus:
            yield "an instance_group of KIND_CPU names GPUs"
        if group.profile and config.backend != "tensorrt":
            yield f"an instance_group has a profile, which {config.backend} does not have"
        if not all(profile.isdecimal() for profile in group.profile):
            yield f"an instance_group has the profiles {list(group.profile)}: they are numbers from 0"


def _about_warmup(config: Any) -> Iterator[str]:
    entries = {entry.name: entry for entry in config.input}
    for sample in config.model_warmup:
        if not 0 < sample.batch_size <= max(1, config.max_batch_size):
            yield f"warm-up {sample.name!r} has batch_size {sample.batch_size}"
        if set(sample.inputs) != set(entries):
            yield f"warm-up {sample.name!r} gives {sorted(sample.inputs)}, the inputs are {sorted(entries)}"
            continue
        for name, tensor in sample.inputs.items():
            dims, input_dims = list(tensor.dims), list(entries[name].dims)
            fits = len(dims) == len(input_dims) and all(
                dim > 0 and limit in (-1, dim) for dim, limit in zip(dims, input_dims, strict=True)
            )
            if not fits:
                yield f"warm-up {sample.name!r} gives {name} the dims {dims}, the input has {input_dims}"
            if tensor.data_type != entries[name].data_type:
                yield f"warm-up {sample.name!r} gives {name} another data_type than the input's"
            if tensor.WhichOneof("input_data_type") is None:
                yield f"warm-up {sample.name!r} gives {name} no data"
