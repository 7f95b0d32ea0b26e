"""Operators of torch that its exporter doesn't translate, or translates to others, written with others.

    isin(x, values)                 any(x == values)
    cummax(x, dim)                  the largest of x_j for j <= i, without the places where they are; cummin alike
    scatter_reduce(..., "mean")     the sums of scatter_add, divided by how many numbers each of them has

The running extremes take memory for all pairs of places. The exporter would write a mean as the last of its numbers.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

_ATEN = torch.ops.aten
_SCATTERS = (_ATEN.scatter_reduce.two, _ATEN.scatter_reduce_.two)
_EXTREMES = {_ATEN.cummax.default: _ATEN.amax.default, _ATEN.cummin.default: _ATEN.amin.default}


def with_translated_operators(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program without these operators. It is changed in place."""
    graph = program.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is _ATEN.isin.Tensor_Tensor:
            with graph.inserting_before(node):
                node.replace_all_uses_with(_member(node))
            graph.erase_node(node)
        elif node.target in _SCATTERS and _arguments(node)["reduce"] == "mean":
            with graph.inserting_before(node):
                node.replace_all_uses_with(_mean(node))
            graph.erase_node(node)
        elif node.target in _EXTREMES and _gives_only_values(node):
            with graph.inserting_before(node):
                values = _extreme(node)
            for use in list(node.users):
                use.replace_all_uses_with(values)
                graph.erase_node(use)
            graph.erase_node(node)
    graph.lint()
    program.graph_module.recompile()
    return program


def _gives_only_values(node: Node) -> bool:
    """Whether nothing reads the second result, the places."""
    return all(use.target is operator.getitem and (use.args[1] == 0 or not use.users) for use in node.users)


def _member(node: Node) -> Node:
    elements, values = node.args[:2]
    one, all_values = _call(_ATEN.unsqueeze.default, elements, -1), _call(_ATEN.flatten.using_ints, values)
    pairs = _call(_ATEN.eq.Tensor, one, all_values)
    found = _call(_ATEN.any.dim, pairs, -1)
    return _call(_ATEN.logical_not.default, found) if node.kwargs.get("invert") else found


def _arguments(node: Node) -> dict[str, Any]:
    """The arguments of a scatter_reduce by name."""
    names = ("self", "dim", "index", "src", "reduce")
    return {"include_self": True, **dict(zip(names, node.args, strict=False)), **node.kwargs}


def _mean(node: Node) -> Node:
    given = _arguments(node)
    before, dim, index, src = (given[name] for name in ("self", "dim", "index", "src"))
    zeros = _call(_ATEN.zeros_like.default, before)
    sums = _call(_ATEN.scatter_add.default, zeros, dim, index, src)
    counts = _call(_ATEN.scatter_add.default, zeros, dim, index, _call(_ATEN.ones_like.default, src))
    rounding = None if before.meta["val"].dtype.is_floating_point else "floor"
    if given["include_self"]:
        sums, some = _call(_ATEN.add.Tensor, sums, before), _call(_ATEN.add.Scalar, counts, 1)
        mean = _call(_ATEN.div.Tensor_mode, sums, some, rounding_mode=rounding)
    else:
        some = _call(_ATEN.clamp.default, counts, 1)
        mean = _call(_ATEN.div.Tensor_mode, sums, some, rounding_mode=rounding)
        mean = _call(_ATEN.where.self, _call(_ATEN.gt.Scalar, counts, 0), mean, before)
    return mean if node.target is _SCATTERS[0] else _call(_ATEN.copy_.default, before, mean)


def _extreme(node: Node) -> Node:
    given, dim = node.args[:2]
    assert isinstance(given, Node)
    reduce = _EXTREMES[node.target]  # type: ignore[index]
    dtype = given.meta["val"].dtype
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    x = _call(_ATEN.transpose.int, given, dim, -1)
    at = _call(_ATEN.cumsum.default, _call(_ATEN.ones_like.default, x, dtype=torch.int64), -1)
    before = _call(_ATEN.ge.Tensor, _call(_ATEN.unsqueeze.default, at, -1), _call(_ATEN.unsqueeze.default, at, -2))
    others = _call(
        _ATEN.where.ScalarOther,
        before,
        _call(_ATEN.unsqueeze.default, x, -2),
        limits.min if reduce is _ATEN.amax.default else limits.max,
    )
    return _call(_ATEN.transpose.int, _call(reduce, others, [-1]), dim, -1)


def _call(target: Any, *args: Any, **options: Any) -> Node:
    """A new node, with the fake tensor that it returns."""
    first = next(one for one in args if isinstance(one, Node))
    node: Node = first.graph.call_function(target, args, options)
    with first.meta["val"].fake_mode:
        given = [one.meta["val"] if isinstance(one, Node) else one for one in args]
        node.meta["val"] = target(*given, **options)
    return node
