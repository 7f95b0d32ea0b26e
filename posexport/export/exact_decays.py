"""Decays of linear attention that are computed with a sigmoid, in a traced module.

A state is multiplied by the decays of all tokens. ONNX Runtime's Sigmoid has errors of up to 1e-7. This is large for a
decay near zero, and it adds up over the tokens. 1 / (1 + exp(-x)) is right to the last bits.
"""

from __future__ import annotations

from typing import Any

import torch

from posexport.custom_ops import linear_attention

_aten = torch.ops.aten
_DECAY = 4
"""The index of the argument of `linear_attention` that is the decay."""

_SIGMOID = _aten.sigmoid.default
_MADE_OF = (
    *(_aten.mul.Tensor, _aten.neg.default, _aten.to.dtype, _aten._to_copy.default, _aten.view.default),
    *(_aten.reshape.default, _aten.flatten.using_ints, _aten.unsqueeze.default, _aten.transpose.int),
)
"""Operators that may be between a sigmoid and a decay."""


def with_exact_decays(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with decays that are computed without a sigmoid; it is changed in place."""
    graph = program.graph
    for node in list(graph.nodes):
        if node.target is linear_attention.overload:
            for sigmoid in _sigmoids(*node.args[_DECAY : _DECAY + 1]):
                _write(sigmoid)
    graph.lint()
    program.graph_module.recompile()
    return program


def _sigmoids(node: Any = None) -> list[torch.fx.Node]:
    """The sigmoids that an argument is computed from."""
    if not isinstance(node, torch.fx.Node):
        return []
    if node.target is _SIGMOID:
        return [node]
    return [one for given in node.args for one in _sigmoids(given)] if node.target in _MADE_OF else []


def _write(sigmoid: torch.fx.Node) -> None:
    """Replace a sigmoid by 1 / (1 + exp(-x))."""
    node: Any = sigmoid.args[0]
    with sigmoid.graph.inserting_before(sigmoid):
        for operator, *others in ((_aten.neg.default,), (_aten.exp.default,), (_aten.add.Scalar, 1)):
            value = node.meta["val"]
            node = sigmoid.graph.call_function(operator, (node, *others))
            with value.fake_mode:
                node.meta["val"] = operator(value, *others)
    sigmoid.target, sigmoid.args = _aten.reciprocal.default, (node,)
