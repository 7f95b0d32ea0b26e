"""Exported graphs: every encoding in every form is checked, run on ONNX Runtime, and compared with the contract."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnx.shape_inference
import onnx_ir as ir
import onnxruntime
import oracles
import pytest
from helpers import CASES, MORE_CASES, Array, as_float64, case, exported, inputs_for, open_ort, weights_for

from posexport.export import export
from posexport.models import read_spec
from posexport.models.weights import weight_shapes
from posexport.spec.forms import FORMS
from posexport.spec.spec import Spec

RUNS = ((2, 7, "consecutive"), (1, 1, "offset"), (3, 4, "shuffled"), (1, 12, "gaps"), (2, 9, "uneven"))
"""Batch, length and positions; (2, 7) is the traced shape."""

FUNCTIONS = {
    "none": set(),
    "learned": set(),
    "sinusoidal": {"Sinusoids", "PairFeatures"},
    "relative": {"HeadBias", "RelativeScore"},
    "relative-table": {"HeadBias", "RelativeTableScore"},
    "t5": {"RelativeBias"},
    "rope": {"Sinusoids", "RotaryPosition"},
    "rope2d": {"Sinusoids", "RotaryPosition"},
    "alibi": {"AlibiBias"},
}
ENDS = {"Cos", "Sin", "Exp", "Log", "Equal", "Gather", "GatherElements", "Softmax", "Attention", "MultiHeadAttention"}
"""Operators whose output is no longer a position, a distance or a logit."""
WIDE = (onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.FLOAT, onnx.TensorProto.BOOL)
"""Types of positions, distances, angles and their comparisons."""
PLUMBING = {"MatMul", "Transpose", "Add", "Cast"}

OPERATORS = {
    "native": ("", 23, {"Attention"}, {"RotaryEmbedding"}),
    "contrib": ("com.microsoft", 1, {"MultiHeadAttention"}, {"RotaryEmbedding"}),
}
"""Domain and version of a form's operators, the operators of every block, and those of rotary encodings."""

