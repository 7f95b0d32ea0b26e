"""Near misses of operators that compute a whole attention or rotation: slightly wrong attributes and inputs."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
from near_miss_editor import Editor
from near_miss_graph import ATTENTION, number

Change = Callable[[Editor], bool]
OPERATORS: dict[str, Change] = {}


def operator(*names: str) -> Callable[[Callable[[Editor, ir.Node], bool]], Change]:
    """Registers a fault at one drawn node with one of these operators."""

    def register(change: Callable[[Editor, ir.Node], bool]) -> Change:
        def changed(editor: Editor) -> bool:
            places = [node for node in editor.model.graph if node.op_type in names]
            return bool(places) and change(editor, editor.rng.choice(places))

        OPERATORS[change.__name__] = changed
        return changed

    return register


@operator(*sorted(ATTENTION))
def operator_scale(editor: Editor, node: ir.Node) -> bool:
    """The scale is 0.3, which no head size gives."""
    node.attributes["scale"] = ir.AttrFloat32("scale", 0.3)
    return True


@operator("Attention")
def operator_softcap(editor: Editor, node: ir.Node) -> bool:
    node.attributes["softcap"] = ir.AttrFloat32("softcap", 2.0)
    return True


@operator("Attention")
def operator_causal(editor: Editor, node: ir.Node) -> bool:
    """Changes a causal attention to one that is not causal, or the other way round."""
    causal = node.attributes["is_causal"].as_int() if "is_causal" in node.attributes else 0
    node.attributes["is_causal"] = ir.AttrInt64("is_causal", 1 - causal)
    return True


@operator("Attention")
def operator_keys_for_values(editor: Editor, node: ir.Node) -> bool:
    keys, values = node.inputs[1], node.inputs[2]
    if keys is None or values is None or str(keys.shape) != str(values.shape):
        return False
    node.replace_input_with(2, keys)
    return True


@operator("GroupQueryAttention")
def operator_window(editor: Editor, node: ir.Node) -> bool:
    """The window is longer by one. If there was no window, it has three tokens."""
    window = node.attributes["local_window_size"].as_int() if "local_window_size" in node.attributes else -1
    node.attributes["local_window_size"] = ir.AttrInt64("local_window_size", window + 1 if window > 0 else 3)
    return True


@operator("MultiHeadAttention")
def operator_unidirectional(editor: Editor, node: ir.Node) -> bool:
    one_way = node.attributes["unidirectional"].as_int() if "unidirectional" in node.attributes else 0
    node.attributes["unidirectional"] = ir.AttrInt64("unidirectional", 1 - one_way)
    return True


@operator("RotaryEmbedding")
def operator_layout(editor: Editor, node: ir.Node) -> bool:
    """Queries or keys have the other layout: interleaved instead of half, or the other way round."""
    layout = node.attributes["interleaved"].as_int() if "interleaved" in node.attributes else 0
    node.attributes["interleaved"] = ir.AttrInt64("interleaved", 1 - layout)
    return True


@operator("RotaryEmbedding")
def operator_cosine_and_sine_swapped(editor: Editor, node: ir.Node) -> bool:
    first = 2 if node.domain == "com.microsoft" else 1
    editor.swap((node, first), (node, first + 1))
    return True


@operator("RotaryEmbedding")
def operator_backwards(editor: Editor, node: ir.Node) -> bool:
    """The sine of queries or of keys has the other sign."""
    editor.wrap((node, 3 if node.domain == "com.microsoft" else 2), "Neg")
    return True


@operator("Cos", "Sin")
def operator_theta(editor: Editor, node: ir.Node) -> bool:
    """The angle of one cosine or sine is 2 % larger."""
    if number(node.inputs[0]) is not None:
        return False
    editor.wrap((node, 0), "Mul", editor.number(1.02, node.inputs[0]))
    return True


@operator("RotaryEmbedding")
def operator_positions(editor: Editor, node: ir.Node) -> bool:
    """The queries or the keys read the cosines also as sines."""
    first = 2 if node.domain == "com.microsoft" else 1
    node.replace_input_with(first + 1, node.inputs[first])
    return True
