"""Artifacts read from their files, `.onnx` or `.plan`, and checked, with what verify and bench need from them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from posexport.artifact.authenticity import signature_of, weights_of
from posexport.artifact.graph_file import GraphFile
from posexport.artifact.manifest import (
    MISMATCH,
    Manifest,
    OnnxManifest,
    PlanManifest,
    Profiles,
    changed,
    manifest_path,
    read_manifest_of,
    tensors_of,
    values_of,
)
from posexport.artifact.onnx_artifact import Artifact, ForeignFileError, artifact_of, module_of, read_onnx
from posexport.artifact.plan import check_plan, onnx_of
from posexport.artifact.rewrite_record import RewriteRecord
from posexport.artifact.signing import TrustedKey
from posexport.errors import MismatchError, Reason, RequestError, shown
from posexport.files import sha256_of
from posexport.machine import available, size_text
from posexport.spec.contract import SUMS, Bounds, Values, bounds_of, graph_inputs, graph_outputs, smallest
from posexport.spec.spec import Spec


@attrs.frozen(kw_only=True)
class LoadedArtifact:
    """One artifact: the file that runs (`path`), and the ONNX artifact with its weights (the same file, or a plan's
    source).

    `manifest` is the manifest of the file; for a plan it equals `plan`. `contract_violation` says how the graph breaks
    the contract. `optimal_sizes` are the sizes by dimension for which a plan is tuned. `weights` says what is known
    about its weights and `signature` who signed it. Both have a code of posexport.artifact.authenticity. `mismatch`
    says how the manifest contradicts the file, if this was allowed.
    """

    path: Path
    source: Artifact
    plan: PlanManifest | None = None
    manifest: OnnxManifest | PlanManifest | None = None
    inputs: Values
    outputs: Values
    bounds: Bounds
    contract_violation: str | None = None
    optimal_sizes: Mapping[str, int] = attrs.field(factory=dict)
    weights: Reason | None = None
    signature: Reason | None = None
    mismatch: Reason | None = None

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
        """The only runtime that can open it: the builder of a plan. None for an ONNX file."""
        return None if self.plan is None else self.plan.runtime.name

    def profile_requests(self, sizes: Sequence[Mapping[str, int]]) -> list[str]:
        """Return requests for a plan that is built on the fly. It spans `sizes` and is tuned for the largest."""
        spans = {dim: [one[dim] for one in sizes] for dim, (low, high) in self.bounds.items() if low != high}
        return [f"{dim}={min(span)}:{max(span)}:{max(span)}" for dim, span in spans.items()]


def load_artifact(path: Path, trusted: Sequence[TrustedKey] = (), *, lenient: bool = False) -> LoadedArtifact:
    """Read the artifact at `path`. RequestError says why it cannot be verified.

    MismatchError if it does not match its manifest, or if none of the `trusted` keys signed it. `lenient` only records
    how the manifest of an ONNX file contradicts it.
    """
    optimal_sizes: dict[str, int] = {}
    manifest: OnnxManifest | PlanManifest | None
    mismatch = plan = None
    if path.suffix == ".plan":
        manifest = plan = check_plan(path, trusted)
        source = read_onnx(onnx_of(path, plan), plan.onnx.sha256)
        if reason := source_mismatch(path, plan, source):
            raise MismatchError(path, reason, sha256=plan.sha256, runtime=plan.runtime.name)
        inputs, outputs = values_of(plan.inputs), values_of(plan.outputs)
        bounds, optimal_sizes = _profile_bounds(source.spec, inputs, plan.profiles)
    else:
        manifest = read_manifest_of(OnnxManifest, path, trusted)
        if manifest is None or lenient:
            source = read_onnx(path)
            mismatch = None if manifest is None else manifest_mismatch(source, manifest)
        else:
            source = _read_as_described(path, manifest)
        inputs, outputs = source.inputs(), source.outputs()
        bounds = bounds_of(graph_inputs(source.spec), inputs)
    _check_sizes(path, {**inputs, **outputs}, bounds)
    return LoadedArtifact(
        path=path,
        source=source,
        plan=plan,
        manifest=manifest,
        inputs=inputs,
        outputs=outputs,
        bounds=bounds,
        contract_violation=contract_violation(source.spec, inputs, outputs),
        optimal_sizes=optimal_sizes,
        weights=weights_of(manifest, mismatch),
        signature=signature_of(manifest, bool(trusted)),
        mismatch=mismatch,
    )


def source_mismatch(path: Path, plan: PlanManifest, source: GraphFile) -> Reason | None:
    """Return how the manifest of a plan contradicts the ONNX file from which the plan was built, or None."""
    keys = contradictions(plan, source)
    text = f"its manifest {manifest_path(path).name} contradicts {source.path.name} in {keys}"
    return Reason(MISMATCH, text) if keys else None


def _read_as_described(path: Path, manifest: OnnxManifest) -> Artifact:
    """Read an ONNX artifact that must match its manifest. MismatchError, before it is parsed if its bytes differ."""
    for name, sha256 in manifest.external_data.items():
        file = path.with_name(name)
        if file.is_file() and sha256_of(file) != sha256:  # a missing file is reported when it is read
            raise MismatchError(path, _changed_weights(path, name))
    artifact = read_onnx(path, manifest.sha256)
    names = {*manifest.external_data} ^ {*artifact.external_files()}
    mismatch = _changed_weights(path, min(names)) if names else manifest_mismatch(artifact, manifest, external=False)
    if mismatch is not None:
        raise MismatchError(path, mismatch, sha256=artifact.sha256)
    return artifact


def load_sound(path: Path, trusted: Sequence[TrustedKey] = ()) -> LoadedArtifact:
    """Do the same as `load_artifact`. RequestError also for a graph with a broken contract or other weights."""
    artifact = load_artifact(path, trusted)
    artifact.source.weights()  # checks their names and shapes; no value is read
    if artifact.contract_violation is not None:
        raise RequestError(f"{str(path)!r} contradicts its own spec, {artifact.contract_violation}: export it again.")
    return artifact


def _check_sizes(path: Path, values: Values, bounds: Bounds) -> None:
    """Raise RequestError if an input or output would not fit into memory even at its smallest sizes."""
    free = available()
    for name, (shape, _) in values.items():
        sizes = [dim if isinstance(dim, int) else max(bounds.get(dim, (1, None))[0], 1) for dim in shape]
        if (size := math.prod(sizes) * _BYTES) > free:
            raise RequestError(
                f"{str(path)!r} takes {size_text(size)} for {shown(name)} {shown(list(shape))} alone, in float64, and "
                f"{size_text(free)} of memory are free: export it with smaller sizes."
            )


_BYTES = 8  # per element of the float64 reference


def _profile_bounds(spec: Spec, inputs: Values, profiles: Profiles) -> tuple[Bounds, dict[str, int]]:
    """Return the bounds of a plan's dimensions, and the sizes for which it is tuned."""
    bounds, optimal_sizes = bounds_of(graph_inputs(spec), inputs), {}
    for name, (shape, _) in graph_inputs(spec).items():
        sizes = profiles.get(name, {"min": (), "opt": (), "max": ()})
        for dim, low, optimal, high in zip(shape, sizes["min"], sizes["opt"], sizes["max"], strict=False):
            if isinstance(dim, str) and dim in bounds:
                lower, upper = bounds[dim]
                bounds[dim] = (max(low, lower), high if upper is None else min(high, upper))
                optimal_sizes[dim] = optimal
    return bounds, optimal_sizes


