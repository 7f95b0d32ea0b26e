"""What `posexport rewrite` holds of a file with large weights: one process has it open, the others hold little.

How much that process takes depends on the sets of inputs more than on the file: it evaluates 4 rows of 705 tokens in
float64.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
import small_graphs
from small_graphs import Graph

SIZES = {"HIDDEN": 2048, "HEADS": 16, "KV_HEADS": 2, "SIZE": 128, "VOCABULARY": 1000}
BESIDE = 300e6
"""Bytes of all processes but the largest: three of Python, one with a runtime or torch before it opens the file."""


def large_decoder(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Write a decoder with its weights beside it; returns their bytes."""

    def random(graph: Graph, name: str, *shape: int) -> str:
        numbers = np.random.default_rng(len(graph.weights)).standard_normal(shape, np.float32)
        return graph.weight(name, numbers * np.float32(0.3 / np.sqrt(shape[0])))

    monkeypatch.setattr(Graph, "random", random)
    for name, size in SIZES.items():
        monkeypatch.setattr(small_graphs, name, size)
    model = small_graphs.decoder(layers=8)
    onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=1024)
    return path.with_name("weights").stat().st_size


def held(leader: int) -> list[int]:
    """The anonymous bytes of the processes of a session."""
    found = []
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        with suppress(OSError):
            if os.getsid(pid) == leader:
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")]
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_large_file_is_held_by_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert large_decoder(tmp_path / "large.onnx", monkeypatch) > 256 * 2**20
    command = [sys.executable, "-P", "-m", "posexport", "rewrite", "large.onnx", "-o", "out.onnx"]
    command += ["--form", "contrib", "--target", "ort"]
    seen = []
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        while process.poll() is None:
            sizes = held(process.pid)
            seen.append((sum(sizes) - max(sizes, default=0), sizes))
            time.sleep(0.05)
    assert process.returncode == 0
    most, sizes = max(seen)
    assert most < BESIDE, sizes
