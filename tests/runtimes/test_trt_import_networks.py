"""Layers and modes that TensorRT's parser rarely or never makes, in handmade networks compared with numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from trt_helpers import needs_rtx
from trt_import_helpers import Array, ByHand, causal_truth, network

from posexport.errors import RuntimeMissingError

pytestmark = needs_rtx

Build = Callable[[ByHand], Any]
A = np.arange(24, dtype=np.float32).reshape(2, 3, 4) - 7.5


@pytest.mark.parametrize(("kind", "offset"), [("UPPER_LEFT", 0), ("LOWER_RIGHT", 4), ("NONE", 99)])
def test_causality_is_aligned_as_the_network_says(kind: str, offset: int) -> None:
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, 2, size, 4)).astype(np.float32) for size in (3, 7, 7))

    def build(made: ByHand) -> Any:
        soft, causal = made.trt.AttentionNormalizationOp.SOFTMAX, getattr(made.trt.CausalMaskKind, kind)
        return made.net.add_attention_v2(*made.inputs.values(), soft, causal)

    found = network(build, {"q": q, "k": k, "v": v}).run({"q": q, "k": k, "v": v})["y0"]
    np.testing.assert_allclose(found, causal_truth(q, k, v, offset), rtol=1e-5, atol=1e-6)


def fill_of_inputs(made: ByHand) -> Any:
    layer = made.net.add_fill((2, 3), made.trt.FillOperation.LINSPACE, made.trt.int64)
    layer.set_input(1, made.constant(5))
    layer.set_input(2, made.constant([10, -2]))
    return layer


def fill_of_attributes(made: ByHand) -> Any:
    layer = made.net.add_fill((4,), made.trt.FillOperation.LINSPACE, made.trt.float32)
    layer.alpha, layer.beta = 1.5, 0.25
    return layer


def scaled(mode: str, *weights: Any) -> Build:
    """(x * factor + shift) ^ power. `weights` are in the order shift, factor, power."""

    def build(made: ByHand) -> Any:
        shuffle = made.net.add_shuffle(made.inputs["x"])
        shuffle.reshape_dims = (2, 3, 4, 1)
        kept = [made.keep(np.asarray(each, np.float32).reshape(-1)) for each in weights]
        return made.net.add_scale_nd(shuffle.get_output(0), getattr(made.trt.ScaleMode, mode), *kept, 1)

    return build


def sliced(mode: str) -> Build:
    """A slice of eight rows from row -2 on, three columns each."""

    def build(made: ByHand) -> Any:
        layer = made.net.add_slice(made.inputs["x"], (0, -2, 1), (2, 8, 3), (1, 1, 1))
        layer.mode = getattr(made.trt.SampleMode, mode)
        if mode == "FILL":
            layer.set_input(4, made.constant(np.float32(9)))
        return layer

    return build


def tanh(made: ByHand) -> Any:
    layer = made.net.add_activation(made.inputs["x"], made.trt.ActivationType.SCALED_TANH)
    layer.alpha, layer.beta = 2.0, 0.3
    return layer


def product(first: str, second: str) -> Build:
    """A product of matrices or vectors."""

    def build(made: ByHand) -> Any:
        one, two = (getattr(made.trt.MatrixOperation, name) for name in (first, second))
        return made.net.add_matrix_multiply(made.inputs["x"], one, made.inputs["w"], two)

    return build


def shuffled(made: ByHand) -> Any:
    layer = made.net.add_shuffle(made.inputs["x"])
    layer.first_transpose, layer.reshape_dims, layer.second_transpose = (2, 0, 1), (0, -1), (1, 0)
    return layer


STEPS = np.linspace(1, 2, 3)[:, None]


def padded(mode: str, **more: Any) -> Array:
    """The result of `sliced`, made with numpy's padding."""
    return np.pad(A, ((0, 0), (2, 3), (0, 0)), mode, **more)[:, :, 1:]  # type: ignore[call-overload, no-any-return]


