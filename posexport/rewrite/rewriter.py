"""Rewrites the attention of any graph in a form: recognises, replaces and tests it site by site.

A site whose replacement is not the same function stays as it was. No decision is based on names alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import attrs
import onnx_ir as ir

from posexport.custom_ops.attention import KINDS
from posexport.errors import Reason, RequestError, check_known, shown
from posexport.graphs.attention.attention import Attention, UnknownAttention
from posexport.graphs.attention.candidates import may_hold_attention, unread
from posexport.graphs.attention.recognise import narrower
from posexport.graphs.axes import PAST, SLOTS
from posexport.graphs.cases import cases_of, without_keys
from posexport.graphs.draw import DrawnInputs
from posexport.graphs.expand import Expanded, domain_of, expand
from posexport.graphs.function_bodies import DOMAIN, Functions, names_in
from posexport.graphs.load import live
from posexport.graphs.roles import Role
from posexport.graphs.view import View, view_of
from posexport.rewrite.angles.result import SiteAngles
from posexport.rewrite.broadcasts import LengthsApart
from posexport.rewrite.cache_lengths import check_one_length
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
    shared = shared and not _has_buffers(view)
    buffers = _growing_caches(view) if shared else ()
    job = _Job(view=view, form=form, target=target, buffers=buffers, even_in_form=called or shared)
    job.choose(only)
    cases = cases_of(view.roles, seed, own=without_keys(view.roles)) if job.chosen else []
    after = job.write(cases, lambda: live(converted(model, form, target, opset, shared), kept))
    sites = (*job.sites(), *(_functions(view.model, len(view.attentions)) if kept else ()))
    changed = bool(job.chosen or job.buffers)
    return Rewritten(
        model=after if changed else model,
        original=model,
        form=form,
        target=target,
        roles=view.roles,
        sites=tuple(attrs.evolve(site, view=view) for site in sites),
        changed=changed,
    )


@attrs.define(kw_only=True)
class _Job:
    """Writes attention of a view in a form: what is `chosen` now, and what became of the rest.

    With `even_in_form`, what is in the form already is written anew. `buffers` are the names of the caches that become
    buffers: all caches, or none.
    """

    view: View
    form: str
    target: str
    buffers: Sequence[str]
    even_in_form: bool = False
    chosen: list[Attention] = attrs.field(factory=list)
    reasons: dict[str, Reason] = attrs.field(factory=dict)
    evidence: dict[str, Evidence] = attrs.field(factory=dict)

    def choose(self, only: Sequence[str]) -> None:
        """Choose the attention to write: with a name in `only` if there are any, and not in the form already."""
        unusable = _unusable_cache(self.view, self.buffers)
        self.buffers = self.buffers if unusable is None else ()
        for one in self.view.attentions:
            if isinstance(one, UnknownAttention):
                self.reasons[one.name] = one.reason
            elif only and one.name not in only:
                self.reasons[one.name] = Reason(NOT_CHOSEN, "--only names others")
            elif self._is_settled(one):
                self.reasons[one.name] = Reason(ALREADY, f"it is in the form {self.form} already")
            elif unusable is not None:
                self.reasons[one.name] = unusable
            else:
                self.chosen.append(one)

    def write(self, cases: Sequence[DrawnInputs], unexpanded: Callable[[], ir.Model]) -> ir.Model:
        """The model with what is chosen in the form. What the form can't express, and what differs, is chosen no more.

        `unexpanded` gives the model with its operators for attention not written out.
        """
        view, after = self.view, self.view.model
        if self.buffers:
            check_one_length(view.model, view.roles)
        while self.chosen:
            after, refused = self._tried(unexpanded)
            if refused:
                told = {name: _refusal(error) for name, error in refused.items()}
                self.reasons = told | self.reasons  # the reasons of what was tried first count
                self._narrow(refused, keep=False)
                continue
            self.evidence |= evidence_of(
                view.model, after, self.chosen, cases, buffers=self.buffers, shapes_on=view.shapes_on
            )
            wrong = {one.name for one in self.chosen if not self.evidence[one.name].agrees}
            if not wrong:
                break
            if any(one.name in wrong and (one.near is not None or one.turns) for one in self.chosen):
                # what comes before the products was not what it seemed, but the products may be replaced
                self._narrow(wrong, keep=True)
                continue
            self.reasons |= {name: _disagreement(self.evidence[name]) for name in wrong}
            self.chosen = [one for one in self.chosen if one.name not in wrong]
        if self.buffers and not self.chosen:  # caches become buffers though no attention has the form
            after, _ = self._tried(unexpanded)
        return after

    def _is_settled(self, one: Attention) -> bool:
        return not self.even_in_form and is_in_form(self.view, one, self.form, self.target)

    def _narrow(self, names: Collection[str], *, keep: bool) -> None:
        """Let the attentions with these names begin and end nearer to their products.

        If such an attention is in the form then, for example without its rotation, it stays as it is.
        """
        self.chosen = _narrowed(self.view, self.chosen, names, keep=keep)
        settled = [one for one in self.chosen if one.name in names and self._is_settled(one)]
        self.reasons |= {one.name: Reason(ALREADY, f"it is in the form {self.form} already") for one in settled}
        self.chosen = [one for one in self.chosen if one not in settled]

    def sites(self) -> tuple[SiteResult, ...]:
        """What became of each attention."""
        done = {one.name for one in self.chosen}
        return tuple(
            SiteResult(
                attention=one,
                state=REWRITTEN if one.name in done else KEPT,
                reason=None if one.name in done else self.reasons.get(one.name),
                evidence=self.evidence.get(one.name),
            )
            for one in self.view.attentions
        )

    def _tried(self, unexpanded: Callable[[], ir.Model]) -> tuple[ir.Model, dict[str, RequestError]]:
        """The model with what is chosen in the form; and what the form can't express, by name."""
        after, refused = self._written(self.view.model)
        stay = set() if refused else self._staying(after)
        if stay:
            base = unexpanded()
            expand(base, self.view.operator_shapes, {one.name for one in self.view.expanded} - stay)
            after, _ = self._written(base)
        return after, refused

    def _written(self, base: ir.Model) -> tuple[ir.Model, dict[str, RequestError]]:
        """A copy of `base` with what is chosen in the form, and what the form can't express."""
        copy = base.clone()
        functions = Functions(copy.opset_imports[""], self.form, self.target, names_in(copy))
        refused = write_sites(self.view, copy, self.chosen, functions, buffers=self.buffers)
        if not refused:
            lower(copy, functions, self.form)
        return copy, refused

    def _staying(self, after: ir.Model) -> set[str]:
        """The names of the operators that were written out, but should stay operators.

        They should if one of their outputs is read but no value inside them, and if they are not rotations that the
        form has no operator for. An operator with a cache inside can't stay if caches become buffers.
        """
        met = [*values_read(self.chosen), *(one.output.value for one in self.chosen)]
        inside = {node.name for value in met if (node := value.producer()) is not None}
        inputs = {value.name: value for value in self.view.model.graph.inputs}
        inside |= {joint.name for name in self.buffers if (joint := joint_of(inputs[name])) is not None}
        made = {value.name: node.name for node in after.graph for value in node.outputs}

        def stays(one: Expanded) -> bool:
            foreign = self.form == "decomposed" or (self.form != "contrib" and domain_of(one.node) == "com.microsoft")
            if (foreign and one.node.op_type == "RotaryEmbedding") or not one.nodes.isdisjoint(inside):
                return False
            return any(made.get(output) in one.nodes for output in one.outputs)

        return {one.name for one in self.view.expanded if stays(one)}


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


def _growing_caches(view: View) -> list[str]:
    """The names of the caches that grow; RequestError if there are none."""
    caches = grown_caches(view.roles)
    if not caches:
        raise RequestError("--kv-cache shared makes buffers of caches, and the graph has none that grows: drop it.")
    return caches


def _unusable_cache(view: View, caches: Sequence[str]) -> Reason | None:
    """Why these caches can't become buffers; None if they can."""
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


def _refusal(error: RequestError) -> Reason:
    text = str(error).rstrip(".")
    return Reason("rows", text) if isinstance(error, LengthsApart) else Reason("form", text)


def _disagreement(evidence: Evidence) -> Reason:
    if evidence.problem is not None:
        return Reason("not-the-same", evidence.problem)
    if not evidence.cases:
        return Reason("not-tested", "no drawn inputs gave values that could be compared")
    return Reason("not-the-same", f"its replacement differs by {evidence.error:.2g} of the largest value")
