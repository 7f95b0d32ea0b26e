"""The package stage: an artifact becomes a model of a Triton Inference Server repository.

    <repository>/<name>/config.pbtxt             what Triton must know of it, for all versions
    <repository>/<name>/<version>/model.onnx     or model.plan, byte for byte the artifact's file
    <repository>/<name>/<version>/model.onnx.json     its manifest: `posexport verify` takes a packaged ONNX file too
    <repository>/<name>/<version>/<file>.data    external data, under the name that the graph knows

Source: https://github.com/triton-inference-server/server, docs/user_guide/model_repository.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport import __version__
from posexport.artifact.manifest import Manifest, manifest_path, values_of
from posexport.artifact.paths import check_artifact
from posexport.artifact.plan import check_plan
from posexport.artifact.profiles import profiles_of
from posexport.errors import RequestError
from posexport.export.triton.batching import Batching, batching_of
from posexport.export.triton.config import BACKENDS, Served, config_of, read_config, schema, text_of
from posexport.export.triton.rules import UNSERVED, problems
from posexport.files import HashingFile, write_folder
from posexport.spec import fields
from posexport.spec.contract import Values, bounds_of, graph_inputs
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    from posexport.artifact.onnx_artifact import Artifact

Step = Callable[[str], object]
_PIECE = 1 << 22  # bytes read at a time


@attrs.frozen(kw_only=True)
class PackageOptions:
    """The numbers and names of a package, validated; `gpu` None leaves the choice to Triton."""

    name: str | None = fields.text(None, "the model's name")
    version: int = fields.integer(1, "the model's version")
    instances: int = fields.integer(1, "copies of the model for each device", at_most=1024)
    max_batch_size: int | None = fields.integer(None, "the most rows that are joined", at_least=0, optional=True)
    gpu: bool | None = None
    force: bool = False


@attrs.frozen(kw_only=True)
class _Source:
    """An artifact as it will be served. `files` are the names in the version's folder with where their bytes lie, and
    the sha256 that the manifest gives them."""

    path: Path
    backend: str
    spec: Spec
    inputs: Values
    outputs: Values
    usual: Mapping[str, Sequence[int]]
    profiles: Mapping[str, Mapping[str, Sequence[int]]] | None
    operators: frozenset[str]
    manifest: Manifest | None
    files: dict[str, tuple[Path, str | None]]
    about: str


def package_triton(
    path: Path, repository: Path, options: PackageOptions, step: Step = lambda _: None
) -> dict[str, Any]:
    """Write the artifact at `path` (.onnx or .plan) into a Triton model repository; returns what was written.

    Raises RequestError for what Triton can't serve, or where something is in the way; RuntimeMissingError where its
    schema isn't installed. Every file is then as it was.
    """
    check_artifact(path)
    name = _name(options.name, path)
    _check_place(repository, name, options)
    schema()
    step(f"reading {path.name}")
    source = _from_plan(path) if path.suffix == ".plan" else _from_onnx(path)
    _check_served(source, options)
    values = {**source.inputs, **source.outputs}
    batching = batching_of(
        source.spec, values, operators=source.operators, profiles=source.profiles, requested=options.max_batch_size
    )
    served = Served(
        name=name,
        backend=source.backend,
        inputs=source.inputs,
        outputs=source.outputs,
        usual=source.usual,
        batching=batching,
        gpu=True if source.backend == "tensorrt" else options.gpu,
        instances=options.instances,
    )
    config = config_of(served)
    text = text_of(config, _comments(source, batching))
    broken = problems(read_config(text), name, source.inputs, source.outputs)
    if broken:
        raise RequestError(f"{str(path)!r} can't be served by Triton: {'; '.join(broken)}.")
    hashes = _write(source, repository, name, config, text, options, step)
    return _told(source, repository, served, config, hashes, options)


def _from_onnx(path: Path) -> _Source:
    from posexport.artifact.loaded import contradictions
    from posexport.artifact.onnx_artifact import read_onnx

    artifact = read_onnx(path)
    manifest = artifact.manifest()
    if manifest is not None and (other := contradictions(manifest, artifact)):
        raise RequestError(f"{str(path)!r} and its manifest differ in {', '.join(other)}: export it again.")
    inputs = artifact.inputs()
    fixed = {dim: low for dim, (low, high) in bounds_of(graph_inputs(artifact.spec), inputs).items() if low == high}
    shapes = {name: shape for name, (shape, _) in inputs.items()}
    spans = profiles_of(shapes, (), artifact.spec.token_limit(), fixed)
    file = BACKENDS["onnxruntime"][1]
    data = {} if manifest is None else manifest.external_data
    places = artifact.external_files()
    taken = [place for place in places if place in (file, manifest_path(Path(file)).name)]
    if taken:
        raise RequestError(f"{str(path)!r} keeps weights in {taken[0]!r}, which is Triton's own name: export it again.")
    return _Source(
        path=path,
        backend="onnxruntime",
        spec=artifact.spec,
        inputs=inputs,
        outputs=artifact.outputs(),
        usual={name: shapes["opt"] for name, shapes in spans.items()},
        profiles=None,
        operators=_operators(artifact),
        manifest=None if manifest is None else attrs.evolve(manifest, file=file),
        files={
            file: (path, None if manifest is None else manifest.sha256),
            **{place: (path.with_name(place), data.get(place)) for place in places},
        },
        about=f"opset {artifact.opset}{_domains(artifact)}",
    )


def _from_plan(path: Path) -> _Source:
    manifest = check_plan(path)
    runtime = manifest.runtime
    if runtime.name != "tensorrt":
        raise RequestError(
            f"{str(path)!r} was built by {runtime.name} {runtime.version}, whose plans Triton's TensorRT backend "
            "can't load: build it with 'posexport compile --runtime tensorrt', or package the ONNX file."
        )
    inputs, outputs = values_of(manifest.inputs), values_of(manifest.outputs)
    file, profiles = BACKENDS["tensorrt"][1], manifest.profiles
    return _Source(
        path=path,
        backend="tensorrt",
        spec=manifest.block(),
        inputs=inputs,
        outputs=outputs,
        usual={name: shapes["opt"] for name, shapes in profiles.items()},
        profiles=profiles,
        operators=frozenset(),
        manifest=attrs.evolve(manifest, file=file),
        files={file: (path, manifest.sha256)},
        about=f"opened by TensorRT {runtime.version} alone: take the Triton that has it",
    )


def _operators(artifact: Artifact) -> frozenset[str]:
    nodes = [*artifact.model.graph.node, *(node for each in artifact.model.functions for node in each.node)]
    return frozenset(node.op_type for node in nodes)


def _domains(artifact: Artifact) -> str:
    others = sorted({entry.domain for entry in artifact.model.opset_import} - {"", "ai.onnx", "posexport"})
    return f" and {', '.join(others)}" if others else ""


def _check_served(source: _Source, options: PackageOptions) -> None:
    """RequestError for a dtype or a device that the backend doesn't have."""
    if source.spec.dtype in UNSERVED[source.backend]:
        raise RequestError(
            f"{str(source.path)!r} is {source.spec.dtype}, which Triton's {source.backend} backend has no tensors of: "
            "export it with --dtype fp16, or package a plan of tensorrt."
        )
    if source.backend == "tensorrt" and options.gpu is False:
        raise RequestError(f"--cpu was given with the plan {str(source.path)!r}, which runs on GPUs only: drop it.")


