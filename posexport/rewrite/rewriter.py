"""Attention of any graph, written anew in a form: recognised, replaced, tested site by site, and kept where it differs.

A site whose replacement is not the same function is left as it was; nothing is rewritten on the strength of names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs
import onnx_ir as ir
from onnxscript import version_converter

from posexport.errors import Reason, RequestError, check_known
from posexport.graphs.attention.attention import Attention, UnknownAttention
from posexport.graphs.cases import cases_of
from posexport.graphs.expand import Expanded, expand
from posexport.graphs.function_bodies import Functions
from posexport.graphs.view import View, inline, view_of
from posexport.rewrite.evidence import Evidence, evidence_of
from posexport.rewrite.in_form import is_in_form
from posexport.rewrite.surgery import lower, write_sites
from posexport.spec.forms import FORM_OPSETS, FORMS, TARGETS, unsupported_opset

REWRITTEN, KEPT = "rewritten", "kept"

ALREADY = "already-in-form"
"""The code of the reason of a site that needs no rewriting."""


@attrs.frozen(kw_only=True)
class SiteResult:
    """What became of one attention: `state` REWRITTEN or KEPT, with the reason, and the evidence."""

    attention: Attention | UnknownAttention
    state: str
    reason: Reason | None = None
    evidence: Evidence | None = None


@attrs.frozen(kw_only=True)
class Rewritten:
    """A rewritten model; `changed` is False where it is the model that was given."""

    model: ir.Model
    form: str
    target: str
    view: View
    sites: tuple[SiteResult, ...]
    changed: bool


def rewrite_model(
    model: ir.Model,
    *,
    form: str = "decomposed",
    target: str = "portable",
    opset: int | None = None,
    roles: Mapping[str, str] | None = None,
    only: Sequence[str] = (),
    seed: int = 0,
) -> Rewritten:
    """`model` with its attention in `form`; the model that is given stays as it is.

    RequestError for unknown names, for an opset that the form or the file can't have, and where the role of an input
    can't be guessed.
    """
    check_known("form", form, FORMS)
    check_known("target", target, TARGETS)
    before = converted(model, form, target, opset)
    view = view_of(before, roles, seed)
    reasons: dict[str, Reason] = {}
    chosen: list[Attention] = []
    for one in view.attentions:
        if isinstance(one, UnknownAttention):
            reasons[one.name] = one.reason
        elif only and one.name not in only:
            reasons[one.name] = Reason("not-chosen", "--only names others")
        elif is_in_form(view, one, form, target):
            reasons[one.name] = Reason(ALREADY, f"it is in the form {form} already")
        else:
            chosen.append(one)
    cases = cases_of(view.roles, seed) if chosen else []
    evidence: dict[str, Evidence] = {}
    after = before
    while chosen:
        after, refused = _written(view, before, chosen, form, target)
        if refused:
            reasons |= {name: Reason("form", str(error).rstrip(".")) for name, error in refused.items()}
            chosen = [one for one in chosen if one.name not in refused]
            continue
        absorbed = {one.name for one in view.expanded if not _makes_output(after, one)}
        if len(absorbed) < len(view.expanded):  # the other operators stay operators
            base = converted(model, form, target, opset)
            inline(base)
            expand(base, view.operator_shapes, absorbed)
            after, _ = _written(view, base, chosen, form, target)
        evidence |= evidence_of(before, after, chosen, cases)
        wrong = {one.name for one in chosen if not evidence[one.name].agrees}
        if not wrong:
            break
        reasons |= {name: _disagreement(evidence[name]) for name in wrong}
        chosen = [one for one in chosen if one.name not in wrong]
    done = {one.name for one in chosen}
    sites = tuple(
        SiteResult(
            attention=one,
            state=REWRITTEN if one.name in done else KEPT,
            reason=reasons.get(one.name),
            evidence=evidence.get(one.name),
        )
        for one in view.attentions
    )
    return Rewritten(
        model=after if done else model, form=form, target=target, view=view, sites=sites, changed=bool(done)
    )


def _written(
    view: View, base: ir.Model, chosen: Sequence[Attention], form: str, target: str
) -> tuple[ir.Model, dict[str, RequestError]]:
    """A copy of `base` with these sites in the form; and the sites that the form can't express, by name."""
    copy = base.clone()
    functions = Functions(copy.opset_imports[""], form, target)
    values = _read(chosen)
    refused = write_sites(copy, chosen, functions, view.dtypes(values), view.shapes(values))
    if not refused:
        lower(copy, functions, form)
    return copy, refused


def _makes_output(model: ir.Model, operator: Expanded) -> bool:
    """Whether nodes of an operator that was written out still make one of its outputs."""
    return any(
        value.name in operator.outputs and node.name in operator.nodes for node in model.graph for value in node.outputs
    )


def converted(model: ir.Model, form: str, target: str, opset: int | None) -> ir.Model:
    """A copy of the model in an opset that the form has: its own, or the nearest above; `opset` where it is given."""
    own = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 1))
    wanted = opset if opset is not None else max(own, FORM_OPSETS[form][0])
    why = unsupported_opset(form, target, wanted)
    if why is not None:
        raise RequestError(f"{why}.")
    if wanted < own:
        raise RequestError(f"opset is {wanted}: the file is of opset {own}, so give {own} or more, or none.")
    copy = model.clone()
    if wanted > own:
        version_converter.convert_version(copy, wanted, fallback=True)
    return copy


def _read(attentions: Iterable[Attention]) -> list[ir.Value]:
    """Every value that the sites read."""
    values: list[ir.Value] = []
    for one in attentions:
        for side in (one.q, one.k, one.v):
            values.append(side.source.value)
            if side.rotary is not None:
                values += [side.rotary.cos.value, side.rotary.sin.value]
            if side.cache is not None:
                values.append(side.cache.past)
        values += [term.value for term in one.terms] + [scale for scale, _ in one.head_scales]
        values += [] if one.sinks is None else [one.sinks]
    return list(dict.fromkeys(values))


def _disagreement(evidence: Evidence) -> Reason:
    if evidence.problem is not None:
        return Reason("not-the-same", evidence.problem)
    if not evidence.cases:
        return Reason("not-tested", "no drawn inputs gave numbers that could be compared")
    return Reason("not-the-same", f"its replacement differs by {evidence.error:.2g} of the largest value")
