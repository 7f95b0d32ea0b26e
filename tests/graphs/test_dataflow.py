"""The flow of content through a graph."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from posexport.graphs.attention.dataflow import Dataflow


def test_sequences_are_no_tensors_that_content_passes_through() -> None:
    """Experts of a mixture are cut with SplitToSequence, as in JetMoe, whose queries lie behind it."""
    text = """<ir_version: 10, opset_import: ["" : 21]> g (float[6, 4] x) => (float[n, 4] y) {
        sizes = Constant<value_ints = [2, 4]>() one = Constant<value_int = 1>()
        before = Neg(x) parts = SplitToSequence(before, sizes) part = SequenceAt(parts, one) y = Exp(part)
    }"""
    model = ir.serde.deserialize_model(onnx.parser.parse_model(text))
    above = [value.name for value in Dataflow(model, set(), {"x"}).dominators(model.graph.outputs[0])]
    assert above == ["y", "part", "before", "x"]
