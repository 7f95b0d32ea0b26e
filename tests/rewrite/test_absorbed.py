"""Nodes that have an effect only on long or unusual inputs: a rewrite must not absorb them into its operators.

The oracle is ONNX Runtime with the original graph, on inputs on which these nodes have an effect.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import pytest
from absorbed_graphs import HEADS, HIDDEN, SIZE, Hook, growing, long, many, model_of
from onnx import TensorProto, helper
from rewrite_helpers import rewritten_model
from small_graphs import Graph, run

from posexport.rewrite.rewriter import REWRITTEN

FAR = 512
"""A number of tokens. Nodes that depend on lengths have an effect only from about 256 tokens on."""


def clipped(g: Graph, value: str) -> str:
    return g.op("Clip", value, g.constant(-8.0, np.float32), g.constant(8.0, np.float32))


def scaled_by_length(g: Graph, value: str) -> str:
    return g.op("Mul", value, growing(g))


def scaled_by_choice(g: Graph, value: str) -> str:
    return g.op("Mul", value, g.op("Where", long(g), g.constant([2.0], np.float32), g.constant([1.0], np.float32)))


def scaled_by_whole_division(g: Graph, value: str) -> str:
    """Times 1 + n // 256 for n tokens."""
    steps = g.op("Div", g.length("features", 1), g.constant([256]))
    return g.op("Mul", value, g.op("Cast", g.op("Add", steps, g.constant([1])), to=TensorProto.FLOAT))


def chosen(g: Graph, value: str) -> str:
    return g.op("Where", long(g), g.op("Neg", value), value)


def last_keys(g: Graph, value: str) -> str:
    """The last 256 tokens of [B, N, T, D]."""
    return g.op("Slice", value, g.constant([-256]), g.constant([2**31 - 1]), g.constant([2]))


def first_keys(g: Graph, value: str) -> str:
    return g.op("Slice", value, g.constant([0]), g.constant([256]), g.constant([2]))


def last_keys_computed(g: Graph, value: str) -> str:
    """The tokens from max(n - 256, 0) on."""
    start = g.op("Max", g.op("Sub", g.length("features", 1), g.constant([256])), g.constant([0]))
    return g.op("Slice", value, start, g.constant([2**31 - 1]), g.constant([2]))


def up_to(g: Graph, count: int) -> str:
    """The number of tokens [1], at most `count`."""
    return g.op("Min", many(g), g.constant([count]))


def blocks(g: Graph) -> str:
    """The number of whole blocks of 256 tokens, at least 1."""
    return g.op("Max", g.constant([1]), g.op("Div", many(g), g.constant([256])))


def last_keys_by_split(g: Graph, value: str) -> str:
    taken = up_to(g, 256)
    sizes = g.op("Concat", g.op("Sub", many(g), taken), taken, axis=0)
    return g.parts("Split", 2, value, sizes, axis=2)[1]


def turned_round(g: Graph, value: str) -> str:
    """The tokens from 256 on come before the others."""
    later = g.op("Max", g.op("Sub", many(g), g.constant([256])), g.constant([0]))
    first = g.op("Concat", g.op("Sub", many(g), later), later, axis=0)
    return g.op("Concat", *reversed(g.parts("Split", 2, value, first, axis=2)), axis=2)


def tiled(g: Graph, value: str) -> str:
    return g.op("Tile", value, g.op("Concat", g.constant([1, 1]), blocks(g), g.constant([1]), axis=0))


def repeated(g: Graph, value: str) -> str:
    shape = g.op("Concat", g.constant([1, 1, 1]), blocks(g), g.constant([1]), axis=0)
    wide = g.op("Expand", g.op("Unsqueeze", value, g.constant([3])), shape)
    return g.op("Reshape", wide, g.op("Concat", g.length("features", 0), g.constant([HEADS, -1, SIZE]), axis=0))


def scaled_by_a_shape(g: Graph, value: str) -> str:
    """Times the length of a value with one element for each block of 256 tokens."""
    length = g.op("Shape", g.op("ConstantOfShape", blocks(g)))
    return g.op("Mul", value, g.op("Cast", length, to=TensorProto.FLOAT))


