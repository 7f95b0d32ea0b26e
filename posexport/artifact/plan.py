"""Plans on disk: what must hold before a plan is opened. Imports no engine.

A plan is code that the engine runs. Without a matching manifest `<file>.plan.json`, no engine gets it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from posexport.artifact.manifest import (
    BUILDERS,
    MISMATCH,
    MOMENTS,
    PlanKernels,
    PlanManifest,
    Profiles,
    changed,
    manifest_path,
    read_manifest_of,
)
from posexport.artifact.signing import TrustedKey
from posexport.errors import MismatchError, Reason, RequestError, system_error
from posexport.files import check_name, not_a_file, sha256_of
from posexport.spec.contract import SUMS, Shape

_AGAIN = "build it again with 'posexport compile'"


def check_plan(path: Path, trusted: Sequence[TrustedKey] = ()) -> PlanManifest:
    """Return the manifest of the plan at `path`. Raises the errors of `plan_manifest`. MismatchError if the sha256
    differs.

    A plan is code, so call this before an engine gets it.
    """
    manifest = plan_manifest(path, trusted)
    reason = plan_mismatch(path, manifest)
    if reason is not None:
        raise MismatchError(path, reason, _AGAIN, sha256=sha256_of(path), runtime=manifest.runtime.name)
    return manifest


def plan_mismatch(path: Path, manifest: PlanManifest) -> Reason | None:
    """Return how a manifest contradicts the plan, whose bytes are hashed, or itself. None if it does not."""
    with system_error(f"{str(path)!r} can't be read", "give a plan that can be"):
        sha256 = sha256_of(path)
    if manifest.sha256 != sha256:
        return changed(path)
    keys = plan_contradictions(path, manifest)
    text = f"its manifest {manifest_path(path).name} contradicts the plan or itself in {keys}"
    return Reason(MISMATCH, text) if keys else None


def plan_contradictions(path: Path, manifest: PlanManifest) -> str:
    """Return the keys under which the manifest of a plan contradicts the file or another key, as text.

    It does not read the ONNX file. A key that the manifest does not have contradicts nothing. `tools` without the
    builder do not belong to its build.
    """
    builder = manifest.runtime
    built_by = {name: version for name, version in manifest.tools.items() if name in BUILDERS}
    holds = {
        f"tools.{builder.name}": not manifest.tools or built_by == {builder.name: builder.version},
        "sizes.plan": manifest.sizes.get("plan") in (None, path.stat().st_size),
        "sizes": all(size is None or size >= 0 for size in manifest.sizes.values()),
        "memory_limit": manifest.memory_limit is None or manifest.memory_limit >= 0,
        "kernels": _are_counted(manifest.kernels),
        "external_data": not manifest.external_data,
        "profiles": _are_sound(manifest.profiles, {tensor.name: tensor.shape for tensor in manifest.inputs}),
    }
    keys = [key for key, fine in holds.items() if not fine]
    return f"its {', '.join(keys)}" if keys else ""


def _are_counted(kernels: PlanKernels) -> bool:
    """Whether no count is negative, and counts are those of the listed kernels."""
    counts = (kernels.count, kernels.attention_kernels, kernels.host_steps)
    fixed = (kernels.attention_layers, kernels.decomposed_attention)
    if any(count is not None and count < 0 for count in (*counts, *fixed)):
        return False
    attention = sum(row.attention for row in kernels.rows)
    return not kernels.rows or counts[:2] == (len(kernels.rows), attention)


def _are_sound(profiles: Profiles, shapes: Mapping[str, Shape]) -> bool:
    """Whether sizes rise, fixed dimensions and sums are right, and each name has one range."""
    ranges: dict[str, set[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        for dim, *sizes in zip(shape, *(profiles[name][moment] for moment in MOMENTS), strict=True):
            if sizes != sorted(sizes) or (isinstance(dim, int) and set(sizes) != {dim}):
                return False
            if isinstance(dim, str):
                ranges.setdefault(dim, set()).add(tuple(sizes))
    for total, parts in SUMS.items():
        if {total, *parts} <= set(ranges):
            ranges[total].add(tuple(map(sum, zip(*(min(ranges[part]) for part in parts), strict=True))))
    return all(len(spans) == 1 for spans in ranges.values())


def plan_manifest(path: Path, trusted: Sequence[TrustedKey] = ()) -> PlanManifest:
    """Return the manifest of a plan without reading the plan. RequestError if either is missing or cannot be used.

    With `trusted` keys, MismatchError unless one of them signed it.
    """
    check_name(path)
    if problem := not_a_file(path):
        raise RequestError(f"{str(path)!r} is {problem}: build it with 'posexport compile'.")
    manifest = read_manifest_of(PlanManifest, path, trusted)
    if manifest is None:
        raise RequestError(
            f"{str(path)!r} has no manifest {manifest_path(path).name}, so it is not opened, because a plan is code: "
            "build it with 'posexport compile'."
        )
    return manifest


def check_builder(path: Path, manifest: PlanManifest, name: str, version: str | None = None) -> None:
    """Raise RequestError unless the runtime `name` (in this `version`, if given) built the plan."""
    built = manifest.runtime
    if built.name != name or version not in (None, built.version):
        here = name if version is None else f"{name} {version}"
        raise RequestError(
            f"{str(path)!r} was built by {built.name} {built.version} and runs only there, not on {here}: "
            f"build it again with 'posexport compile --runtime {name}'."
        )


def onnx_of(path: Path, manifest: PlanManifest) -> Path:
    """Return the ONNX file beside a plan from which the plan was built.

    RequestError if it or its weights are missing. MismatchError if they were changed.
    """
    source = manifest.onnx
    for name, sha256 in {source.file: source.sha256, **source.external_data}.items():
        file = path.with_name(name)
        if not file.is_file():
            raise RequestError(f"{str(path)!r} was built from {name}, which is not beside it: put it there.")
        if sha256_of(file) != sha256:
            reason = Reason(MISMATCH, f"{name} beside it is not what it was built from (their sha256 differ)")
            raise MismatchError(path, reason, _AGAIN, sha256=manifest.sha256, runtime=manifest.runtime.name)
    return path.with_name(source.file)
