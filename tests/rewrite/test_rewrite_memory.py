"""The memory of `posexport rewrite` for a file with large weights.

Only one process at a time has the file open, and the others use little memory. All of them together use at most about
twice the size of the file, including the inputs and results of the tests.
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
"""Bytes of all processes except the largest: three Python processes, one with a runtime or torch before it opens the
file."""

WHATEVER = 1e9
"""Bytes that all processes use whatever the size of the file: Python, torch, the inputs and results of a group of
cases, and freed memory that is not returned to the system yet."""


def large_decoder(path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Writes a decoder with external weights; returns their size in bytes."""

    def random(graph: Graph, name: str, *shape: int) -> str:
        numbers = np.random.default_rng(len(graph.weights)).standard_normal(shape, np.float32)
        return graph.weight(name, numbers * np.float32(0.3 / np.sqrt(shape[0])))

    monkeypatch.setattr(Graph, "random", random)
    for name, size in SIZES.items():
        monkeypatch.setattr(small_graphs, name, size)
    model = small_graphs.decoder(layers=8)
    onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=1024)
    return path.with_name("weights").stat().st_size


def held(leader: int) -> list[tuple[int, int]]:
    """The bytes of each process of a session: anonymous memory, and all memory, with shared memory in proportion."""
    found = []
    for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
        with suppress(OSError):
            if os.getsid(pid) == leader:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                sizes = {line.split()[0]: int(line.split()[1]) * 1024 for line in lines[1:]}
                found.append((sizes["Anonymous:"], sizes["Pss:"]))
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_large_file_is_held_by_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = large_decoder(tmp_path / "large.onnx", monkeypatch)
    assert weights > 256 * 2**20
    command = [sys.executable, "-P", "-m", "posexport", "rewrite", "large.onnx", "-o", "out.onnx"]
    command += ["--form", "contrib", "--target", "ort"]
    seen, most = [], 0
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        while process.poll() is None:
            sizes = held(process.pid)
            anonymous = [size for size, _ in sizes]
            seen.append((sum(anonymous) - max(anonymous, default=0), anonymous))
            most = max(most, sum(size for _, size in sizes))
            time.sleep(0.05)
    assert process.returncode == 0
    beside, anonymous = max(seen)
    assert beside < BESIDE, anonymous
    assert most < 2 * weights + WHATEVER
