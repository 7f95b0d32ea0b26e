"""An artifact as Triton will serve it, read from an ONNX file or a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from posexport.artifact.manifest import Manifest, manifest_path, values_of
from posexport.artifact.plan import check_plan
from posexport.artifact.profiles import ShapeProfiles
from posexport.artifact.signing import TrustedKey
from posexport.errors import RequestError
from posexport.spec.contract import Values
from posexport.spec.spec import Spec

BACKENDS = {"onnxruntime": ("onnxruntime_onnx", "model.onnx"), "tensorrt": ("tensorrt_plan", "model.plan")}
"""Backend to (platform, file name)."""

UNSERVED = {"onnxruntime": {"bf16"}, "tensorrt": set[str]()}
"""Dtypes that a backend does not take: server issue 8464 (onnxruntime_backend has no TYPE_BF16)."""


@attrs.frozen(kw_only=True)
class ServedArtifact:
    """An artifact to be served.

    `files` maps names in the version's folder to (the file to copy, its sha256 in the manifest). `usual` holds for each
    input the shape that it is tuned for. `profiles` are those of a plan, `operators` those of an ONNX graph.
    """

    backend: str
    spec: Spec
    inputs: Values
    outputs: Values
    usual: Mapping[str, Sequence[int]]
    profiles: ShapeProfiles | None
    operators: frozenset[str]
    manifest: Manifest | None
    files: dict[str, tuple[Path, str | None]]
    about: str


def read_served(path: Path, gpu: bool | None, trusted: Sequence[TrustedKey] = ()) -> ServedArtifact:
    """The artifact at `path` (.onnx or .plan), to run on a GPU, on the CPU (False) or where Triton chooses (None).

    Raises RequestError where it can't be read, where it contradicts its manifest or its spec or none of the `trusted`
    keys signed it, and for a dtype or a device that its backend does not support.
    """
    served = _from_plan(path, trusted) if path.suffix == ".plan" else _from_onnx(path, trusted)
    if served.spec.dtype in UNSERVED[served.backend]:
        raise RequestError(
            f"{str(path)!r} is {served.spec.dtype}, which Triton's {served.backend} backend has no tensors of: export "
            "it with --dtype fp16, or package a plan of tensorrt."
        )
    if served.backend == "tensorrt" and gpu is False:
        raise RequestError(f"--cpu was given with the plan {str(path)!r}, which runs on GPUs only: drop it.")
    return served


def _from_onnx(path: Path, trusted: Sequence[TrustedKey]) -> ServedArtifact:
    from posexport.artifact.loaded import load_sound

    loaded = load_sound(path, trusted)
    artifact, manifest = loaded.source, loaded.manifest
    file = BACKENDS["onnxruntime"][1]
    hashes = {} if manifest is None else manifest.external_data
    weight_files = artifact.external_files()
    for name in weight_files:
        if name in (file, manifest_path(Path(file)).name):
            raise RequestError(
                f"{str(path)!r} keeps weights in {name!r}, a name that Triton reserves: export it again."
            )
    nodes = [*artifact.model.graph.node, *(node for function in artifact.model.functions for node in function.node)]
    domains = sorted(set(artifact.domains()) - {"", "ai.onnx", "posexport"})
    return ServedArtifact(
        backend="onnxruntime",
        spec=artifact.spec,
        inputs=artifact.inputs(),
        outputs=artifact.outputs(),
        usual={name: shapes["opt"] for name, shapes in artifact.profiles().items()},
        profiles=None,
        operators=frozenset(node.op_type for node in nodes),
        manifest=None if manifest is None else attrs.evolve(manifest, file=file),
        files={
            file: (path, None if manifest is None else manifest.sha256),
            **{name: (path.with_name(name), hashes.get(name)) for name in weight_files},
        },
        about=f"opset {artifact.opset}{' and ' if domains else ''}{', '.join(domains)}",
    )


def _from_plan(path: Path, trusted: Sequence[TrustedKey]) -> ServedArtifact:
    from posexport.artifact.loaded import contract_violation

    manifest = check_plan(path, trusted)
    violation = contract_violation(manifest.block(), values_of(manifest.inputs), values_of(manifest.outputs))
    if violation is not None:
        raise RequestError(f"{str(path)!r} contradicts the spec in its manifest, {violation}: build it again.")
    runtime = manifest.runtime
    if runtime.name != "tensorrt":
        raise RequestError(
            f"{str(path)!r} was built by {runtime.name} {runtime.version}, whose plans Triton's TensorRT backend "
            "can't load: build it with 'posexport compile --runtime tensorrt', or package the ONNX file."
        )
    file, profiles = BACKENDS["tensorrt"][1], manifest.profiles
    return ServedArtifact(
        backend="tensorrt",
        spec=manifest.block(),
        inputs=values_of(manifest.inputs),
        outputs=values_of(manifest.outputs),
        usual={name: shapes["opt"] for name, shapes in profiles.items()},
        profiles=profiles,
        operators=frozenset(),
        manifest=attrs.evolve(manifest, file=file),
        files={file: (path, manifest.sha256)},
        about=f"only TensorRT {runtime.version} can open it: use a Triton with that version",
    )
