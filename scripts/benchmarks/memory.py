"""Peak memory of an export, of stacks of layers, and of the forms at run time. Each figure comes from a new process.

This file is also the script of these processes: `memory.py FUNCTION ARGUMENTS-AS-JSON` prints the result as JSON.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results import Row, counted, not_run
from timing import THREADS, block_spec, write_block, write_forms

from posexport import machine, temporary
from posexport.artifact.onnx_artifact import read_onnx, write_onnx
from posexport.bench.shapes import Sizes, seeded_inputs
from posexport.export import export
from posexport.files import HashingFile, staged
from posexport.models.weights import TORCH_DTYPES, bytes_of, seeded
from posexport.runtimes import ort
from posexport.runtimes.torch_eager import StreamedRunner

EXPORT_TARGET = 1.5
TOKENS = 4096
FORM_LIMITS = {"native": 1300, "contrib --target ort": 200}
"""The most megabytes that a form may take for `TOKENS` tokens. The other forms have no target."""

LAYERS = (4, 20, 80)
STACK_MEMORY, STACK_SECONDS = 1.2, 0.3
"""The largest ratio of a peak to the peak of the fewest layers, and the most seconds per layer beyond writing its
bytes."""
STAGES = {"export": "export", "fp64": "reference in float64", "fp16": "reference in fp16"}


def child(function: Callable[..., dict[str, Any]], **arguments: Any) -> dict[str, Any] | str:
    """The result of a function of this file in a new process, or the reason why that process failed."""
    command = [sys.executable, __file__, function.__name__, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return next(iter(done.stderr.strip().splitlines()[-1:]), "killed")
    return dict(json.loads(done.stdout))


def of_export(argument: str) -> dict[str, Any]:
    """The peak of exporting and writing a kind of block, above the memory of the process after a tiny export."""
    with temporary.folder() as folder:
        path = Path(folder, "block.onnx")
        write_block(block_spec("rope", 64, 4), path)
        spec = block_spec("rope", 1024, 16, layers=24, block=argument)
        before, start = machine.forget_peak(), time.perf_counter()
        write_block(spec, path)
        seconds = time.perf_counter() - start
    peak = machine.peak() - before
    return {"value": peak / bytes_of(spec), "peak_mb": peak / 1e6, "seconds": seconds}


def of_form(argument: str) -> dict[str, Any]:
    """The peak of one run of a file, above the memory of the process with the session open and the inputs made."""
    empty = machine.resident()
    runner = ort.load(Path(argument), {"threads": THREADS})
    inputs = seeded_inputs(read_onnx(Path(argument)).spec, Sizes(seq=TOKENS), 0)
    before, start = machine.forget_peak(), time.perf_counter()
    runner.run(inputs)
    seconds = time.perf_counter() - start
    return {"value": (machine.peak() - before) / 1e6, "session_mb": (before - empty) / 1e6, "seconds": seconds}


def of_stack(what: str, layers: int, path: str) -> dict[str, Any]:
    """The peak of a whole process, including Python and torch, and the seconds of its stages."""
    target, spec = Path(path), block_spec("rope", 2048, 16, causal=True, dtype="fp16", layers=layers)
    marks = [time.perf_counter()]
    if what == "export":
        model = export(spec, seeded(spec, 0))
        marks.append(time.perf_counter())
        write_onnx(model, target, external_from=0)
    elif what == "bytes":

        def write_bytes(file: HashingFile) -> None:
            for tensor in seeded(spec, 0).values():
                file.write(tensor.numpy().reshape(-1).view(np.uint8).data)

        with staged() as files:
            files.write(target.with_name("bytes"), write_bytes)
    else:
        runner = StreamedRunner(read_onnx(target), getattr(torch, TORCH_DTYPES[what]), torch.device("cpu"))
        inputs = [seeded_inputs(spec, Sizes(batch=2, seq=seq), 0) for seq in (1, 33)]
        runner.run_all(inputs)
    marks.append(time.perf_counter())
    return {"peak": machine.peak(), "seconds": [after - before for before, after in itertools.pairwise(marks)]}


def _peak_row(what: str, target: float | None, unit: str, measure: Callable[..., dict[str, Any]], argument: str) -> Row:
    result = child(measure, argument=argument)
    if isinstance(result, str):
        return not_run(what, target, result)
    return counted(what, result.pop("value"), target, unit, **result)


def measure_exports(quick: bool) -> list[Row]:
    """The peak of an export, divided by the bytes of its weights."""
    what = "peak memory of exporting 24 {} layers, hidden 1024, over its weights"
    blocks = ("attention",) if quick else ("attention", "transformer")
    return [_peak_row(what.format(block), EXPORT_TARGET, "ratio", of_export, block) for block in blocks]


def measure_forms(quick: bool) -> list[Row]:
    """The megabytes above the weights for each form of causal rope: hidden 1024, 16 heads, fp32."""
    spec, forms = block_spec("rope:layout=half", 1024, 16, causal=True), ("decomposed", "function", "native", "contrib")
    what = f"peak memory of {TOKENS} tokens above the weights, {{}}"
    with temporary.folder() as folder:
        files = write_forms(spec, folder, forms[-1:] if quick else forms)[0].items()
        return [_peak_row(what.format(name), FORM_LIMITS.get(name), "MB", of_form, str(path)) for name, path in files]


def measure_stacks(quick: bool) -> list[Row]:
    """Ratios of peaks, and seconds per layer: the slope from the fewest layers to the most.

    The time of writing is compared with the time of making, hashing and writing only the weights, which no export can
    save.
    """
    counts, results, rows = (2, 6) if quick else LAYERS, {}, []
    with temporary.folder() as folder:
        for layers, what in itertools.product(counts, ("export", "bytes", "fp64", "fp16")):
            result = child(of_stack, what=what, layers=layers, path=str(Path(folder, "block.onnx")))
            if isinstance(result, str):
                return [not_run(f"{what} of {layers} layers", None, result)]
            results[what, layers] = result
    for what, name in STAGES.items():
        first, *peaks = (results[what, layers]["peak"] / 1e6 for layers in counts)
        for layers, peak in zip(counts[1:], peaks, strict=True):
            title = f"peak memory, {name}: {layers} layers over {counts[0]}"
            rows.append(counted(title, peak / first, STACK_MEMORY, "ratio", peak_mb=peak, first_mb=first))
    return [*rows, *_seconds_a_layer(results, counts)]


def _seconds_a_layer(results: dict[tuple[str, int], dict[str, Any]], counts: Sequence[int]) -> list[Row]:
    def slope(what: str, stage: int) -> float:
        few, many = (results[what, layers]["seconds"][stage] for layers in (counts[0], counts[-1]))
        return float(many - few) / (counts[-1] - counts[0])

    span = f"{counts[0]} to {counts[-1]} layers"
    whole = {f"seconds_{layers}": sum(results["export", layers]["seconds"]) for layers in counts}
    graph, written, weights = slope("export", 0), slope("export", 1), slope("bytes", 0)
    beyond = graph + written - weights
    return [
        counted(f"export, seconds a layer beyond its bytes, {span}", beyond, STACK_SECONDS, "s", **whole),
        counted(f"the graph alone, seconds a layer, {span}", graph, None, "s"),
        counted(f"making, hashing and writing the bytes alone, seconds a layer, {span}", weights, None, "s"),
        counted(f"reference in float64, seconds a layer, {span}", slope("fp64", 0), None, "s"),
    ]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))))
