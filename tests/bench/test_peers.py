"""The peers that artifacts are timed against: plain torch blocks, exported and optimised, with the same results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from helpers import exported, inputs_for, run_block, run_ort, small_spec, weights_for

from posexport.artifact import onnx_file
from posexport.artifact.onnx_artifact import write_onnx
from posexport.bench import alternatives
from posexport.custom_ops import attend
from posexport.custom_ops.operator import plain_torch
from posexport.errors import RequestError
from posexport.models import ENCODINGS
from posexport.spec.contract import graph_inputs
from posexport.spec.spec import Spec


def plain(spec: Spec, folder: Path, opset: int = 20, **fixed: int) -> Path:
    """The peer of a small block, made from an artifact of it."""
    source, output = folder / "source.onnx", folder / "plain.onnx"
    write_onnx(exported(spec, **fixed), source)
    alternatives.write_plain(source, output, opset)
    return output


def off(path: Path, spec: Spec, batch: int = 2, seq: int = 9) -> float:
    """The error of a file against the oracle."""
    inputs = inputs_for(spec, batch, seq)
    if spec.padding_mask:
        inputs["attention_mask"] = np.ones((batch, seq), np.int64)
        inputs["attention_mask"][0, : seq // 3] = 0
    made = run_ort(path, inputs)["output"]
    truth = run_block(spec, weights_for(spec), inputs)
    assert made.shape == truth.shape
    return float(np.abs(made - truth).max())


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "rope": ({"causal": True}, 18),
    "alibi": ({"causal": True, "padding_mask": True}, 24),
}


@pytest.mark.slow
@pytest.mark.parametrize("encoding", CASES)
def test_torchs_own_export_is_the_same_function_at_any_length(encoding: str, tmp_path: Path) -> None:
    over, opset = CASES[encoding]
    spec = small_spec(encoding, **over)
    path = plain(spec, tmp_path, opset)
    model = onnx.load(path)
    assert [entry.version for entry in model.opset_import if not entry.domain] == [opset]
    assert {node.domain for node in model.graph.node} == {""} and not model.functions
    assert [value.name for value in model.graph.input] == list(graph_inputs(spec))
    assert off(path, spec) < 1e-5
    assert off(path, spec, batch=1, seq=1) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 24])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_torchs_own_export_knows_every_encoding(encoding: str, opset: int, tmp_path: Path) -> None:
    spec = small_spec(encoding, causal=ENCODINGS[encoding].axes < 2)
    assert off(plain(spec, tmp_path, opset), spec) < 1e-4


@pytest.mark.slow
def test_what_the_artifact_fixes_the_peer_fixes_too(tmp_path: Path) -> None:
    spec = small_spec("rope", kv_cache="concat", causal=True)
    model = onnx.load(plain(spec, tmp_path, batch=3, seq=1))
    shapes = {
        value.name: [dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim]
        for value in (*model.graph.input, *model.graph.output)
    }
    heads, width = spec.num_kv_heads, spec.head_dim
    assert shapes["past_key"] == [3, heads, "past_seq", width]
    assert shapes["output"] == [3, 1, spec.hidden_size]


BARE = small_spec("none", causal=True)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The peer of a block without positions, with external weights."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(alternatives, "EXTERNAL_FROM", 1)
        return plain(BARE, tmp_path_factory.mktemp("bare"))


@pytest.mark.slow
def test_large_weights_go_beside_the_file(bare: Path) -> None:
    assert bare.with_name("plain.onnx.data").exists()
    assert onnx_file.read(bare) is not None
    assert off(bare, BARE) < 1e-5


@pytest.mark.slow
def test_optimizers_say_what_they_fused_and_keep_the_function(bare: Path, tmp_path: Path) -> None:
    spec, path = BARE, bare
    assert alternatives.write_optimized(path, tmp_path / "optimized.onnx", spec) == {}
    assert alternatives.write_fused(path, tmp_path / "fused.onnx", spec) == {"MultiHeadAttention": 1}
    assert off(tmp_path / "optimized.onnx", spec) < 1e-5
    assert off(tmp_path / "fused.onnx", spec) < 1e-5


@pytest.mark.slow
def test_an_optimizer_that_breaks_the_function_is_refused(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnxruntime.transformers import optimizer

    spec, path, output = BARE, bare, tmp_path / "optimized.onnx"

    class Broken:
        model = onnx.load(path)

    softmax = next(node for node in Broken.model.graph.node if node.op_type == "Softmax")
    softmax.attribute[0].i = 2
    monkeypatch.setattr(optimizer, "optimize_model", lambda *_, **__: Broken)
    with pytest.raises(RequestError, match=r"changed the function: output of 'plain\.onnx' is off by"):
        alternatives.write_optimized(path, output, spec)
    assert not output.exists()
    monkeypatch.setattr(optimizer, "optimize_model", lambda *_, **__: 1 / 0)
    with pytest.raises(RequestError, match=r"can't take 'plain.onnx' \(ZeroDivisionError: division by zero\)"):
        alternatives.write_optimized(path, output, spec)


@pytest.mark.slow
def test_what_torch_cannot_export_is_refused_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small_spec("none")

    def fails(*_: object, **__: object) -> torch.Tensor:
        raise ValueError("no such thing.\nmore")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fails)
    with pytest.raises(RequestError, match=r"can't write none at opset 20 \(.*no such thing\)"):
        plain(spec, tmp_path)
    assert not (tmp_path / "plain.onnx").exists()


@pytest.mark.parametrize("opset", [17, 25])
def test_other_opsets_are_refused(opset: int, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=f"opset is {opset}: torch's exporter writes 18 to 24"):
        alternatives.write_plain(tmp_path / "absent.onnx", tmp_path / "plain.onnx", opset)


def test_plain_bodies_are_for_their_own_export_only() -> None:
    class Calls(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = attend(x, x, x, None, None, None, 2, 2, 0.5, False, 0, 0, 0.0)
            return made

    def operators() -> set[str]:
        program = torch.export.export(Calls(), (torch.zeros(1, 3, 8),))
        return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}

    with plain_torch():
        assert not [name for name in operators() if name.startswith("posexport")]
    assert "posexport.attend.default" in operators()
