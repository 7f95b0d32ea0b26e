"""The plain torch blocks that benchmarks compare with compute what posexport's blocks compute."""

import sys
from pathlib import Path

import pytest
import torch

from posexport.models import ENCODINGS
from posexport.models.block import build_block
from posexport.models.weights import seeded_weights

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "benchmarks"))
try:
    import blocks
    import plain_torch
    import rows
finally:
    sys.path.pop(0)

NAMES = [*blocks.names(False), "rope2d:layout=half"]


@pytest.mark.parametrize("name", NAMES)
def test_the_plain_block_is_the_same_function(name: str) -> None:
    spec = blocks.spec(name, 48, 6)
    weights = seeded_weights(spec, 3)
    x, positions = (
        torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(0)),
        blocks.positions(name.partition(":")[0], 2, 9),
    )
    ours = build_block(spec, weights)(x, *((positions,) if spec.encoding.axes else ()))
    theirs = blocks.plain(name, 48, 6, weights)(x, positions)
    assert float((ours - theirs).abs().max()) < 2e-6


def test_plain_blocks_are_of_encodings_that_are() -> None:
    assert set(plain_torch.PLAIN) <= set(ENCODINGS)


def test_the_comparison_sees_a_swapped_layout() -> None:
    spec = blocks.spec("rope", 48, 6)
    weights = seeded_weights(spec, 3)
    x, positions = torch.ones(1, 9, 48).cumsum(1), blocks.positions("rope", 1, 9)
    ours = build_block(spec, weights)(x, positions)
    theirs = blocks.plain("rope:layout=half", 48, 6, weights)(x, positions)
    assert float((ours - theirs).abs().max()) > 1e-3


def test_a_row_passes_or_fails_by_its_target() -> None:
    slow, fast = [2.0] * 9, [1.0] * 9
    assert rows.compared("x", slow, fast, 1.3).state == "failed"
    assert rows.compared("x", fast, slow, 1.3).state == "passed"
    assert rows.counted("x", 7, 6, "kernels").state == "failed"
    assert rows.counted("x", 6, 6, "kernels").state == "passed"
    assert rows.not_run("x", 6, "no GPU").state == "not run"


def test_within_the_interval_only_what_is_surely_slower_fails() -> None:
    theirs = [1.0] * 9
    unsure = [0.98, 0.99, 1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06]
    assert rows.compared("x", unsure, theirs, 1.0).state == "failed"
    assert rows.compared("x", unsure, theirs, 1.0, within_interval=True).state == "passed"
    assert rows.compared("x", [1.1] * 9, theirs, 1.0, within_interval=True).state == "failed"