DTYPES = ("fp32", "fp16")
GRAPHS = [
    pytest.param(
        (name, form, DTYPES[(row + column) // 2 % 2]), marks=[] if (row + column) % 3 == 0 else pytest.mark.slow
    )
    for row, name in enumerate(FUNCTIONS)
    for column, form in enumerate(FORMS)
]
GRAPHS += [
    (name, form, "fp16")
    for name, form in zip((name for name in CASES if name not in FUNCTIONS), itertools.cycle(FORMS), strict=False)
]
"""Every encoding in every form, with alternating dtypes; two of three run only in the slow sweep.

Each variant has one form in half precision, which is the most difficult dtype.
"""


@pytest.fixture(scope="module", params=GRAPHS, ids=lambda param: "-".join(param))
def graph(request: pytest.FixtureRequest) -> tuple[str, str, Spec, ir.Model]:
    name, form, dtype = request.param
    spec = case(name, dtype=dtype)
    return name, form, spec, export(spec, weights_for(spec), form=form)


def wanted(spec: Spec, inputs: dict[str, Array]) -> Array:
    return oracles.block(spec, as_float64(weights_for(spec)), inputs)


def error(made: Array, truth: Array) -> float:
    assert made.shape == truth.shape
    assert np.isfinite(made).all()
    return float(np.abs(made.astype(np.float64) - truth).max() / max(1.0, np.abs(truth).max()))


@pytest.mark.sampled(6)
def test_runs_like_the_formula(graph: tuple[str, str, Spec, ir.Model]) -> None:
    _, _, spec, model = graph
    run = open_ort(model)
    for batch, seq, kind in RUNS:
        inputs = inputs_for(spec, batch, seq, kind)
        made = run(inputs)
        assert list(made) == ["output"]
        assert made["output"].dtype == inputs["hidden_states"].dtype
        # fp32 angles up to 2000 have errors of 1e-4; fp16 has 11 bits and sums of 32 numbers.
        bound = 5e-3 if spec.dtype == "fp16" else 5e-6 if kind in ("consecutive", "shuffled") else 5e-5
        assert error(made["output"], wanted(spec, inputs)) < bound, (batch, seq, kind)


@pytest.mark.sampled(3)
def test_keeps_the_contract(graph: tuple[str, str, Spec, ir.Model]) -> None:
    name, _, spec, model = graph
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    kind = {"fp32": onnx.TensorProto.FLOAT, "fp16": onnx.TensorProto.FLOAT16}[spec.dtype]
    described = [
        (
            value.name,
            value.type.tensor_type.elem_type,
            [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim],
        )
        for value in (*proto.graph.input, *proto.graph.output)
    ]
    positions = [("position_ids", onnx.TensorProto.INT64, ["batch", "seq"] + [2] * name.startswith("rope2d"))]
    assert described == [
        ("hidden_states", kind, ["batch", "seq", 32]),
        *(positions if name != "none" else []),
        ("output", kind, ["batch", "seq", 32]),
    ]
    found = {tensor.name: (tuple(tensor.dims), tensor.data_type) for tensor in proto.graph.initializer}
    for weight, shape in weight_shapes(spec).items():
        assert found.pop(weight) == (shape, kind), weight
    # The rest are constants of the encoding: angles and slopes in fp32, buckets in int64.
    assert set(found) <= {"encoding.frequencies", "encoding.slopes", "encoding.buckets"}
    assert {dtype for _, dtype in found.values()} <= {onnx.TensorProto.FLOAT, onnx.TensorProto.INT64}
    assert {entry.key: entry.value for entry in proto.metadata_props}["posexport.spec"] == spec.to_json()


@pytest.mark.sampled(3)
def test_reads_in_its_form(graph: tuple[str, str, Spec, ir.Model]) -> None:
    name, form, _, model = graph
    own = [node.op_type.split("_")[0] for node in model.graph if node.domain == "posexport"]
    if form == "decomposed":
        assert not own
        assert not model.functions
        assert set(model.opset_imports) == {""}
        return
    if form in OPERATORS:
        domain, version, always, rotary = OPERATORS[form]
        wanted_ops = always | (rotary if name.startswith("rope") else set())
        theirs = {op for _, _, ops, more in OPERATORS.values() for op in ops | more}
        found = {(node.domain, node.op_type) for node in model.graph if node.op_type in theirs}
        assert found == {(domain, op) for op in wanted_ops}
        assert not own
        assert not model.functions
        assert "Softmax" not in {node.op_type for node in model.graph}
        assert model.opset_imports[domain] == version
        assert set(model.opset_imports) == {"", domain}
        return
    family = "-".join(name.split("-")[: 1 + (name == "relative-table")])
    assert set(own) == FUNCTIONS[family] | {"PositionalAttention"}
    assert {node.op_type for node in model.graph if node.domain != "posexport"} <= PLUMBING | (
        {"Gather"} if name == "learned" else set()
    )
    assert {function.domain for function in model.functions.values()} == {"posexport"}
    assert dict(model.opset_imports) == {"": 18, "posexport": 1}


def check_never_half(model: ir.Model, form: str) -> tuple[int, int]:
    """Asserts that values computed from positions are integers or fp32 until they are cosines, table rows or weights.

    Returns the number of cosines and sines, and the number of such values.
    """
    proto = onnx.inliner.inline_local_functions(ir.to_proto(model))
    proto = onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
    types = {v.name: v.type.tensor_type.elem_type for v in (*proto.graph.value_info, *proto.graph.input)}
    turns = [node for node in proto.graph.node if node.op_type in ("Cos", "Sin")]
    assert all(types[node.input[0]] == onnx.TensorProto.FLOAT for node in turns)
    reached = {"position_ids"}  # positions, distances, angles, and logits that contain them
    clamped = set()  # biases clamped to fp16's range, which an operator takes as a mask in the graph's dtype
    for node in proto.graph.node:
        if form in OPERATORS and node.op_type == "Max" and types[node.output[0]] == onnx.TensorProto.FLOAT:
            clamped |= set(node.output)
        elif reached & set(node.input) and (node.op_type not in ENDS or _takes_axis(node, reached)):
            if node.op_type == "Cast" and node.input[0] in clamped:
                continue
            assert node.op_type != "MatMul", "TF32 would round it to 11 bits"
            assert all(types[output] in WIDE for output in node.output), node.op_type
            reached |= set(node.output)
    return len(turns), len(reached) - 1


def _takes_axis(node: onnx.NodeProto, reached: set[str]) -> bool:
    """Whether a node selects the positions of one axis."""
    return node.op_type == "Gather" and node.input[0] in reached


@pytest.mark.sampled(3)
def test_angles_and_positions_are_never_half(graph: tuple[str, str, Spec, ir.Model]) -> None:
    name, form, _, model = graph
    turns, reached = check_never_half(model, form)
    assert bool(turns) == (name.startswith(("rope", "sinusoidal")) or name == "relative")
    assert reached or name in ("none", "learned")


QUICK = (
    *(
        "rope-longrope-exact",
        "rope-dynamic",
        "rope2d-pixtral",
        "rope-mixed",
        "mrope-interleaved",
        "rope-dinov3",
        "xpos",
    ),
    *("sandwich", "fire", "shaw-sinks", "deberta-buckets", "cope-gqa", "swinv2", "pattern"),
)


@pytest.mark.sampled(18)
@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, marks=() if name in QUICK else pytest.mark.slow)
        for name, form in zip(MORE_CASES, itertools.cycle(FORMS), strict=False)
    ],
)
def test_more_encodings_run_like_their_formula_and_never_have_half_angles(name: str, form: str) -> None:
    """Each variant runs in half precision, the most difficult dtype, in one of the forms."""
    spec = case(name, dtype="fp16")
    model = export(spec, weights_for(spec), form=form)
    run = open_ort(model)
    for batch, seq, kind in RUNS[:3]:
        inputs = inputs_for(spec, batch, seq, kind)
        assert error(run(inputs)["output"], wanted(spec, inputs)) < 1e-2, (batch, seq, kind)
    turns, reached = check_never_half(model, form)
    assert bool(turns) == any(
        kind.encoding.uses_fp32_products() or name.startswith("rope-dinov3") for kind in spec.distinct_layers()
    )
    assert bool(reached) == bool(spec.position_axes)


