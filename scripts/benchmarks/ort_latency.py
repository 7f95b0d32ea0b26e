"""Latency on ONNX Runtime CPU: posexport's decomposed form against torch's own opset-18 export of the same block.

The peer is the block as a textbook writes it in plain torch, where that is the same function. The textbook's `relative`
is not: its shift holds for consecutive positions only, while position_ids are data here. There the peer is posexport's
own torch block, exported by torch from its plain bodies, and a row of its own says what positions as data cost.

Both run in one process with 2 threads and ONNX Runtime's own defaults, in alternation with pauses.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import blocks
import numpy as np
import onnxruntime
from rows import Row, compared

from posexport.artifact.onnx_artifact import write_onnx
from posexport.export import export
from posexport.models.weights import seeded_weights
from posexport.runtimes.base import timed

TARGET = 1.0
HIDDEN, HEADS, THREADS = 1024, 16, 2
SESSIONS = 3
"""Fresh pairs of sessions per row: where its memory lies makes a session a few per cent faster or slower for good."""
LENGTHS = {1: 35, 128: 17, 1024: 7}
"""Tokens to rounds per session. One token is a decode step without a cache."""
DATA_TARGET = 2.5
"""What `relative` with positions as data may take of the textbook's shift."""
CONFIDENCE = 0.998
"""Of one row's interval, so that all rows together are right with about 95 %."""


def measure(quick: bool) -> list[Row]:
    """A ratio per encoding and length, batch 1."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in blocks.names(quick):
            ours, theirs = Path(folder, "ours.onnx"), Path(folder, "theirs.onnx")
            spec = blocks.spec(name, HIDDEN, HEADS)
            weights = seeded_weights(spec, 0)
            encoding, _ = blocks.parameters_of(name)
            write_onnx(export(spec, weights), ours)
            textbook = blocks.plain(name, HIDDEN, HEADS, weights)
            peers = [(name, TARGET, textbook)]
            if encoding == "relative":
                peers = [(name, TARGET, blocks.own(name, HIDDEN, HEADS, weights))]
                peers.append((f"{name} against the textbook's shift", DATA_TARGET, textbook))
            for what, target, peer in peers:
                blocks.plain_export(peer, HIDDEN, encoding, theirs)
                for seq, rounds in LENGTHS.items():
                    rows.append(_row(what, target, encoding, seq, 5 if quick else rounds, ours, theirs))
    return rows


def _row(name: str, target: float, encoding: str, seq: int, rounds: int, ours: Path, theirs: Path) -> Row:
    inputs = {
        "hidden_states": np.random.default_rng(0).standard_normal((1, seq, HIDDEN), dtype=np.float32),
        "position_ids": blocks.positions(encoding, 1, seq).numpy(),
    }
    series: dict[str, list[float]] = {path.stem: [] for path in (ours, theirs)}
    for session in range(SESSIONS):
        runs = {path.stem: _run(path, inputs) for path in (ours, theirs)}
        first, second = (run() for run in runs.values())
        error = float(np.abs(first - second).max())
        assert error < 1e-3, f"{name}: the two exports differ by {error}, so comparing their times means nothing"
        calls = {stem: timed(run) for stem, run in runs.items()}
        for stem, seconds in rounds.interleave(calls, rounds, seed=session).items():
            series[stem] += seconds
    what = f"ORT CPU, {name}, {seq} token{'s' if seq > 1 else ''}"
    return compared(what, series["ours"], series["theirs"], target, CONFIDENCE, within_interval=True, error=error)


def _run(path: Path, inputs: dict[str, np.ndarray]) -> Callable[[], np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    wanted = {value.name for value in session.get_inputs()}
    feeds = {name: array for name, array in inputs.items() if name in wanted}
    for _ in range(3):
        session.run(None, feeds)
    return lambda: session.run(None, feeds)[0]
