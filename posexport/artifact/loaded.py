"""Artifacts read from their files, `.onnx` or `.plan`, and checked, with what verify and bench need of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs

from posexport.artifact.contract_check import contract_violation
from posexport.artifact.manifest import Manifest, PlanManifest, Profiles, manifest_path, tensors_of, values_of
from posexport.artifact.onnx_artifact import Artifact, read_onnx
from posexport.artifact.plan import check_plan, onnx_of
from posexport.errors import RequestError
from posexport.spec.contract import Bounds, Values, bounds_of, graph_inputs
from posexport.spec.spec import Spec


@attrs.frozen(kw_only=True)
class LoadedArtifact:
    """One artifact: the file that runs (`path`), and the ONNX artifact with its weights (the same, or a plan's source).

    `contract_violation` says what of the contract its graph breaks, `optimal_sizes` are the sizes, by dimension, that a
    plan is tuned for, and `manifest_warnings` say how the manifest contradicts the file.
    """

    path: Path
    source: Artifact
    plan: PlanManifest | None = None
    inputs: Values
    outputs: Values
    bounds: Bounds
    contract_violation: str | None = None
    optimal_sizes: Mapping[str, int] = attrs.field(factory=dict)
    manifest_warnings: tuple[str, ...] = ()

    @property
    def spec(self) -> Spec:
        """The spec of the block."""
        return self.source.spec

    @property
    def sha256(self) -> str:
        """The sha256 of the file at `path`."""
        return self.source.sha256 if self.plan is None else self.plan.sha256

    @property
    def required_runtime(self) -> str | None:
        """The one runtime that can open it: a plan's builder. None for an ONNX file."""
        return None if self.plan is None else self.plan.runtime.name


def load_artifact(path: Path) -> LoadedArtifact:
    """Read the artifact at `path`; RequestError says what keeps it from being verified."""
    optimal_sizes: dict[str, int] = {}
    if path.suffix == ".plan":
        plan = check_plan(path)
        source = read_onnx(onnx_of(path, plan))
        inputs, outputs = values_of(plan.inputs), values_of(plan.outputs)
        bounds, optimal_sizes = _profile_bounds(source.spec, inputs, plan.profiles)
        keys = ", ".join(contradictions(plan, source))
        text = f"its manifest {manifest_path(path).name} contradicts {source.path.name} in its {keys}"
        fault = text if keys else None
    else:
        plan, source = None, read_onnx(path)
        inputs, outputs = source.inputs(), source.outputs()
        bounds, fault = bounds_of(graph_inputs(source.spec), inputs), manifest_fault(source)
    return LoadedArtifact(
        path=path,
        source=source,
        plan=plan,
        inputs=inputs,
        outputs=outputs,
        bounds=bounds,
        contract_violation=contract_violation(source.spec, inputs, outputs),
        optimal_sizes=optimal_sizes,
        manifest_warnings=() if fault is None else (fault,),
    )


def _profile_bounds(spec: Spec, inputs: Values, profiles: Profiles) -> tuple[Bounds, dict[str, int]]:
    """The bounds of a plan's dimensions, and the sizes that it is tuned for."""
    bounds, optimal_sizes = bounds_of(graph_inputs(spec), inputs), {}
    for name, (shape, _) in graph_inputs(spec).items():
        sizes = profiles.get(name, {"min": (), "opt": (), "max": ()})
        for dim, low, optimal, high in zip(shape, sizes["min"], sizes["opt"], sizes["max"], strict=False):
            if isinstance(dim, str) and dim in bounds:
                lower, upper = bounds[dim]
                bounds[dim] = (max(low, lower), high if upper is None else min(high, upper))
                optimal_sizes[dim] = optimal
    return bounds, optimal_sizes


def manifest_fault(artifact: Artifact, external: bool = True) -> str | None:
    """How the manifest beside an ONNX artifact contradicts it, without a full stop; None where it doesn't, or where
    there is none.

    The file is used all the same, since it carries its own spec: a fault says that one of the two was changed since.
    Without `external`, external data is not read.
    """
    name = manifest_path(artifact.path).name
    try:
        manifest = artifact.manifest()
    except RequestError as error:
        return str(error).rstrip(".")
    if manifest is None:
        return None
    if manifest.sha256 != artifact.sha256 or (external and manifest.external_data != artifact.external_sha256):
        return f"the file is not the one that its manifest {name} describes (their sha256 differ)"
    keys = ", ".join(contradictions(manifest, artifact))
    return f"its manifest {name} contradicts the file in its {keys}" if keys else None


def contradictions(manifest: Manifest, artifact: Artifact) -> list[str]:
    """The keys under which a manifest, of an ONNX artifact or of a plan built from it, contradicts the file."""
    pairs = {
        "spec": (manifest.block(), artifact.spec),
        "form": (manifest.form, artifact.form),
        "inputs": (manifest.inputs, tensors_of(artifact.inputs())),
        "outputs": (manifest.outputs, tensors_of(artifact.outputs())),
        "opset": (manifest.opset, artifact.opset),
    }
    return [key for key, (written, actual) in pairs.items() if written != actual]