def _name(given: str | None, path: Path) -> str:
    """The model's name: a folder of the repository, and part of the URLs that clients ask."""
    name = path.stem if given is None else given
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}", name):
        raise RequestError(
            f"the model's name {name!r} can't be used: give --name with letters, digits, '_', '-' and '.', beginning "
            "with a letter, a digit or '_'."
        )
    return name


def _comments(source: _Source, batching: Batching) -> list[str]:
    """What people who read config.pbtxt should know."""
    spec = source.spec
    encodings = ", ".join(dict.fromkeys(kind.encoding.name for kind in spec.distinct_layers()))
    return [
        f"{encodings} in {spec.dtype}, {source.about}; written by posexport {__version__}.",
        f"Batches: {'joined' if batching.joined else 'not joined'}, {batching.reason}.",
    ]


def _check_place(repository: Path, name: str, options: PackageOptions) -> None:
    """RequestError where something is in the way of the model's folder or of this version."""
    home, version = repository / name, repository / name / str(options.version)
    if not repository.parent.is_dir():
        raise RequestError(f"the folder {str(repository.parent)!r} is not there: make it first, or give another.")
    for folder in (repository, home, version):
        if folder.exists() and not folder.is_dir():
            raise RequestError(f"{str(folder)!r} is a file: give another --output or --name, or move it away.")
    if version.exists() and not options.force:
        raise RequestError(f"{str(version)!r} is there: give another --version or --name, or --force to replace it.")


