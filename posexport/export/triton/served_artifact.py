"""A file as Triton will serve it: an artifact of posexport, a plan, or any other ONNX file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from posexport.artifact.manifest import Manifest, manifest_path
from posexport.artifact.profiles import ShapeProfiles
from posexport.artifact.signing import signature_path
from posexport.errors import Reason, RequestError
from posexport.files import HashingFile
from posexport.spec.contract import Values
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    from posexport.artifact.graph_file import GraphFile
    from posexport.graphs.roles import Role

BACKENDS = {"onnxruntime": ("onnxruntime_onnx", "model.onnx"), "tensorrt": ("tensorrt_plan", "model.plan")}
"""Backend to (platform, file name)."""

UNSERVED = {"onnxruntime": {"bf16"}, "tensorrt": set[str]()}
"""Dtypes that a backend does not take: server issue 8464 (onnxruntime_backend has no TYPE_BF16)."""


@attrs.frozen(kw_only=True)
class ServedArtifact:
    """A file to be served; `title` says what it is.

    `files` maps names in the version's folder to (the file to copy, its sha256 in the manifest). `usual` has the shape
    that each input is tuned for; it is empty if that is not known. `profiles` are those of a plan, `operators` those of
    an ONNX graph. For a graph that is not an artifact, `spec` is None, and `roles` are those of its inputs, or the
    reason why they aren't known.
    """

    backend: str
    spec: Spec | None
    title: str
    inputs: Values
    outputs: Values
    usual: Mapping[str, Sequence[int]]
    profiles: ShapeProfiles | None
    operators: frozenset[str]
    manifest: Manifest | None
    files: dict[str, tuple[Path, str | None]]
    about: str
    roles: Mapping[str, Role] | Reason = attrs.field(factory=dict)


def weight_files(graph: GraphFile, hashes: Mapping[str, str]) -> dict[str, tuple[Path, str | None]]:
    """The files of external data to copy, with their sha256 in a manifest.

    RequestError for a reserved name, and for external data in the file itself, whose name changes.
    """
    model = BACKENDS["onnxruntime"][1]
    if graph.path.name != model and graph.holds_external_data:
        raise RequestError(
            f"{str(graph.path)!r} keeps weights as external data in itself, which are not found under another name: "
            "write it anew with 'posexport rewrite'."
        )
    manifest = manifest_path(Path(model))
    for name in graph.external_files():
        if name in (model, manifest.name, signature_path(manifest).name):
            raise RequestError(
                f"{str(graph.path)!r} keeps weights in {name!r}, a name that Triton reserves: export it again."
            )
    return {name: (graph.path.with_name(name), hashes.get(name)) for name in graph.external_files()}


def copy_file(source: Path, target: Path, sha256: str | None) -> str:
    """Copy a file in pieces; returns its sha256. RequestError if it differs from the one in the manifest."""
    with target.open("wb") as write:
        hashing = HashingFile(write)
        hashing.copy(source)
        write.flush()
        os.fsync(write.fileno())
    digest = hashing.sha256.hexdigest()
    if sha256 is not None and digest != sha256:
        raise RequestError(f"{str(source)!r} is not the file that its manifest describes: make the artifact again.")
    return digest
