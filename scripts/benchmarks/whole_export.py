"""Export time of whole models: `posexport export --model` of Llama-shaped checkpoints of several depths, beside mobius.

Each export is a command in a process of its own: it starts, reads the checkpoint and writes the file. One layer of each
kind is traced and copied. So the cost of one more layer is the slope from the fewest layers to the most. The time of
reading, hashing and writing the same bytes is subtracted, because no export can save it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from results import Row, compared, counted, not_run
from timing import cpu_seconds
from whole_decoder import CONFIG, MOBIUS, install_mobius, write_mobius, write_ours

from posexport import temporary
from posexport.bench import statistics
from posexport.files import HashingFile, staged

LAYERS = (2, 12, 24)
A_LAYER, ALL_LAYERS = 0.3, 60.0
"""The most seconds per layer beyond its bytes, and the most seconds for the largest number of layers."""

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "hidden 64": {**CONFIG, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "vocab_size": 1000},
    "hidden 768": CONFIG,
}
ROUNDS = 3
FORM = ("--form", "native")
BYTES = "bytes"


def measure(quick: bool) -> list[Row]:
    """The seconds of whole exports, and of one more layer."""
    with temporary.folder() as folder:
        why = _refusal(partial(install_mobius, folder / "packages"))
        shapes = dict(itertools.islice(SHAPES.items(), 1 if quick else None))
        rows = [row for name, shape in shapes.items() for row in _of_shape(name, shape, folder, quick, why is None)]
    return rows if why is None else [*rows, not_run(f"export by {MOBIUS}", None, why)]


def _of_shape(name: str, shape: Mapping[str, Any], folder: Path, quick: bool, with_mobius: bool) -> list[Row]:
    counts, rounds = (LAYERS[:2], 1) if quick else (LAYERS, ROUNDS)
    wall: dict[tuple[str, int], list[float]] = {}
    busy: dict[tuple[str, int], list[float]] = {}
    checkpoints = {layers: _checkpoint(folder / f"{name}, {layers}", shape, layers) for layers in counts}
    for _, (layers, checkpoint) in itertools.product(range(rounds), checkpoints.items()):
        calls: dict[str, Callable[[Path], None]] = {
            "ours": partial(write_ours, checkpoint, FORM),
            BYTES: partial(_bytes, checkpoint),
        }
        if with_mobius:
            calls[MOBIUS] = partial(write_mobius, checkpoint, folder / "packages")
        for who, call in calls.items():
            with temporary.folder() as out:
                start, used = time.perf_counter(), cpu_seconds()
                call(out / "model.onnx")
                wall.setdefault((who, layers), []).append(time.perf_counter() - start)
                busy.setdefault((who, layers), []).append(cpu_seconds() - used)
    return [*_wholes(name, counts, wall, busy, with_mobius), *_a_layer_more(name, counts, wall, busy)]


def _wholes(name: str, counts: Sequence[int], wall: Any, busy: Any, with_mobius: bool) -> list[Row]:
    rows = []
    for layers in counts:
        ours, title = wall["ours", layers], f"export of {layers} layers, {name}"
        limit = ALL_LAYERS if layers == counts[-1] else None
        rows.append(counted(f"{title}, seconds", _median(ours), limit, "s"))
        rows.append(counted(f"{title}, CPU seconds", _median(busy["ours", layers]), None, "s"))
        if with_mobius:
            rows.append(compared(f"{title}, to {MOBIUS}", ours, wall[MOBIUS, layers], None))
    return rows


def _a_layer_more(name: str, counts: Sequence[int], wall: Any, busy: Any) -> list[Row]:
    few, many = counts[0], counts[-1]
    slope = partial(_slope, few, many)
    title = f"a layer more, {few} to {many} layers, {name}"
    rows = [
        counted(f"{title}, seconds beyond its bytes", slope(wall, "ours") - slope(wall, BYTES), A_LAYER, "s"),
        counted(f"{title}, CPU seconds with its bytes", slope(busy, "ours"), None, "s"),
        counted(f"{title}, its bytes alone, seconds", slope(wall, BYTES), None, "s"),
    ]
    if (MOBIUS, few) in wall:
        rows.append(counted(f"{title}, seconds of {MOBIUS} with its bytes", slope(wall, MOBIUS), None, "s"))
    return rows


def _slope(few: int, many: int, seconds: Mapping[tuple[str, int], Sequence[float]], who: str) -> float:
    return (_median(seconds[who, many]) - _median(seconds[who, few])) / (many - few)


def _median(values: Sequence[float]) -> float:
    return statistics.quantile(values, 0.5)


def _checkpoint(folder: Path, shape: Mapping[str, Any], layers: int) -> Path:
    torch.manual_seed(0)
    transformers.logging.disable_progress_bar()
    config = transformers.LlamaConfig(**{**shape, "num_hidden_layers": layers})
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _bytes(checkpoint: Path, path: Path) -> None:
    """Read, hash and write the bytes of the weights."""

    def write(file: HashingFile) -> None:
        for part in sorted(checkpoint.glob("*.safetensors")):
            file.write(part.read_bytes())

    with staged() as files:
        files.write(path, write)


def _refusal(call: Callable[[], None]) -> str | None:
    try:
        call()
    except RuntimeError as error:  # an error of pip becomes a row
        return str(error).splitlines()[-1][:200]
    return None
