"""Making one file of a project, and what became of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from posexport.errors import PosexportError, RequestError
from posexport.export.request import write
from posexport.progress import Progress
from posexport.runtimes.tensorrt.api import can_build

if TYPE_CHECKING:
    from posexport.workflows.project.products import Product


FRESH, MADE, STALE, NOT_RUN = "up to date", "made", "out of date", "not run"


@attrs.frozen(kw_only=True)
class Outcome:
    """What became of one file, and why."""

    file: str
    artifact: str
    state: str
    reason: str = ""
    sha256: str | None = None
    size: int | None = None


def outcome(product: Product, state: str, reason: str) -> Outcome:
    """The outcome of a file, with its sha256 and size where it is there."""
    from posexport.artifact.manifest import read_manifest

    file, name = str(product.path), product.entry.name
    if state not in (FRESH, MADE):
        return Outcome(file=file, artifact=name, state=state, reason=reason)
    manifest = read_manifest(product.path)
    sha256 = None if manifest is None else manifest.sha256
    return Outcome(file=file, artifact=name, state=state, reason=reason, sha256=sha256, size=product.bytes())


def make(product: Product, request: Any, source: dict[str, Any], reason: str, progress: Progress) -> Outcome:
    """Make the file of `product`; a plan whose builder is not there is "not run"."""
    from posexport.workflows.project.products import stamp

    missing = can_build(source["runtime"]) if product.plan else None
    if missing is not None:
        return outcome(product, NOT_RUN, f"{source['runtime']} can't build a plan here, {missing}")
    folder = product.path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(
            f"the folder {str(folder)!r} of the project can't be made ({error.strerror}): name another."
        ) from None
    try:
        if product.plan:
            _compile(product, source, progress)
        else:
            write(request, product.path, progress)
        stamp(product.path, source)
    except PosexportError as error:
        told = str(error)
        raise type(error)(told if str(product.path) in told else f"{str(product.path)!r}: {told}") from None
    return outcome(product, MADE, reason)


def _compile(product: Product, source: dict[str, Any], progress: Progress) -> None:
    name = source["runtime"]
    progress(f"loading {name}")
    from posexport.export.compile import BuildOptions, compile_plan

    compile_plan(
        product.source,
        product.path,
        BuildOptions(
            runtime=name,
            profile=tuple(source["profile"]),
            capabilities=tuple(source["compute_capability"]),
            memory_limit=source["memory_limit"],
            tf32=source["tf32"],
        ),
        lambda phase: progress(f"{product.path.name}: {phase}"),
    )
