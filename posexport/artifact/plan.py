"""Plans on disk: what must hold before one is opened. Imports no engine.

A plan is code that the engine runs: without a manifest `<file>.plan.json` that fits it, no engine gets it.
"""

from __future__ import annotations

from pathlib import Path

from posexport.artifact.manifest import PlanManifest, manifest_path, read_manifest_of
from posexport.errors import RequestError
from posexport.files import check_name, sha256_of


def check_plan(path: Path) -> PlanManifest:
    """The manifest of the plan at `path`; RequestError as in `plan_manifest`, and where the plan's sha256 differs."""
    manifest = plan_manifest(path)
    if manifest.sha256 != sha256_of(path):
        raise RequestError(
            f"{str(path)!r} is not the file that its manifest {path.name}.json describes (their sha256 differ), so it "
            "is not opened (a plan is code): build it again with 'posexport compile'."
        )
    return manifest


def plan_manifest(path: Path) -> PlanManifest:
    """The manifest of a plan, whose bytes are not read; RequestError where either is missing or can't be used."""
    check_name(path)
    if not path.is_file():
        raise RequestError(f"{str(path)!r} is not there: build it with 'posexport compile'.")
    manifest = read_manifest_of(PlanManifest, path)
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
    """The ONNX file beside a plan that it was built from; RequestError where it or its weights are gone or changed."""
    source = manifest.onnx
    for name, sha256 in {source.file: source.sha256, **source.external_data}.items():
        file = path.with_name(name)
        if not file.is_file():
            raise RequestError(f"{str(path)!r} was built from {name}, which is not beside it: put it there.")
        if sha256_of(file) != sha256:
            raise RequestError(
                f"{str(file)!r} is not what {path.name} was built from (their sha256 differ): compile it again."
            )
    return path.with_name(source.file)