def _write(
    source: _Source, repository: Path, name: str, config: Any, text: bytes, options: PackageOptions, step: Step
) -> dict[str, str]:
    """Write the model's folder, or a version of it; returns the sha256 of each file in the version's folder."""

    home, version = repository / name, repository / name / str(options.version)
    _check_config(home / "config.pbtxt", config, options)
    target = next((folder for folder in (repository, home) if not folder.exists()), version)
    hashes: dict[str, str] = {}

    def fill(folder: Path) -> None:
        if target != version:
            model = folder / name if target == repository else folder
            inside = model / version.name
            inside.mkdir(parents=True)
            (model / "config.pbtxt").write_bytes(text)
        else:
            inside = folder
        for file, (place, sha256) in source.files.items():
            step(f"copying {place.name}")
            hashes[file] = _copy(place, inside / file, sha256)
        if source.manifest is not None:
            file = BACKENDS[source.backend][1]
            manifest_path(inside / file).write_bytes(source.manifest.to_bytes())

    write_folder(target, fill, {home / "config.pbtxt": text} if target == version else {})
    return hashes


def _check_config(path: Path, config: Any, options: PackageOptions) -> None:
    """RequestError where the configuration says otherwise than this version needs: --force replaces it where no other
    version is served by it."""
    versions = [each.name for each in path.parent.glob("*") if each.name.isdigit() and each.is_dir()]
    others = sorted((name for name in versions if name != str(options.version)), key=int)
    if not path.is_file() or (options.force and not others):
        return
    try:
        same = read_config(path.read_bytes()) == config
    except RequestError:
        same = False
    if same:
        return
    if others:
        raise RequestError(
            f"{str(path)!r} says otherwise than this version needs, and version {others[0]} shares it: give another "
            "--name."
        )
    raise RequestError(
        f"{str(path)!r} says otherwise than this version needs: give another --name, or --force to replace it."
    )


def _copy(source: Path, target: Path, sha256: str | None) -> str:
    """Copy a file in pieces; returns its sha256. RequestError where that isn't the one that the manifest gives."""
    with source.open("rb") as read, target.open("wb") as write:
        hashing = HashingFile(write)
        while piece := read.read(_PIECE):
            hashing.write(piece)
        write.flush()
        os.fsync(write.fileno())
    found = hashing.sha256.hexdigest()
    if sha256 is not None and found != sha256:
        raise RequestError(f"{str(source)!r} is not the file that its manifest describes: make the artifact again.")
    return found


def _told(
    source: _Source,
    repository: Path,
    served: Served,
    config: Any,
    hashes: dict[str, str],
    options: PackageOptions,
) -> dict[str, Any]:
    pb, _ = schema()
    tensors = {
        kind: [
            {"name": entry.name, "dims": list(entry.dims), "data_type": pb.DataType.Name(entry.data_type)}
            for entry in entries
        ]
        for kind, entries in (("inputs", config.input), ("outputs", config.output))
    }
    group = config.instance_group[0]
    return {
        "kind": "package",
        "version": 1,
        "repository": str(repository),
        "name": served.name,
        "model_version": options.version,
        "backend": served.backend,
        "files": hashes,
        "max_batch_size": served.batching.max_batch_size,
        "batching": {
            "joined": served.batching.joined,
            "preferred": list(served.batching.preferred),
            "reason": served.batching.reason,
        },
        "instances": {"kind": pb.ModelInstanceGroup.Kind.Name(group.kind), "count": group.count},
        **tensors,
        "warmup": {name: list(sample.inputs[name].dims) for sample in config.model_warmup for name in source.inputs},
        "about": source.about,
    }
