"""TensorRT's import of handmade graphs, evaluated layer by layer, gives what ONNX Runtime computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from trt_helpers import needs_rtx
from trt_import_helpers import graph, imported, inputs_for, on_ort

from posexport.errors import RuntimeMissingError
from posexport.runtimes.tensorrt import layers
from posexport.runtimes.tensorrt.layers import ACTIVATIONS, BINARY, LAYERS, REDUCTIONS, UNARY

pytestmark = needs_rtx

IMAGES = ({"b": 2, "s": 9, "t": 8}, {"b": 1, "s": 6, "t": 7})
SIZES = ({"b": 2, "s": 5, "t": 7}, {"b": 1, "s": 1, "t": 3})


@attrs.frozen
class Made:
    """A graph in ONNX's text syntax, and the inputs that can't be arbitrary numbers (`given`)."""

    text: str
    given: dict[str, Any] = attrs.field(factory=dict)
    opset: int = 23
    sizes: tuple[dict[str, int], ...] = SIZES


X = "(float[b,s,8] x)"
Y = "(float[i,j,k] y)"


def whole(low: int, high: int) -> Any:
    """Random integers in [low, high) with the input's shape."""
    return lambda shape: np.random.default_rng(1).integers(low, high, shape)


def positive(shape: Any) -> Any:
    """Numbers above 1."""
    return 1.1 + np.random.default_rng(1).random(shape)


def _weights(name: str, *shape: int) -> str:
    """The text of a constant with normally distributed numbers."""
    numbers = np.random.default_rng(2).standard_normal(int(np.prod(shape)))
    return f"float[{','.join(map(str, shape))}] {name} = {{{', '.join(f'{number:.4f}' for number in numbers)}}}"


FUNCTIONS = {
    **dict.fromkeys(
        (
            "Exp",
            "Abs",
            "Neg",
            "Sin",
            "Cos",
            "Tan",
            "Sinh",
            "Cosh",
            "Atan",
            "Asinh",
            "Ceil",
            "Floor",
            "Erf",
            "Sign",
            "Round",
        ),
        None,
    ),
    **dict.fromkeys(("Log", "Sqrt", "Reciprocal", "Acosh"), positive),
    **dict.fromkeys(("Asin", "Acos", "Atanh"), lambda shape: positive(shape) / 3),
}
ACTIVATED = {
    "Relu": "",
    "Sigmoid": "",
    "Tanh": "",
    "LeakyRelu": "<alpha = 0.3>",
    "Elu": "<alpha = 0.7>",
    "Softsign": "",
    "Selu": "<alpha = 1.5, gamma = 0.7>",
    "Softplus": "",
    "HardSigmoid": "<alpha = 0.3, beta = 0.4>",
    "ThresholdedRelu": "<alpha = 0.4>",
    "Gelu": '<approximate = "tanh">',
    "HardSwish": "",
    "Mish": "",
}

