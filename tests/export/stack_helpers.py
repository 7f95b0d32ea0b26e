"""An oracle for stacks: a trace of all layers, and a comparison of two graphs node by node except for names."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

import onnx
import onnx.numpy_helper
import onnx_ir as ir
from helpers import weights_for

from posexport.export.exporter import _describe, _dynamic, _example, capture, finish
from posexport.export.initializers import Initializers, name_initializers
from posexport.export.support import default_opset
from posexport.graphs.function_bodies import Functions
from posexport.models import read_spec
from posexport.models.block import build_block
from posexport.spec.contract import graph_inputs, graph_outputs
from posexport.spec.spec import Spec


def traced_whole(spec: Spec, form: str = "decomposed", target: str = "portable") -> onnx.ModelProto:
    """The block exported with every layer traced by torch's exporter."""
    functions = Functions(default_opset(form, spec), form, target)
    fixed = {"batch": None, "seq": None, "max_seq": None}
    names = (list(graph_inputs(spec)), list(graph_outputs(spec)))
    block = build_block(spec, weights_for(spec))
    arguments = {"args": _example(spec, fixed), "dynamic_shapes": (_dynamic(spec, fixed),)}
    model = capture(block, functions, input_names=names[0], output_names=names[1], **arguments)
    name_initializers(model, spec, Initializers(spec, weights_for(spec)))
    finish(model, form)
    _describe(model, spec, fixed)
    return ir.to_proto(model)


def difference(one: onnx.ModelProto, two: onnx.ModelProto, weights: Iterable[str]) -> str | None:
    """The first difference between two graphs except names of nodes and of inner values, or None."""
    for what in ("input", "output"):
        if list(getattr(one.graph, what)) != list(getattr(two.graph, what)):
            return (
                f"{what}s: {[v.name for v in getattr(one.graph, what)]}, {[v.name for v in getattr(two.graph, what)]}"
            )
    public, (mine, theirs) = set(weights), (_constants(model, weights) for model in (one, two))
    for a, b in zip_longest(*([t for t in each.graph.initializer if t.name in public] for each in (one, two))):
        if a != b:
            return f"initializers: {a and a.name}, {b and b.name}"
    if set(mine.values()) != set(theirs.values()):
        return f"constants: {sorted(mine)}, {sorted(theirs)}"
    if list(one.functions) != list(two.functions):
        return f"functions: {[v.name for v in one.functions]}, {[v.name for v in two.functions]}"
    for node in (*one.graph.node, *two.graph.node):
        for attribute in node.attribute:
            attribute.t.ClearField("name")  # the name of a constant's tensor
    same: dict[str, object] = {value.name: value.name for value in (*one.graph.input, *one.graph.initializer)}
    same |= {"": "", **mine}
    for index, (a, b) in enumerate(zip(one.graph.node, two.graph.node, strict=False)):
        if (a.domain, a.op_type, list(a.attribute)) != (b.domain, b.op_type, list(b.attribute)):
            return f"node {index}: {a}, {b}"
        reads = [same.get(name) for name in a.input], [theirs.get(name, name) for name in b.input]
        if reads[0] != reads[1] or len(a.output) != len(b.output):
            return f"node {index} reads {a}, {b}"
        same.update(zip(a.output, b.output, strict=True))
    if any(same[value.name] != value.name for value in one.graph.output):
        return "outputs are other values"
    return None if len(one.graph.node) == len(two.graph.node) else "one graph has more nodes"


def _constants(model: onnx.ModelProto, weights: Iterable[str]) -> dict[str, object]:
    """The dtype, shape and bytes of every constant of a graph by name.

    Values identify constants because torch's exporter folds some once for each layer.
    """
    found = {}
    for tensor in model.graph.initializer:
        if tensor.name not in weights:
            array = onnx.numpy_helper.to_array(tensor)
            found[tensor.name] = (str(array.dtype), array.shape, array.tobytes())
    return found


STACKS: dict[str, dict[str, object]] = {
    "plain": {"encoding": {"name": "rope"}},
    "llama": {
        **{"encoding": {"name": "rope"}, "causal": True, "num_kv_heads": 1, "kv_cache": "concat", "padding_mask": True},
        **{"block": "transformer", "norm_type": "rmsnorm", "mlp": "swiglu"},
    },
    "shared": {"encoding": {"name": "rope"}, "causal": True, "kv_cache": "shared", "padding_mask": True},
    "t5": {"encoding": {"name": "t5"}, "kv_cache": "concat", "block": "transformer"},
    "vocabulary": {
        **{"encoding": {"name": "learned", "max_positions": 64}, "vocab_size": 11, "scale_embedding": True},
        **{"cross": True, "bias": True},
    },
    "alibi": {
        "encoding": {"name": "alibi"},
        "sinks": True,
        "block": "transformer",
        "norm": "post",
        "kv_cache": "shared",
    },
    "none": {"encoding": {"name": "none"}, "qk_norm": True, "softcap": 3.0},
    "relative": {"encoding": {"name": "relative"}},
    "cope": {"encoding": {"name": "cope"}, "causal": True},
    "pattern": {
        **{"encoding": {"name": "rope"}, "qk_norm": True, "causal": True, "kv_cache": "concat"},
        "layer_pattern": [
            {"encoding": {"name": "rope"}, "window": 4},
            {"encoding": {"name": "alibi"}, "qk_norm": False},
        ],
    },
}
"""Stacks of five layers as data of specs: caches, layer patterns, norms and token embeddings."""


def stack(name: str) -> Spec:
    """One of STACKS."""
    return read_spec({"hidden_size": 32, "num_heads": 2, "layers": 5, **STACKS[name]})
