"""The requests of a project's entries, to export and to compile, and what each file is made from.

Options are read as the commands read theirs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posexport.errors import FieldError, PosexportError, RequestError, RuntimeMissingError, unknown
from posexport.export.block_options import CheckpointOptions
from posexport.export.request import ExportOptions, Request, read_request
from posexport.export.support import default_opset
from posexport.files import sha256_of
from posexport.runtimes import runtime
from posexport.runtimes.tensorrt.api import BUILDERS
from posexport.runtimes.tensorrt.options import capabilities, memory_size
from posexport.spec.fields import check_types
from posexport.spec.spec import Spec
from posexport.workflows.project.file import EXPORT_OPTIONS, Entry, Project, find_project

if TYPE_CHECKING:
    from posexport.workflows.project.products import Product


Sources = dict[Path, dict[str, Any]]
"""What each file should be made from, by its path."""


def open_project(named: str | None) -> Project:
    """The project in the file `named`, or the nearest one; RequestError for unknown runtimes."""
    project = find_project(named)
    for name in (*project.require, *(name for entry in project.entries for name in entry.runtimes or ())):
        _about(project, None, partial(runtime, name))
    for entry in project.entries:
        _about(project, entry, partial(_check_latency, entry))
        if entry.compile is not None and entry.compile.runtime not in BUILDERS:
            error = unknown("runtime", entry.compile.runtime, BUILDERS)
            raise RequestError(f"{project.file}, artifact {entry.name!r}, compile: {error}")
    return project


def _check_latency(entry: Entry) -> None:
    """RequestError for a budget of time that applies to no runtime of the entry."""
    from posexport.bench.candidates import CANDIDATES

    known = [name for name, candidate in CANDIDATES.items() if not candidate.role]
    plan = () if entry.compile is None else (entry.compile.runtime,)
    timed = known if entry.runtimes is None else [name for name in known if name in (*entry.runtimes, *plan)]
    if entry.budget.latency and not timed:
        raise RequestError(
            f"budget latency was given, but none of its runtimes is timed: add one of {', '.join(known)}."
        )
    for latency in entry.budget.latency:
        if latency.runtime is not None and latency.runtime not in timed:
            raise unknown("runtime in budget latency,", latency.runtime, timed)


def chosen_names(project: Project, names: Sequence[str]) -> tuple[str, ...]:
    """Names of artifacts, checked; RequestError for one that the project doesn't list."""
    known = [entry.name for entry in project.entries]
    for name in names:
        if name not in known:
            raise unknown(f"artifact of {project.file}", name, known)
    return tuple(names)


def request_of(project: Project, entry: Entry, form: str | None) -> Request:
    """The export that an entry asks for in one form (None: the form of its config); RequestError names the entry."""
    options = dict(entry.options)
    given = {name: value for name, value in options.items() if name not in ("config", "preset", "set")} | {"form": form}
    config, preset, parameters = (options.get(name) for name in ("config", "preset", "set"))
    for name, value in (("config", config), ("preset", preset), ("from", given.get("from"))):
        if value is not None and not isinstance(value, str):
            raise RequestError(f"{project.file}, artifact {entry.name!r}: {name} is {value!r}: it must be text.")
    for kind in (Spec, ExportOptions, CheckpointOptions):
        _about(project, entry, partial(check_types, kind, given))
    request: Request = _about(
        project, entry, lambda: read_request(config, preset, parameters or {}, given, project.root)
    )
    if request.options.output is not None:
        raise RequestError(
            f"{project.file}, artifact {entry.name!r}: its config gives output: a project names the files, so drop it."
        )
    return request


def made_from(request: Request) -> dict[str, Any]:
    """Everything that decides the bytes of an ONNX file, as JSON data."""
    options = request.options
    if options.weights is not None:
        weights: dict[str, Any] = {"file_sha256": sha256_of(Path(options.weights))}
    elif request.weights is not None:
        from posexport.models.weights import digest_of

        # of the tensors that are read, not of the whole checkpoint
        weights = {"checkpoint_sha256": digest_of(request.weights)}
    else:
        weights = {"seed": options.seed or 0}
    opset = options.opset or default_opset(options.form, request.spec)
    sizes = {name: getattr(options, name) for name in ("batch", "seq", "max_seq")}
    head = {"form": options.form, "target": options.target, "opset": opset, **sizes, "weights": weights}
    source: dict[str, Any] = json.loads(json.dumps({**head, "spec": request.spec.to_dict()}))
    return source


def plan_made_from(project: Project, product: Product) -> dict[str, Any]:
    """Everything beside its ONNX file that decides a plan, as JSON data."""
    plan = product.entry.compile
    assert plan is not None
    limit, entry = plan.memory_limit, product.entry
    return {
        "runtime": plan.runtime,
        "profile": list(plan.profile),
        "compute_capability": list(_about(project, entry, lambda: capabilities(plan.compute_capability))),
        "memory_limit": None if limit is None else _about(project, entry, lambda: memory_size(limit)),
        "tf32": plan.tf32,
    }


def read_requests(project: Project, files: Sequence[Product]) -> tuple[Sources, dict[Path, Request]]:
    """What each file should be made from, and the export requests, by path.

    RequestError for the first request that can't work, as far as that is known without exporting.
    """
    sources: Sources = {}
    requests: dict[Path, Request] = {}
    for product in files:
        if product.plan:
            sources[product.path] = plan_made_from(project, product)
            continue
        request = request_of(project, product.entry, product.form)
        requests[product.path] = request
        sources[product.path] = made_from(request)
    return sources, requests


def _about(project: Project, entry: Entry | None, read: Callable[[], Any]) -> Any:
    """The result of `read`; its error names the project's file and the entry."""
    try:
        return read()
    except PosexportError as error:
        where = str(project.file) + ("" if entry is None else f", artifact {entry.name!r}")
        kind = RuntimeMissingError if isinstance(error, RuntimeMissingError) else RequestError
        if isinstance(error, FieldError) and error.field in EXPORT_OPTIONS:
            error = error.named(error.field.replace("_", "-"))
        raise kind(f"{where}: {error}") from None
