"""What is to be verified: artifacts read and checked from their own files, `.onnx` or `.plan`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from posexport.artifact.contract_check import contract_violation
from posexport.artifact.manifest import manifest_path, matches_manifest
from posexport.artifact.onnx_artifact import Artifact, _entry, read_onnx
from posexport.artifact.plan import check_plan, onnx_of
from posexport.errors import RequestError
from posexport.models import read_spec
from posexport.spec.contract import Bounds, Values, bounds_of, graph_inputs
from posexport.spec.spec import Spec


@attrs.frozen(kw_only=True)
class LoadedArtifact:
    """One artifact: what runs (`path`), and the ONNX artifact that its truth comes from (the same, or a plan's source).

    `required_runtime` names the one runtime that can open it (a plan's builder), `contract_violation` what of the
    contract its graph breaks,
    `optimal_sizes` the sizes, by dimension, that a plan is tuned for.
    """

    path: Path
    source: Artifact
    inputs: Values
    dtypes: Mapping[str, str]
    bounds: Bounds
    required_runtime: str | None = None
    contract_violation: str | None = None
    optimal_sizes: Mapping[str, int] = attrs.field(factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def spec(self) -> Spec:
        """The spec of the block."""
        return self.source.spec


def find_artifacts(paths: Sequence[Path]) -> list[Path]:
    """The artifacts that `paths` name, all those under a folder, each once; RequestError where there are none."""
    found: dict[str, Path] = {}
    for path in paths:
        if not path.exists():
            raise RequestError(f"{str(path)!r} is not there: give artifacts of posexport, or a folder that holds some.")
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.suffix in (".onnx", ".plan") and file.is_file())
            if not inside:
                raise RequestError(f"the folder {str(path)!r} holds no .onnx or .plan: give a folder with artifacts.")
        elif path.suffix in (".onnx", ".plan"):
            inside = [path]
        else:
            raise RequestError(f"{str(path)!r} is neither .onnx nor .plan nor a folder: give artifacts of posexport.")
        for file in inside:
            found.setdefault(os.path.realpath(file), file)
    return list(found.values())


def load_artifact(path: Path) -> LoadedArtifact:
    """Read the artifact at `path`; RequestError says what keeps it from being verified."""
    return _plan(path) if path.suffix == ".plan" else _onnx(path)


def _onnx(path: Path) -> LoadedArtifact:
    artifact = read_onnx(path)
    inputs, outputs = artifact.inputs(), artifact.outputs()
    fault = manifest_fault(artifact)
    return LoadedArtifact(
        path=path,
        source=artifact,
        inputs=inputs,
        dtypes={name: dtype for name, (_, dtype) in outputs.items()},
        bounds=bounds_of(graph_inputs(artifact.spec), inputs),
        contract_violation=contract_violation(artifact.spec, inputs, outputs),
        notes=() if fault is None else (fault,),
    )


def _plan(path: Path) -> LoadedArtifact:
    manifest = check_plan(path)
    source = read_onnx(onnx_of(path, manifest))
    inputs, outputs = (_values(manifest[key]) for key in ("inputs", "outputs"))
    bounds, tuned = _profiled(source.spec, inputs, manifest["profiles"])
    other = ", ".join(contradictions(manifest, source))
    told = f"its manifest {path.name}.json says otherwise than {source.path.name} of its {other}"
    return LoadedArtifact(
        path=path,
        source=source,
        optimal_sizes=tuned,
        inputs=inputs,
        dtypes={name: dtype for name, (_, dtype) in outputs.items()},
        bounds=bounds,
        required_runtime=manifest["runtime"]["name"],
        contract_violation=contract_violation(source.spec, inputs, outputs),
        notes=(told,) if other else (),
    )


def _profiled(spec: Spec, inputs: Values, profiles: Mapping[str, Any]) -> tuple[Bounds, dict[str, int]]:
    """The bounds of a plan's dimensions, and the sizes that it is tuned for."""
    bounds, tuned = bounds_of(graph_inputs(spec), inputs), {}
    for name, (shape, _) in graph_inputs(spec).items():
        sizes = profiles.get(name, {"min": (), "opt": (), "max": ()})
        for dim, low, best, high in zip(shape, sizes["min"], sizes["opt"], sizes["max"], strict=False):
            if dim in bounds:
                before = bounds[str(dim)]
                bounds[str(dim)] = (max(low, before[0]), high if before[1] is None else min(high, before[1]))
                tuned[str(dim)] = best
    return bounds, tuned


def _values(entries: Iterable[Mapping[str, Any]]) -> Values:
    return {entry["name"]: (tuple(entry["shape"]), entry["dtype"]) for entry in entries}


def manifest_fault(artifact: Artifact, external: bool = True) -> str | None:
    """Why the manifest beside an ONNX artifact is not of it, in words without a full stop; None where it is, or where
    there is none.

    The file unsupported its own spec, so it can be used all the same: this tells that one of the two was changed since.
    `external` is that of `matches_manifest`.
    """
    name = manifest_path(artifact.path).name
    try:
        manifest = artifact.manifest()
        same = matches_manifest(artifact.path, external)
    except RequestError as error:
        return str(error).rstrip(".")
    if manifest is None:
        return None
    if not same:
        return f"the file is not the one that its manifest {name} describes (their sha256 differ)"
    other = ", ".join(contradictions(manifest, artifact))
    return f"its manifest {name} says otherwise than the file of its {other}" if other else None


def contradictions(manifest: Mapping[str, Any], artifact: Artifact) -> list[str]:
    """The keys under which a manifest, of an ONNX artifact or of a plan built from it, says otherwise than the file."""
    graph = artifact.model.graph
    ours = {
        "form": artifact.form,
        "inputs": [_entry(value) for value in graph.input],
        "outputs": [_entry(value) for value in graph.output],
        "opset": artifact.opset,
    }
    found = [key for key, value in ours.items() if manifest.get(key) != value]
    return found if _spec_of(manifest) == artifact.spec else ["spec", *found]


def _spec_of(manifest: Mapping[str, Any]) -> Spec | None:
    """A manifest's spec, read as a file's own is: one of an earlier version may lack what has a default since."""
    data = manifest.get("spec")
    try:
        return read_spec(data) if isinstance(data, dict) else None
    except (ValueError, RequestError):
        return None
