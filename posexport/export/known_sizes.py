"""Sizes of a traced module that torch knows, but that its graph computes: `x.view(batch, tokens, -1, 16)`.

After such a view, the number of heads is not known if the number of tokens was computed differently. Also, torch's
exporter writes `x.squeeze(0)` even if the size isn't 1: torch then changes nothing, but ONNX rejects it.
"""

from __future__ import annotations

import torch

_SQUEEZE = torch.ops.aten.squeeze.dim
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default)


def with_known_sizes(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with views that have the sizes that torch knows in place of -1; it is changed in place."""
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target not in _VIEWS or -1 not in node.args[1]:
            continue
        at = list(node.args[1]).index(-1)
        size = node.meta["val"].shape[at]
        if isinstance(size, int):
            node.update_arg(1, [*node.args[1][:at], size, *node.args[1][at + 1 :]])
    program.graph_module.recompile()
    return program


def without_idle_squeezes(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program without squeezes that change nothing; it is changed in place."""
    graph = program.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is _SQUEEZE:
            tensor = node.args[0]
            if tensor.meta["val"].dim() == node.meta["val"].dim() > 0:
                node.replace_all_uses_with(tensor)
                graph.erase_node(node)
    graph.lint()
    program.graph_module.recompile()
    return program
