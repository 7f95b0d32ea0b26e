"""Every encoding, form and dtype compiles to a plan, in half precision with one fused attention and few kernels."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import onnx
import psutil
import pytest
from helpers import by_turns, cli, refused, small_spec, weights_for
from trt_helpers import RTX, built, copied, exported, needs_rtx

from posexport import custom_ops
from posexport.artifact.loaded import load_artifact
from posexport.artifact.onnx_artifact import write_onnx
from posexport.errors import RequestError
from posexport.export import export
from posexport.export.compile import compile_plan
from posexport.models import ENCODINGS
from posexport.runtimes.tensorrt import api
from posexport.runtimes.tensorrt.builder import _configure
from posexport.runtimes.tensorrt.options import BuildOptions
from posexport.spec.forms import FORMS, OPSETS

pytestmark = needs_rtx

MOST = {
    **{"none": 7, "learned": 8, "sinusoidal": 8, "relative": 13, "t5": 8, "rope": 6, "rope2d": 6, "alibi": 8},
    **{"xpos": 7, "mrope": 6, "rope3d": 6, "rope-mixed": 6, "rope-dinov3": 8, "rope-vjepa2": 6, "alibi2d": 8},
    **{"kerple": 8, "sandwich": 12, "fire": 13, "shaw": 23, "deberta": 18, "cope": 16, "swin": 8, "swinv2": 12},
    "temperature": 7,
}
"""The most kernels in fp16 at hidden size 256 with 4 heads; one more if attention is a single operator."""

UNFUSED = {(name, form) for name in ("shaw", "cope") for form in ("decomposed", "function")}
"""Encodings that also read the logits or weights of attention, which prevents TensorRT from fusing it."""

CAUSAL = ("xpos", "cope")
FAST = ("none", "learned", "sinusoidal", "relative", "t5", "rope", "rope2d", "alibi", "rope3d", "swinv2")
FEW = [
    pytest.param(name, marks=[] if name in ("none", "relative", "rope", "alibi") else pytest.mark.slow)
    for name in ENCODINGS
]

OPERATORS = {"native": "Attention", "contrib": "MultiHeadAttention"}


def test_every_encoding_has_its_number_of_kernels() -> None:
    assert set(MOST) == set(ENCODINGS)


def sizes(encoding: str) -> dict[str, Any]:
    return {"causal": True} if encoding in CAUSAL else {}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("encoding", "form"),
    [
        pytest.param(
            name, form, marks=[] if name in FAST and row % 2 == 0 and (row // 2 + column) % 4 == 0 else pytest.mark.slow
        )
        for row, name in enumerate(ENCODINGS)
        for column, form in enumerate(FORMS)
    ],
)
def test_fp16_fuses_attention_into_one_kernel(encoding: str, form: str) -> None:
    kernels = built(exported(encoding, form=form, **sizes(encoding))).kernels
    assert kernels.rows is not None
    assert kernels.fused_attention is ((encoding, form) not in UNFUSED)
    if not kernels.fused_attention:
        return
    assert len(kernels.rows) <= MOST[encoding] + (form in OPERATORS), [row.name for row in kernels.rows]
    covered = [node for row in kernels.rows for node in row.nodes]
    attention = OPERATORS.get(form, "Softmax")
    assert any(attention in node for row in kernels.rows if row.attention for node in row.nodes)
    assert any("node_linear" in node for node in covered)
    if form == "function":
        assert any(node.endswith("(PositionalAttention)") for node in covered)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "over"),
    [
        pytest.param(name, over, marks=[] if row == column else pytest.mark.slow)
        for row, name in enumerate(["none", "alibi", "rope"])
        for column, over in enumerate(
            [{"causal": True}, {"window": 3}, {"causal": True, "window": 3, "num_kv_heads": 2}]
        )
    ],
)
def test_masks_and_shared_heads_stay_fused(encoding: str, over: dict[str, Any]) -> None:
    kernels = built(exported(encoding, **over)).kernels
    assert kernels.rows is not None
    assert kernels.fused_attention is True
    assert len(kernels.rows) <= 8, [row.name for row in kernels.rows]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("encoding", FEW)
def test_fp32_compiles_without_fused_attention_and_says_so(encoding: str) -> None:
    plan = built(exported(encoding, dtype="fp32", **sizes(encoding)))
    assert plan.kernels.fused_attention is False
    assert plan.kernels.rows
    assert all(size is not None for size in plan.memory.values()), plan.memory


@pytest.mark.slow
@pytest.mark.parametrize("encoding", FEW)
def test_bf16_compiles_with_fused_attention(encoding: str) -> None:
    fused = built(exported(encoding, dtype="bf16", form="function", **sizes(encoding))).kernels.fused_attention
    assert fused is ((encoding, "function") not in UNFUSED)


@pytest.mark.slow
def test_each_layer_of_a_stack_is_fused() -> None:
    kernels = built(exported("rope", layers=3, block="transformer")).kernels
    assert (kernels.attention_kernels, kernels.attention_layers, kernels.fused_attention) == (3, 3, True)


def test_token_ids_and_learned_positions() -> None:
    plan = built(exported("learned", vocab_size=11), profile=("batch=1:2:4",))
    assert plan.profiles["input_ids"] == {"min": [1, 1], "opt": [2, 512], "max": [4, 512]}


def test_static_graphs_need_no_profile() -> None:
    plan = built(exported("rope2d", batch=1, seq=196))
    assert plan.profiles["position_ids"] == {key: [1, 196, 2] for key in ("min", "opt", "max")}
    assert plan.kernels.fused_attention is True


@pytest.mark.slow
@pytest.mark.parametrize("opset", by_turns([(opset,) for opset in (OPSETS[0], 20, 23, 22, OPSETS[-1], 24)]))
def test_opsets_that_are_exported_compile(opset: int) -> None:
    assert built(exported("rope", opset=opset)).kernels.fused_attention is True


def configured(**options: Any) -> Any:
    """The TensorRT builder's settings for some options."""
    trt = api.load(RTX)
    builder = api.create(trt.Builder, api.make_log(trt))
    return _configure(trt, builder, BuildOptions(runtime=RTX, **options))


