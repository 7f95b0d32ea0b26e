"""Kernels that TensorRT for RTX chooses for an fp16 block: in all, and fused attention kernels. Needs no GPU.

The limits are what the encodings took when first measured, written by hand in standard operators.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import blocks
from rows import Row, counted, not_run

from posexport import trt_api
from posexport.artifact import read_onnx, write_onnx
from posexport.export import export
from posexport.models.weights import seeded_weights
from posexport.trt_build import BuildOptions, build

HIDDEN, HEADS = 256, 4
LIMITS: dict[str, tuple[int, dict[str, object]]] = {
    "none": (7, {}),
    "learned": (8, {}),
    "sinusoidal": (8, {}),
    "relative": (13, {}),
    "t5": (8, {}),
    "rope": (6, {}),
    "rope:layout=half": (6, {}),
    "rope2d": (6, {}),
    "rope2d:layout=half": (6, {}),
    "alibi": (8, {}),
    "none with a window of 64": (8, {"window": 64}),
}
"""The most kernels of a block with dynamic shapes."""


def measure(quick: bool) -> list[Row]:
    """Two counts per encoding."""
    rows = []
    missing = trt_api.can_build("tensorrt-rtx")
    with tempfile.TemporaryDirectory() as folder:
        for name, (limit, fields) in list(LIMITS.items())[: 6 if quick else None]:
            what = f"fp16 kernels of {name} in TensorRT for RTX"
            if missing is not None:
                rows.append(not_run(what, limit, missing))
                continue
            spec = blocks.spec(name.partition(" ")[0], HIDDEN, HEADS, dtype="fp16", **fields)
            path = Path(folder, "block.onnx")
            write_onnx(export(spec, seeded_weights(spec, 0)), path)
            found = build(read_onnx(path), BuildOptions(runtime="tensorrt-rtx")).kernels
            if found.rows is None or found.attention is None:
                rows.append(not_run(what, limit, found.unknown or "the builder didn't say"))
                continue
            rows.append(counted(what, len(found.rows), limit, "kernels"))
            unfused = spec.layers - found.attention
            rows.append(counted(f"attention of {name} that is not one kernel", unfused, 0, "kernels"))
    return rows
