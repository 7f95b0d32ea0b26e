"""Inputs with a mask for each query are named by their effect, whether an operator or a Where reads them."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from posexport.graphs.attention.describe import Describer
from posexport.graphs.attention.origins import call_sites
from posexport.graphs.view import view_of

CASES = {
    "an operator's": (
        "int32[batch, seq, seq] attention_mask",
        "y = com.microsoft.MultiHeadAttention<num_heads = 4>(x, x, x, , attention_mask)",
        ("input", [], ["attention_mask"]),
    ),
    "beside a causal one": (
        "int32[batch, seq, seq] attention_mask",
        "y = com.microsoft.MultiHeadAttention<num_heads = 4, unidirectional = 1>(x, x, x, , attention_mask)",
        ("causal", ["attention_mask"], None),
    ),
    "for tokens": (
        "int32[batch, seq] attention_mask",
        "y = com.microsoft.MultiHeadAttention<num_heads = 4>(x, x, x, , attention_mask)",
        ("none", ["attention_mask"], None),
    ),
    "of Attention": (
        "bool[batch, 1, seq, seq] mask",
        "y = Attention<q_num_heads = 4, kv_num_heads = 4>(x, x, x, mask)",
        ("input", [], ["mask"]),
    ),
    "of the positions of few tokens": (
        "int64[3] input_pos, float[batch, 8, 32] past_values",
        "keys = Constant<value_ints = [0, 1, 2, 3, 4, 5, 6, 7]>() one = Constant<value_ints = [1]>() "
        "two = Constant<value_ints = [0, 1]>() queries = Unsqueeze(input_pos, one) seen = LessOrEqual(keys, queries) "
        "mask = Unsqueeze(seen, two) "
        "y = Attention<q_num_heads = 4, kv_num_heads = 4>(x, past_values, past_values, mask)",
        ("input", [], ["input_pos"]),
    ),
    "of a table that ends, before keys of unknown places": (
        "float[batch, cached, 32] self_keys",
        "size = Constant<value_ints = [16, 16]>() none = ConstantOfShape<value = float[1] {-1e9}>(size) "
        "one = Constant<value_int = 1>() table = Trilu<upper = 1>(none, one) "
        "first = Shape<start = 1, end = 2>(self_keys) length = Shape<start = 1, end = 2>(x) last = Add(first, length) "
        "rows = Constant<value_ints = [0]>() columns = Constant<value_ints = [1]>() "
        "queries = Slice(table, first, last, rows) mask = Slice(queries, rows, last, columns) "
        "keys = Concat<axis = 1>(self_keys, x) "
        "y = Attention<q_num_heads = 4, kv_num_heads = 4>(x, keys, keys, mask)",
        ("other", [], None),
    ),
    "that hides nothing": (
        "float[batch, 1, seq, seq] mask",
        "zero = Constant<value_float = 0.0>() none = Mul(mask, zero) "
        "y = Attention<q_num_heads = 4, kv_num_heads = 4>(x, x, x, none)",
        ("none", [], None),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mask_for_each_query_is_named(name: str) -> None:
    mask, made, (kind, padding, inputs) = CASES[name]
    seq = 3 if "[3]" in mask else "seq"
    text = f"""<ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>
      g (float[batch, {seq}, 32] x, {mask}) => (float[batch, {seq}, 32] y) {{ {made} }}"""
    model = ir.serde.deserialize_model(onnx.parser.parse_model(text))
    sites = call_sites(model)
    view = view_of(model)
    (found,) = view.attentions
    described = Describer(view, sites).describe(found)["mask"]
    assert (described["kind"], described["padding"], described.get("inputs")) == (kind, padding, inputs)
