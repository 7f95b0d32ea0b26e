"""Kernels that TensorRT for RTX chooses for an fp16 block in each form: in all, and fused attention kernels. No GPU.

The limits are what the blocks took when first measured, written by hand in standard operators; forms with operators of
their own may take one kernel more.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import blocks
from rows import Row, counted, not_run

from posexport.artifact.onnx_artifact import read_onnx, write_onnx
from posexport.export import export, support
from posexport.models.weights import seeded_weights
from posexport.runtimes.tensorrt import api
from posexport.runtimes.tensorrt.builder import build
from posexport.runtimes.tensorrt.kernels import Kernels
from posexport.runtimes.tensorrt.options import BuildOptions
from posexport.spec.spec import Spec

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

HOOKS = ("none", "rope", "alibi", "relative")
CASES: dict[str, tuple[dict[str, object], tuple[int, ...]]] = {
    "causal": ({"causal": True}, (7, 6, 8, 13)),
    "padding": ({"causal": True, "padding_mask": True}, (7, 7, 8, 14)),
    "grown caches": ({"causal": True, "kv_cache": "concat"}, (8, 7, 8, 13)),
    "grown caches, padding": ({"causal": True, "kv_cache": "concat", "padding_mask": True}, (8, 7, 12, 18)),
    "shared caches": ({"causal": True, "kv_cache": "shared"}, (7, 6, 8, 13)),
    "shared caches, padding": ({"causal": True, "kv_cache": "shared", "padding_mask": True}, (7, 6, 11, 16)),
    "sinks": ({"causal": True, "sinks": True}, (10, 7, 11, 16)),
    "softcap": ({"causal": True, "softcap": 30.0}, (7, 6, 8, 13)),
    "qk-norm": ({"qk_norm": True}, (9, 8, 10, 16)),
}
"""The same for what blocks may have beside, over `HOOKS`: one encoding for each point where encodings act. What the
standard operators take, and at least the encoding's own figure."""

PAIRS = {("decomposed", "function"): 0, ("native", "contrib"): 1}
"""Forms that share a limit, and how many kernels they may take above it."""


def measure(quick: bool) -> list[Row]:
    """The most kernels of each pair of forms, per block, and over all how often attention is not one kernel."""
    rows = []
    missing = api.can_build("tensorrt-rtx")
    fused = "attention that is not one kernel, over all of these"
    unfused: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (spec, limit) in list(_blocks().items())[: 2 if quick else None]:
            for pair, above in PAIRS.items():
                able = [form for form in pair if support.unsupported_reason(spec, form) is None]
                what = f"fp16 kernels of {name}, {' and '.join(able)}"
                if not able:
                    continue
                if missing is not None:
                    rows.append(not_run(what, limit + above, missing))
                    continue
                found = {form: _kernels(spec, form, Path(folder, "block.onnx")) for form in able}
                unknown = [
                    kernels.unknown or "the builder didn't say" for kernels in found.values() if not kernels.rows
                ]
                if unknown:
                    rows.append(not_run(what, limit + above, unknown[0]))
                    continue
                counts = {form: len(kernels.rows or ()) for form, kernels in found.items()}
                rows.append(counted(what, max(counts.values()), limit + above, "kernels", **counts))
                unfused += [f"{name}, {form}" for form in found if found[form].attention != spec.layers]
    if missing is not None:
        return [*rows, not_run(fused, 0, missing)]
    return [*rows, counted(fused, len(unfused), 0, "blocks", **({"blocks": unfused} if unfused else {}))]


def _blocks() -> dict[str, tuple[Spec, int]]:
    """All blocks by name, with the limit of each."""
    found = {name: (_spec(name.partition(" ")[0], fields), limit) for name, (limit, fields) in LIMITS.items()}
    for case, (fields, limits) in CASES.items():
        for encoding, limit in zip(HOOKS, limits, strict=True):
            found[f"{encoding}, {case}"] = (_spec(encoding, fields), limit)
    return found


def _spec(name: str, fields: dict[str, object]) -> Spec:
    return blocks.spec(name, HIDDEN, HEADS, dtype="fp16", **fields)


def _kernels(spec: Spec, form: str, path: Path) -> Kernels:
    write_onnx(export(spec, seeded_weights(spec, 0), form=form), path)
    return build(read_onnx(path), BuildOptions(runtime="tensorrt-rtx")).kernels
