"""The output of `posexport rewrite` for a file that is only a copy, and for a file without angles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import rewrite_helpers as helpers
import small_graphs
from exact_graphs import changed, frequencies
from helpers import cli
from onnx import helper


@pytest.fixture(autouse=True)
def _one_runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    helpers.only_one_runtime(monkeypatch, tmp_path)


def headline(stdout: str) -> str:
    """The line about the new file."""
    return next(line for line in stdout.splitlines() if line.startswith("out.onnx is "))


def squashed(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model whose scores go through an operator that no form supports."""
    for place, node in reversed(list(enumerate(model.graph.node))):
        if node.op_type == "Softmax":
            scores, node.input[0] = node.input[0], f"{node.name}_squashed"
            model.graph.node.insert(place, helper.make_node("Softsign", [scores], [node.input[0]], name=node.input[0]))
    return model


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        (small_graphs.no_attention(), (), "no attention was found in it"),
        (small_graphs.decoder(layers=2), ("--form", "decomposed"), "all attention is in the form decomposed already"),
        (
            small_graphs.decoder(layers=2),
            ("--form", "decomposed", "--only", "node_attention_1"),
            "what was chosen is in the form decomposed already",
        ),
        (
            squashed(small_graphs.decoder(layers=2)),
            ("--form", "native"),
            "2 of 2 could not be rewritten, the reasons are in the table",
        ),
        (
            changed("inv_freq", frequencies() * np.float32(1.7)),
            ("--form", "decomposed", "--angles", "exact"),
            "all attention is in the form decomposed already; "
            "angles of 1 of 1 could not be made exact, the reasons are in the table",
        ),
    ],
    ids=["none", "already", "chosen", "refused", "angles"],
)
def test_a_copy_says_why_it_is_one(
    tmp_path: Path, model: onnx.ModelProto, options: tuple[str, ...], expected: str
) -> None:
    helpers.saved(tmp_path, model)
    result = cli("rewrite", "in.onnx", "-o", "out.onnx", *options)
    assert result.exit_code == 0
    assert headline(result.stdout) == f"out.onnx is written, a copy of in.onnx: {expected}"
    assert (tmp_path / "out.onnx").read_bytes() == (tmp_path / "in.onnx").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rope", "options", "expected"),
    [
        (False, (), "no attention is rotated: there was nothing to make exact"),
        (False, ("--only", "node_attention_0"), "no attention of those that were chosen is rotated: "),
        (True, (), None),
    ],
)
def test_angles_where_nothing_is_rotated(
    tmp_path: Path, rope: bool, options: tuple[str, ...], expected: str | None
) -> None:
    helpers.saved(tmp_path, small_graphs.decoder(rope=rope))
    result = cli("rewrite", "in.onnx", "-o", "out.onnx", "--form", "native", "--angles", "exact", *options)
    assert result.exit_code == 0
    said = [line for line in result.stdout.splitlines() if line.strip().startswith("angles ")]
    assert len(said) == (0 if expected is None else 1) and (expected or "") in "".join(said)