def last_keys_without_axes(g: Graph, value: str) -> str:
    """The last 256 tokens, by a Slice with steps and without axes."""
    turned = g.op("Transpose", value, perm=[0, 1, 3, 2])
    ends = g.constant([2**31 - 1] * 4)
    cut = g.op("Slice", turned, g.constant([0, 0, 0, -256]), ends, "", g.constant([1, 1, 1, 1]))
    return g.op("Transpose", cut, perm=[0, 1, 3, 2])


def in_blocks(g: Graph) -> str:
    """A shape that splits long rows into rows of 256 tokens."""
    return g.op("Concat", g.constant([-1]), up_to(g, 256), g.constant([HEADS, SIZE]), axis=0)


def in_rows(g: Graph, value: str) -> str:
    return g.op("Reshape", value, g.op("Concat", g.op("Shape", "features", end=2), g.constant([HIDDEN]), axis=0))


def mixed_by_blocks(g: Graph, value: str) -> str:
    """The tokens of a row, reordered in blocks of 256."""
    pairs = g.op("Concat", g.length("features", 0), g.constant([-1]), up_to(g, 256), g.constant([HIDDEN]), axis=0)
    return in_rows(g, g.op("Transpose", g.op("Reshape", value, pairs), perm=[0, 2, 1, 3]))


