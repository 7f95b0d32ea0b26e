"""Both bodies of a graph that is one choice, as optimum's merged decoders, written anew one after the other."""

from __future__ import annotations

import attrs
import onnx_ir as ir

from posexport.errors import Reason, RequestError
from posexport.graphs.attention.candidates import may_hold_attention, unevaluated
from posexport.graphs.branches import BRANCHES, branch_of, of_branch, with_branch
from posexport.graphs.roles import roles_of
from posexport.rewrite.opset import converted
from posexport.rewrite.request import RewriteOptions
from posexport.rewrite.result import KEPT
from posexport.rewrite.rewriter import Rewritten, SiteResult, rewrite_as


def rewrite_branches(model: ir.Model, options: RewriteOptions) -> Rewritten:
    """`rewrite_as` of each body of a graph that is one choice (posexport.graphs.branches).

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
