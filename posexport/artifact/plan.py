"""Plans on disk: what must hold before one is opened. Imports no engine.

A plan is code that the engine runs: without a manifest `<file>.plan.json` that fits it, no engine gets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from posexport.artifact.manifest import MISMATCH, MOMENTS, PlanManifest, changed, manifest_path, read_manifest_of
from posexport.artifact.signing import TrustedKey
from posexport.errors import MismatchError, Reason, RequestError, system_error
from posexport.files import check_name, sha256_of

_AGAIN = "build it again with 'posexport compile'"


def check_plan(path: Path, trusted: Sequence[TrustedKey] = ()) -> PlanManifest:
    """The manifest of the plan at `path`; raises what `plan_manifest` raises, MismatchError where the sha256 differs.

    A plan is code: this comes before an engine gets it.
    """
    manifest = plan_manifest(path, trusted)
    with system_error(f"{str(path)!r} can't be read", "give a plan that can be"):
        sha256 = sha256_of(path)
    if manifest.sha256 != sha256:
        raise MismatchError(path, changed(path), _AGAIN, sha256=sha256, runtime=manifest.runtime.name)
    if keys := plan_contradictions(path, manifest):
        reason = Reason(MISMATCH, f"its manifest {manifest_path(path).name} contradicts the plan or itself in {keys}")
        raise MismatchError(path, reason, _AGAIN, sha256=sha256, runtime=manifest.runtime.name)
    return manifest


def plan_contradictions(path: Path, manifest: PlanManifest) -> str:
    """The keys under which the manifest of a plan contradicts the file, or another key, as text; without its ONNX file.

    A key that the manifest doesn't have contradicts nothing.
    """
    builder, shapes = manifest.runtime, {tensor.name: tensor.shape for tensor in manifest.inputs}
    fixed = all(
        size == dim
        for name, moments in manifest.profiles.items()
        for shape in moments.values()
        for size, dim in zip(shape, shapes[name], strict=True)
        if isinstance(dim, int)
    )
    rising = all(
        sizes[0] <= sizes[1] <= sizes[2]
        for moments in manifest.profiles.values()
        for sizes in zip(*(moments[moment] for moment in MOMENTS), strict=True)
    )
    holds = {
        f"tools.{builder.name}": manifest.tools.get(builder.name, builder.version) == builder.version,
        "sizes.plan": manifest.sizes.get("plan") in (None, path.stat().st_size),
        "profiles": fixed and rising,
    }
    keys = [key for key, fine in holds.items() if not fine]
    return f"its {', '.join(keys)}" if keys else ""


def plan_manifest(path: Path, trusted: Sequence[TrustedKey] = ()) -> PlanManifest:
    """The manifest of a plan, whose bytes are not read; RequestError where either is missing or can't be used.

    With `trusted` keys, MismatchError unless one of them signed it.
    """
    check_name(path)
    if not path.is_file():
        raise RequestError(f"{str(path)!r} is not there: build it with 'posexport compile'.")
    manifest = read_manifest_of(PlanManifest, path, trusted)
    if manifest is None:
        raise RequestError(
            f"{str(path)!r} has no manifest {manifest_path(path).name}, so it is not opened (a plan is code): "
            "build it with 'posexport compile'."
        )
    return manifest


def check_builder(path: Path, manifest: PlanManifest, name: str, version: str | None = None) -> None:
    """RequestError unless the runtime `name` (in this `version`, where given) built the plan: no other can open it."""
    built = manifest.runtime
    if built.name != name or version not in (None, built.version):
        here = name if version is None else f"{name} {version}"
        raise RequestError(
            f"{str(path)!r} was built by {built.name} {built.version} and runs on nothing else, not on {here}: "
            f"build it again with 'posexport compile --runtime {name}'."
        )


def onnx_of(path: Path, manifest: PlanManifest) -> Path:
    """The ONNX file beside a plan that it was built from; RequestError where it or its weights are gone, MismatchError
    where they were changed."""
    source = manifest.onnx
    for name, sha256 in {source.file: source.sha256, **source.external_data}.items():
        file = path.with_name(name)
        if not file.is_file():
            raise RequestError(f"{str(path)!r} was built from {name}, which is not beside it: put it there.")
        if sha256_of(file) != sha256:
            reason = Reason(MISMATCH, f"{name} beside it is not what it was built from (their sha256 differ)")
            raise MismatchError(path, reason, _AGAIN, sha256=manifest.sha256, runtime=manifest.runtime.name)
    return path.with_name(source.file)
