"""What any ONNX file contains besides its operators: the roles of its inputs, and its attention.

A damaged or hostile file can end the process that evaluates it, use all memory or never end. So a child process does
this, `python -P -m posexport.graphs.inspection`. Whatever happens to it becomes the reason why attention was not looked
for. A request is {path, sha256, roles}, the answer an Inspection. This module loads no engine by itself.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport import machine, temporary
from posexport.artifact.graph_file import GraphFile
from posexport.artifact.weights_on_disk import read_with_weights_on_disk
from posexport.errors import PosexportError, Reason, RequestError
from posexport.jsondata import structure, unstructure
from posexport.processes import Worker, failure_of, report, serve
from posexport.progress import Progress, silent

if TYPE_CHECKING:
    import onnx_ir as ir

    from posexport.graphs.attention.describe import Describer
    from posexport.graphs.attention.recognise import Found

LONGEST_STEP, LONGEST = 300.0, 900.0
"""The seconds that one step may take, and the seconds after which no further attention is described."""

ROLES, NOT_EVALUATED, TIME, FAILED = "roles-unknown", "not-evaluated", "time", "failed"
"""Codes of reasons why attention was not looked for or not described, in addition to those of posexport.processes."""


NOT_STARTED = "not-started"
"""The code of the reason that the child process can't be started."""


@attrs.frozen(kw_only=True)
class Inspection:
    """The role of each input by name, None if it can't be guessed, and the attentions as data.

    docs/reference/attentions.md describes the data. `reason` says why attention was not looked for. If all roles are
    known, `shapes` are those of the inputs with all sizes that the graph needs, `axes` the meanings of their axes
    (posexport.graphs.axes), `positions` the rows of the smallest table of positions, and `sides` the usual height and
    width of images.
    """

    roles: Mapping[str, str | None]
    shapes: Mapping[str, tuple[str | int, ...]] = attrs.field(factory=dict)
    axes: Mapping[str, tuple[str | int, ...]] = attrs.field(factory=dict)
    positions: int | None = None
    sides: Mapping[str, int] = attrs.field(factory=dict)
    attentions: tuple[Mapping[str, Any], ...] = ()
    reason: Reason | None = None