def manifest_mismatch(artifact: GraphFile, manifest: Manifest, external: bool = True) -> Reason | None:
    """Return how a manifest contradicts the ONNX file beside it, or None.

    Without `external`, external data is not read.
    """
    name = manifest_path(artifact.path).name
    if reason := bytes_mismatch(artifact, manifest, external):
        return reason
    keys = contradictions(manifest, artifact)
    return Reason(MISMATCH, f"its manifest {name} contradicts the file in {keys}") if keys else None


def bytes_mismatch(graph: GraphFile, manifest: Manifest, external: bool = True) -> Reason | None:
    """Return how hashes in a manifest differ from an ONNX file and, with `external`, from its weights, or None."""
    if manifest.sha256 != graph.sha256:
        return changed(graph.path)
    if external and manifest.external_data != (hashes := graph.external_sha256):
        files = sorted({*manifest.external_data, *hashes})
        differing = [file for file in files if manifest.external_data.get(file) != hashes.get(file)]
        return _changed_weights(graph.path, differing[0])
    return None


def check_manifest(graph: GraphFile, trusted: Sequence[TrustedKey] = ()) -> OnnxManifest | None:
    """Return the manifest beside a file that was read, or None if there is none. MismatchError if it contradicts the
    file.

    If `trusted` keys are given, one of them must have signed it.
    """
    manifest = read_manifest_of(OnnxManifest, graph.path, trusted)
    if manifest is None:
        return None
    with contextlib.suppress(ForeignFileError):
        graph = artifact_of(graph)
    mismatch = manifest_mismatch(graph, manifest)
    if mismatch is not None:
        raise MismatchError(graph.path, mismatch, sha256=graph.sha256)
    return manifest


def check_source(graph: GraphFile, trusted: Sequence[TrustedKey] = ()) -> OnnxManifest | None:
    """Do the same as `check_manifest` for a file from which another file is made.

    RequestError for a graph without inputs or without outputs, for which no manifest can exist.
    """
    for kind, values in (("inputs", graph.inputs()), ("outputs", graph.outputs())):
        if not values:
            raise RequestError(f"{str(graph.path)!r} has no {kind}: export it with some.")
    return check_manifest(graph, trusted)


def _changed_weights(path: Path, name: str) -> Reason:
    manifest = manifest_path(path).name
    return Reason(
        MISMATCH, f"its weights in {name} are not those that its manifest {manifest} describes (their sha256 differ)"
    )