def test_tf32_is_off_unless_asked_for() -> None:
    flag = api.load(RTX).BuilderFlag.TF32
    assert [configured().get_flag(flag), configured(tf32=True).get_flag(flag)] == [False, True]


def test_capabilities_reach_the_builder() -> None:
    known = api.load(RTX).ComputeCapability
    assert configured().num_compute_capabilities == 0
    config = configured(compute_capability=("8.9", "12.0"))
    found = [config.get_compute_capability(at) for at in range(config.num_compute_capabilities)]
    assert found == [known.SM89, known.SM120]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{"tf32": True}, {"compute_capability": ("8.9", "12.0")}])
def test_a_build_uses_those_settings(options: dict[str, Any]) -> None:
    """Three builds without the option give one plan, and three with it another, so the difference is not chance."""
    source = exported("none", dtype="fp32")
    plain, other = ({bytes(built(source, **given).plan) for _ in range(3)} for given in ({}, options))
    assert (len(plain), len(other), len(plain | other)) == (1, 1, 2)


def test_no_function_is_called_like_an_operator_that_tensorrt_knows() -> None:
    trt = api.load(RTX)
    log = api.make_log(trt)
    builder = api.create(trt.Builder, log)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    assert parser.supports_operator("RotaryEmbedding")  # The query itself works.
    names = [operator.function for operator in custom_ops.operators()]
    assert len(names) == len(set(names)) >= 8
    for name in names:
        for each in (name, f"{name}_2", f"posexport::{name}"):
            assert not parser.supports_operator(each), each


def test_a_function_that_tensorrt_would_replace_is_refused(tmp_path: Any) -> None:
    model = onnx.load(exported("rope", form="function"))
    for function in model.functions:
        if function.name == "RotaryPosition":
            function.name = "RotaryEmbedding"
    for node in model.graph.node:
        if node.op_type == "RotaryPosition":
            node.op_type = "RotaryEmbedding"
    path = tmp_path / "shadow.onnx"
    onnx.save(model, path)
    with pytest.raises(RequestError, match="'RotaryEmbedding', and tensorrt-rtx has an operator of that name"):
        built(path)


@pytest.mark.parametrize("through", [False, True])
def test_a_function_that_calls_itself_would_crash_the_parser_and_is_refused(tmp_path: Any, through: bool) -> None:
    model = onnx.load(exported("rope", form="function"))
    first, second = model.functions[:2]
    for function, callee in ((first, second if through else first), (second, first)):
        function.opset_import.add(domain="posexport", version=1)
        function.node[0].CopyFrom(
            onnx.helper.make_node(callee.name, ["x"], function.node[0].output, domain="posexport")
        )
    path = tmp_path / "loop.onnx"
    onnx.save(model, path)
    with pytest.raises(RequestError, match="that calls itself"):
        built(path)


