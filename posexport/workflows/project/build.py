"""Building a project: each of its files that is out of date is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import attrs

from posexport.artifact.folders import make_folders
from posexport.artifact.manifest import read_manifest
from posexport.artifact.signing import SigningKey
from posexport.errors import MismatchError, RequestError, located, system_error
from posexport.export.request import write
from posexport.files import renewed
from posexport.jsondata import unstructure
from posexport.progress import Progress
from posexport.runtimes.tensorrt.api import can_build
from posexport.runtimes.tensorrt.options import BuildOptions
from posexport.workflows.project.file import Project
from posexport.workflows.project.products import Product, made_from, out_of_date, products, request_of, stamp

State = Literal["made", "up to date", "out of date", "not run"]


@attrs.frozen(kw_only=True)
class Outcome:
    """The state of one file after the build, and the reason. sha256 and size (bytes) are set if it is up to date."""

    file: str
    artifact: str
    state: State
    reason: str = ""
    sha256: str | None = None
    size: int | None = None


@attrs.frozen(kw_only=True)
class BuildResult:
    """The outcomes of a project's files, in the order of the project."""

    project: str
    files: tuple[Outcome, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"kind": "build", "version": 1, **unstructure(self)}


def build_project(
    project: Project,
    names: Sequence[str],
    *,
    check: bool,
    force: bool,
    progress: Progress,
    key: SigningKey | None = None,
) -> BuildResult:
    """Make the files of a project, or of its artifacts of these `names`, that are out of date.

    With `check`, nothing is written. With `force`, files that are up to date are made too. With a `key`, every file is
    signed. A file that the key has not signed is out of date, because nobody knows where it comes from. Raises
    RequestError for names that the project lacks, and for the first entry that can't be made.
    """
    if check and force:
        raise RequestError("both --check and --force were given: one writes nothing, the other everything; drop one.")
    progress("loading torch")
    stale: set[Path] = set()
    outcomes = []
    for product in products(project, names):
        old = out_of_date(product)
        reason = "--force makes every file anew" if force else None if old is None else old.text
        if product.plan and product.source in stale:
            reason = reason or f"{product.source.name} is out of date"
        if reason is None and key is not None:
            reason = _not_signed(product, key)
        if reason is None:
            outcomes.append(_outcome(product, "up to date", ""))
        elif check:
            stale.add(product.path)
            outcomes.append(_outcome(product, "out of date", reason))
        else:
            progress(f"making {product.path.name}")
            outcomes.append(_make(project, product, reason, progress, key))
    return BuildResult(project=str(project.file), files=tuple(outcomes))


def _outcome(product: Product, state: State, reason: str) -> Outcome:
    outcome = Outcome(file=str(product.path), artifact=product.entry.name, state=state, reason=reason)
    if state not in ("made", "up to date"):
        return outcome
    with renewed():
        manifest = read_manifest(product.path)
    return attrs.evolve(outcome, sha256=None if manifest is None else manifest.sha256, size=product.bytes())


def _not_signed(product: Product, key: SigningKey) -> str | None:
    """Why `key` has not signed a file, as a clause. None if it has."""
    try:
        with renewed():
            read_manifest(product.path, (key.trusted(),))
    except MismatchError as error:
        return error.reason.text
    return None


@contextmanager
def _folder(path: Path) -> Iterator[None]:
    """Make a folder and those above it. If the block fails, those that it made and left empty are removed."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    make_folders(path)
    try:
        yield
    except BaseException:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise


def _make(project: Project, product: Product, reason: str, progress: Progress, key: SigningKey | None) -> Outcome:
    """Make one file. A plan without its builder is "not run"."""
    if product.plan and (missing := can_build(product.plan.runtime)) is not None:
        return _outcome(product, "not run", f"{product.plan.runtime} can't build a plan here, {missing}")
    folder = product.path.parent
    with ExitStack() as stack:
        with system_error(f"the folder {str(folder)!r} of the project can't be made", "name another"):
            stack.enter_context(_folder(folder))
        stack.enter_context(located(repr(str(product.path))))
        if product.plan:
            progress(f"loading {product.plan.runtime}")
            from posexport.export.compile import compile_plan

            options = BuildOptions(**attrs.asdict(product.plan))
            compile_plan(
                product.source,
                product.path,
                options,
                lambda phase: progress(f"{product.path.name}: {phase}"),
                key=key,
                trusted=() if key is None else (key.trusted(),),
            )
        else:
            request = request_of(project, product.entry, product.form)  # anew: what it reads may have changed
            product = attrs.evolve(product, made_from=made_from(request))
            write(request, product.path, progress, key)
        stamp(product, key)
    return _outcome(product, "made", reason)
