"""Rewrites attention in a form with exact angles: first only the angles, then everything else as the same function.

An attention that can't be rewritten keeps its own angles too.
"""

from __future__ import annotations

import attrs
import onnx_ir as ir

from posexport.errors import Reason
from posexport.graphs.attention.candidates import may_hold_attention, unread
from posexport.rewrite.angles.exact import ExactModel, exact_model
from posexport.rewrite.angles.result import SiteAngles
from posexport.rewrite.request import RewriteOptions
from posexport.rewrite.result import ALREADY, KEPT, REWRITTEN
from posexport.rewrite.rewriter import Rewritten, SiteResult, rewrite_as

ATTENTION_KEPT = "angles-attention-kept"
"""The code of the reason for angles that stay because their attention stays."""


def rewrite_exactly(model: ir.Model, options: RewriteOptions) -> Rewritten:
    """posexport.rewrite.rewriter.rewrite_as with exact angles for all recognised rotations.

    `original` of the result has exact angles too, and is otherwise `model`.
    """
    if unread(model) or not may_hold_attention(model):
        return rewrite_as(model, options)
    without: dict[str, Reason] = {}
    while True:
        exact = exact_model(model, options, without)
        done = rewrite_as(exact.model, options)
        left = {
            site.attention.name: Reason(ATTENTION_KEPT, f"the attention stays as it was: {site.reason.text}")
            for site in done.sites
            if site.state == KEPT and site.reason is not None and site.reason.code != ALREADY
        }
        again = left.keys() & exact.changed
        if not again:
            break
        without |= {name: left[name] for name in again}
    changed = done.changed or bool(exact.changed)
    return attrs.evolve(
        done,
        model=done.model if changed else model,
        original=exact.model,
        roles=exact.view.roles,
        sites=tuple(attrs.evolve(site, view=exact.view) for site in _sites(exact, done)),
        changed=changed,
    )


def _sites(exact: ExactModel, done: Rewritten) -> list[SiteResult]:
    """The results for the attentions of the original, with what became of their angles."""
    known = {one.name: one for one in exact.view.attentions}
    if not any(site.attention.name in known for site in done.sites) and len(known) == len(done.sites):
        return [  # functions of the form `function`; the view has written them out
            attrs.evolve(site, attention=one, angles=exact.angles.get(one.name))
            for site, one in zip(done.sites, exact.view.attentions, strict=True)
        ]
    return [
        _with_angles(attrs.evolve(site, attention=known.get(name, site.attention)), exact.angles.get(name))
        for site in done.sites
        for name in [site.attention.name]
    ]


def _with_angles(site: SiteResult, angles: SiteAngles | None) -> SiteResult:
    """A site with its angles. If only its angles changed, it counts as rewritten."""
    if angles is not None and angles.changed and site.state == KEPT:
        return attrs.evolve(site, state=REWRITTEN, reason=None, angles=angles)
    return attrs.evolve(site, angles=angles)
