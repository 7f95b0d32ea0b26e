"""The kernels that TensorRT for RTX chooses for an fp16 block in each form: their number, and fused attention kernels.
It needs no GPU.

The limits are the numbers of kernels when the blocks were first measured, written by hand in standard operators. Forms
with custom operators may take one kernel more.
"""

from __future__ import annotations

from pathlib import Path

from results import Row, counted, not_run
from timing import block_spec, write_block

from posexport import temporary
from posexport.artifact.manifest import PlanKernels
from posexport.artifact.onnx_artifact import read_onnx
from posexport.export.support import unsupported_reason
from posexport.runtimes.tensorrt import api
from posexport.runtimes.tensorrt.builder import build
from posexport.runtimes.tensorrt.options import BuildOptions
from posexport.spec.spec import Spec

LIMITS = {"none": 7, "learned": 8, "sinusoidal": 8, "relative": 13, "t5": 8, "alibi": 8}
LIMITS |= dict.fromkeys(("rope", "rope:layout=half", "rope2d", "rope2d:layout=half"), 6)
"""The largest number of kernels of a block with dynamic shapes."""

HOOKS = ("none", "rope", "alibi", "relative")
CASES: dict[str, tuple[dict[str, object], tuple[int, ...]]] = {
    "a window of 64": ({"window": 64}, (8,)),
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
"""The limits for options of blocks, one for each of the first `HOOKS`. The hooks are one encoding for each point where
encodings act. A limit is what the standard operators take, and at least the encoding's own limit."""

PAIRS = {("decomposed", "function"): 0, ("native", "contrib"): 1}
"""Forms that share a limit, and the number of kernels that they may take above it."""


def measure(quick: bool) -> list[Row]:
    """The largest number of kernels of each pair of forms for each block, and how often attention is not one kernel."""
    rows, unfused, missing = [], [], api.can_build("tensorrt-rtx")
    blocks = [(name, _spec(name), limit) for name, limit in LIMITS.items()]
    for case, (fields, limits) in CASES.items():
        blocks += [(f"{hook}, {case}", _spec(hook, **fields), most) for hook, most in zip(HOOKS, limits, strict=False)]
    for name, spec, limit in blocks[: 2 if quick else None]:
        for pair, above in PAIRS.items():
            forms = [form for form in pair if unsupported_reason(spec, form) is None]
            what = f"fp16 kernels of {name}, {' and '.join(forms)}"
            kernels = {form: kernels_of(spec, form) for form in forms} if missing is None else {}
            unknown = [table.unknown or "the builder did not say" for table in kernels.values() if not table.rows]
            if reason := missing or next(iter(unknown), None):
                rows.append(not_run(what, limit + above, reason))
            elif forms:
                counts = {form: len(table.rows) for form, table in kernels.items()}
                rows.append(counted(what, max(counts.values()), limit + above, "kernels", **counts))
                unfused += [f"{name}, {form}" for form in forms if kernels[form].attention_kernels != spec.layers]
    total = "attention that is not one kernel, over all of these"
    if missing is not None:
        return [*rows, not_run(total, 0, missing)]
    return [*rows, counted(total, len(unfused), 0, "blocks", **({"blocks": unfused} if unfused else {}))]


def _spec(name: str, **fields: object) -> Spec:
    return block_spec(name, 256, 4, dtype="fp16", **fields)


def kernels_of(spec: Spec, form: str, target: str = "portable") -> PlanKernels:
    with temporary.folder() as folder:
        path = Path(folder, "block.onnx")
        write_block(spec, path, form=form, target=target)
        return build(read_onnx(path), BuildOptions(runtime="tensorrt-rtx")).kernels
