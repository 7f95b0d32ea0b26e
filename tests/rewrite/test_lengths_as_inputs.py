"""Masks that a graph computes from token counts: the length of each row, or a prefix that all queries see."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from helpers import cli
from rewrite_helpers import in_process, ran, rewritten
from torch import Tensor, nn

HEADS, SIZE = 2, 8


class Counted(nn.Module):
    """Attention with a mask from `numbers`, one for each row.

    Without `prefix`, a number is the length of its row, and the mask may also be causal. With `prefix`, it is the
    length of the prefix: queries see the prefix and earlier keys.
    """

    def __init__(self, prefix: bool, causal: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.prefix, self.causal = prefix, causal
        self.projections = nn.ModuleList(nn.Linear(HEADS * SIZE, HEADS * SIZE) for _ in range(4))

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        query, key, value = (each(x).view(batch, seq, HEADS, SIZE).transpose(1, 2) for each in [*self.projections][:3])
        places = torch.arange(seq)
        counted, before = places < numbers[:, None, None], places <= places[:, None]
        seen = counted | before if self.prefix else counted & (before | (not self.causal))
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen[:, None])
        return torch.as_tensor(self.projections[3](mixed.transpose(1, 2).reshape(batch, seq, HEADS * SIZE)))


def _file(folder: Path, name: str, prefix: bool = False, causal: bool = False) -> Path:
    path, batch, seq = folder / "in.onnx", torch.export.Dim("batch"), torch.export.Dim("seq")
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(
            Counted(prefix, causal).eval(),
            (torch.randn(2, 7, HEADS * SIZE), torch.tensor([7, 3])),
            path,
            dynamo=True,
            verbose=False,
            input_names=["hidden_states", name],
            dynamic_shapes=({0: batch, 1: seq}, {0: batch}),
            external_data=False,
        )
    return path


@pytest.mark.sampled(6)
@pytest.mark.parametrize("form", ["native", "contrib"])
@pytest.mark.parametrize(
    ("name", "prefix", "causal", "mask"),
    [
        ("src_lengths", False, False, {"kind": "none", "padding": ["src_lengths"]}),
        ("lengths", False, True, {"kind": "causal", "padding": ["lengths"]}),
        ("prefix_len", True, True, {"kind": "other", "padding": []}),
    ],
)
def test_numbers_of_tokens_are_tried(
    name: str,
    prefix: bool,
    causal: bool,
    mask: dict[str, object],
    form: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_process(monkeypatch)
    path, out = _file(tmp_path, name, prefix, causal), tmp_path / "out.onnx"
    result = rewritten(path, out, form=form, target="ort", opset=24 if form == "native" else 20)
    [found] = result.attentions
    assert (found["state"], found["reason"]) == ("rewritten", None)
    assert {key: found["mask"][key] for key in mask} == mask
    features = np.random.default_rng(1).standard_normal((3, 9, HEADS * SIZE)).astype(np.float32)
    for numbers in ([9, 9, 9], [1, 5, 9], [8, 2, 4]):
        inputs = {"hidden_states": features, name: np.array(numbers)}
        before, after = ran(path, inputs)[0], ran(out, inputs)[0]
        np.testing.assert_allclose(after, before, atol=2e-6 * float(np.abs(before).max()))


@pytest.mark.slow
def test_a_causal_graph_is_not_the_same_as_one_with_a_prefix(tmp_path: Path) -> None:
    """A test with only a prefix of 0 would hide the difference."""
    with_prefix = _file(tmp_path, "prefix_len", prefix=True)
    without = onnx.load(with_prefix)
    [below] = [node for node in without.graph.node if node.op_type == "Less"]
    below.input[0] = below.input[1]
    onnx.save(without, tmp_path / "causal.onnx")
    done = cli("verify", with_prefix, "--against", tmp_path / "causal.onnx", "--runtime", "ort-cpu")
    assert done.exit_code == 1, done.output
    assert "1 failed" in done.output
