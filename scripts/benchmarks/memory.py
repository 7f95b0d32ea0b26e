"""Memory of an export: the peak of a fresh process that makes weights, exports and writes, above what it held before.

Before: posexport and torch are imported and a tiny block has been exported, so that what loads once is not counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from rows import Row, counted, not_run

TARGET = 1.5
BLOCKS = {
    "24 attention layers, hidden 1024": {"layers": 24},
    "24 transformer layers, hidden 1024": {"layers": 24, "block": "transformer"},
}

_CHILD = """
import json, os, sys, tempfile, threading, time
from pathlib import Path
import psutil
from posexport.artifact import write_onnx
from posexport.export import export
from posexport.models import read_spec
from posexport.models.weights import seeded_weights

process, peak = psutil.Process(), 0

def watch():
    global peak
    while True:
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.01)

def run(data, folder):
    spec = read_spec(data)
    weights = seeded_weights(spec, 0)
    size = sum(tensor.nbytes for tensor in weights.values())
    write_onnx(export(spec, weights), Path(folder) / "block.onnx")
    return size

with tempfile.TemporaryDirectory() as folder:
    run({"encoding": {"name": "rope"}, "hidden_size": 64, "num_heads": 4}, folder)
    before = peak = process.memory_info().rss
    threading.Thread(target=watch, daemon=True).start()
    start = time.perf_counter()
    weights = run(json.loads(sys.argv[1]), folder)
    print(json.dumps({"before": before, "peak": peak, "weights": weights, "seconds": time.perf_counter() - start}))
"""


def measure(quick: bool) -> list[Row]:
    """Peak above the process before, over the bytes of the weights."""
    rows = []
    for what, fields in list(BLOCKS.items())[: 1 if quick else None]:
        what = f"peak memory of exporting {what}, over its weights"
        data = {"encoding": {"name": "rope"}, "hidden_size": 1024, "num_heads": 16, **fields}
        done = subprocess.run([sys.executable, "-c", _CHILD, json.dumps(data)], capture_output=True, text=True)
        if done.returncode:
            rows.append(
                not_run(what, TARGET, done.stderr.strip().splitlines()[-1:][0] if done.stderr.strip() else "killed")
            )
            continue
        found: dict[str, Any] = json.loads(done.stdout)
        megabytes = {f"{name}_mb": found[name] / 1e6 for name in ("before", "peak", "weights")}
        value = (found["peak"] - found["before"]) / found["weights"]
        rows.append(counted(what, value, TARGET, "ratio", **megabytes, seconds=found["seconds"]))
    return rows