NETWORKS: dict[str, tuple[Build, dict[str, Array], Array]] = {
    "fill of inputs": (fill_of_inputs, {}, 5 + 10 * np.arange(2)[:, None] - 2 * np.arange(3)),
    "fill of attributes": (fill_of_attributes, {}, 1.5 + 0.25 * np.arange(4)),
    "scale": (scaled("UNIFORM", 20, 1.5, 2), {"x": A}, ((1.5 * A + 20) ** 2)[..., None]),
    "scale of channels": (
        scaled("CHANNEL", STEPS + 19, STEPS, STEPS + 1),
        {"x": A},
        ((A * STEPS + STEPS + 19) ** (STEPS + 1))[..., None],
    ),
    "slice, filled": (sliced("FILL"), {"x": A}, padded("constant", constant_values=9)),
    "slice, clamped": (sliced("CLAMP"), {"x": A}, padded("edge")),
    "slice, mirrored": (sliced("REFLECT"), {"x": A}, padded("reflect")),
    "slice, wrapped": (sliced("WRAP"), {"x": A}, padded("wrap")),
    "scaled tanh": (tanh, {"x": A}, 2 * np.tanh(0.3 * A)),
    "matrix by vector": (product("NONE", "VECTOR"), {"x": A, "w": A[:, 0]}, np.einsum("bij,bj->bi", A, A[:, 0])),
    "vector by matrix": (product("VECTOR", "TRANSPOSE"), {"x": A[:, 1], "w": A}, np.einsum("bj,bij->bi", A[:, 1], A)),
    "transposed": (product("TRANSPOSE", "NONE"), {"x": A, "w": A}, np.einsum("bki,bkj->bij", A, A)),
    "shuffle": (shuffled, {"x": A}, A.transpose(2, 0, 1).reshape(4, -1).T),
    "non-zero": (
        lambda made: made.net.add_non_zero(made.inputs["x"]),
        {"x": np.maximum(A, 0)},
        np.array(np.nonzero(np.maximum(A, 0))),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_layer_computes_what_is_documented(name: str) -> None:
    build, inputs, wanted = NETWORKS[name]
    found = network(build, inputs).run(inputs)["y0"]
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_an_assertion_holds_or_ends_the_run() -> None:
    x = np.array([True, True])

    def build(made: ByHand) -> Any:
        made.net.add_assertion(made.inputs["x"], "sizes differ")
        return made.net.add_identity(made.inputs["x"])

    runner = network(build, {"x": x})
    assert runner.run({"x": x})["y0"].tolist() == [True, True]
    with pytest.raises(RuntimeError, match=r"\(ASSERTION\).*sizes differ"):
        runner.run({"x": ~x})


def test_a_slice_outside_of_its_input_ends_the_run() -> None:
    def build(made: ByHand) -> Any:
        layer = made.net.add_slice(made.constant(np.arange(3, dtype=np.float32)), (0,), (2,), (1,))
        layer.set_input(1, made.inputs["start"])
        return layer

    runner = network(build, {"start": np.array([0])})
    assert runner.run({"start": np.array([1])})["y0"].tolist() == [1, 2]
    with pytest.raises(RuntimeError, match=r"\(SLICE\).*index 3 is outside of axis 0 with size 3"):
        runner.run({"start": np.array([2])})


def combined(op: str, first: list[int], second: list[int]) -> Build:
    """An elementwise operation on two vectors of integers."""

    def build(made: ByHand) -> Any:
        kind = getattr(made.trt.ElementWiseOperation, op)
        return made.net.add_elementwise(made.constant(first), made.constant(second), kind)

    return build


def row(mode: str) -> Build:
    """A slice of a vector from one element before its start to one element after its end."""

    def build(made: ByHand) -> Any:
        layer = made.net.add_slice(made.constant([5, 6, 7]), (-1,), (5,), (1,))
        layer.mode = getattr(made.trt.SampleMode, mode)
        return layer

    return build


def picked(made: ByHand) -> Any:
    return made.net.add_gather(made.constant([5, 6, 7]), made.constant([-1, 0, 2]), 0)


def reduced(op: str) -> Build:
    """A reduction of each row of a matrix of integers."""

    def build(made: ByHand) -> Any:
        return made.net.add_reduce(made.constant([[2, 3], [4, 5]]), getattr(made.trt.ReduceOperation, op), 2, False)

    return build


SHAPES: dict[str, Build] = {
    **{
        f"{op} of {signs} numbers": combined(op, [-7 * sign, 7, 7, 6], [2, -2 * sign, 2, 3])
        for op in ("DIV", "FLOOR_DIV", "MAX", "MIN", "SUM", "SUB", "PROD")
        for sign, signs in ((-1, "like"), (1, "unlike"))
    },
    **{f"slice by {mode}": row(mode) for mode in ("FILL", "CLAMP", "WRAP", "REFLECT")},
    "gather": picked,
    **{f"reduce by {op}": reduced(op) for op in ("SUM", "PROD", "MAX", "MIN")},
}


@pytest.mark.parametrize("name", SHAPES)
def test_integers_are_what_tensorrt_itself_works_out(name: str) -> None:
    """TensorRT computes shapes on the CPU while a network is made. A tensor with these sizes shows its result."""

    def build(made: ByHand) -> Any:
        sizes = SHAPES[name](made).get_output(0)
        (count,) = sizes.shape
        sizes = made.net.add_elementwise(sizes, made.constant([20] * count), made.trt.ElementWiseOperation.SUM)
        layer = made.net.add_fill((1,), made.trt.FillOperation.LINSPACE, made.trt.int64)
        for index, tensor in enumerate((sizes.get_output(0), made.constant(0), made.constant([1] * count))):
            layer.set_input(index, tensor)
        return layer

    runner = network(build, {})
    worked_out = tuple(runner._network.get_output(0).shape)
    assert min(worked_out) > 0, "TensorRT knows all of it"
    assert runner.run({})["y0"].shape == worked_out


Q = np.zeros((1, 2, 3, 4), np.float32)


def attended(norm: str = "SOFTMAX", **parts: Any) -> Build:
    """Self-attention of Q with further parts."""

    def build(made: ByHand) -> Any:
        kinds = getattr(made.trt.AttentionNormalizationOp, norm), made.trt.CausalMaskKind.NONE
        layer = made.net.add_attention_v2(*[made.inputs["q"]] * 3, *kinds)
        for name, array in parts.items():
            setattr(layer, name, made.constant(array))
        return layer

    return build


def grouped(made: ByHand) -> Any:
    ones = np.ones((1, 2, 1, 1), np.float32)
    layer = made.net.add_normalization_v2(made.inputs["q"], made.constant(ones), made.constant(ones), 12)
    layer.num_groups = 2
    return layer


def scattered(*rows: int) -> Build:
    """Rows of ones are written to Q at these indices, one after another."""

    def build(made: ByHand) -> Any:
        updates = made.constant(np.ones((len(rows), 2, 3, 4), np.float32))
        indices = made.constant(np.array(rows).reshape(-1, 1))
        return made.net.add_scatter(made.inputs["q"], indices, updates, made.trt.ScatterMode.ND)

    return build


def turned(made: ByHand) -> Any:
    table = made.constant(np.ones((5, 2), np.float32))
    layer = made.net.add_rotary_embedding(made.inputs["q"], table, table, False, 0)
    layer.set_input(3, made.constant([[0, 5, 1]]))
    return layer


def cached(made: ByHand) -> Any:
    starts = made.constant(np.array([2], np.int32))
    update = made.net.add_slice(made.inputs["q"], (0, 0, 0, 0), (1, 2, 2, 4), (1, 1, 1, 1)).get_output(0)
    return made.net.add_kv_cache_update(made.inputs["q"], update, starts, made.trt.KVCacheMode.LINEAR)


def of_layer(call: str, *arguments: Any) -> Build:
    """One layer on Q. String arguments name TensorRT's constants, such as `float32` or `PoolingType.MAX`."""

    def build(made: ByHand) -> Any:
        def said(argument: Any) -> Any:
            for part in argument.split(".") if isinstance(argument, str) else ():
                argument = getattr(made.trt if isinstance(argument, str) else argument, part)
            return argument

        return getattr(made.net, call)(made.inputs["q"], *map(said, arguments))

    return build


UNSURE: dict[str, tuple[Build, str]] = {
    "attention without softmax": (attended("NONE"), "(ATTENTION_INPUT): it normalises by NONE"),
    "attention with lengths": (attended(key_value_lengths=np.array([2], np.int32)), "it has key_value_lengths"),
    "a query that sees nothing": (attended(mask=np.zeros((1, 1, 3, 3), bool)), "a query attends to no key"),
    "random numbers": (
        lambda made: made.net.add_fill((3,), made.trt.FillOperation.RANDOM_NORMAL, made.trt.float32),
        "(FILL): the operation RANDOM_NORMAL is random",
    ),
    "equal elements": (of_layer("add_topk", "TopKOperation.MAX", 2, 8, "int32"), "(TOPK): elements are equal"),
    "a norm in groups": (grouped, "(NORMALIZATION): it has 2 groups"),
    "a norm of neighbours": (of_layer("add_lrn", 3, 1e-4, 0.75, 1.0), "(LRN): its kind is not known"),
    "a pooling of two kinds": (
        of_layer("add_pooling_nd", "PoolingType.MAX_AVERAGE_BLEND", (1, 1)),
        "(POOLING): the operation MAX_AVERAGE_BLEND is not known",
    ),
    "quantised numbers": (of_layer("add_cast", "int8"), "(CAST): its output is INT8"),
    "one place twice": (scattered(0, 0), "(SCATTER): it writes to one place twice"),
    "a place outside": (scattered(1), "(SCATTER): it writes at negative indices, or outside of an axis"),
    "a position outside of its table": (turned, "(ROTARY_EMBEDDING): a position is not in [0, 5)"),
    "a cache that overflows": (cached, "(KV_CACHE_UPDATE): 2 entries from 2 on don't fit into a cache of 3"),
}


@pytest.mark.parametrize("name", UNSURE)
def test_what_is_not_known_for_sure_is_never_guessed(name: str) -> None:
    build, said = UNSURE[name]
    with pytest.raises(RuntimeMissingError) as caught:
        network(build, {"q": Q}).run({"q": Q})
    assert said in str(caught.value)
    assert str(caught.value).startswith("tensorrt-import can't evaluate layer '")
