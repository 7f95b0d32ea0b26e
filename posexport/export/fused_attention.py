"""Which attentions of a graph that posexport didn't write are one kernel of its plan, and why others are not.

The builder's table names the ONNX nodes of each kernel: "name", "node_of_<output>" for a node without a name, and "name
| call (function)" inside a function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from posexport.artifact.manifest import KernelRow, PlanAttention, PlanKernels
from posexport.errors import Reason

BUILDER, NOT_RECOGNISED, NOT_LISTED = "builder", "not-recognised", "not-listed"
"""Codes of reasons, in addition to those of posexport.graphs.attention.support."""


def with_attentions(
    kernels: PlanKernels, attentions: Sequence[Mapping[str, Any]], unknown: Reason | None, runtime: str
) -> PlanKernels:
    """The kernels of a plan, with the result for each attention.

    `attentions` are as posexport.graphs.attention.describe gives them. `unknown` says why they were not looked for.
    """
    if unknown is not None or not attentions:
        why = "no attention was found" if unknown is None else unknown.text
        return attrs.evolve(kernels, fused_attention=None, unknown=kernels.unknown or why)
    if kernels.count is None:
        return kernels
    found = tuple(_attention(kernels.rows, one, runtime) for one in attentions)
    fused = [one.fused for one in found]
    whole = None if None in fused and False not in fused else all(fused)
    why_unknown = "the builder's table names no node of some attentions" if whole is None else None
    return attrs.evolve(kernels, attentions=found, fused_attention=whole, unknown=why_unknown)


def _attention(rows: Sequence[KernelRow], one: Mapping[str, Any], runtime: str) -> PlanAttention:
    node = (one["nodes"] or {}).get("softmax") or one["name"]
    holding = [row for row in rows if any(_is_node(text, node) for text in row.nodes)]
    fused = any(row.attention for row in holding) if holding else None
    reason = None if fused else _reason(one, runtime) if holding else _not_listed(node)
    return PlanAttention(name=node, layer=one["layer"], fused=fused, reason=reason)


def _is_node(text: str, node: str) -> bool:
    """Whether a name in the builder's table is that of a node, or of a node inside the call of a function."""
    inner, *calls = text.split(" | ")
    return inner in (node, f"node_of_{node}") or any(call.rpartition(" (")[0] == node for call in calls)


def _not_listed(node: str) -> Reason:
    return Reason(NOT_LISTED, f"the builder's table doesn't name {node!r}")


def _reason(one: Mapping[str, Any], runtime: str) -> Reason:
    if one["runtimes"] is None:
        return Reason(NOT_RECOGNISED, f"it was not recognised, {one['reason']['text']}")
    expected = one["runtimes"].get(runtime, {}).get("reason")
    if expected is not None:
        return Reason(expected["code"], expected["text"])
    return Reason(BUILDER, "the builder chose several kernels for it: try 'posexport rewrite --target tensorrt'")
