"""Whether an attention is already in a form, so that it stays as it is."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from posexport.graphs.attention.attention import Attention
from posexport.graphs.attention.heads import Side
from posexport.graphs.attention.rotary import Rotary
from posexport.graphs.attention.support import ort_takes, tensorrt_takes
from posexport.graphs.expand import Expanded, domain_of
from posexport.graphs.view import View
from posexport.rewrite.number_types import turned_values, widest


def _for_all_targets(operator: Expanded) -> bool:
    """Whether ONNX Runtime and TensorRT take an operator for attention."""
    return ort_takes(operator) and tensorrt_takes(operator) and "softcap" not in operator.node.attributes


def _never(operator: Expanded) -> bool:
    return False


_CORES: dict[tuple[str, str], dict[tuple[str, str], Callable[[Expanded], bool]]] = {
    ("native", "ort"): {("", "Attention"): ort_takes},
    ("native", ""): {("", "Attention"): _for_all_targets},
    ("contrib", "ort"): {
        ("com.microsoft", "MultiHeadAttention"): ort_takes,
        ("com.microsoft", "GroupQueryAttention"): ort_takes,
    },
    ("contrib", ""): {("com.microsoft", "MultiHeadAttention"): _for_all_targets},
}
"""The operators for attention in a form, for ONNX Runtime or for all targets, with what they require."""

_ROTATIONS = {"native": ("", "RotaryEmbedding"), "contrib": ("com.microsoft", "RotaryEmbedding")}


def is_in_form(view: View, attention: Attention, form: str, target: str) -> bool:
    """Whether a site is written as the form writes it for the target."""
    core = view.operator_of(attention.softmax.name or "")
    if form == "decomposed":
        return core is None and all(not _operators(view, side) for side in (attention.q, attention.k))
    if form == "function" or core is None:
        return False
    cores = _CORES[form, "ort" if target == "ort" else ""]
    takes = cores.get((domain_of(core.node), core.node.op_type), _never)
    return takes(core) and all(_rotates_in_form(view, side, form, core) for side in (attention.q, attention.k))


def _operators(view: View, side: Side) -> list[Expanded]:
    """The operators that a rotation consists of."""
    between = (node for rotary in side.rotations for node in view.flow.between(rotary.source, rotary.target))
    nodes = {node.name or "" for node in between}
    return [one for one in view.expanded if nodes & one.nodes]


def _rotates_in_form(view: View, side: Side, form: str, core: Expanded) -> bool:
    if not side.rotations or (len(side.rotations) == 1 and core.node.attributes.get_int("do_rotary", 0) == 1):
        return True
    operators = [one for one in _operators(view, side) if one is not core]  # the core transposes what was rotated
    if not operators:
        return all(_is_double(view, rotary) for rotary in side.rotations)
    return all(_is_sound(view, one, form) for one in operators)


def _is_double(view: View, rotary: Rotary) -> bool:
    """Whether a rotation is computed in float64, for which there is no operator."""
    return widest(view.flow, rotary, view.dtypes(turned_values(view.flow, rotary))) == ir.DataType.DOUBLE


def _is_sound(view: View, operator: Expanded, form: str) -> bool:
    """Whether a rotation is in the form, and its cosines have as many rows as its input: no runtime broadcasts them."""
    if (domain_of(operator.node), operator.node.op_type) != _ROTATIONS[form]:
        return False
    x, cos = operator.inputs[0], operator.inputs[1]
    if form != "native" or x is None or cos is None or len(operator.inputs) > 3:
        return True
    shapes = view.operator_shapes
    return shapes[cos.name or ""][0] == shapes[x.name or ""][0]
