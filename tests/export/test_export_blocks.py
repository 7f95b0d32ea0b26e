"""Exports beyond one attention: opsets, transformer blocks, layers, vocabularies, fixed sizes, and other modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import oracles
import pytest
import torch
from helpers import as_float64, case, inputs_for, open_ort, run_ort, small_spec, weights_for
from oracle_rotations import pairs_of, turn_pairs

from posexport import custom_ops
from posexport.errors import RequestError
from posexport.export import export
from posexport.export.modules import export_module
from posexport.models.weights import weight_shapes
from posexport.spec.contract import graph_inputs
from posexport.spec.forms import OPSETS
from posexport.spec.spec import Spec


def holds(spec: Spec, model: ir.Model, runs: tuple[tuple[int, int], ...] = ((3, 5), (1, 1), (2, 11))) -> None:
    """Asserts that the model passes onnx's checker and agrees with the formula."""
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    bound = 1e-2 if spec.dtype == "fp16" else 2e-5
    run = open_ort(model)
    for batch, seq in runs:
        inputs = inputs_for(spec, batch, seq, "shuffled")
        made = run(inputs)["output"].astype(np.float64)
        wanted = oracles.block(spec, as_float64(weights_for(spec)), inputs)
        assert made.shape == wanted.shape
        assert np.abs(made - wanted).max() < bound * max(1.0, np.abs(wanted).max()), (batch, seq)


OPSET_BLOCKS: dict[str, dict[str, Any]] = {
    "decomposed": {
        "name": "rope-half",
        "block": "transformer",
        "norm_type": "rmsnorm",
        "mlp": "swiglu",
        "causal": True,
    },
    "function": {"name": "relative", "block": "transformer", "window": 4, "num_heads": 2, "bias": True},
    "native": {"name": "rope-partial", "block": "transformer", "qk_norm": True, "norm_type": "rmsnorm", "window": 3},
    "contrib": {"name": "rope2d-half", "block": "transformer", "qk_norm": True, "causal": True, "num_kv_heads": 2},
}
EVERY_OPSET = [
    *(("decomposed", opset) for opset in OPSETS[::2]),
    *(("function", opset) for opset in OPSETS[::4]),
    *(("native", opset) for opset in (23, 24)),
    *(("contrib", opset) for opset in OPSETS[3::4]),
]
"""A part of all opsets; the slow sweep (test_ort_sweep) runs more of them in every form."""


@pytest.mark.sampled(10)
@pytest.mark.parametrize(("form", "opset"), EVERY_OPSET)
def test_every_opset(form: str, opset: int) -> None:
    spec = case(**OPSET_BLOCKS[form])
    model = export(spec, weights_for(spec), form=form, opset=opset)
    assert model.opset_imports[""] == opset
    assert {function.opset_imports[""] for function in model.functions.values()} <= {opset}
    holds(spec, model)


def test_the_opsets_are_those_that_work() -> None:
    assert list(OPSETS) == list(range(18, 26))
    spec = small_spec("none")
    for form, low, high in (("decomposed", 18, 25), ("function", 18, 25), ("native", 23, 24), ("contrib", 18, 25)):
        for opset in (low - 1, high + 1, 0):
            said = f"opset is {opset}: {form} is written in opsets {low} to {high}"
            with pytest.raises(RequestError, match=said):
                export(spec, weights_for(spec), form=form, opset=opset)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "over",
    [
        {"encoding": "learned", "block": "transformer", "norm": "post", "bias": True, "layers": 2},
        {"encoding": "t5", "block": "transformer", "norm_type": "rmsnorm", "layers": 2, "scale": 1.0, "dtype": "fp16"},
        {"encoding": "sinusoidal", "vocab_size": 13, "scale_embedding": True, "layers": 2},
        {
            "encoding": "rope2d",
            "vocab_size": 13,
            "block": "transformer",
            "mlp": "swiglu",
            "bias": ["mlp.up_proj"],
            "dtype": "fp16",
        },
    ],
    ids=lambda over: over["encoding"],
)
def test_blocks_layers_and_vocabularies(over: dict[str, Any]) -> None:
    spec = small_spec(**over)
    model = export(spec, weights_for(spec), form="function")
    assert set(weight_shapes(spec)) <= set(model.graph.initializers)
    assert [value.name for value in model.graph.inputs] == list(graph_inputs(spec))
    holds(spec, model)
    names = list(weight_shapes(spec))
    if spec.layers > 1:
        assert "layers.0.q_proj.weight" in names
        assert not any(name.startswith("layers.") and "embed_tokens" in name for name in names)


def test_fixed_sizes() -> None:
    spec = small_spec("alibi", causal=True)
    both = export(spec, weights_for(spec), batch=1, seq=6)
    assert [list(value.shape or ()) for value in both.graph.inputs] == [[1, 6, 32], [1, 6]]
    assert [list(value.shape or ()) for value in both.graph.outputs] == [[1, 6, 32]]
    holds(spec, both, ((1, 6),))
    one = export(spec, weights_for(spec), seq=1)
    assert [str(dim) for dim in one.graph.inputs[0].shape or ()] == ["batch", "1", "32"]
    holds(spec, one, ((1, 1), (4, 1)))


def test_names_stay_when_weights_are_equal() -> None:
    """Equal tensors, such as norms of ones, are not merged into one initializer: pipelines look them up by name."""
    spec = small_spec("relative", block="transformer", layers=2)
    weights = {name: torch.ones_like(tensor) for name, tensor in weights_for(spec).items()}
    assert set(weights) <= set(export(spec, weights).graph.initializers)


def test_a_module_of_ones_own() -> None:
    """A user module that calls the operators gets their functions too."""

    class Turn(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", torch.tensor([1.0, 0.1]))

        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            cos, sin = custom_ops.sinusoids(positions, self.frequencies, 1.0)
            turned: torch.Tensor = custom_ops.rotate(x, cos, sin, 4, True, [2])
            return turned

    batch, seq = torch.export.Dim("batch"), torch.export.Dim("seq")
    args = (torch.zeros(2, 7, 8), torch.zeros(2, 7, dtype=torch.int64))
    shapes = ({0: batch, 1: seq}, {0: batch, 1: seq})
    names = {"input_names": ("x", "positions"), "output_names": ("y",)}
    model = export_module(Turn().eval(), args, shapes, **names, form="function")  # type: ignore[arg-type]
    assert [node.op_type for node in model.graph if node.domain == "posexport"] == ["Sinusoids", "RotaryPosition"]
    x = np.random.default_rng(0).standard_normal((1, 3, 8)).astype(np.float32)
    positions = np.array([[5, 2, 9]])
    heads = x.reshape(1, 3, 2, 4).astype(np.float64)
    angles = positions[..., None, None] * np.array([1.0, 0.1])
    wanted = turn_pairs(heads, angles, pairs_of("interleaved", [4])).reshape(1, 3, 8)
    assert np.abs(run_ort(model, {"x": x, "positions": positions})["y"] - wanted).max() < 1e-5


@pytest.mark.sampled(3)
@pytest.mark.parametrize("encoding", ["none", "alibi", "relative"])
def test_sizes_equal_to_the_traced_lengths_stay_dynamic(encoding: str) -> None:
    """The traced example has 2 sequences of 7. A head size of 7, or 2 or 7 heads, must not fix these lengths."""
    for heads, width in ((2, 7), (7, 2)):
        spec = small_spec(encoding, hidden_size=14, num_heads=heads, head_dim=width)
        holds(spec, export(spec, weights_for(spec)))
