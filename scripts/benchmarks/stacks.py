"""Stacks of layers: memory and time of an export and of the float64 reference, for 4, 20 and 80 layers of one kind.

Each runs in a fresh process: rope, hidden 2048, 16 heads, fp16, 34 MB a layer, weights from a seed into external data.
Memory is the process's peak in all, Python and torch included. Time a layer is the slope from the fewest layers to the
most: of the trace and the graph, and of writing. Writing is compared with copying the same bytes through sha256, and
with making the same weights, neither of which an export can save.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rows import Row, counted, not_run, observed

LAYERS = (4, 20, 80)
MEMORY, SECONDS = 1.2, 0.3
"""The most of the peak of the fewest layers, and seconds a layer beyond making and writing its bytes."""

_CHILD = """
import json, resource, sys, time
from pathlib import Path
import numpy as np
from posexport.artifact import write_onnx
from posexport.export import export
from posexport.files import staged
from posexport.models import read_spec
from posexport.models.weights import seeded
from posexport.runtimes import torch_eager

what, layers, path = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
spec = read_spec({
    "encoding": {"name": "rope"}, "causal": True, "dtype": "fp16",
    "hidden_size": 2048, "num_heads": 16, "layers": layers,
})

def bare(file):
    for tensor in seeded(spec, 0).values():
        file.write(tensor.numpy().reshape(-1).view(np.uint8).data)

marks = [time.perf_counter()]
if what == "export":
    model = export(spec, seeded(spec, 0))
    marks.append(time.perf_counter())
    write_onnx(model, path, external_from=0)
    marks.append(time.perf_counter())
elif what == "bytes":
    with staged() as files:
        files.write(path.with_name("bare"), bare)
    marks.append(time.perf_counter())
    path.with_name("bare").unlink()
else:
    dtype = {"truth": "fp64", "eager": "fp16"}[what]
    runner = torch_eager.load(path, {"dtype": dtype, "streamed": True})
    runner.run_all([
        {"hidden_states": np.ones((2, seq, 2048), np.float16), "position_ids": np.arange(seq)[None].repeat(2, 0)}
        for seq in (1, 33)
    ])
    marks.append(time.perf_counter())
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps({"peak": peak, "seconds": [after - before for before, after in zip(marks, marks[1:])]}))
"""


def measure(quick: bool) -> list[Row]:
    """Ratios of peaks, and seconds a layer."""
    counts = (2, 6) if quick else LAYERS
    found: dict[tuple[str, int], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for layers in counts:
            path = Path(folder, "block.onnx")
            for what in ("export", "bytes", "truth", "eager"):
                command = [sys.executable, "-c", _CHILD, what, str(layers), str(path)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    said = next(iter(done.stderr.strip().splitlines()[-1:]), "killed")
                    return [not_run(f"{what} of {layers} layers", None, said)]
                found[what, layers] = json.loads(done.stdout)
    return [*_memory(found, counts), *_time(found, counts)]


def _memory(found: dict[tuple[str, int], dict[str, Any]], counts: tuple[int, ...]) -> list[Row]:
    names = {"export": "export", "truth": "reference in float64", "eager": "reference in fp16"}
    return [
        counted(
            f"peak memory, {name}: {layers} layers over {counts[0]}",
            found[what, layers]["peak"] / found[what, counts[0]]["peak"],
            MEMORY,
            "ratio",
            peak_mb=found[what, layers]["peak"] / 1e6,
            first_mb=found[what, counts[0]]["peak"] / 1e6,
        )
        for what, name in names.items()
        for layers in counts[1:]
    ]


def _time(found: dict[tuple[str, int], dict[str, Any]], counts: tuple[int, ...]) -> list[Row]:
    def slope(what: str, stage: int) -> float:
        few, many = (found[what, layers]["seconds"][stage] for layers in (counts[0], counts[-1]))
        return float(many - few) / (counts[-1] - counts[0])

    span = f"{counts[0]} to {counts[-1]} layers"
    graph, write, bare = slope("export", 0), slope("export", 1), slope("bytes", 0)
    whole = {f"seconds_{layers}": sum(found["export", layers]["seconds"]) for layers in counts}
    return [
        counted(f"export, seconds a layer beyond its bytes, {span}", graph + write - bare, SECONDS, "s", **whole),
        observed(f"the graph alone, seconds a layer, {span}", graph, "s"),
        observed(f"making, hashing and writing the bytes alone, seconds a layer, {span}", bare, "s"),
        observed(f"reference in float64, seconds a layer, {span}", slope("truth", 0), "s"),
    ]
