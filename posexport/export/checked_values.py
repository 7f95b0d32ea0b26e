"""Checks of values in a traced module, such as whether the sizes of levels sum to the number of tokens.

torch traces `torch._check_tensor_all` as an operator that its exporter doesn't translate, although nothing reads the
result but the check, which a file doesn't have. So the operator is replaced by its equal.
"""

from __future__ import annotations

import torch

_EQUALS = {
    torch.ops.aten._is_all_true.default: torch.ops.aten.all.default,
    torch.ops.aten._is_any_true.default: torch.ops.aten.any.default,
}


def with_translatable_checks(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with operators that torch's exporter translates in its checks; it is changed in place."""
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target in _EQUALS:
            node.target = _EQUALS[node.target]
    program.graph.lint()
    program.graph_module.recompile()
    return program
