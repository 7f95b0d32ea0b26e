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
from posexport.graphs.function_bodies import Functions
from posexport.graphs.view import View, view_of
from posexport.rewrite.evidence import Evidence, evidence_of
from posexport.rewrite.surgery import lower, write_sites
from posexport.spec.forms import FORM_OPSETS, FORMS, TARGETS, unsupported_opset

REWRITTEN, KEPT = "rewritten", "kept"


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
    chosen = [one for one in view.attentions if isinstance(one, Attention) and (not only or one.name in only)]
    reasons: dict[str, Reason] = {}
    evidence: dict[str, Evidence] = {}
    cases = cases_of(view.roles, seed) if chosen else []
    after = before
    while chosen:
        after = before.clone()
        functions = Functions(before.opset_imports[""], form, target)
        refused = write_sites(after, chosen, functions, view.dtypes(_read(chosen)), view.shapes(_read(chosen)))
        if refused:
            reasons |= {name: Reason("form", str(error).rstrip(".")) for name, error in refused.items()}
            chosen = [one for one in chosen if one.name not in refused]
            continue
        lower(after, functions, form)
        evidence |= evidence_of(before, after, chosen, cases)
        wrong = {one.name for one in chosen if not evidence[one.name].agrees}
        if not wrong:
            break
        reasons |= {name: _disagreement(evidence[name]) for name in wrong}
        chosen = [one for one in chosen if one.name not in wrong]
    done = {one.name for one in chosen}
    sites = tuple(_result(one, done, reasons, evidence, only) for one in view.attentions)
    return Rewritten(
        model=after if done else model, form=form, target=target, view=view, sites=sites, changed=bool(done)
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


def _result(
    one: Attention | UnknownAttention,
    done: set[str],
    reasons: Mapping[str, Reason],
    evidence: Mapping[str, Evidence],
    only: Sequence[str],
) -> SiteResult:
    if one.name in done:
        return SiteResult(attention=one, state=REWRITTEN, evidence=evidence[one.name])
    reason = one.reason if isinstance(one, UnknownAttention) else reasons.get(one.name)
    if reason is None:
        reason = Reason("not-chosen", "--only names others")
    return SiteResult(attention=one, state=KEPT, reason=reason, evidence=evidence.get(one.name))
