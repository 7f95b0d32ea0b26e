"""The package stage: writes an artifact as a model of a Triton Inference Server repository (`repository`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from posexport import __version__
from posexport.artifact.paths import check_artifact
from posexport.artifact.signing import SigningKey, TrustedKey
from posexport.errors import RequestError
from posexport.export.triton.batching import Batching, batching_of
from posexport.export.triton.config import config_of, read_config, schema, text_of
from posexport.export.triton.reading import read_served
from posexport.export.triton.repository import ModelVersion
from posexport.export.triton.rules import problems
from posexport.export.triton.served_artifact import ServedArtifact
from posexport.progress import Progress, silent
from posexport.spec import fields


@attrs.frozen(kw_only=True)
class PackageOptions:
    """The numbers and names of a package, validated; `gpu` None leaves the choice to Triton."""

    name: str | None = fields.text(None, "the model's name")
    version: int = fields.integer(1, "the model's version")
    instances: int = fields.integer(1, "copies of the model for each device", at_most=1024)
    max_batch_size: int | None = fields.integer(None, "the most rows that are joined", at_least=0)
    gpu: bool | None = None
    force: bool = False


@attrs.frozen(kw_only=True)
class PackagedTensor:
    """An input or output in the configuration."""

    name: str
    dims: tuple[int, ...]
    data_type: str


@attrs.frozen(kw_only=True)
class PackagedBatching:
    """Whether Triton joins requests, the batch sizes that it prefers, and why."""

    joined: bool
    preferred: tuple[int, ...]
    reason: str


@attrs.frozen(kw_only=True)
class Instances:
    """Where copies of the model run, and how many for each device."""

    kind: str
    count: int


@attrs.frozen(kw_only=True)
class Package:
    """What was written. `files` are the sha256 of files in the version's folder, `warmup` the dims of each input."""

    kind: Literal["package"] = "package"
    version: Literal[1] = 1
    repository: str
    name: str
    model_version: int
    backend: str
    files: Mapping[str, str]
    max_batch_size: int
    batching: PackagedBatching
    instances: Instances
    inputs: tuple[PackagedTensor, ...]
    outputs: tuple[PackagedTensor, ...]
    warmup: Mapping[str, tuple[int, ...]]
    about: str


def package_triton(
    path: Path,
    repository: Path,
    options: PackageOptions,
    progress: Progress = silent,
    *,
    key: SigningKey | None = None,
    trusted: Sequence[TrustedKey] = (),
) -> Package:
    """Write the artifact at `path` (.onnx or .plan) into a Triton model repository; returns what was written.

    One of the `trusted` keys must have signed the artifact. Its manifest in the repository names another file, so it is
    signed again with `key`, or not at all. Raises RequestError for what Triton can't serve, or if something is in the
    way; RuntimeMissingError if Triton's schema isn't installed. No file is changed then.
    """
    check_artifact(path)
    place = ModelVersion(repository, _name(options.name, path), options.version, options.force)
    place.check()
    schema()
    progress(f"reading {path.name}")
    artifact = read_served(path, options.gpu, trusted, key)
    artifact, batching = _batched(artifact, path, options.max_batch_size, progress)
    config = config_of(place.name, artifact, batching, options.gpu, options.instances)
    comments = [
        f"{artifact.title}, {artifact.about}; written by posexport {__version__}.",
        f"Batches: {'joined' if batching.joined else 'not joined'}, {batching.reason}.",
    ]
    text = text_of(config, comments)
    written = read_config(text)
    broken_rules = problems(written, place.name, artifact.inputs, artifact.outputs)
    if written != config:
        broken_rules.append("its config.pbtxt would say something else")
    if broken_rules:
        raise RequestError(f"{str(path)!r} can't be served by Triton: {'; '.join(broken_rules)}.")
    return _package(place, artifact, batching, config, place.write(artifact, config, text, progress, key))


def _batched(
    artifact: ServedArtifact, path: Path, requested: int | None, progress: Progress
) -> tuple[ServedArtifact, Batching]:
    """The artifact, and how its requests are joined: by its spec, or by trying the graph.

    A graph without a spec also gets the shapes of a usual request.
    """
    values = {**artifact.inputs, **artifact.outputs}
    if artifact.spec is not None:
        batching = batching_of(
            artifact.spec, values, operators=artifact.operators, profiles=artifact.profiles, requested=requested
        )
        return artifact, batching
    from posexport.export.triton.graph_batching import GraphTrial

    progress(f"trying batches of {path.name}")
    with GraphTrial(path, artifact.roles, values) as trial:
        return attrs.evolve(artifact, usual=trial.usual()), trial.batching(requested)


def _name(given: str | None, path: Path) -> str:
    """The model's name: a folder of the repository, and part of the URLs of clients."""
    name = path.stem if given is None else given
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}", name):
        raise RequestError(
            f"the model's name {name!r} can't be used: give --name with letters, digits, '_', '-' and '.', beginning "
            "with a letter, a digit or '_'."
        )
    return name


def _package(
    place: ModelVersion, artifact: ServedArtifact, batching: Batching, config: Any, files: Mapping[str, str]
) -> Package:
    pb, _ = schema()
    group = config.instance_group[0]

    def tensors(entries: Any) -> tuple[PackagedTensor, ...]:
        return tuple(
            PackagedTensor(name=entry.name, dims=tuple(entry.dims), data_type=pb.DataType.Name(entry.data_type))
            for entry in entries
        )

    return Package(
        repository=str(place.repository),
        name=place.name,
        model_version=place.version,
        backend=artifact.backend,
        files=files,
        max_batch_size=batching.max_batch_size,
        batching=PackagedBatching(joined=batching.joined, preferred=tuple(batching.preferred), reason=batching.reason),
        instances=Instances(kind=pb.ModelInstanceGroup.Kind.Name(group.kind), count=group.count),
        inputs=tensors(config.input),
        outputs=tensors(config.output),
        warmup={name: tuple(sample.inputs[name].dims) for sample in config.model_warmup for name in artifact.inputs},
        about=artifact.about,
    )
