"""Differences of a number and a tensor of integers, such as `1.0 - attention_mask`, in a traced module.

torch's exporter makes a subtraction of two tensors of them and then doesn't take the number: the tensor is converted to
the dtype of the result before.
"""

from __future__ import annotations

import torch

_RSUB = torch.ops.aten.rsub.Scalar
_TO = torch.ops.aten.to.dtype


def with_converted_tensors(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program, whose tensors have the dtype of the result where they are subtracted from a number; it is changed in
    place."""
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
