"""Descriptions of attention: encodings, masks and biases of hand-written graphs, right and wrong ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from attention_graphs import (
    HEADS,
    SIZE,
    Add,
    Writer,
    attention,
    by_distance,
    chunks,
    constant_bias,
    padding,
    rotation,
    visible,
)
from descriptions import described
from onnx import TensorProto, helper
from rotation_graphs import halves, sliced

from posexport.errors import RequestError
from posexport.graphs.attention.describe import Describer
from posexport.graphs.attention.logits import AddedToScores
from posexport.graphs.view import view_of

Array = np.ndarray[Any, Any]

PLAIN = 10_000.0 ** (-np.arange(SIZE // 2) / (SIZE // 2))
"""Frequencies of RoPE."""


def encoding(model: onnx.ModelProto) -> dict[str, Any]:
    """The encoding in the description of a model."""
    found: dict[str, Any] = described(model)["encoding"]
    return found


def test_every_key_of_a_decoder() -> None:
    found = described(
        attention(rotate=rotation(PLAIN), add=[visible(), padding()], cached=True, norm=True, key_heads=2)
    )
    assert found.pop("runtimes").keys() == {"ort-cpu", "ort-cuda", "tensorrt", "tensorrt-rtx"}
    nodes = found.pop("nodes")
    assert all(name.startswith("node_") for name in nodes.values()) and len({*nodes.values()}) == 3
    assert found == {
        "name": nodes["softmax"],
        "layer": 0,
        "state": "recognised",
        "reason": None,
        "num_heads": HEADS,
        "num_kv_heads": 2,
        "head_dim": SIZE,
        "value_dim": SIZE,
        "scale": 0.25,
        "softcap": None,
        "sinks": False,
        "head_scales": False,
        "weight_factors": [],
        "qk_norm": {"queries": {"kind": "rms", "per_head": True}, "keys": {"kind": "rms", "per_head": True}},
        "mask": {"kind": "causal", "window": None, "chunk": None, "padding": ["attention_mask"], "tested": 8192},
        "encoding": {"name": "rope", "layout": "half", "theta": 10_000.0},
        "bias": None,
        "query_factor": None,
        "input_encoding": None,
        "prefix_tokens": 0,
        "cache": {
            "kind": "grown",
            "inputs": {"key": "past_key", "value": "past_value"},
            "outputs": {"key": "present_key", "value": "present_value"},
        },
        "dtype": "fp32",
        "softmax_dtype": "fp32",
        "operator": "Softmax",
    }


def test_scales_that_are_computed_from_fixed_lengths_are_numbers() -> None:
    """The root of the head size, on the scores or on the queries, as TorchScript writes it."""

    def root(g: Writer, value: str) -> str:
        size = g.op("Cast", g.op("Shape", value, start=3, end=4), to=g.type)
        return g.op("Pow", size, g.floats(-0.5))

    def scaled(g: Writer, scores: str) -> str:
        return g.op("Mul", scores, root(g, "transpose"))

    def turned(g: Writer, heads: str, queries: bool) -> str:
        g.nodes.append(helper.make_node("Identity", [heads], ["transpose"])) if queries else None
        return heads

    on_scores = described(attention(rotate=turned, add=[scaled]))
    assert (on_scores["head_scales"], on_scores["encoding"]["name"]) == (False, "none")
    assert on_scores["scale"] == pytest.approx(1 / SIZE)
    on_queries = described(attention(rotate=lambda g, heads, queries: g.op("Mul", heads, root(g, heads))))
    assert on_queries["encoding"] == {"name": "none"} and on_queries["query_factor"] is None


def test_softcap_and_no_positions() -> None:
    found = described(attention(softcap=30.0))
    assert (found["softcap"], found["encoding"], found["mask"]["kind"]) == (30.0, {"name": "none"}, "none")
    assert found["runtimes"]["tensorrt-rtx"]["reason"]["code"] == "scores"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"table": 600}, {"places": True}, {"places": True, "table": 300}], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [SIZE // 2, 2])
def test_rope_by_inputs_by_places_and_by_tables(pairs: int, interleaved: bool, options: dict[str, Any]) -> None:
    frequencies = 500_000.0 ** (-np.arange(pairs) / pairs)
    found = encoding(attention(rotate=rotation(frequencies, interleaved=interleaved, **options)))
    width = {} if 2 * pairs == SIZE else {"rotary_dim": 2 * pairs}
    layout = "interleaved" if interleaved else "half"
    assert found == {"name": "rope", "layout": layout, **width, "theta": 500_000.0}


def test_positions_of_all_rows() -> None:
    """An input with one position per token, as in gpt-fast and LitGPT."""

    def rotate(g: Writer, heads: str, queries: bool) -> str:
        positions = g.op("Cast", g.input("input_pos", TensorProto.INT64, "seq"), to=g.type)
        turns = g.op("Mul", g.op("Unsqueeze", positions, g.const([1])), g.floats(PLAIN))
        cos, sin = g.op("Cos", turns), g.op("Sin", turns)
        first, last = sliced(g, heads, 0, SIZE // 2), sliced(g, heads, SIZE // 2, SIZE)
        return g.op("Concat", *halves(first, last, cos, sin, g), axis=-1)

    assert encoding(attention(rotate=rotate)) == {"name": "rope", "layout": "half", "theta": 10_000.0}


def test_two_axes_that_are_inputs() -> None:
    half = 100.0 ** (-np.arange(4) / 4)
    matrix = np.concatenate([np.stack([half, 0 * half]), np.stack([0 * half, half])], -1)
    found = encoding(attention(rotate=rotation(matrix, interleaved=True)))
    assert found == {"name": "rope2d", "layout": "interleaved", "theta": 100.0, "order": "xy"}
    mixed = encoding(attention(rotate=rotation(matrix + matrix[::-1] / 2, interleaved=True)))
    assert mixed["name"] == "rope" and np.shape(mixed["frequencies"]) == (2, 8)


OFF = PLAIN * np.array([1, 1, 1, 1 + 1e-4, 1, 1, 1, 1])


@pytest.mark.parametrize(
    ("rotate", "expected"),
    [
        (rotation(10_001.0 ** (-np.arange(8) / 8)), {"name": "rope", "layout": "half", "theta": 10_001.0}),
        (rotation(PLAIN, amplitude=1.001), {"attention_factor": 1.001, "theta": 10_000.0}),
        (rotation(-PLAIN), {"name": "rope", "layout": "half"}),
        (rotation(PLAIN[::-1].copy()), {"name": "rope", "layout": "half"}),
        (rotation(PLAIN, keys=-PLAIN), {"name": "rotary", "reason": "rotations-differ"}),
        (rotation(PLAIN, keys=PLAIN * 1.00001), {"name": "rotary", "reason": "rotations-differ"}),
    ],
    ids=["theta", "amplitude", "backwards", "reversed", "keys backwards", "keys a little faster"],
)
def test_a_rotation_that_is_a_little_off_is_not_called_the_usual_one(rotate: Any, expected: dict[str, Any]) -> None:
    found = encoding(attention(rotate=rotate))
    code = (found.get("reason") or {}).get("code")
    assert {**found, "reason": code}.items() >= expected.items()
    assert found != {"name": "rope", "layout": "half", "theta": 10_000.0}


def test_one_pair_that_is_off_gives_a_list_of_frequencies() -> None:
    found = encoding(attention(rotate=rotation(OFF)))
    assert found["name"] == "rope" and "theta" not in found
    np.testing.assert_allclose(found["frequencies"], OFF, rtol=1e-7)


def test_frequencies_in_half_precision_are_named_with_their_neighbour() -> None:
    half = PLAIN.astype(np.float16).astype(float)
    found = encoding(attention(rotate=rotation(half)))
    assert found["near"]["theta"] == 10_000.0 and 1e-5 < found["near"]["difference"] < 1e-3


def test_angles_that_are_no_multiples_of_positions_have_a_reason() -> None:
    found = encoding(attention(rotate=rotation(PLAIN, table=600, power=1.01)))
    assert (found["name"], found["reason"]["code"]) == ("rotary", "rotation-by-table")


@pytest.mark.parametrize(
    ("add", "cached", "expected"),
    [
        (visible(), False, ("causal", None, None)),
        (visible(), True, ("causal", None, None)),
        (visible(behind=5), True, ("window", 5, None)),
        (visible(behind=6), True, ("window", 6, None)),
        (visible(behind=300), False, ("window", 300, None)),
        (visible(behind=4000), True, ("window", 4000, None)),
        (visible(behind=4, ahead=3), False, ("local", 4, None)),
        (visible(ahead=1), False, ("other", None, None)),
        (visible(behind=4, ahead=2), False, ("other", None, None)),
        (visible(ahead=None), False, ("none", None, None)),
        (chunks(6), True, ("chunk", None, 6)),
        (chunks(7), False, ("chunk", None, 7)),
        (chunks(5), False, ("chunk", None, 5)),
        (chunks(5), True, ("chunk", None, 5)),
        (chunks(16), False, ("chunk", None, 16)),
        (chunks(16), True, ("chunk", None, 16)),
        (chunks(64), False, ("chunk", None, 64)),
        (chunks(64), True, ("chunk", None, 64)),
        (chunks(100), False, ("chunk", None, 100)),
        (chunks(100), True, ("chunk", None, 100)),
        (chunks(1024), False, ("causal", None, None)),
        (chunks(1024), True, ("chunk", None, 1024)),
    ],
)
def test_masks(add: Add, cached: bool, expected: tuple[str, int | None, int | None]) -> None:
    mask = described(attention(add=[add], cached=cached))["mask"]
    assert (mask["kind"], mask["window"], mask["chunk"]) == expected
    assert mask["padding"] == []


def test_a_window_wider_than_what_was_tried_doesnt_show_and_the_mask_says_how_far_it_was() -> None:
    mask = described(attention(add=[visible(behind=9000)], cached=True))["mask"]
    assert (mask["kind"], mask["tested"]) == ("causal", 8192)


@pytest.mark.parametrize("hidden", [-10_000.0, float(np.finfo(np.float32).min)])
def test_padding_comes_from_an_input(hidden: float) -> None:
    mask = described(attention(add=[padding(hidden)]))["mask"]
    assert (mask["kind"], mask["padding"]) == ("none", ["attention_mask"])


def test_padding_that_hides_nothing_is_none_and_a_soft_one_is_a_bias() -> None:
    found = described(attention(add=[padding(0.0)]))
    assert found["mask"]["padding"] == [] and found["bias"] is None
    soft = described(attention(add=[padding(-3.0)]))
    assert soft["mask"]["padding"] == []


REACH = 900


def slopes(*numbers: float) -> Array:
    """Biases by distance from -REACH to REACH, 0 for keys ahead."""
    return -np.array(numbers)[:, None] * np.abs(np.arange(-REACH, REACH + 1))


AUTHORS = [2.0 ** (-2 * head) for head in range(1, HEADS + 1)]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        (AUTHORS, {"name": "alibi"}),
        ([0.25, 0.0625, 0.0156, 0.00390625], {"name": "alibi", "slopes": [0.25, 0.0625, 0.0156, 0.00390625]}),
    ],
)
def test_alibi(numbers: list[float], expected: dict[str, Any]) -> None:
    found = described(attention(add=[by_distance(slopes(*numbers), REACH), visible()]))
    assert found["encoding"] == found["bias"] == expected
    assert found["mask"]["kind"] == "causal"


def test_a_bias_of_distance_that_nobody_knows() -> None:
    table = slopes(*AUTHORS)
    table[1] = np.sin(table[1])
    found = encoding(attention(add=[by_distance(table, REACH)]))
    assert (found["name"], found["of"], found["reason"]["code"]) == ("unknown", "distance", "bias-unknown")


def grid_bias(side: int, special: int = 0) -> Array:
    """Biases by offset on a grid, as in Swin and BEiT."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((HEADS, 2 * side - 1, 2 * side - 1))
    y, x = np.divmod(np.arange(side * side), side)
    inner = table[:, y[:, None] - y + side - 1, x[:, None] - x + side - 1]
    if not special:
        return inner
    whole = np.empty((HEADS, side * side + 1, side * side + 1))
    whole[:, 1:, 1:] = inner
    whole[:, 0] = rng.standard_normal((HEADS, 1))
    whole[:, :, 0] = rng.standard_normal((HEADS, 1))
    return whole


