"""Rewrites the attention of any graph in a form: recognises, replaces and tests it site by site.

A site whose replacement is not the same function stays as it was. No decision is based on names alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import attrs
import onnx_ir as ir

from posexport.custom_ops.attention import KINDS
from posexport.errors import Reason, RequestError, check_known, shown
from posexport.graphs.attention.attention import Attention, UnknownAttention
from posexport.graphs.attention.candidates import may_hold_attention, unread
from posexport.graphs.attention.recognise import narrower
from posexport.graphs.axes import PAST, SLOTS
from posexport.graphs.cases import cases_of, without_keys
from posexport.graphs.expand import Expanded, domain_of, expand
from posexport.graphs.function_bodies import DOMAIN, Functions, names_in
from posexport.graphs.load import live
from posexport.graphs.roles import Role
from posexport.graphs.view import View, view_of
from posexport.rewrite.angles.result import SiteAngles
from posexport.rewrite.broadcasts import LengthsApart
from posexport.rewrite.evidence import Evidence, evidence_of
from posexport.rewrite.in_form import is_in_form
from posexport.rewrite.opset import converted
from posexport.rewrite.request import RewriteOptions
from posexport.rewrite.result import ALREADY, KEPT, NOT_CHOSEN, REWRITTEN
from posexport.rewrite.shared_cache import grown_caches, joint_of
from posexport.rewrite.surgery import lower, values_read, write_sites
from posexport.spec.forms import FORMS, TARGETS


@attrs.frozen(kw_only=True)
class SiteResult:
    """What became of one attention: `state` REWRITTEN or KEPT, with the reason and the evidence.

    `angles` says what became of its angles, if exact ones were asked for. `view` is the graph that it was found in,
    None if that was not read.
    """

    attention: Attention | UnknownAttention
    state: str
    reason: Reason | None = None
    evidence: Evidence | None = None
    angles: SiteAngles | None = None
    view: View | None = None


@attrs.frozen(kw_only=True)
class Rewritten:
    """A rewritten model; `changed` is False if it is the given model.

    `original` is the model whose function it has: the given one, except for angles that were made exact. `roles` are
    those of its inputs; empty if the graph can't have attention, or only in operators that can't be evaluated.
    """

    model: ir.Model
    original: ir.Model
    form: str
    target: str
    roles: Mapping[str, Role]
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
    kv_cache: str | None = None,
    seed: int = 0,
) -> Rewritten:
    """`model` with its attention in `form`; the given model is not changed.

    RequestError for unknown names, for an opset that the form or the file can't have, and if the role of an input can't
    be guessed.
    """
    check_known("form", form, FORMS)
    check_known("target", target, TARGETS)
    shared = kv_cache == "shared"
    if kv_cache not in (None, "shared"):
        raise RequestError(f"kv_cache is {shown(kv_cache)}: give 'shared', or none to leave caches as they are.")
    left = unread(model)
    if left or not may_hold_attention(model):
        kept_sites = tuple(SiteResult(attention=one, state=KEPT, reason=one.reason) for one in left)
        return Rewritten(
            model=model, original=model, form=form, target=target, roles={}, sites=kept_sites, changed=False
        )
    kept = kept_domain(form)
    called = kept is None and any(function.domain == DOMAIN for function in model.functions.values())
    view = view_of(converted(model, form, target, opset, shared), roles, seed, kept=kept)
    before = view.model
    shared = shared and not _has_buffers(view)
    reasons: dict[str, Reason] = {}
    chosen: list[Attention] = []
    for one in view.attentions:
        if isinstance(one, UnknownAttention):
            reasons[one.name] = one.reason
        elif only and one.name not in only:
            reasons[one.name] = Reason(NOT_CHOSEN, "--only names others")
        elif not (called or shared) and is_in_form(view, one, form, target):
            reasons[one.name] = Reason(ALREADY, f"it is in the form {form} already")
        else:
            chosen.append(one)
    buffers = grown_caches(view.roles) if shared else []
    unusable = _unusable_cache(view, buffers) if shared else None
    if unusable is not None:
        reasons |= dict.fromkeys((one.name for one in chosen), unusable)
        chosen = []
    inputs = {value.name: value for value in before.graph.inputs}
    appends = {joint.name for name in buffers if (joint := joint_of(inputs[name])) is not None}
    cases = cases_of(view.roles, seed, own=without_keys(view.roles)) if chosen else []
    evidence: dict[str, Evidence] = {}
    after = before
    while chosen:
        after, refused = _written(view, before, chosen, form, target, shared)
        if refused:
            told = {name: _refusal(error) for name, error in refused.items()}
            reasons = told | reasons  # the reasons of what was tried first count
            chosen = _narrowed(view, chosen, refused, keep=False)
            continue
        others = [one for one in view.expanded if one.nodes.isdisjoint(appends)]
        stay = {one.name for one in others if _stays(after, one, chosen, form)}
        if stay:  # these operators stay operators
            base = converted(model, form, target, opset, shared)
            live(base, kept)
            expand(base, view.operator_shapes, {one.name for one in view.expanded} - stay)
            after, _ = _written(view, base, chosen, form, target, shared)
        evidence |= evidence_of(before, after, chosen, cases, buffers=buffers, shapes_on=view.shapes_on)
        wrong = {one.name for one in chosen if not evidence[one.name].agrees}
        if not wrong:
            break
        if any(one.name in wrong and (one.near is not None or one.turns) for one in chosen):
            # what comes before the products was not what it seemed, but the products may be replaced
            chosen = _narrowed(view, chosen, wrong, keep=True)
            continue
        reasons |= {name: _disagreement(evidence[name]) for name in wrong}
        chosen = _without(chosen, wrong)
    done = {one.name for one in chosen}
    sites = tuple(
        SiteResult(
            attention=one,
            state=REWRITTEN if one.name in done else KEPT,
            reason=None if one.name in done else reasons.get(one.name),
            evidence=evidence.get(one.name),
        )
        for one in view.attentions
    )
    sites += tuple(_functions(before, len(sites))) if kept else ()
    return Rewritten(
        model=after if done else model,
        original=model,
        form=form,
        target=target,
        roles=view.roles,
        sites=tuple(attrs.evolve(site, view=view) for site in sites),
        changed=bool(done),
    )


def kept_domain(form: str) -> str | None:
    """The domain whose functions stay functions in a form; None if all calls are inlined."""
    return DOMAIN if form == "function" else None


def rewrite_as(model: ir.Model, options: RewriteOptions) -> Rewritten:
    """`rewrite_model` with these options, without exact angles (posexport.rewrite.angles.rewriter)."""
    return rewrite_model(
        model,
        form=options.form,
        target=options.target,
        opset=options.opset,
        roles=options.roles,
        only=options.only,
        kv_cache=options.kv_cache,
        seed=options.seed,
    )


def _narrowed(view: View, chosen: Sequence[Attention], names: Collection[str], *, keep: bool) -> list[Attention]:
    """The attentions; those with these names begin and end nearer to their products.

    Those that can't be any nearer are left out, unless `keep` is set.
    """
    found = []
    for one in chosen:
        nearer = narrower(view.flow, view.probe, one) if one.name in names else one
        found += [nearer] if nearer is not None else [one] if keep else []
    return found


def _without(chosen: Sequence[Attention], names: Collection[str]) -> list[Attention]:
    return [one for one in chosen if one.name not in names]


def _functions(model: ir.Model, count: int) -> Iterator[SiteResult]:
    """The attention in calls of posexport's functions; it is in the form `function` already."""
    names = {operator.function for operator in KINDS}
    for node in model.graph:
        if node.domain == DOMAIN and node.op_type.rstrip("_0123456789") in names:
            reason = Reason(ALREADY, "it is in the form function already")
            name = node.name or node.outputs[0].name or ""
            yield SiteResult(
                attention=UnknownAttention(name=name, layer=count, reason=reason), state=KEPT, reason=reason
            )
            count += 1


