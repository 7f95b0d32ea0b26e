"""Attention in the bodies of If.

Either the graph is one choice, as in optimum's merged decoders, or the If is among other nodes. Each body is rewritten
as a graph of its own, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import onnx_ir as ir

from posexport.errors import Reason, RequestError
from posexport.graphs.attention.candidates import CONTROL_FLOW, may_be_attention, may_hold_attention, unevaluated
from posexport.graphs.branches import BRANCHES, branch_of, of_branch, with_branch
from posexport.graphs.cases import cases_of
from posexport.graphs.choices import Body, bodies_with, lifted, put_back
from posexport.graphs.load import live
from posexport.graphs.roles import roles_of
from posexport.rewrite.opset import converted
from posexport.rewrite.request import RewriteOptions
from posexport.rewrite.result import KEPT, NOT_CHOSEN
from posexport.rewrite.rewriter import Rewritten, SiteResult, kept_domain, rewrite_as
from posexport.rewrite.whole import whole_evidence


def rewrite_branches(model: ir.Model, options: RewriteOptions) -> Rewritten:
    """`rewrite_as` for each body of a graph that is one choice (posexport.graphs.branches).

    A body that can't be evaluated stays as it is. RequestError as `rewrite_as` raises it.
    """
    if not may_hold_attention(model):
        return rewrite_as(model, options)
    roles = roles_of(model, options.roles)
    base = converted(model, options.form, options.target, options.opset)
    after, sites = base, list[SiteResult]()
    for name in BRANCHES:
        branch = branch_of(after, name)
        try:
            done = rewrite_as(branch, attrs.evolve(options, roles=of_branch(options.roles, branch), opset=None))
        except RequestError as error:
            left = unevaluated(branch, Reason("not-evaluated", str(error).rstrip(".")))
            found = [SiteResult(attention=one, state=KEPT, reason=one.reason) for one in left]
        else:
            found = [*done.sites]
            after = with_branch(after, name, done.model) if done.changed else after
        first = len(sites)
        sites += (
            attrs.evolve(site, attention=attrs.evolve(site.attention, layer=site.attention.layer + first))
            for site in found
        )
    changed = after is not base
    return Rewritten(
        model=after if changed else model,
        original=model,
        form=options.form,
        target=options.target,
        roles=roles,
        sites=tuple(sites),
        changed=changed,
    )


def rewrite_with_choices(model: ir.Model, options: RewriteOptions) -> Rewritten:
    """`rewrite_as` for a graph, and for each body of its If that has attention (posexport.graphs.choices).

    With its body in place of the If, the whole graph must be the same before and after, whatever the condition is;
    otherwise the body stays as it is. RequestError as `rewrite_as` raises it.
    """
    done = rewrite_as(model, options)
    if not any(_is_inside(site) for site in done.sites):
        return done
    after = done.model
    if not done.changed:
        after = live(converted(model, options.form, options.target, options.opset), kept_domain(options.form))
    base, inside = after, dict[str, list[SiteResult]]()
    for body in [*bodies_with(after, may_be_attention(after))]:
        after, sites = _with_body(after, body, options)
        for site in sites:
            inside.setdefault(site.attention.name, []).append(site)
    changed = done.changed or after is not base
    return attrs.evolve(
        done, model=after if changed else model, sites=tuple(_placed(done.sites, inside)), changed=changed
    )


def _with_body(model: ir.Model, body: Body, options: RewriteOptions) -> tuple[ir.Model, list[SiteResult]]:
    """The model with the attention of a body in its form, and what became of each attention."""
    only = tuple(name for name in body.names if not options.only or name in options.only)
    before = lifted(model, body)
    if not only:
        return model, _left(before, body, Reason(NOT_CHOSEN, "--only names others"))
    try:
        done = rewrite_as(before, attrs.evolve(options, opset=None, only=only))
    except RequestError as error:
        return model, _left(before, body, Reason("not-evaluated", str(error).rstrip(".")))
    sites = [site for site in done.sites if site.attention.name in body.names]
    if not done.changed:
        return model, sites
    after = put_back(model, body, done.model)
    evidence = whole_evidence(before, lifted(after, body), cases_of(done.roles, options.seed))
    if evidence.problem is None:
        return after, sites
    return model, [
        one if one.state == KEPT else attrs.evolve(one, state=KEPT, reason=evidence.problem) for one in sites
    ]


def _left(model: ir.Model, body: Body, reason: Reason) -> list[SiteResult]:
    """The attention of a body that is not read, with this reason."""
    left = [one for one in unevaluated(model, reason) if one.name in body.names]
    return [SiteResult(attention=one, state=KEPT, reason=reason) for one in left]


def _placed(sites: Sequence[SiteResult], inside: Mapping[str, list[SiteResult]]) -> Iterator[SiteResult]:
    """All attentions; those in bodies as they were read there."""
    for site in sites:
        read = inside.get(site.attention.name, [])
        if not _is_inside(site) or not read:
            yield site
        else:
            found = read.pop(0)
            yield attrs.evolve(found, attention=attrs.evolve(found.attention, layer=site.attention.layer))


def _is_inside(site: SiteResult) -> bool:
    return site.reason is not None and site.reason.code == CONTROL_FLOW