@pytest.mark.parametrize(("special", "name"), [(0, "swin"), (1, "beit")])
def test_biases_by_offset_on_a_grid(special: int, name: str) -> None:
    bias = grid_bias(4, special)
    fixed = (2, bias.shape[-1])
    assert encoding(attention(add=[constant_bias(bias)], fixed=fixed)) == {"name": name, "window_size": 4}
    bias[1, 3, 5] += 1e-3
    found = encoding(attention(add=[constant_bias(bias)], fixed=fixed))
    assert (found["name"], found["reason"]["code"]) == ("unknown", "bias-of-places")


def test_distances_on_a_grid_are_alibi2d() -> None:
    y, x = np.divmod(np.arange(25), 5)
    far = np.hypot(y[:, None] - y, x[:, None] - x)
    bias = -np.array(AUTHORS)[:, None, None] * far
    assert encoding(attention(add=[constant_bias(bias)], fixed=(2, 25))) == {"name": "alibi2d"}


def test_layers_that_share_a_mask_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from posexport.graphs.attention import describe

    calls = []
    real = describe.mask_of
    monkeypatch.setattr(describe, "mask_of", lambda *given: calls.append(1) or real(*given))
    view = view_of(ir.from_proto(attention(add=[visible()])))
    describer = Describer(view)
    one = view.attentions[0]
    assert describer.describe(one)["mask"] == describer.describe(one)["mask"]
    assert len(calls) == 1


