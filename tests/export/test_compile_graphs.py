"""`posexport compile` of ONNX files from other tools: profiles, which attention is fused, and reasons if it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from attention_graphs import attention, padding, visible
from onnx import TensorProto, helper, numpy_helper
from small_graphs import decoder
from trt_helpers import RTX, needs_rtx, posexport, refused

from posexport.artifact.manifest import KernelRow, PlanKernels
from posexport.artifact.plan import check_plan
from posexport.errors import Reason
from posexport.export.fused_attention import with_attentions
from posexport.graphs import inspection
from posexport.rewrite.rewriter import REWRITTEN, rewrite_model
from posexport.runtimes.tensorrt import builder

SIZES = ("--profile", "seq=1:8:16", "--profile", "past_seq=0:8:16")


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches for attention in this process, because a new process takes seconds to start."""
    from posexport.export import compile_source

    monkeypatch.setattr(
        compile_source, "inspect_graph", lambda graph, roles, *_: inspection.inspected(graph, roles or {})
    )


def saved(folder: Path, **options: Any) -> Path:
    """A decoder of one layer in half precision whose cache lengths have different names."""
    model = attention(**{"add": [visible(), padding(-60_000.0)], "cached": True, "half": True, **options})
    for value in model.graph.input:
        if value.name.startswith("past"):
            value.type.tensor_type.shape.dim[2].dim_param = f"length of {value.name}"
    path = folder / "graph.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@needs_rtx
def test_each_attention_is_named_and_fused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    result = posexport("compile", path, "--runtime", RTX, *SIZES, "--require-fused-attention", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    printed = json.loads(result.stdout)
    (one,) = printed["kernels"]["attentions"]
    assert one == {
        "name": next(n.name for n in onnx.load(path).graph.node if n.op_type == "Softmax"),
        "layer": 0,
        "fused": True,
    }
    manifest = check_plan(path.with_suffix(".plan"))
    assert manifest.spec is None and manifest.form is None and manifest.onnx.version is None
    assert manifest.kernels.fused_attention is True and manifest.kernels.attention_layers == 1
    shapes = {tensor.name: tensor.shape for tensor in manifest.inputs}
    assert shapes["past_key"] == shapes["past_value"] == ("batch", 4, "past_seq", 16)
    assert shapes["attention_mask"] == ("batch", "total_seq")
    assert manifest.profiles["attention_mask"]["max"] == (8, 32)


@pytest.mark.slow
@needs_rtx
def test_shared_caches_of_a_rewritten_file_are_built(tmp_path: Path) -> None:
    """The length of the mask tells how full they are; it has its own range in the profile."""
    done = rewrite_model(ir.from_proto(decoder()), form="native", target="portable", kv_cache="shared")
    assert [one.state for one in done.sites] == [REWRITTEN]
    path = tmp_path / "shared.onnx"
    ir.save(done.model, path)
    result = posexport(
        "compile", path, "--runtime", RTX, "--profile", "max_seq=4:16:32", "--profile", "seq=4", "--json"
    )
    assert result.exit_code == 0, result.stderr
    mask = json.loads(result.stdout)["profiles"]["attention_mask"]
    assert mask == {"min": [1, 1], "opt": [1, 16], "max": [8, 32]}


@pytest.mark.slow
@needs_rtx
def test_numbers_that_decide_lengths_have_a_range(tmp_path: Path) -> None:
    """An example is the number of cached tokens: the builder needs its range."""
    ends = [helper.make_tensor_value_info("past_sequence_length", TensorProto.INT64, [1])]
    dims = ["batch", "seq", 16]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name in ("hidden_states", "y")]
    values[1].type.tensor_type.shape.dim[1].dim_param = "left"
    weights = [numpy_helper.from_array(np.array([number]), name) for name, number in (("zero", 0), ("one", 1))]
    node = helper.make_node("Slice", ["hidden_states", "zero", "past_sequence_length", "one"], ["y"])
    graph = helper.make_graph([node], "graph", [values[0], *ends], values[1:], weights)
    path = tmp_path / "graph.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    result = posexport("compile", path, "--runtime", RTX, "--profile", "seq=1:8:16")
    assert result.exit_code == 0, result.stderr


@needs_rtx
def test_lengths_that_the_file_names_differently_would_not_be_fused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The builder gets one name for equal lengths. With the file's names, it would treat them as different lengths."""
    built = builder.build
    path = saved(tmp_path)
    kernels = []
    for keep in (False, True):

        def spoiled(graph: Any, options: Any, progress: Any, shapes: Any, keep: bool = keep) -> Any:
            shapes = attrs.evolve(shapes, dimensions=shapes.dimensions if keep else {})
            kernels.append(built(graph, options, progress, shapes))
            return kernels[-1]

        monkeypatch.setattr(
            "posexport.export.compile.build_in_child",
            lambda _, graph, options, progress, shapes, make=spoiled: make(graph, options, progress, shapes),
        )
        posexport("compile", path, "--runtime", RTX, *SIZES)
    assert [one.kernels.attention_kernels for one in kernels] == [0, 1]