def contradictions(manifest: Manifest, graph: GraphFile) -> str:
    """Return the keys under which a manifest contradicts the file, as text such as "its spec, opset". Empty if it does
    not.

    The manifest belongs to the ONNX file or to a plan that was built from it.
    """
    pairs = _block_pairs(manifest, graph) if isinstance(graph, Artifact) else _module_pairs(manifest, graph)
    pairs |= {
        "inputs": (manifest.inputs, tensors_of(graph.inputs())),
        "outputs": (manifest.outputs, tensors_of(graph.outputs())),
        "opset": (manifest.opset, graph.opset),
        "domains": (manifest.domains, graph.domains()),
    }
    keys = [key for key, (written, actual) in pairs.items() if written != actual]
    return f"its {', '.join(keys)}" if keys else ""


def _block_pairs(manifest: Manifest, artifact: Artifact) -> dict[str, tuple[object, object]]:
    """Return pairs of what a manifest of a block says and what its file says, by key."""
    pairs: dict[str, tuple[object, object]] = {
        "spec": (manifest.block(), artifact.spec),
        "form": (manifest.form, artifact.form),
    }
    origin = artifact.origin
    if isinstance(manifest, OnnxManifest):  # a plan has its own target, version and tools
        pairs |= {
            "target": (manifest.target or "portable", artifact.target),
            "version": (manifest.version, artifact.version),
            "module": (manifest.module, None),
        }
        pairs |= {} if origin is None else origin.pairs(manifest)
    elif isinstance(manifest, PlanManifest):
        pairs["onnx.version"] = (manifest.onnx.version, artifact.version)
        pairs |= {} if origin is None else {"weights": (manifest.weights, origin.weights)}
    return pairs


def _module_pairs(manifest: Manifest, graph: GraphFile) -> dict[str, tuple[object, object]]:
    """Return the same pairs for a file without a spec.

    The export of a module has metadata. A file of another tool has none.
    """
    pairs: dict[str, tuple[object, object]] = {"spec": (manifest.spec, None)}
    if not isinstance(manifest, OnnxManifest):
        return pairs
    known = module_of(graph)
    if manifest.rewrite is not None:
        return pairs | _rewritten_pairs(manifest, manifest.rewrite, graph, known is not None)
    if known is None:
        return pairs | _unstated(manifest, "form", "target", "weights", "module", "attentions")
    (module, origin), properties = known, graph.metadata()
    pairs |= {
        "form": (manifest.form, properties.get("posexport.form")),
        "target": (manifest.target, properties.get("posexport.target")),
        "version": (manifest.version, properties.get("posexport.version")),
        "module": (manifest.module, module),
    }
    return pairs if origin is None else pairs | origin.pairs(manifest)


def _rewritten_pairs(
    manifest: OnnxManifest, record: RewriteRecord, graph: GraphFile, known: bool
) -> dict[str, tuple[object, object]]:
    """Return the same pairs for a file that was rewritten.

    It has metadata if the export of a module is `known`. Form and target in this metadata became those of its
    attention. `version` and `tools` are those of the original, not of the rewrite.
    """
    pairs = _unstated(manifest, "weights", "module", "attentions")
    pairs["form"] = (record.fits(manifest.form, graph.model), True)
    if not record.changed and not graph.external_files() and not graph.holds_external_data:
        pairs["rewrite.source"] = (record.source.sha256, graph.sha256)
    properties = graph.metadata()
    if known and record.all_rewritten() and "posexport.form" in properties:
        pairs["form"] = (manifest.form, properties["posexport.form"])
        if manifest.target != "portable":  # the file states it only if it is not portable
            pairs["target"] = (manifest.target, properties.get("posexport.target"))
    return pairs


def _unstated(manifest: OnnxManifest, *keys: str) -> dict[str, tuple[object, object]]:
    """Return pairs for keys that a file states nowhere, so that its manifest must not have them."""
    return {key: (getattr(manifest, key) or None, None) for key in keys}


def contract_violation(spec: Spec, inputs: Values, outputs: Values) -> str | None:
    """Return the first way in which a graph breaks the contract of its spec, or None."""
    return (
        _value_violation("input", graph_inputs(spec), inputs)
        or _value_violation("output", graph_outputs(spec), outputs)
        or _dimension_violation(spec, {**inputs, **outputs})
    )


def _value_violation(kind: str, expected: Values, actual: Values) -> str | None:
    """Return the first input or output that is missing, unknown, or of another shape or dtype, or None."""
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
    """Whether a dimension has the expected size, or may be the size of a named dimension."""
    if actual == expected:
        return True
    return isinstance(expected, str) and (isinstance(actual, str) or actual >= smallest(expected))


def _dimension_violation(spec: Spec, values: Values) -> str | None:
    """Return a dimension with two sizes, or fixed in one value and free in another, or a wrong sum, or None."""
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