def test_windows_of_a_term_are_rows() -> None:
    measure: Any = None
    site: Any = SimpleNamespace(terms=(), num_heads=2)
    term: Any = SimpleNamespace(axes=(), level=SimpleNamespace(name="level"))
    added = AddedToScores(measure, site, {"level": (3, 4, 2, 5, 5)})
    value = torch.arange(3.0 * 4 * 5 * 5).reshape(3, 4, 1, 5, 5)
    rows = added._four_axes(term, value)
    assert rows.shape == (12, 1, 5, 5)
    assert torch.equal(rows[7], value[1, 3])


def test_groups_of_a_term_are_heads() -> None:
    measure: Any = None
    site: Any = SimpleNamespace(terms=(), num_heads=6)
    term: Any = SimpleNamespace(axes=(), level=SimpleNamespace(name="level"))
    added = AddedToScores(measure, site, {"level": (4, 2, 3, 5, 7)})
    slopes = torch.arange(3.0).reshape(3, 1, 1)
    assert torch.equal(added._four_axes(term, slopes), torch.tensor([0.0, 1, 2, 0, 1, 2]).reshape(1, 6, 1, 1))
    padding = torch.arange(28.0).reshape(4, 1, 1, 1, 7)
    assert torch.equal(added._four_axes(term, padding), padding[:, 0])
    assert torch.equal(added._four_axes(term, padding[0, 0, 0]), padding[0, 0, :1][None])


@pytest.mark.parametrize(("error", "code"), [(RequestError("odd."), "not-evaluated"), (IndexError("odd"), "failed")])
def test_what_cant_be_measured_leaves_what_was_recognised(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: str
) -> None:
    from posexport.graphs.attention import describe

    def broken(*_: Any) -> None:
        raise error

    monkeypatch.setattr(describe, "rotary_encoding", broken)
    found = described(attention(rotate=rotation(PLAIN), key_heads=2))
    assert (found["state"], found["num_kv_heads"], found["operator"]) == ("recognised", 2, "Softmax")
    assert found["encoding"]["reason"]["code"] == found["mask"]["reason"]["code"] == code
