"""Whether an operator of the standard domain means the same in two opsets.

If it does, its node may be in a graph of either. Most new versions of an operator add something: dtypes, an input, or
an attribute whose default is the old behaviour. A node means the same if it uses nothing that the other version lacks,
and if its defaults are the same in both. `_CHANGED` lists the operators that changed in another way.
"""

from __future__ import annotations

import onnx.defs
import onnx_ir as ir

_CHANGED = {"Softmax": 13, "LogSoftmax": 13, "Hardmax": 13, "Split": 18, "GroupNormalization": 21}
"""The opset from which on an operator means something else.

Softmax and others: over one axis, instead of all axes from there on. Split: an explicit number of outputs.
GroupNormalization: a scale for each channel.
"""


def means_the_same(node: ir.Node, one: int, other: int) -> bool:
    """Whether a node of the standard's domain means the same in two opsets."""
    first, second = (_schema(node.op_type, opset) for opset in (one, other))
    if first is None or second is None:
        return False
    if first.since_version == second.since_version:
        return True
    changed = _CHANGED.get(node.op_type, 0)
    if min(one, other) < changed <= max(one, other) and not _states_its_parts(node):
        return False
    return all(
        len(node.inputs) <= schema.max_input
        and len(node.inputs) >= schema.min_input
        and len(node.outputs) <= schema.max_output
        and node.attributes.keys() <= schema.attributes.keys()
        for schema in (first, second)
    ) and all(
        name in node.attributes or _default(first, name) == _default(second, name)
        for name in first.attributes.keys() & second.attributes.keys()
    )


def _states_its_parts(node: ir.Node) -> bool:
    """Whether a Split has an input with the length of each part."""
    return node.op_type == "Split" and len(node.inputs) > 1 and node.inputs[1] is not None


def _schema(kind: str, opset: int) -> onnx.defs.OpSchema | None:
    try:
        schema = onnx.defs.get_schema(kind, opset, "")
    except onnx.defs.SchemaError:
        return None
    return None if schema.deprecated else schema


def _default(schema: onnx.defs.OpSchema, name: str) -> str:
    return str(schema.attributes[name].default_value)