def _has_buffers(view: View) -> bool:
    """Whether all caches of the graph are already buffers of a fixed length."""
    pasts = [role for role in view.roles.values() if role.kind == "past"]
    return bool(pasts) and all(SLOTS in role.axes for role in pasts)


def _unusable_cache(view: View, caches: Sequence[str]) -> Reason | None:
    """Why these caches can't become buffers; None if they can. RequestError if there are none."""
    if not caches:
        raise RequestError("--kv-cache shared makes buffers of caches, and the graph has none that grows: drop it.")
    values = {value.name: value for value in view.model.graph.inputs}
    read = [side.cache for one in view.attentions if isinstance(one, Attention) for side in (one.k, one.v)]
    presents = {cache.name: cache.present for cache in read if cache is not None}
    for name in caches:
        joint = joint_of(values[name])
        grows = joint is not None and presents.get(name, joint.outputs[0]) is joint.outputs[0]
        if not grows or view.roles[name].axes[2:3] != (PAST,):
            text = f"no Concat appends new tokens to {shown(name)} [batch, heads, tokens, size]"
            return Reason("cache-kind", f"{text}, and caches are buffers all together or not at all")
    return None


def _written(
    view: View, base: ir.Model, chosen: Sequence[Attention], form: str, target: str, shared: bool
) -> tuple[ir.Model, dict[str, RequestError]]:
    """A copy of `base` with these sites in the form; and the sites that the form can't express, by name."""
    copy = base.clone()
    functions = Functions(copy.opset_imports[""], form, target, names_in(copy))
    refused = write_sites(view, copy, chosen, functions, shared=shared)
    if not refused:
        lower(copy, functions, form)
    return copy, refused


def _stays(model: ir.Model, operator: Expanded, chosen: Sequence[Attention], form: str) -> bool:
    """Whether an operator that was written out should stay an operator.

    It should if one of its outputs is read but no value inside it, and it is not a rotation that the form has no
    operator for.
    """
    foreign = form == "decomposed" or (form != "contrib" and domain_of(operator.node) == "com.microsoft")
    if foreign and operator.node.op_type == "RotaryEmbedding":
        return False
    met = [*values_read(chosen), *(one.output.value for one in chosen)]
    inside = {value.name for value in met if (node := value.producer()) and node.name in operator.nodes}
    return not inside and any(
        value.name in operator.outputs and node.name in operator.nodes for node in model.graph for value in node.outputs
    )


def _refusal(error: RequestError) -> Reason:
    text = str(error).rstrip(".")
    return Reason("rows", text) if isinstance(error, LengthsApart) else Reason("form", text)


def _disagreement(evidence: Evidence) -> Reason:
    if evidence.problem is not None:
        return Reason("not-the-same", evidence.problem)
    if not evidence.cases:
        return Reason("not-tested", "no drawn inputs gave values that could be compared")
    return Reason("not-the-same", f"its replacement differs by {evidence.error:.2g} of the largest value")
