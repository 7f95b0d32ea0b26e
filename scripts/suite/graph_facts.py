"""What a graph contains: attentions and rotations that are one operator each, and the number of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import attrs
import onnx
import onnx.inliner

ATTENTION = {
    *("Attention", "MultiHeadAttention", "GroupQueryAttention", "SparseAttention", "PagedAttention"),
    *("PackedAttention", "PackedMultiHeadAttention", "QAttention", "LongformerAttention"),
    *("DecoderMaskedSelfAttention", "DecoderMaskedMultiHeadAttention", "DecoderAttention"),
}
"""The operators of ONNX and of ONNX Runtime that compute a whole attention."""

ROTATION = {"RotaryEmbedding", "GemmaRotaryEmbedding"}


@attrs.frozen(kw_only=True)
class Facts:
    """Numbers of operators. `rotations` counts the rotations of queries and those of keys."""

    attentions: int
    rotations: int
    nodes: int


def facts_of(model: onnx.ModelProto) -> Facts:
    """The facts of a model. Its functions are inlined, and the branches of its control flow are included."""
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    nodes = list(_nodes(model.graph))
    counts = Counter(node.op_type for node in nodes if node.domain in ("", "ai.onnx", "com.microsoft"))
    inside = sum(2 for node in nodes for item in node.attribute if item.name == "do_rotary" and item.i == 1)
    return Facts(
        attentions=sum(counts[name] for name in ATTENTION),
        rotations=sum(counts[name] for name in ROTATION) + inside,
        nodes=len(nodes),
    )


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for item in node.attribute:
            for inner in (item.g, *item.graphs):
                yield from _nodes(inner)
