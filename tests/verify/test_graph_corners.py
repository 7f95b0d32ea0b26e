"""Graphs that differ from the right one in only one corner are compared with it. The inputs must reach each corner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from helpers import cli

HEAD = '<ir_version: 10, opset_import: ["" : 21]> g '

BUFFER = """(float[b, 1, 4] hidden_states, int64[b] write_indices, float[b, 1, slots, 4] past_key)
=> (float[b, 1, slots, 4] present_key) {
    zero = Constant<value_int = 0>() one = Constant<value_int = 1>() last = Constant<value_ints = [1, 3]>()
    first = Constant<value_ints = [0]>() second = Constant<value_ints = [1]>()
    count = Shape<start = 2, end = 3>(past_key) end = Squeeze(count, first) slots = Range(zero, end, one)
    begins = Unsqueeze(write_indices, second) ROWS hits = Equal(slots, rows) hit = Unsqueeze(hits, last)
    new = Unsqueeze(hidden_states, second) WRITE
}"""

KEPT = """(float[b, s, 4] hidden_states, int64 logits_to_keep) => (float[b, kept, 4] logits) {
    axis = Constant<value_ints = [1]>() flat = Constant<value_ints = [1]>() most = Constant<value_ints = [2147483647]>()
    count = Reshape(logits_to_keep, flat) zero = Constant<value_ints = [0]>() SLICE
}"""

TABLE = """(int64[b, s] input_ids) => (float[b, s, 2] y)
<float[6, 2] table = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0},
 float[4, 2] short = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0}> { LOOK }"""

ROWS = """(float[b, 7, 4] x) => (float[b, 7, 4] y) {
    four = Constant<value_ints = [4]>() two = Constant<value_float = 2.0>() twice = Mul(x, two)
    rows = Shape<start = 0, end = 1>(x) many = Less(four, rows) END
}"""

STEPS = """(float[b, 1, 4] x, float[b, 1, past, 4] past_key_values) => (float[b, 1, total, 4] y) {
    low = Constant<value_ints = [47]>() high = Constant<value_ints = [180]>() two = Constant<value_float = 2.0>()
    axis = Constant<value_ints = [1]>() new = Unsqueeze(x, axis) z = Concat<axis = 2>(past_key_values, new)
    twice = Mul(z, two) cached = Shape<start = 2, end = 3>(past_key_values)
    above = Less(low, cached) below = Less(cached, high) inside = And(above, below) END
}"""

BEAMS = """(float[b, s, 4] x, int64[b] beam_idx, float[b, 1, past, 4] past_key_values) => (float[b, 1, total, 4] y) {
    axis = Constant<value_ints = [1]>() new = Unsqueeze(x, axis) TAKE y = Concat<axis = 2>(taken, new)
}"""

PICTURES = """(float[b, 3, 8, 8] pixel_values, int64[b, 8, 8] pixel_mask) => (float[b, 3, 8, 8] y) {
    axis = Constant<value_ints = [1]>() wide = Cast<to = 1>(pixel_mask) mask = Unsqueeze(wide, axis) END
}"""

PADDED = """(float[b, s, 4] hidden_states, int64[b, s] attention_mask) => (float[b, s, 4] y) {
    zero = Constant<value_ints = [0]>() one = Constant<value_ints = [1]>() most = Constant<value_ints = [9999]>()
    last = Constant<value_ints = [2]>() crowd = Constant<value_ints = [16]>() ones = Max(attention_mask, one)
    rows = Shape<start = 0, end = 1>(attention_mask) several = Less(one, rows) many = Less(crowd, rows)
    first = Slice(attention_mask, zero, one, zero) others = Slice(attention_mask, one, most, zero) MASK
    wide = Cast<to = 1>(mask) column = Unsqueeze(wide, last) kept = Mul(hidden_states, column)
    sum = ReduceSum<keepdims = 1>(kept, one) y = Add(hidden_states, sum)
}"""

SHARES = """(float16[b, s, 600] x) => (float16[b, s, 600] y) {
    small = Constant<value_float = 0.02>() factor = Cast<to = 10>(small) quiet = Mul(x, factor)
    shares = Softmax<axis = -1>(quiet) one = Constant<value_ints = [1]>() most = Constant<value_ints = [9999]>()
    zero = Constant<value_ints = [0]>() axis = Constant<value_ints = [2]>()
    head = Slice(shares, zero, one, axis) tail = Slice(shares, one, most, axis) END
}"""

CLIPPED = """(float[b, s, 4] hidden_states, int64[b, total] attention_mask, float[b, 1, past, 4] past_key)
=> (float[b, 1, total, 4] y) {
    axis = Constant<value_ints = [1]>() last = Constant<value_ints = [1, 3]>()
    new = Unsqueeze(hidden_states, axis) TAKE all = Concat<axis = 2>(old, new)
    wide = Cast<to = 1>(attention_mask) seen = Unsqueeze(wide, last) y = Mul(all, seen)
}"""

CORNERS: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    # fault: (graph, its parts in the right graph, its parts in the wrong graph)
    "new keys added to what a buffer holds": (
        BUFFER,
        {"ROWS": "rows = Identity(begins)", "WRITE": "present_key = Where(hit, new, past_key)"},
        {"WRITE": "float = Cast<to = 1>(hit) own = Mul(float, new) present_key = Add(past_key, own)"},
    ),
    "the place of the first row taken for all": (
        BUFFER,
        {"ROWS": "rows = Identity(begins)", "WRITE": "present_key = Where(hit, new, past_key)"},
        {"ROWS": "rows = Slice(begins, first, second, first)"},
    ),
    "the last slot of a buffer never written": (
        BUFFER,
        {"ROWS": "rows = Identity(begins)", "WRITE": "present_key = Where(hit, new, past_key)"},
        {
            "WRITE": "end_slot = Sub(end, one) before = Less(slots, end_slot) flat = Unsqueeze(before, first)"
            " wide = Unsqueeze(flat, last) both = And(hit, wide) present_key = Where(both, new, past_key)"
        },
    ),
    "places of rows apart far into a buffer": (
        BUFFER,
        {"ROWS": "rows = Identity(begins)", "WRITE": "present_key = Where(hit, new, past_key)"},
        {
            "ROWS": "most = Constant<value_int = 100>() short = Min(begins, most) low = ReduceMin<keepdims = 0>(begins)"
            " high = ReduceMax<keepdims = 0>(begins) alike = Equal(low, high) rows = Where(alike, begins, short)"
        },
    ),
    "many free slots of a buffer": (
        BUFFER,
        {"ROWS": "rows = Identity(begins)", "WRITE": "present_key = Where(hit, new, past_key)"},
        {
            "WRITE": "most = Constant<value_int = 200>() high = ReduceMax<keepdims = 0>(begins) free = Sub(end, high)"
            " many = Less(most, free) written = Where(hit, new, past_key) twice = Add(written, written)"
            " present_key = Where(many, twice, written)"
        },
    ),
    "large numbers of a cache": (
        CLIPPED,
        {"TAKE": "old = Identity(past_key)"},
        {"TAKE": "most = Constant<value_float = 7.0>() old = Min(past_key, most)"},
    ),
    "the first tokens kept, not the last": (
        KEPT,
        {"SLICE": "from = Neg(count) logits = Slice(hidden_states, from, most, axis)"},
        {"SLICE": "logits = Slice(hidden_states, zero, count, axis)"},
    ),
    "a table with fewer rows": (
        TABLE,
        {"LOOK": "y = Gather(table, input_ids)"},
        {"LOOK": "last = Constant<value_int = 3>() near = Min(input_ids, last) y = Gather(short, near)"},
    ),
    "rows of a graph with a fixed number of tokens": (
        ROWS,
        {"END": "y = Identity(x)"},
        {"END": "y = Where(many, twice, x)"},
    ),
    "cached tokens of a graph for single steps": (
        STEPS,
        {"END": "y = Identity(z)"},
        {"END": "y = Where(inside, twice, z)"},
    ),
    "rows that beams don't choose": (
        BEAMS,
        {"TAKE": "taken = Gather(past_key_values, beam_idx)"},
        {"TAKE": "taken = Identity(past_key_values)"},
    ),
    "pixels outside pictures": (
        PICTURES,
        {"END": "y = Mul(pixel_values, mask)"},
        {"END": "y = Identity(pixel_values)"},
    ),
    "padding of the first of several rows": (
        PADDED,
        {"MASK": "mask = Identity(attention_mask)"},
        {
            "MASK": "head = Max(first, one) all = Concat<axis = 0>(head, others)"
            " mask = Where(several, all, attention_mask)"
        },
    ),
    "padding that all rows share": (
        PADDED,
        {"MASK": "mask = Identity(attention_mask)"},
        {
            "MASK": "same = Equal(attention_mask, first) number = Cast<to = 7>(same)"
            " least = ReduceMin<keepdims = 0>(number) alike = Cast<to = 9>(least)"
            " both = And(alike, several) mask = Where(both, ones, attention_mask)"
        },
    ),
    "padding of many rows": (
        PADDED,
        {"MASK": "mask = Identity(attention_mask)"},
        {"MASK": "mask = Where(many, ones, attention_mask)"},
    ),
    "small shares in the wrong order": (
        SHARES,
        {"END": "y = Concat<axis = 2>(head, tail)"},
        {"END": "y = Concat<axis = 2>(tail, head)"},
    ),
}


def write(path: Path, text: str, parts: dict[str, str]) -> Path:
    for name, part in parts.items():
        text = text.replace(name, part)
    onnx.save(onnx.parser.parse_model(HEAD + text), path)
    return path


@pytest.mark.sampled(12)
@pytest.mark.parametrize("corner", CORNERS)
def test_another_function_in_one_corner_fails(corner: str, tmp_path: Path) -> None:
    text, right, wrong = CORNERS[corner]
    sound = write(tmp_path / "right.onnx", text, right)
    faulty = write(tmp_path / "wrong.onnx", text, right | wrong)
    result = cli("verify", sound, faulty, "--against", sound, "--runtime", "ort-cpu", "--json")
    verdicts: list[dict[str, Any]] = json.loads(result.stdout)["verdicts"]
    assert {Path(one["artifact"]).stem: one["state"] for one in verdicts} == {"right": "passed", "wrong": "failed"}


def test_features_that_are_rounded_may_round_otherwise(tmp_path: Path) -> None:
    """A runtime multiplies by the reciprocal of the scale. A number halfway between two integers may then be rounded to
    the other one."""
    text = """(float[b, s, 64] x) => (float[b, s, 64] y)
    { whole, scale, zero = DynamicQuantizeLinear(x) y = DequantizeLinear(whole, scale, zero) }"""
    path = write(tmp_path / "rounded.onnx", text, {})
    assert cli("verify", path, "--runtime", "ort-cpu", "--cases", "60").exit_code == 0
