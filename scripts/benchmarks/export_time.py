"""Export time: posexport's export of a default block against torch.onnx.export of the same block in plain torch.

Both write their file into a temporary folder, both with dynamic batch and sequence, opset 18, in one process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import blocks
from rows import Row, compared

from posexport.artifact.onnx_artifact import write_onnx
from posexport.bench import rounds
from posexport.export import export
from posexport.models.weights import seeded_weights
from posexport.runtimes.base import timed

TARGET = 1.3
HIDDEN, HEADS = 768, 12


def measure(quick: bool) -> list[Row]:
    """A ratio per encoding."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in blocks.names(quick):
            calls = {
                "ours": timed(_ours(name, Path(folder))),
                "theirs": timed(_theirs(name, Path(folder))),
            }
            for call in calls.values():
                call()
            series = rounds.interleave(calls, 3 if quick else 9, pause=0.0)
            rows.append(compared(f"export of {name}, hidden {HIDDEN}", series["ours"], series["theirs"], TARGET))
    return rows


def _ours(name: str, folder: Path) -> Callable[[], object]:
    spec = blocks.spec(name, HIDDEN, HEADS)
    weights = seeded_weights(spec, 0)
    return lambda: write_onnx(export(spec, weights), folder / "ours.onnx")


def _theirs(name: str, folder: Path) -> Callable[[], object]:
    block = blocks.plain(name, HIDDEN, HEADS, seeded_weights(blocks.spec(name, HIDDEN, HEADS), 0))
    return lambda: blocks.plain_export(block, block.hidden, blocks.parameters_of(name)[0], folder / "theirs.onnx")
