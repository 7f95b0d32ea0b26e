"""Arithmetic in bfloat16 in a traced model of another dtype, for example the ALiBi of Falcon.

ONNX Runtime's CPU provider has no arithmetic in bfloat16. torch computes such a result in float32 and rounds it. The
graph then does the same, so that only conversions are left in bfloat16.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

_aten = torch.ops.aten
_ARITHMETIC = (_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor)
_TO = _aten.to.dtype


def without_bfloat16_arithmetic(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with sums and products in bfloat16 computed in float32 and rounded; it is changed in place.

    A program whose inputs or weights are in bfloat16 stays as it is.
    """
    graph = program.graph
    if _is_in_bfloat16(program):
        return program
    for node in list(graph.nodes):
        if node.target not in _ARITHMETIC or node.meta["val"].dtype != torch.bfloat16:
            continue
        with graph.inserting_before(node):
            wide = [
                _converted(_converted(each, torch.bfloat16), torch.float32) if _is_tensor(each) else each
                for each in node.args
            ]
            computed = graph.call_function(node.target, tuple(wide), dict(node.kwargs))
            computed.meta["val"] = node.meta["val"].to(torch.float32)
        # the node itself stays, because an output is known by its name
        node.target, node.args, node.kwargs = _TO, (computed, torch.bfloat16), {}
    graph.lint()
    program.graph_module.recompile()
    return program


def _is_in_bfloat16(program: torch.export.ExportedProgram) -> bool:
    """Whether an input, or most of the weights, is in bfloat16."""
    sizes = Counter[torch.dtype]()
    for weight in program.state_dict.values():
        sizes[weight.dtype] += weight.numel()
    inputs = [node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs]
    given = {node.meta["val"].dtype for node in inputs if _is_tensor(node)}
    return torch.bfloat16 in given or 2 * sizes[torch.bfloat16] > sizes.total()


def _is_tensor(argument: Any) -> bool:
    return isinstance(argument, torch.fx.Node) and isinstance(argument.meta["val"], torch.Tensor)


def _converted(node: Any, dtype: torch.dtype) -> Any:
    """A node with the same numbers in a dtype, inserted at the graph's current place."""
    value = node.meta["val"]
    if value.dtype == dtype:
        return node
    made = node.graph.call_function(_TO, (node, dtype))
    made.meta["val"] = value.to(dtype)
    return made