@pytest.mark.parametrize("form", FORMS)
def test_an_unknown_operator_is_named_with_its_node(tmp_path: Any, form: str) -> None:
    path = copied(exported("rope", form=form), tmp_path)
    model = onnx.load(path)
    nodes = model.functions[-1].node if form == "function" else model.graph.node
    node = next(node for node in nodes if node.op_type == OPERATORS.get(form, "Softmax"))
    node.op_type = "Sofmax"
    onnx.save(model, path)
    with pytest.raises(RequestError, match=r"\(operator Sofmax\).*--form decomposed") as caught:
        built(path)
    assert f"node {node.name!r}" in str(caught.value) or form == "function"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "form"),
    by_turns([("concat", "native"), ("concat", "decomposed"), ("shared", "decomposed"), ("shared", "native")]),
)
def test_a_block_with_a_cache_becomes_a_plan_that_takes_an_empty_one(tmp_path: Path, kind: str, form: str) -> None:
    path = copied(exported("rope", form=form, kv_cache=kind, causal=True, padding_mask=True), tmp_path)
    compile_plan(path, tmp_path / "block.plan", BuildOptions(runtime=RTX, profile=("batch=1:1:2", "seq=1:1:64")))
    plan = load_artifact(tmp_path / "block.plan")
    assert plan.contract_violation is None
    grown = {"past_seq": (0, 4096)} if kind == "concat" else {"max_seq": (1, 4096)}
    assert plan.bounds == {"batch": (1, 2), "seq": (1, 64), **grown}
    assert plan.optimal_sizes == {
        "batch": 1,
        "seq": 1,
        **({"past_seq": 1024} if kind == "concat" else {"max_seq": 4096}),
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("encoding", "cache"), [("rope", "concat"), ("alibi", None)])
def test_consecutive_positions_become_a_plan_with_fused_attention(
    encoding: str, cache: str | None, tmp_path: Path
) -> None:
    path = copied(exported(encoding, kv_cache=cache, causal=True, positions="consecutive"), tmp_path)
    compile_plan(path, tmp_path / "block.plan", BuildOptions(runtime=RTX, profile=("batch=1:1:2",)))
    plan = load_artifact(tmp_path / "block.plan")
    assert plan.contract_violation is None
    assert plan.spec.consecutive
    positions = {name: list(shape) for name, (shape, _) in plan.inputs.items() if name == "position_ids"}
    assert positions == ({"position_ids": ["batch", 1]} if cache else {})
    assert plan.plan is not None and plan.plan.kernels.fused_attention is True


def test_a_builder_that_gives_up_says_what_to_do() -> None:
    with pytest.raises(RequestError, match=r"drop --compute-capability 7\.5.*FP32 GEMM is not supported"):
        built(exported("rope", dtype="fp32"), compute_capability=("7.5",))
    with pytest.raises(RequestError, match=r"raise --memory-limit.*TensorRT says: .*workspace limit"):
        built(exported("rope"), memory_limit=1024)


@pytest.mark.slow
@pytest.mark.usefixtures("real_processes")
def test_an_interrupt_ends_the_build_and_its_process(tmp_path: Path) -> None:
    """The signal arrives while the engine works in its child process: no plan is written, and the child ends."""
    phases: list[str] = []

    def phase(name: str) -> None:
        phases.append(name)
        if name == "Building engine":
            os.kill(os.getpid(), signal.SIGINT)

    path = copied(exported("relative", layers=4), tmp_path)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(KeyboardInterrupt):
        compile_plan(path, tmp_path / "block.plan", BuildOptions(runtime=RTX), phase)
    assert phases == ["parsing", "Building engine"]
    assert not (tmp_path / "block.plan").exists()
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    compile_plan(exported("rope"), tmp_path / "block.plan", BuildOptions(runtime=RTX))


@pytest.mark.parametrize(
    ("planted", "parts"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", ("'parsing'", "killed by SIGSEGV")),
        ("os._exit(7)", ("'parsing'", "ended with exit code 7")),
        ("raise RuntimeError('set_shape: no')", ("'parsing'", "RuntimeError: set_shape: no")),
        ("raise MemoryError", ("not enough memory",)),
    ],
)
@pytest.mark.usefixtures("real_processes")
def test_an_engine_that_ends_its_process_is_one_sentence(
    planted: str, parts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child imports `sitecustomize`, which replaces the parser's factory by a fault."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal\n"
        "import posexport.runtimes.tensorrt.api as api\n"
        "def fault(*_):\n"
        f"    {planted}\n"
        "api.make_network = fault\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RequestError) as caught:
        compile_plan(exported("rope"), tmp_path / "block.plan", BuildOptions(runtime=RTX))
    assert all(part in str(caught.value) for part in parts), caught.value
    assert not (tmp_path / "block.plan").exists()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["native", "contrib"])
def test_a_file_for_onnx_runtime_alone_is_refused(form: str, tmp_path: Path) -> None:
    spec = small_spec("rope", kv_cache="shared", causal=True, dtype="fp16")
    write_onnx(export(spec, weights_for(spec), form=form, target="ort"), tmp_path / "a.onnx")
    said = ("'a.onnx' can't be compiled", "for ONNX Runtime only", "--target portable")
    refused(cli("compile", tmp_path / "a.onnx"), *said)
    assert {path.name for path in tmp_path.iterdir()} == {"a.onnx", "a.onnx.json"}
