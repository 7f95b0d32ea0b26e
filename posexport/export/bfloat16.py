"""Numbers that a model of another dtype computes in bfloat16, as Falcon does its ALiBi, in a traced module.

ONNX Runtime's CPU provider has no arithmetic in bfloat16. torch computes such a result in float32 and rounds it, and so
does the graph then: conversions are all that is left in bfloat16.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

_aten = torch.ops.aten
_ARITHMETIC = (_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor)
_TO = _aten.to.dtype


def without_bfloat16_arithmetic(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program, whose sums and products in bfloat16 are rounded ones in float32; it is changed in place. One whose
    inputs or weights are in bfloat16 is left as it is."""
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
        node.target, node.args, node.kwargs = _TO, (computed, torch.bfloat16), {}  # an output is known by its name
    graph.lint()
    program.graph_module.recompile()
    return program


def _is_in_bfloat16(program: torch.export.ExportedProgram) -> bool:
    """Whether an input, or the most of the weights, is in bfloat16."""
    sizes = Counter[torch.dtype]()
    for weight in program.state_dict.values():
        sizes[weight.dtype] += weight.numel()
    inputs = [node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs]
    given = {node.meta["val"].dtype for node in inputs if _is_tensor(node)}
    return torch.bfloat16 in given or 2 * sizes[torch.bfloat16] > sizes.total()


def _is_tensor(argument: Any) -> bool:
    return isinstance(argument, torch.fx.Node) and isinstance(argument.meta["val"], torch.Tensor)


def _converted(node: Any, dtype: torch.dtype) -> Any:
    """A node of the same numbers in a dtype, which is put before where the graph is written."""
    value = node.meta["val"]
    if value.dtype == dtype:
        return node
    made = node.graph.call_function(_TO, (node, dtype))
    made.meta["val"] = value.to(dtype)
    return made
