"""Differences of a number and a tensor of integers, such as `1.0 - attention_mask`, in a traced module.

torch's exporter writes a subtraction of two integer tensors and then doesn't accept the number. So the tensor is first
converted to the dtype of the result.
"""

from __future__ import annotations

import torch

_RSUB = torch.ops.aten.rsub.Scalar
_TO = torch.ops.aten.to.dtype


def with_converted_tensors(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with tensors converted to the dtype of the result before they are subtracted from a number.

    It is changed in place.
    """
    graph = program.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not _RSUB:
            continue
        tensor, dtype = node.args[0], node.meta["val"].dtype
        value = tensor.meta["val"]
        if value.dtype == dtype:
            continue
        with graph.inserting_before(node):
            converted = graph.call_function(_TO, (tensor, dtype))
        with value.fake_mode:
            converted.meta["val"] = _TO(value, dtype)
        node.update_arg(0, converted)
    graph.lint()
    program.graph_module.recompile()
    return program
