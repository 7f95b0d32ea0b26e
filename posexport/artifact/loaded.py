"""Artifacts read from their files, `.onnx` or `.plan`, and checked, with what verify and bench need of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from posexport.artifact.manifest import Manifest, PlanManifest, Profiles, manifest_path, tensors_of, values_of
from posexport.artifact.onnx_artifact import Artifact, read_onnx
from posexport.artifact.plan import check_plan, onnx_of
from posexport.errors import RequestError, shown
from posexport.machine import available, size_text
from posexport.spec.contract import SUMS, Bounds, Values, bounds_of, graph_inputs, graph_outputs, smallest
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

    def profile_requests(self, sizes: Sequence[Mapping[str, int]]) -> list[str]:
        """Requests for a plan that is built on the fly: it spans `sizes` and is tuned for the largest."""
        spans = {dim: [one[dim] for one in sizes] for dim, (low, high) in self.bounds.items() if low != high}
        return [f"{dim}={min(span)}:{max(span)}:{max(span)}" for dim, span in spans.items()]


def load_artifact(path: Path) -> LoadedArtifact:
    """Read the artifact at `path`; RequestError says what keeps it from being verified."""
    optimal_sizes: dict[str, int] = {}
    if path.suffix == ".plan":
        plan = check_plan(path)
        source = read_onnx(onnx_of(path, plan))
        inputs, outputs = values_of(plan.inputs), values_of(plan.outputs)
        bounds, optimal_sizes = _profile_bounds(source.spec, inputs, plan.profiles)
        keys = ", ".join(contradictions(plan, source))
        name = manifest_path(path).name
        fault = f"its manifest {name} contradicts {source.path.name} in its {keys}" if keys else None
    else:
        plan, source = None, read_onnx(path)
        inputs, outputs = source.inputs(), source.outputs()
        bounds, fault = bounds_of(graph_inputs(source.spec), inputs), manifest_fault(source)
    _check_sizes(path, {**inputs, **outputs}, bounds)
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


def _check_sizes(path: Path, values: Values, bounds: Bounds) -> None:
    """RequestError where an input or output would not fit into memory even at its smallest sizes."""
    free = available()
    for name, (shape, _) in values.items():
        sizes = [dim if isinstance(dim, int) else max(bounds.get(dim, (1, None))[0], 1) for dim in shape]
        if (size := math.prod(sizes) * _BYTES) > free:
            raise RequestError(
                f"{str(path)!r} takes {size_text(size)} for {shown(name)} {shown(list(shape))} alone, in float64, and "
                f"{size_text(free)} of memory are free: export it with smaller sizes."
            )


_BYTES = 8  # of an element of the float64 reference


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
    """How the manifest beside an ONNX artifact contradicts it, in a clause; None where it doesn't, or there is none.

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


def contract_violation(spec: Spec, inputs: Values, outputs: Values) -> str | None:
    """The first way in which a graph breaks the contract of its spec, or None."""
    return (
        _value_violation("input", graph_inputs(spec), inputs)
        or _value_violation("output", graph_outputs(spec), outputs)
        or _dimension_violation(spec, {**inputs, **outputs})
    )


def _value_violation(kind: str, expected: Values, actual: Values) -> str | None:
    """The first input or output that is missing, unknown, or of another shape or dtype than expected."""
    for name, (shape, dtype) in expected.items():
        if name not in actual:
            return f"the graph lacks the {kind} {name!r}: it has {', '.join(actual) or 'none'}"
        actual_shape, actual_dtype = actual[name]
        if actual_dtype != dtype:
            return f"the graph's {kind} {name!r} is {actual_dtype}, its spec says {dtype}"
        if len(actual_shape) != len(shape) or not all(map(_fits, actual_shape, shape)):
            return f"the graph's {kind} {name!r} has shape {list(actual_shape)}, its spec says {list(shape)}"
    unknown = [name for name in actual if name not in expected]
    return f"the graph has the {kind} {unknown[0]!r}, which its spec has not" if unknown else None


def _fits(actual: int | str, expected: int | str) -> bool:
    """Whether a dimension is the expected size, or may stand for a named one."""
    if actual == expected:
        return True
    return isinstance(expected, str) and (isinstance(actual, str) or actual >= smallest(expected))


def _dimension_violation(spec: Spec, values: Values) -> str | None:
    """A dimension with two sizes, or fixed in one value and free in another; or a sum that is not that of its parts."""
    sizes: dict[str, tuple[str, int | str]] = {}
    for name, (shape, _) in {**graph_inputs(spec), **graph_outputs(spec)}.items():
        for dim, actual in zip(shape, values[name][0], strict=True):
            if isinstance(dim, str):
                size = actual if isinstance(actual, int) else "free"
                other, known = sizes.setdefault(dim, (name, size))
                if size != known:
                    return f"the graph's {dim} is {known} in {other!r} and {size} in {name!r}: it must be the same"
    for total, parts in SUMS.items():
        name, size = sizes.get(total, ("", "free"))
        terms = [sizes[part][1] for part in parts if part in sizes]
        numbers = [term for term in terms if isinstance(term, int)]
        if isinstance(size, int) and (len(numbers) < len(terms) or size != sum(numbers)):
            written = " + ".join(f"{part} {term}" for part, term in zip(parts, terms, strict=True))
            return f"the graph's {total} in {name!r} is fixed to {size}: it must be the sum of {written}"
    return None