def test_half_angles_would_be_found() -> None:
    spec = case("rope", dtype="fp16")
    model = export(spec, weights_for(spec))
    cos = next(node for node in model.graph if node.op_type == "Cos")
    angles = cos.inputs[0]
    cast = ir.node("Cast", [angles], attributes={"to": ir.DataType.FLOAT16})
    back = ir.node("Cast", [cast.outputs[0]], attributes={"to": ir.DataType.FLOAT})
    model.graph.insert_before(cos, [cast, back])
    cos.replace_input_with(0, back.outputs[0])
    with pytest.raises(AssertionError):
        check_never_half(model, "decomposed")


def texts(message: Any) -> Iterator[str]:
    """Every string in a protobuf message."""
    for field, value in message.ListFields():
        many = value if field.is_repeated else [value]
        for each in many:
            if field.type == field.TYPE_MESSAGE:
                yield from texts(each)
            elif field.type == field.TYPE_STRING or (field.type == field.TYPE_BYTES and field.name in ("s", "strings")):
                yield each if isinstance(each, str) else each.decode()


@pytest.mark.sampled(3)
def test_holds_no_path(graph: tuple[str, str, Spec, ir.Model]) -> None:
    _, _, _, model = graph
    found = list(texts(ir.to_proto(model)))
    assert "hidden_states" in found
    for trace in ("/", "\\", ".py", "stack_trace", "site-packages", "File ", "pkg.torch", "aten"):
        assert not [text for text in found if trace in text], trace


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "form"), list(zip(FUNCTIONS, itertools.cycle(FORMS), strict=False)))
def test_bf16_exports_and_checks(name: str, form: str) -> None:
    spec = case(name, dtype="bf16")
    proto = ir.to_proto(exported(spec, form))
    onnx.checker.check_model(proto, full_check=True)
    assert proto.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.BFLOAT16
    assert {t.data_type for t in proto.graph.initializer if t.name in weight_shapes(spec)} == {
        onnx.TensorProto.BFLOAT16
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("encoding", ["alibi", "shaw"])
def test_padding_in_bf16_has_kernels_on_the_cuda_provider(encoding: str, form: str) -> None:
    """ONNX Runtime's CUDA provider does not have ReduceMax and Equal for bf16 and would refuse such a file."""
    spec = read_spec(
        {"encoding": {"name": encoding}, "num_heads": 2, "hidden_size": 32, "dtype": "bf16", "padding_mask": True}
    )
    model = onnx.inliner.inline_local_functions(ir.to_proto(exported(spec, form)))
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    types = {value.name: value.type.tensor_type.elem_type for value in inferred.graph.value_info}
    reduced = [node for node in inferred.graph.node if node.op_type in ("ReduceMax", "Equal")]
    assert reduced
    assert all(types.get(name) != onnx.TensorProto.BFLOAT16 for node in reduced for name in node.input)


@pytest.mark.parametrize("cache", [None, "concat"])
def test_onnxruntime_makes_one_product_of_logits_that_are_read_twice(cache: str | None, tmp_path: Path) -> None:
    """The other products are four projections, queries with the table, and weights with values."""
    spec = case("cope", kv_cache=cache)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    source = ir.to_proto(exported(spec)).SerializeToString()
    onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    operators = [node.op_type for node in ir.load(options.optimized_model_filepath).graph]
    assert sum(operator in ("MatMul", "FusedMatMul", "Gemm") for operator in operators) == 7