def inspect_graph(
    graph: GraphFile,
    roles: Mapping[str, str] | None = None,
    progress: Progress = silent,
    *,
    attention: bool = True,
    describe: bool = True,
) -> Inspection:
    """What a file contains, found by another process. `roles` of inputs by name are those that the user knows.

    Without `attention`, only inputs are looked at. Without `describe`, attention is used to tell the axes of inputs,
    and not described. RequestError for roles that the inputs can't have.
    """
    try:
        temporary.usual_parent()
    except RequestError as error:
        return Inspection(roles=dict.fromkeys(graph.inputs()), reason=Reason(NOT_STARTED, str(error).rstrip(".")))
    worker = Worker("posexport.graphs.inspection")
    try:
        request = {"path": str(graph.path.absolute()), "sha256": graph.sha256}
        reply = worker.ask(
            {**request, "roles": dict(roles or {}), "attention": attention, "describe": describe},
            LONGEST_STEP,
            progress,
        )
    finally:
        worker.close()
    failure = failure_of(reply)
    if failure is not None:
        return Inspection(
            roles=dict.fromkeys(graph.inputs()), reason=attrs.evolve(failure, text=failure.text.rstrip("."))
        )
    if reply["refused"] is not None:
        raise RequestError(reply["refused"])
    return structure(reply["inspection"], Inspection)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Inspect the file."""
    machine.limit_to_what_is_free()
    report("reading the graph")
    graph = read_with_weights_on_disk(Path(request["path"]), request["sha256"])
    from posexport.graphs.roles import GivenRoleError

    try:
        asked = {name: request[name] for name in ("attention", "describe")}
        found = inspected(graph, request["roles"], report, **asked)
    except GivenRoleError as error:
        return {"refused": str(error), "inspection": None}
    return {"refused": None, "inspection": unstructure(found)}


def inspected(
    graph: GraphFile,
    given: Mapping[str, str],
    progress: Progress = silent,
    *,
    attention: bool = True,
    describe: bool = True,
) -> Inspection:
    """`inspect_graph` in this process."""
    from posexport.graphs.axes import HEIGHT, WIDTH
    from posexport.graphs.branches import branches_of, of_branch, with_few_queries
    from posexport.graphs.load import inlined, model_of
    from posexport.graphs.roles import GivenRoleError, guessed_roles, roles_of
    from posexport.graphs.sizes import side_of

    model = model_of(graph)
    with_few_queries(model)
    holds = attention and _may_hold_attention(model)
    plain = inlined(model.clone()) if model.functions else model
    kinds = guessed_roles(plain, given)
    found = Inspection(roles=kinds)
    try:
        roles = roles_of(plain, given)
    except GivenRoleError:
        raise
    except RequestError as error:
        return attrs.evolve(found, reason=Reason(ROLES, str(error).rstrip(".")) if holds else None)
    rows = [role.rows for role in roles.values() if role.kind == "position_ids" and role.rows is not None]
    found = attrs.evolve(
        found,
        shapes={name: role.shape for name, role in roles.items()},
        axes={name: role.axes for name, role in roles.items()},
        positions=min(rows, default=None),
        sides={axis: side_of(role, axis) for role in roles.values() for axis in (HEIGHT, WIDTH) if axis in role.axes},
    )
    if not holds:
        return found
    progress("looking for attention")
    branches = branches_of(model)
    if not describe:
        return found if branches else _described(model, given, found, progress, describe=False)
    if not branches:
        untouched = model.clone() if _has_choices(model) else None  # describing a model changes it
        described = _described(model, given, found, progress)
        return described if untouched is None else _in_choices(untouched, given, described, progress)
    attentions: list[Mapping[str, Any]] = []
    for branch in branches.values():
        more = _described(branch, of_branch(given, branch), found, progress)
        left = () if more.reason is None else _unevaluated(branch, more.reason)
        first = len(attentions)
        attentions += ({**one, "layer": one["layer"] + first} for one in (*more.attentions, *left))
    return attrs.evolve(found, attentions=tuple(attentions))


def _may_hold_attention(model: ir.Model) -> bool:
    from posexport.graphs.attention.candidates import may_hold_attention  # loads torch

    return may_hold_attention(model)


def _unevaluated(model: ir.Model, reason: Reason) -> list[Mapping[str, Any]]:
    from posexport.graphs.attention.candidates import unevaluated
    from posexport.graphs.attention.describe import undescribed

    return [undescribed(one, reason) for one in unevaluated(model, reason)]


def _has_choices(model: ir.Model) -> bool:
    nodes = itertools.chain(model.graph, *model.functions.values())
    return any(node.op_type == "If" for node in nodes)


def _in_choices(model: ir.Model, given: Mapping[str, str], found: Inspection, progress: Progress) -> Inspection:
    """The Inspection with attention in the bodies of If described as that of separate graphs."""
    from posexport.graphs.attention.candidates import CONTROL_FLOW, may_be_attention
    from posexport.graphs.choices import bodies_with, lifted
    from posexport.graphs.load import live

    attentions = [*found.attentions]
    if not any(_code(one) == CONTROL_FLOW for one in attentions):
        return found
    for body in bodies_with(live(model), may_be_attention(model)):
        for one in _described(lifted(model, body), given, found, progress).attentions:
            places = [at for at, old in enumerate(attentions) if old["name"] == one["name"] in body.names]
            at = next((at for at in places if _code(attentions[at]) == CONTROL_FLOW), None)
            if at is not None:
                attentions[at] = {**one, "layer": attentions[at]["layer"]}
    return attrs.evolve(found, attentions=tuple(attentions))


def _code(attention: Mapping[str, Any]) -> str | None:
    return (attention.get("reason") or {}).get("code")


def _described(
    model: ir.Model, given: Mapping[str, str], found: Inspection, progress: Progress, *, describe: bool = True
) -> Inspection:
    from posexport.graphs.attention.candidates import unread
    from posexport.graphs.attention.describe import Describer, undescribed
    from posexport.graphs.attention.origins import call_sites
    from posexport.graphs.view import view_of

    if left := unread(model):
        return attrs.evolve(found, attentions=tuple(undescribed(one, one.reason) for one in left))
    start = time.monotonic()
    sites = call_sites(model)
    try:
        view = view_of(model, given)
    except PosexportError as error:
        return attrs.evolve(found, reason=Reason(NOT_EVALUATED, str(error).rstrip(".")))
    except MemoryError:
        raise
    except Exception as error:  # a strange graph, or a wrong role, makes torch or numpy raise any error
        asked = "on inputs of the roles that --input gives, so check those" if given else "on any inputs of its roles"
        return attrs.evolve(
            found, reason=Reason(NOT_EVALUATED, f"the graph can't be evaluated {asked} ({type(error).__name__})")
        )
    found = attrs.evolve(found, axes={name: role.axes for name, role in view.roles.items() if name in found.roles})
    if not describe:
        return found
    describer = Describer(view, sites)
    attentions = []
    for number, one in enumerate(view.attentions, 1):
        progress(f"describing attention {number} of {len(view.attentions)}")
        if time.monotonic() - start > LONGEST:
            reason = Reason(TIME, f"those before it took {LONGEST:g} s")
            attentions.append(describer.missing(one, reason))
        else:
            attentions.append(described_one(describer, one))
    return attrs.evolve(found, attentions=tuple(attentions))


def described_one(describer: Describer, one: Found) -> dict[str, Any]:
    """The description of one attention, or why there is none."""
    try:
        return describer.describe(one)
    except PosexportError as error:
        return describer.missing(one, Reason(NOT_EVALUATED, str(error).rstrip(".")))
    except Exception as error:  # a strange graph makes torch or numpy raise any error
        return describer.missing(one, Reason(FAILED, f"it can't be described ({type(error).__name__})"))


if __name__ == "__main__":
    serve(answer)
