"""Functions of constants that ONNX has no operator for are computed during the export.

    erfinv(2 * 0.95 - 1)        1.1630871

Gemma 3n computes how many of its activations are zero in this way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

_ATEN = torch.ops.aten
_WITHOUT_TRANSLATION = {
    _ATEN.erfinv.default,
    _ATEN.special_erfcx.default,
    _ATEN.special_ndtri.default,
    _ATEN.lgamma.default,
    _ATEN.digamma.default,
    _ATEN.special_i0e.default,
    _ATEN.special_i1.default,
    _ATEN.special_i1e.default,
}
_MOST_NUMBERS = 64


def with_computed_constants(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program without these functions of constants. It is changed in place."""
    graph, known = program.graph, _constants(program)
    for node in list(graph.nodes):
        if node.target in _WITHOUT_TRANSLATION:
            value = _value(node, known)
            if value is not None and 0 < value.numel() <= _MOST_NUMBERS:
                with graph.inserting_before(node):
                    node.replace_all_uses_with(_written(node, value))
                graph.erase_node(node)
    graph.lint()
    program.graph_module.recompile()
    return program


def _constants(program: torch.export.ExportedProgram) -> dict[Node, torch.Tensor | None]:
    """The tensors that the code of the model contains. Weights and buffers are not among them."""
    names = program.graph_signature.inputs_to_lifted_tensor_constants
    found = {node: program.constants.get(names[node.name]) for node in program.graph.nodes if node.name in names}
    return {node: value for node, value in found.items() if isinstance(value, torch.Tensor) and not value.is_meta}


def _value(node: Node, known: dict[Node, torch.Tensor | None]) -> torch.Tensor | None:
    """What a node gives if it reads only constants; None if it reads something else."""
    if node not in known:
        known[node] = None
        given = {one: _value(one, known) for one in node.all_input_nodes}
        is_known = bool(given) and all(value is not None for value in given.values())
        if is_known and isinstance(node.target, torch._ops.OpOverload) and not _changes(node):
            args, options = torch.fx.node.map_arg((node.args, node.kwargs), given.get)
            result = node.target(*args, **options)
            known[node] = result if isinstance(result, torch.Tensor) else None
    return known[node]


def _changes(node: Node) -> bool:
    """Whether a node, or one that reads its result or what it reads, changes numbers in place."""
    near = {node, *node.users, *(user for one in node.all_input_nodes for user in one.users)}
    targets = {one.target for one in near} - {_ATEN.detach_.default}
    return any(getattr(getattr(target, "_schema", None), "is_mutable", False) for target in targets)


def _written(node: Node, value: torch.Tensor) -> Node:
    """Nodes that give these numbers."""
    ones = [_call(node, _ATEN.full.default, [1], number, dtype=value.dtype) for number in value.flatten().tolist()]
    row = ones[0] if len(ones) == 1 else _call(node, _ATEN.cat.default, ones)
    return _call(node, _ATEN.reshape.default, row, list(value.shape))


def _call(like: Node, target: Any, *args: Any, **options: Any) -> Node:
    """A new node, with the fake tensor that it returns."""
    made: Node = like.graph.call_function(target, args, options)
    with like.meta["val"].fake_mode:
        given = torch.fx.node.map_arg(args, lambda one: one.meta["val"])
        made.meta["val"] = target(*given, **options)
    return made
