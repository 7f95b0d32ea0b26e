"""Attention of a traced module whose keys and values have one head for all queries.

torch's scaled_dot_product_attention broadcasts such a head, but torch's exporter has no translation for that. So a
separate node repeats the head.
"""

from __future__ import annotations

import torch

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_EXPAND = torch.ops.aten.expand.default


def with_equal_heads(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with attention whose keys and values have as many heads as its queries; it is changed in place."""
    graph = program.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not _ATTENTION or node.kwargs.get("enable_gqa"):
            continue
        query, *others = node.args[:3]
        shape = query.meta["val"].shape
        for at, other in enumerate(others, 1):
            if len(shape) != 4 or other.meta["val"].shape[1] == shape[1]:
                continue
            with graph.inserting_before(node):
                repeated = graph.call_function(_EXPAND, (other, [-1, shape[1], -1, -1]))
            value = other.meta["val"]
            with value.fake_mode:
                repeated.meta["val"] = _EXPAND(value, repeated.args[1])
            node.update_arg(at, repeated)
    graph.lint()
    program.graph_module.recompile()
    return program
