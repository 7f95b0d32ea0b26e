"""Memory of a prefill of 4096 tokens on ONNX Runtime CPU in each form: the peak of a fresh process above its weights.

Before: the session is open, so that the weights and what it packs of them are there, and the inputs are made.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import blocks
from forms import BLOCK, FORMS, HEADS, HIDDEN, THREADS
from rows import Row, counted, not_run, observed

from posexport.artifact.onnx_artifact import write_onnx
from posexport.export import export
from posexport.models.weights import seeded_weights

SEQ = 4096
LIMITS = {"native": 1300, "native --target ort": 1300, "contrib --target ort": 200}
"""The most megabytes of a form; the others have no target."""
QUICK = ("native --target ort", "contrib --target ort")

_CHILD = """
import json, sys, threading, time
import numpy as np
import onnxruntime
import psutil

path, seq, hidden, threads = sys.argv[1], *map(int, sys.argv[2:])
process = psutil.Process()

def watch():
    global peak
    while True:
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.001)

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = threads
empty = process.memory_info().rss
session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
feeds = {
    "hidden_states": np.random.default_rng(0).standard_normal((1, seq, hidden), dtype=np.float32),
    "position_ids": np.arange(seq)[None],
}
before = peak = process.memory_info().rss
threading.Thread(target=watch, daemon=True).start()
start = time.perf_counter()
session.run(None, feeds)
seconds = time.perf_counter() - start
print(json.dumps({"session": before - empty, "peak": peak - before, "seconds": seconds}))
"""


def measure(quick: bool) -> list[Row]:
    """Megabytes per form."""
    spec = blocks.spec(BLOCK, HIDDEN, HEADS, causal=True)
    weights = seeded_weights(spec, 0)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "block.onnx")
        for name in QUICK if quick else FORMS:
            form, target = FORMS[name]
            write_onnx(export(spec, weights, form=form, target=target), path)
            rows.append(_row(f"peak memory of {SEQ} tokens above the weights, {name}", LIMITS.get(name), path))
    return rows


def _row(what: str, limit: float | None, path: Path) -> Row:
    command = [sys.executable, "-c", _CHILD, *map(str, (path, SEQ, HIDDEN, THREADS))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return not_run(what, limit, next(iter(done.stderr.strip().splitlines()[-1:]), "killed"))
    found: dict[str, Any] = json.loads(done.stdout)
    value, details = found["peak"] / 1e6, {"session_mb": found["session"] / 1e6, "seconds": found["seconds"]}
    if limit is None:
        return observed(what, value, "MB", **details)
    return counted(what, value, limit, "MB", **details)