def features_by_length(g: Graph, value: str) -> str:
    """The halves of the features are exchanged in long rows."""
    first = g.op("Where", long(g), g.constant([SIZE // 2]), g.constant([0]))
    sizes = g.op("Concat", first, g.op("Sub", g.constant([SIZE]), first), axis=0)
    return g.op("Concat", *reversed(g.parts("Split", 2, value, sizes, axis=3)), axis=3)


def cut_in_bytes(g: Graph, value: str) -> str:
    """The first n modulo 256 of n keys, or 256 if that is 0."""
    few = g.op("Cast", g.op("Cast", many(g), to=TensorProto.UINT8), to=TensorProto.INT64)
    end = g.op("Where", g.op("Equal", few, g.constant([0])), g.constant([256]), few)
    return g.op("Slice", value, g.constant([0]), end, g.constant([2]))


def chosen_sign(g: Graph, value: str) -> str:
    """Times 1, or times -1 in long rows: an If whose branches use the same names."""

    def branch(number: float) -> onnx.GraphProto:
        output = helper.make_tensor_value_info("number", TensorProto.FLOAT, [])
        tensor = helper.make_tensor("number_value", TensorProto.FLOAT, [], [number])
        node = helper.make_node("Constant", [], ["number"], value=tensor)
        return helper.make_graph([node], "branch", [], [output])

    condition = g.op("Squeeze", long(g), g.constant([0]))
    factor = g.op("If", condition, then_branch=branch(-1.0), else_branch=branch(1.0))
    return g.op("Mul", value, factor)


def rounded(g: Graph, value: str) -> str:
    """Rounded to bfloat16 and cast back."""
    return g.op("Cast", g.op("Cast", value, to=TensorProto.BFLOAT16), to=TensorProto.FLOAT)


def shorter(g: Graph, value: str) -> str:
    return g.op("Cast", value, to=TensorProto.FLOAT16)


def longer(g: Graph, value: str) -> str:
    return g.op("Cast", value, to=TensorProto.FLOAT)


def scores_in_blocks(g: Graph, value: str) -> str:
    """Scores in blocks of at most 256 keys, so that the weights of each block sum to 1."""
    shape = g.op("Concat", g.constant([0, 0, -1]), up_to(g, 256), axis=0)
    return g.op("Reshape", value, shape)


def back_from_blocks(g: Graph, value: str) -> str:
    return g.op("Reshape", value, g.op("Concat", g.constant([0, 0]), many(g), many(g), axis=0))


FAULTS: dict[str, tuple[dict[str, Any], float]] = {
    "clipped queries": ({"q": clipped}, 6.0),
    "clipped values": ({"v": clipped}, 6.0),
    "queries scaled by the length": ({"q": scaled_by_length}, 1.0),
    "keys scaled by a choice": ({"k": scaled_by_choice}, 1.0),
    "queries scaled by a whole division": ({"q": scaled_by_whole_division}, 1.0),
    "queries chosen": ({"q": chosen}, 1.0),
    "scores scaled by the length": ({"scores": scaled_by_length}, 1.0),
    "weights scaled by a choice": ({"weights": scaled_by_choice}, 1.0),
    "the last keys": ({"k": last_keys, "v": last_keys}, 1.0),
    "the first keys": ({"k": first_keys, "v": first_keys}, 1.0),
    "the last keys, computed": ({"k": last_keys_computed, "v": last_keys_computed}, 1.0),
    "the last keys by Split": ({"k": last_keys_by_split, "v": last_keys_by_split}, 1.0),
    "the last keys without axes": ({"k": last_keys_without_axes, "v": last_keys_without_axes}, 1.0),
    "values in another order": ({"v": turned_round}, 1.0),
    "keys tiled, values repeated": ({"k": tiled, "v": repeated}, 1.0),
    "queries scaled by a shape": ({"q": scaled_by_a_shape}, 1.0),
    "features of queries by the length": ({"q": features_by_length}, 1.0),
    "blocks of tokens": ({"split": in_blocks, "merged": in_rows}, 1.0),
    "the result by blocks": ({"merged": mixed_by_blocks}, 1.0),
    "weights by blocks": ({"scores": scores_in_blocks, "weights": back_from_blocks}, 1.0),
    "rounded values": ({"v": rounded}, 1.0),
    "rounded scores": ({"scores": rounded}, 1.0),
    "keys that are counted in bytes": ({"k": cut_in_bytes, "v": cut_in_bytes}, 1.0),
    "a sign by If": ({"q": chosen_sign}, 1.0),
}
"""The hooks of each graph, and the size of the features on which they have an effect."""


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("form", "fault"), [*itertools.product(["native", "contrib"], FAULTS)])
def test_what_does_nothing_on_short_inputs_stays(fault: str, form: str) -> None:
    hooks, size = FAULTS[fault]
    model = model_of(**hooks)
    features = size * np.random.default_rng(1).standard_normal((2, FAR, HIDDEN)).astype(np.float32)
    expected, plain = (run(one, {"features": features})["output"] for one in (model, model_of()))
    largest = float(np.abs(expected).max())
    assert float(np.abs(plain - expected).max()) > 1e-3 * largest  # The nodes have an effect here.
    _, proto = rewritten_model(model, form=form, target="ort")
    actual = run(proto, {"features": features})["output"]
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * largest)


@pytest.mark.parametrize(
    "fault", [name for name in FAULTS if not {"weights", "rounded scores"} & {name, *name.split()}]
)
def test_attention_begins_below_it(fault: str) -> None:
    """The fault stays, and the attention after it becomes an operator."""
    done, proto = rewritten_model(model_of(**FAULTS[fault][0]), form="native", target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    assert [node.op_type for node in proto.graph.node].count("Attention") == 1


def heads_by_length(g: Graph) -> str:
    """Half as many heads with twice the size in long rows."""
    heads = g.op("Where", long(g), g.constant([HEADS // 2]), g.constant([HEADS]))
    return g.op("Concat", g.constant([0, 0]), heads, g.constant([-1]), axis=0)


def test_a_softmax_of_fewer_digits_is_left_alone() -> None:
    """ONNX Runtime on a CPU computes this float16 softmax in float32, but other runtimes do not."""
    done, _ = rewritten_model(model_of(scores=shorter, weights=longer), form="native", target="ort")
    assert [(one.state, one.reason and one.reason.code) for one in done.sites] == [("kept", "score-digits")]


@pytest.mark.parametrize("form", ["native", "contrib"])
def test_heads_that_lengths_decide_are_left_alone(form: str) -> None:
    done, _ = rewritten_model(model_of(split=heads_by_length), form=form, target="ort")
    assert [(one.state, one.reason and one.reason.code) for one in done.sites] == [("kept", "heads")]


def size_of_heads(g: Graph, value: str) -> str:
    """Divided by the length of the last axis."""
    size = g.op("Slice", g.op("Shape", value), g.constant([-1]), g.constant([2**31 - 1]))
    return g.op("Div", value, g.op("Cast", size, to=TensorProto.FLOAT))


def whole_slice(g: Graph, value: str) -> str:
    return g.op("Slice", value, g.constant([0]), g.constant([2**63 - 1]), g.constant([2]))


@pytest.mark.parametrize("hooks", [{"q": size_of_heads, "k": size_of_heads}, {"k": whole_slice}])
def test_what_is_the_same_for_all_inputs_is_taken_over(hooks: dict[str, Any]) -> None:
    done, proto = rewritten_model(model_of(**hooks), form="native", target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    assert not {node.op_type for node in proto.graph.node} & {"Div", "Slice", "Softmax"}


def test_a_default_that_callers_may_change_is_no_constant() -> None:
    model = model_of()
    scale = next(one for one in model.graph.initializer if onnx.numpy_helper.to_array(one).shape == ())
    model.graph.input.append(helper.make_tensor_value_info(scale.name, TensorProto.FLOAT, []))
    onnx.checker.check_model(model, full_check=True)
    done, proto = rewritten_model(model, form="native", target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    features = np.random.default_rng(1).standard_normal((2, 7, HIDDEN)).astype(np.float32)
    for given in ({}, {scale.name: np.array(1.5, np.float32)}):
        arrays = {"features": features, **given}
        np.testing.assert_allclose(run(proto, arrays)["output"], run(model, arrays)["output"], rtol=0, atol=2e-5)


def with_sinks(g: Graph, scores: str) -> str:
    """Adds one logit for each head and query."""
    sinks = g.constant(np.linspace(-1, 1, HEADS).reshape(1, HEADS, 1, 1), np.float32)
    shape = g.op("Concat", g.length("features", 0), g.constant([1]), many(g), g.constant([1]), axis=0)
    return g.op("Concat", scores, g.op("Expand", sinks, shape), axis=-1)


def as_many_as_keys(g: Graph, weights: str) -> str:
    return g.op("Slice", weights, g.constant([0]), many(g), g.constant([3]))


@pytest.mark.parametrize("form", ["native", "contrib"])
def test_the_column_of_sinks_is_cut_off_by_a_length(form: str) -> None:
    model = model_of(scores=with_sinks, weights=as_many_as_keys)
    done, proto = rewritten_model(model, form=form, target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    features = np.random.default_rng(1).standard_normal((2, 30, HIDDEN)).astype(np.float32)
    expected, actual = (run(one, {"features": features})["output"] for one in (model, proto))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * float(np.abs(expected).max()))


def less_the_maximum(g: Graph, scores: str) -> str:
    """Scores minus their maximum, over the keys in short rows and over the queries in long rows."""
    axis = g.op("Where", long(g), g.constant([2]), g.constant([3]))
    return g.op("Sub", scores, g.op("ReduceMax", scores, axis, keepdims=1))


@pytest.mark.parametrize("form", ["native", "contrib"])
def test_a_maximum_over_an_axis_that_lengths_decide_is_left_alone(form: str) -> None:
    done, _ = rewritten_model(model_of(scores=less_the_maximum), form=form, target="ort")
    assert [(one.state, one.reason and one.reason.code) for one in done.sites] == [("kept", "score-operator")]


def filled_nan(fill: float, *, own: bool = True) -> Hook:
    """`fill` where a weight is NaN, or if `own` is False, where another number is NaN."""

    def hook(g: Graph, weights: str) -> str:
        zero = g.op("Cast", g.op("Max", g.op("Sub", g.constant([256]), many(g)), g.constant([0])), to=TensorProto.FLOAT)
        other = g.op("Div", zero, zero)  # NaN in long rows
        return g.op("Where", g.op("IsNaN", weights if own else other), g.constant(fill, np.float32), weights)

    return hook


@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize(("hook", "state"), [(filled_nan(0.0), "rewritten"), (filled_nan(0.5), "kept")])
def test_weights_that_are_no_numbers_become_zero(hook: Hook, state: str, form: str) -> None:
    done, _ = rewritten_model(model_of(weights=hook), form=form, target="ort")
    assert [one.state for one in done.sites] == [state]


@pytest.mark.parametrize("form", ["native", "contrib"])
def test_other_numbers_that_are_none_decide_nothing(form: str) -> None:
    done, _ = rewritten_model(model_of(weights=filled_nan(0.0, own=False)), form=form, target="ort")
    assert [(one.state, one.reason and one.reason.code) for one in done.sites] == [("kept", "weights")]


def first_of_encoder(g: Graph, value: str) -> str:
    """The first 11 tokens. The inputs of the probe have exactly 11."""
    return g.op("Slice", value, g.constant([0]), g.constant([11]), g.constant([2]))


def last_of_encoder(g: Graph, value: str) -> str:
    return g.op("Slice", value, g.constant([-11]), g.constant([2**31 - 1]), g.constant([2]))


def first_of_encoder_by_split(g: Graph, value: str) -> str:
    length = g.length("encoder_hidden_states", 1)
    sizes = g.op("Concat", g.constant([11]), g.op("Sub", length, g.constant([11])), axis=0)
    return g.parts("Split", 2, value, sizes, axis=2)[0]


@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize("hook", [first_of_encoder, last_of_encoder, first_of_encoder_by_split])
def test_a_cut_of_what_is_probed_as_a_whole_stays(hook: Hook, form: str) -> None:
    model = model_of(encoder=True, k=hook, v=hook)
    _, proto = rewritten_model(model, form=form, target="ort")
    rng = np.random.default_rng(1)
    shapes = {"features": (2, 5, HIDDEN), "encoder_hidden_states": (2, 20, HIDDEN)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    expected, actual, whole = (run(one, arrays)["output"] for one in (model, proto, model_of(encoder=True)))
    assert float(np.abs(expected - whole).max()) > 1e-2
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * float(np.abs(expected).max()))


def slopes_by_row(g: Graph, scores: str) -> str:
    """ALiBi by the positions of the mask, as in BLOOM and Falcon: [rows * N, 1, T], then [B, -1, 1, T]."""
    mask = g.op("Cast", "attention_mask", to=TensorProto.FLOAT)
    places = g.op("Unsqueeze", g.op("CumSum", mask, g.constant(1)), g.constant([1]))
    bias = g.op("Mul", places, g.constant(np.linspace(-0.5, -0.1, HEADS).reshape(1, HEADS, 1), np.float32))
    keys = g.length("attention_mask", 1)
    joined = g.op("Reshape", bias, g.op("Concat", g.constant([-1, 1]), keys, axis=0))
    shape = g.op("Concat", g.length("features", 0), g.constant([-1, 1]), keys, axis=0)
    return g.op("Add", scores, g.op("Reshape", joined, shape))


@pytest.mark.parametrize("form", ["native", "contrib"])
def test_heads_of_a_bias_that_names_do_not_tell(form: str) -> None:
    model = model_of(scores=slopes_by_row)
    mask = next(one for one in model.graph.input if one.name == "attention_mask")
    mask.type.tensor_type.shape.dim[0].dim_param = "mask_rows"
    done, proto = rewritten_model(model, form=form, target="ort")
    assert [one.state for one in done.sites] == [REWRITTEN]
    rng = np.random.default_rng(1)
    arrays = {"features": rng.standard_normal((3, 9, HIDDEN)).astype(np.float32)}
    arrays["attention_mask"] = rng.integers(0, 2, (3, 9))
    expected, actual = (run(one, arrays)["output"] for one in (model, proto))
    assert actual.shape == expected.shape and np.isfinite(expected).all()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * float(np.abs(expected).max()))
