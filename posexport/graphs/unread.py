"""Operators that can't be evaluated, in graphs with attention that can: their outputs are drawn like features.

Attention before or after such an operator is the same function, whatever the operator computes. Only the sizes of the
operator's outputs must be known, so the file has to state them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
import onnx
import onnx_ir as ir

from posexport.errors import RequestError
from posexport.graphs.axes import BATCH, SEQ, axes_of
from posexport.graphs.expand import domain_of
from posexport.graphs.kernels import KERNELS
from posexport.graphs.roles import Role, dtype_of_value, shape_of_value

_FEATURES = "features"


def with_unread(model: ir.Model, roles: Mapping[str, Role]) -> dict[str, Role]:
    """The roles, with roles of features for the outputs of operators of the main graph that can't be evaluated.

    The roles stay as they are if the size of such an output is not stated.
    """
    given: dict[str, Role] = {}
    for value in _outputs(model):
        role = _role(value, roles)
        if role is None:
            return dict(roles)
        given[role.name] = role
    return {**roles, **given}


def _outputs(model: ir.Model) -> Iterator[ir.Value]:
    for node in model.graph:
        if _is_unread(model, node):
            yield from (value for value in node.outputs if value.uses() or value.is_graph_output())


def _is_unread(model: ir.Model, node: ir.Node) -> bool:
    domain = domain_of(node)
    known = (domain, node.op_type) in KERNELS or onnx.defs.has(node.op_type, domain)
    return not known and node.op_identifier() not in model.functions


def _role(value: ir.Value, roles: Mapping[str, Role]) -> Role | None:
    """The role of floating-point features [rows, tokens, size], by the names of the first two dimensions.

    An input must have rows and tokens with the same names; otherwise None.
    """
    if not value.name or value.shape is None or value.dtype is None or not value.dtype.is_floating_point():
        return None
    shape = shape_of_value(value)
    try:
        kinds = {name: role.kind for name, role in roles.items()} | {value.name: _FEATURES}
        shapes = {name: role.shape for name, role in roles.items()} | {value.name: shape}
        axes = axes_of(kinds, shapes, {})[value.name]
        dtype = dtype_of_value(value)
    except RequestError:
        return None
    if len(shape) != 3 or "?" in shape or axes is None or axes[:2] != (BATCH, SEQ) or not isinstance(shape[2], int):
        return None
    like = next((role for role in roles.values() if role.axes[:2] == (BATCH, SEQ)), None)
    if like is None or shape[:2] != like.stated[:2]:
        return None
    same = attrs.evolve(like, name=value.name, kind=_FEATURES, dtype=dtype, axes=axes, rows=None, marks=())
    return attrs.evolve(same, shape=(*like.shape[:2], shape[2]), stated=shape)