MADE: dict[str, Made] = {
    **{op: Made(f"{X} => {Y} {{ y = {op}(x) }}", {"x": x} if x else {}) for op, x in FUNCTIONS.items()},
    **{op: Made(f"{X} => {Y} {{ y = {op}{attributes}(x) }}") for op, attributes in ACTIVATED.items()},
    "Gelu erf": Made(f"{X} => {Y} {{ y = Gelu(x) }}"),
    "Clip": Made(f"{X} => {Y} <float lo = {{-0.5}}, float hi = {{0.7}}> {{ y = Clip(x, lo, hi) }}"),
    "PRelu": Made(f"(float[b,s,8] x, float[8] w) => {Y} {{ y = PRelu(x, w) }}"),
    "IsInf": Made(f"{X} => (bool[i,j,k] y) {{ y = IsInf(x) }}", {"x": lambda n: np.resize([1, np.inf, -np.inf, 0], n)}),
    "IsNaN": Made(f"{X} => (bool[i,j,k] y) {{ y = IsNaN(x) }}", {"x": lambda n: np.resize([np.nan, 1, 0], n)}),
    "Not": Made("(bool[b] x) => (bool[b] y) { y = Not(x) }"),
    # two operands
    **{
        op: Made(f"(float[b,s,8] x, float[s,1] w) => {Y} {{ y = {op}(x, w) }}", {"x": positive})
        for op in ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min")
    },
    **{
        op: Made(
            f"(float[b,s] x, float[s] w) => (bool[i,j] y) {{ y = {op}(x, w) }}", {"x": whole(0, 2), "w": whole(0, 2)}
        )
        for op in ("Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual")
    },
    **{op: Made(f"(bool[b,s] x, bool[s] w) => (bool[i,j] y) {{ y = {op}(x, w) }}") for op in ("And", "Or", "Xor")},
    **{
        f"{op} of integers": Made(
            f"(int64[b,s] x, int64[s] w) => (int64[i,j] y) {{ y = {op}(x, w) }}", {"x": whole(-9, 9), "w": whole(1, 4)}
        )
        for op in ("Add", "Sub", "Mul", "Div", "Mod", "Max", "Min")
    },
    "Where": Made(f"(bool[s,1] c, float[b,s,8] x, float[8] w) => {Y} {{ y = Where(c, x, w) }}"),
    # casts
    "Cast to int64": Made(f"{X} => (int64[i,j,k] y) {{ h = Mul(x, x) g = Neg(h) y = Cast<to = 7>(g) }}"),
    "Cast to int32": Made(f"{X} => (int32[i,j,k] y) {{ h = Mul(x, x) y = Cast<to = 6>(h) }}"),
    "Cast to bool": Made(f"{X} => (bool[i,j,k] y) {{ y = Cast<to = 9>(x) }}", {"x": whole(-1, 2)}),
    "Cast from bool": Made(f"(bool[b,s,8] x) => {Y} {{ y = Cast<to = 1>(x) }}"),
    "Cast beyond fp16": Made(
        "(float[b] x) => (float[b] y) { h = Cast<to = 10>(x) y = Cast<to = 1>(h) }",
        {"x": lambda n: np.resize([65504.0, -65536.0, 65520.0, 1e6, 2.0], n)},
        sizes=({"b": 5},),
    ),
    **{
        f"Cast that rounds to {name}": Made(
            f"(float[b] x) => (float[b] y) {{ h = Cast<to = {to}>(x) y = Cast<to = 1>(h) }}",
            {"x": lambda n: np.resize([1.0, 257.0, 2049.0, 0.0, -5003.0], n)},
            sizes=({"b": 5},),
        )
        for name, to in (("fp16", 10), ("bf16", 16))
    },
    "Identity": Made("(float[b] x) => (float[b] y, float[b] z) { y = Identity(x) z = Identity(x) }"),
    # products and sums
    "MatMul": Made(f"(float[b,s,8] x, float[8,6] w) => {Y} {{ y = MatMul(x, w) }}"),
    "MatMul with a vector": Made("(float[b,s,8] x, float[8] w) => (float[i,j] y) { y = MatMul(x, w) }"),
    "MatMul of a vector": Made("(float[8] x, float[8,s] w) => (float[i] y) { y = MatMul(x, w) }"),
    "MatMul of stacks": Made("(float[b,1,s,8] x, float[3,8,t] w) => (float[i,j,k,l] y) { y = MatMul(x, w) }"),
    "Gemm": Made(
        "(float[8,s] x, float[6,8] w, float[6] c) => (float[i,j] y) "
        "{ y = Gemm<transA = 1, transB = 1, alpha = 0.5, beta = 2.0>(x, w, c) }"
    ),
    "Einsum": Made(
        '(float[b,s,8] x, float[b,t,8] w) => (float[i,j,k] y) { y = Einsum<equation = "bsd,btd->bts">(x, w) }'
    ),
    **{f"Softmax {axis}": Made(f"{X} => {Y} {{ y = Softmax<axis = {axis}>(x) }}") for axis in (0, 1, -1)},
    "LogSoftmax": Made(f"{X} => {Y} {{ y = LogSoftmax<axis = -1>(x) }}"),
    **{
        op: Made(
            f"{X} => (float[i] y, float[i,j,k] z) <int64[2] a = {{1, 2}}> "
            f"{{ y = {op}<keepdims = 0>(x, a) z = {op}(x, a) }}"
        )
        for op in ("ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin", "ReduceMean", "ReduceL2", "ReduceLogSumExp")
    },
    "CumSum": Made(f"{X} => {Y} <int64 a = {{1}}> {{ y = CumSum(x, a) }}"),
    "CumSum from the end, exclusive": Made(
        f"{X} => {Y} <int64 a = {{-1}}> {{ y = CumSum<reverse = 1, exclusive = 1>(x, a) }}"
    ),
    # norms
    "LayerNormalization": Made(
        f"(float[b,s,8] x, float[8] w, float[8] c) => {Y} {{ y = LayerNormalization<epsilon = 0.01>(x, w, c) }}"
    ),
    "LayerNormalization of two axes": Made(
        f"(float[b,5,8] x, float[5,8] w) => {Y} {{ y = LayerNormalization<axis = 1>(x, w) }}"
    ),
    "RMSNormalization": Made(f"(float[b,s,8] x, float[8] w) => {Y} {{ y = RMSNormalization<epsilon = 0.01>(x, w) }}"),
    "BatchNormalization": Made(
        f"(float[b,3,s] x) => {Y} <float[3] w = {{1.0, -2.0, 0.5}}, float[3] c = {{0.1, 0.2, 0.3}}, "
        f"float[3] m = {{1.0, 0.0, -1.0}}, float[3] v = {{0.5, 1.0, 2.0}}> {{ y = BatchNormalization(x, w, c, m, v) }}"
    ),
    # windows
    **{
        f"Conv, {attributes}": Made(
            f"(float[b,4,s,t] x) => (float[i,6,j,k] y) <{_weights('w', 6, 2, 3, 3)}, {_weights('c', 6)}> "
            f"{{ y = Conv<group = 2, {attributes}>(x, w, c) }}",
            opset=18,
            sizes=IMAGES,
        )
        for attributes in (
            "pads = [1, 0, 2, 1], strides = [2, 1], dilations = [1, 2]",
            *(f'auto_pad = "SAME_{side}", strides = [2, 2]' for side in ("UPPER", "LOWER")),
        )
    },
    "Conv with weights that are inputs": Made(
        "(float[b,4,s,t] x, float[6,4,3,3] w, float[6] c) => (float[i,6,j,k] y) { y = Conv(x, w, c) }", sizes=IMAGES
    ),
    "Conv of a sequence": Made(
        f"(float[b,4,s] x) => (float[i,6,j] y) <{_weights('w', 6, 4, 3)}> "
        "{ y = Conv<pads = [1, 0], strides = [2]>(x, w) }",
        sizes=IMAGES,
    ),
    **{
        f"ConvTranspose, {attributes}": Made(
            f"(float[b,4,s,t] x) => (float[i,6,j,k] y) <{_weights('w', 4, 3, 3, 3)}, {_weights('c', 6)}> "
            f"{{ y = ConvTranspose<group = 2, strides = [2, 3], {attributes}>(x, w, c) }}",
            sizes=IMAGES,
        )
        for attributes in ("pads = [1, 0, 1, 1]", "output_padding = [1, 1]")
    },
    **{
        f"{op}, {attributes}": Made(
            f"(float[b,4,s,t] x) => (float[i,4,j,k] y) {{ y = {op}<kernel_shape = [3, 2], {attributes}>(x) }}",
            sizes=IMAGES,
        )
        for op, attributes in (
            ("MaxPool", "strides = [2, 2], pads = [1, 0, 1, 1]"),
            ("MaxPool", "strides = [2, 3], ceil_mode = 1"),
            ("AveragePool", "strides = [2, 2], pads = [1, 0, 1, 1]"),
            ("AveragePool", "strides = [2, 2], pads = [1, 0, 1, 1], count_include_pad = 1"),
            ("AveragePool", 'strides = [2, 3], auto_pad = "SAME_UPPER"'),
        )
    },
    # shapes
    "Transpose": Made("(float[b,s,8] x) => (float[i,j,k] y) { y = Transpose<perm = [2, 0, 1]>(x) }"),
    "Reshape": Made("(float[b,s,8] x) => (float[i,j,k] y) <int64[3] n = {0, -1, 4}> { y = Reshape(x, n) }"),
    "Reshape to sizes of an input": Made(
        "(float[b,s,8] x, int64[2] n) => (float[i,j] y) { y = Reshape(x, n) }", {"n": [8, -1]}
    ),
    "Reshape of nothing": Made(
        "(float[b,s,8] x) => (float[i,j,k] y) <int64[3] n = {0, 0, 4}, int64[1] o = {0}, int64[1] l = {1}> "
        "{ h = Slice(x, o, o, l) y = Reshape(h, n) }"
    ),
    "Flatten": Made("(float[b,s,8] x) => (float[i,j] y) { y = Flatten<axis = 2>(x) }"),
    "Squeeze": Made("(float[b,1,s,1] x) => (float[i,j] y) <int64[2] a = {1, -1}> { y = Squeeze(x, a) }"),
    "Squeeze of all": Made("(float[1,3,1] x) => (float[i] y) { y = Squeeze(x) }"),
    "Unsqueeze": Made("(float[b,s] x) => (float[i,j,k,l] y) <int64[2] a = {-1, 1}> { y = Unsqueeze(x, a) }"),
    "Concat": Made("(float[b,s,8] x, float[b,t,8] w) => (float[i,j,k] y) { y = Concat<axis = 1>(x, w, x) }"),
    "Shape": Made("(float[b,s,8] x) => (int64[2] y) { y = Shape<start = 1>(x) }"),
    "Size": Made("(float[b,s,8] x) => (int64 y) { y = Size(x) }"),
    "Expand": Made("(float[b,1,8] x, int64[3] n) => (float[i,j,k] y) { y = Expand(x, n) }", {"n": [1, 4, 1]}),
    "Tile": Made("(float[b,s] x) => (float[i,j] y) <int64[2] n = {2, 3}> { y = Tile(x, n) }"),
    "Split": Made(
        "(float[b,s,8] x) => (float[i,j,k] y, float[i,j,l] z) <int64[2] n = {3, 5}> { y, z = Split<axis = 2>(x, n) }"
    ),
    "DepthToSpace": Made("(float[b,8,s,t] x) => (float[i,j,k,l] y) { y = DepthToSpace<blocksize = 2>(x) }"),
    "Constant": Made(
        "() => (float[2] y, int64[2] z, bool[2] w) { y = Constant<value_floats = [1.5, -2.0]>() "
        "z = Constant<value_ints = [1099511627776, -3]>() "
        "w = Constant<value = bool[2] {1, 0}>() }"
    ),
    "ConstantOfShape": Made(
        "(int64[2] n) => (int64[i,j] y) { y = ConstantOfShape<value = int64[1] {7}>(n) }", {"n": [2, 3]}
    ),
    "Range": Made("(int64 a, int64 e, int64 d) => (int64[i] y) { y = Range(a, e, d) }", {"a": 2, "e": 11, "d": 4}),
    "Range downwards": Made(
        "(int64 a, int64 e, int64 d) => (int64[i] y) { y = Range(a, e, d) }", {"a": 5, "e": -3, "d": -2}
    ),
    "Trilu": Made("(float[b,s,t] x) => (float[i,j,k] y) <int64 n = {1}> { y = Trilu<upper = 0>(x, n) }"),
    # slices and pads
    **{
        f"Slice from {a} to {e} by {d}": Made(
            "(float[b,9] x, int64[1] a, int64[1] e) => (float[i,j] y) "
            f"<int64[1] d = {{{d}}}, int64[1] l = {{1}}> {{ y = Slice(x, a, e, l, d) }}",
            {"a": [a], "e": [e]},
        )
        for a, e, d in ((1, 5, 1), (-3, 99, 1), (0, -1, 2), (8, -10, -3), (4, 4, 1), (2**40, 2**50, 1))
    },
    "Pad": Made("(float[b,5] x, float c) => (float[i,j] y) <int64[4] n = {0, 3, 1, 4}> { y = Pad(x, n, c) }"),
    "Pad with zeros": Made("(float[b,5] x) => (float[i,j] y) <int64[4] n = {0, 3, 1, 4}> { y = Pad(x, n) }"),
    **{
        f"Pad, {mode}": Made(
            f'(float[b,5] x) => (float[i,j] y) <int64[4] n = {{0, 3, 0, 4}}> {{ y = Pad<mode = "{mode}">(x, n) }}'
        )
        for mode in ("edge", "reflect", "wrap")
    },
    # gathers and scatters
    "Gather": Made(
        "(float[b,6,8] x, int64[s,2] n) => (float[i,j,k,l] y) { y = Gather<axis = 1>(x, n) }", {"n": whole(-6, 6)}
    ),
    "Gather a scalar": Made("(float[b,6,8] x, int64 n) => (float[i,j] y) { y = Gather<axis = 2>(x, n) }", {"n": 5}),
    "GatherElements": Made(
        "(float[b,6] x, int64[b,9] n) => (float[i,j] y) { y = GatherElements<axis = 1>(x, n) }", {"n": whole(-6, 6)}
    ),
    "GatherND": Made("(float[3,6,8] x, int64[s,2] n) => (float[i,j] y) { y = GatherND(x, n) }", {"n": whole(0, 3)}),
    "GatherND of rows": Made(
        "(float[2,6,8] x, int64[2,s,1] n) => (float[i,j,k] y) { y = GatherND<batch_dims = 1>(x, n) }",
        {"n": whole(0, 6)},
    ),
    "ScatterElements": Made(
        "(float[b,6] x, int64[b,3] n, float[b,3] u) => (float[i,j] y) { y = ScatterElements<axis = 1>(x, n, u) }",
        {"n": lambda shape: np.resize([4, 0, 5], shape)},
    ),
    "ScatterND": Made(
        "(float[6,b] x, int64[3,1] n, float[3,b] u) => (float[i,j] y) { y = ScatterND(x, n, u) }",
        {"n": [[5], [0], [2]]},
    ),
    "OneHot": Made(
        "(int64[b,s] n) => (float[i,j,k] y) <int64 d = {4}, float[2] v = {-1.0, 3.0}> "
        "{ y = OneHot<axis = 1>(n, d, v) }",
        {"n": whole(0, 4)},
    ),
    "TopK": Made("(float[b,9] x) => (float[i,j] y, int64[i,j] z) <int64[1] k = {4}> { y, z = TopK<axis = 1>(x, k) }"),
    "TopK of the least": Made(
        "(float[b,9] x) => (float[i,j] y, int64[i,j] z) <int64[1] k = {9}> { y, z = TopK<largest = 0>(x, k) }"
    ),
    "ArgMax": Made("(float[b,s,8] x) => (int64[i,j] y) { y = ArgMax<axis = 2, keepdims = 0>(x) }"),
    # control
    **{
        f"If {c}": Made(
            "(float[b,s] x, bool c) => (float[i,j] y) <float two = {2.0}> { y = If(c) <then_branch = "
            "t () => (float[i,j] a) { a = Mul(x, two) }, "
            "else_branch = e () => (float[i,j] d) { n = Neg(x) d = Exp(n) }> }",
            {"c": c},
        )
        for c in (True, False)
    },
}