@needs_rtx
@pytest.mark.parametrize(
    ("options", "code"), [({"half": False}, "dtype"), ({"softcap": 30.0}, "scores")], ids=["fp32", "softcap"]
)
def test_what_is_not_fused_has_its_reason_and_exits_1(tmp_path: Path, options: dict[str, Any], code: str) -> None:
    path = saved(tmp_path, **options)
    result = posexport("compile", path, "--runtime", RTX, *SIZES, "--require-fused-attention")
    assert result.exit_code == 1
    manifest = check_plan(path.with_suffix(".plan"))
    (one,) = manifest.kernels.attentions
    assert one.fused is False and one.reason is not None and one.reason.code == code
    assert "no, 0 of 1 attentions" in result.stdout and one.reason.text in result.stdout
    assert result.stderr.splitlines()[-1] == f"  {one.name}: {one.reason.text}"


@pytest.mark.slow
@needs_rtx
def test_a_file_without_attention_is_built_and_not_fused(tmp_path: Path) -> None:
    node = helper.make_node("Relu", ["x"], ["y"], name="relu")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ("n", 3)) for name in "xy"]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    path = tmp_path / "relu.onnx"
    path.write_bytes(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9).SerializeToString()
    )
    refused(posexport("compile", path, "--runtime", RTX, "--profile", "m=1:2:3"), "unknown input or dimension 'm'")
    result = posexport("compile", path, "--runtime", RTX, "--profile", "n=1:2:3")
    assert result.exit_code == 0 and "not known: no attention was found" in result.stdout
    result = posexport("compile", path, "--runtime", RTX, "--profile", "n=1:2:3", "--require-fused-attention")
    assert result.exit_code == 1 and "no attention was found" in result.stderr


@needs_rtx
def test_an_operator_that_the_engine_lacks_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path)
    model = onnx.load(path)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    model.graph.node.append(
        helper.make_node("BiasGelu", ["output", "const_0"], ["gelu"], "odd", domain="com.microsoft")
    )
    model.graph.output.append(helper.make_tensor_value_info("gelu", TensorProto.FLOAT16, None))
    path.write_bytes(model.SerializeToString())
    refused(posexport("compile", path, "--runtime", RTX, *SIZES), "odd", "BiasGelu", "posexport rewrite")
    assert {entry.name for entry in tmp_path.iterdir()} == {"graph.onnx"}


@pytest.mark.slow
def test_roles_are_for_files_of_others(tmp_path: Path) -> None:
    from helpers import small_spec

    from posexport.artifact.onnx_artifact import write_onnx
    from posexport.export import export
    from posexport.models.weights import seeded_weights

    spec = small_spec("none")
    write_onnx(export(spec, seeded_weights(spec, 0)), tmp_path / "own.onnx")
    if posexport("compile", tmp_path / "own.onnx", "--runtime", RTX).exit_code == 3:
        pytest.skip("no builder")
    refused(posexport("compile", tmp_path / "own.onnx", "--input", "hidden_states=features"), "drop it")


ROWS = (
    KernelRow(name="_gemm_mha_v2_1", type="kgen", nodes=("soft_0", "product")),
    KernelRow(name="__myl_Max_2", type="kgen", nodes=("soft_1", "other")),
    KernelRow(name="_gemm_mha_v2_3", type="kgen", nodes=("inner | call_2 (Attend)",)),
    KernelRow(name="_gemm_mha_v2_4", type="kgen", nodes=("node_of_y",)),
)


def kernels(rows: tuple[KernelRow, ...] = ROWS, count: int | None = 4) -> PlanKernels:
    """The kernel table of a plan."""
    return PlanKernels(
        count=count, fused_attention=None, attention_kernels=3, attention_layers=4, host_steps=0, rows=rows
    )


def said(node: str, layer: int = 0, reason: dict[str, str] | None = None) -> dict[str, Any]:
    """The record of an attention."""
    runtimes = {RTX: {"one_kernel": reason is None, "reason": reason}}
    return {"name": "softmax", "layer": layer, "nodes": {"softmax": node}, "runtimes": runtimes, "reason": None}


def test_kernels_are_found_by_the_names_of_nodes() -> None:
    names = ("soft_0", "soft_1", "call_2", "y", "nowhere")
    found = with_attentions(kernels(), [said(name, at) for at, name in enumerate(names)], None, RTX)
    assert [one.fused for one in found.attentions] == [True, False, True, True, None]
    assert [one.reason and one.reason.code for one in found.attentions] == [None, "builder", None, None, "not-listed"]
    assert found.fused_attention is False
    assert with_attentions(kernels(), [said("soft_0"), said("y")], None, RTX).fused_attention is True
    unsure = with_attentions(kernels(), [said("soft_0"), said("nowhere")], None, RTX)
    assert unsure.fused_attention is None and unsure.unknown is not None


def test_a_reason_that_was_known_before_is_given() -> None:
    reason = {"code": "dtype", "text": "fp32 has none"}
    (one,) = with_attentions(kernels(), [said("soft_1", reason=reason)], None, RTX).attentions
    assert one.reason == Reason("dtype", "fp32 has none")
    unknown = {**said("soft_1"), "runtimes": None, "reason": {"code": "x", "text": "a Mul is odd"}}
    (one,) = with_attentions(kernels(), [unknown], None, RTX).attentions
    assert one.reason is not None and one.reason.code == "not-recognised" and "a Mul is odd" in one.reason.text


def test_what_is_not_known_never_counts_as_fused() -> None:
    found = with_attentions(kernels(), [], Reason("time", "it took too long"), RTX)
    assert (found.fused_attention, found.unknown) == (None, "it took too long")
    found = with_attentions(kernels(), [], None, RTX)
    assert (found.fused_attention, found.unknown) == (None, "no attention was found")
    found = with_attentions(kernels(count=None), [said("soft_0")], None, RTX)
    assert found.fused_attention is None and not found.attentions