@pytest.mark.parametrize("name", MADE)
def test_an_import_computes_what_onnx_runtime_computes(name: str, tmp_path: Path) -> None:
    made = MADE[name]
    model = graph(made.text, made.opset)
    runner = imported(model, tmp_path)
    for seed, sizes in enumerate(made.sizes):
        inputs = inputs_for(model, sizes, made.given, seed)
        wanted, found = on_ort(model, inputs), runner.run(inputs)
        assert list(found) == list(wanted)
        for output, array in wanted.items():
            assert (found[output].dtype, found[output].shape) == (array.dtype, array.shape), output
            np.testing.assert_allclose(found[output], array, rtol=2e-5, atol=2e-6, err_msg=output)


ELSEWHERE = {"ASSERTION", "ATTENTION_INPUT", "ATTENTION_OUTPUT", "KV_CACHE_UPDATE", "NON_ZERO", "ROTARY_EMBEDDING"}
"""Kinds of layers that test_trt_import_attention.py reaches."""


def test_every_kind_and_operation_is_reached(tmp_path: Path) -> None:
    found: set[tuple[str, str]] = set()
    for made in MADE.values():
        for node in imported(graph(made.text, made.opset), tmp_path)._nodes:
            of = [getattr(node.layer, name, None) for name in ("op", "mode", "type")]
            found |= {(node.kind, each.name) for each in of if each is not None} | {(node.kind, "")}
    wanted = {(kind, "") for kind in set(LAYERS) - ELSEWHERE}
    for kind, table in (("ELEMENTWISE", BINARY), ("UNARY", UNARY), ("REDUCE", REDUCTIONS), ("ACTIVATION", ACTIVATIONS)):
        wanted |= {(kind, name) for name in table if name != "SCALED_TANH"}  # the parser never makes it
    wanted |= {("SLICE", name) for name in ("STRICT_BOUNDS", "FILL", "CLAMP", "REFLECT", "WRAP")}
    wanted |= {("GATHER", name) for name in ("DEFAULT", "ELEMENT", "ND")} | {("SCATTER", "ELEMENT"), ("SCATTER", "ND")}
    assert wanted <= found


@pytest.mark.parametrize("wrong", [lambda layer, x: x[None], lambda layer, x: x > 0])
def test_an_output_that_is_not_what_tensorrt_says_is_not_believed(
    wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(layers.LAYERS, "UNARY", (LAYERS["UNARY"][0], wrong))
    runner = imported(graph("(float[b,6] x) => (float[b,6] y) { y = Exp(x) }"), tmp_path)
    with pytest.raises(RuntimeMissingError, match=r"\(UNARY\): its output is .* TensorRT declares .*FLOAT \[-1, 6\]"):
        runner.run({"x": np.zeros((2, 6), np.float32)})


def test_what_overflows_int32_is_not_guessed(tmp_path: Path) -> None:
    model = graph("(int32[b] x) => (int32[b] y) { y = Add(x, x) }")
    runner = imported(model, tmp_path)
    assert runner.run({"x": np.array([2**30 - 1], np.int32)})["y"].tolist() == [2**31 - 2]
    with pytest.raises(RuntimeMissingError, match="overflows INT32"):
        runner.run({"x": np.array([2**30], np.int32)})
