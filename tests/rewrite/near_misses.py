"""Near misses: attention graphs with one fault. A rewrite must leave them unchanged or keep the fault.

`near_miss(model, name, seed)` returns a changed copy, or None if the graph has no place for this fault. The seed
decides the site, the side (queries or keys) and the constant. Not every draw changes the results (a mask of minus
infinity added twice is the same mask), so callers compare outputs with `difference`.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
import onnxruntime
from near_miss_caches import CACHES
from near_miss_editor import Editor
from near_miss_masks import MASKS
from near_miss_operators import OPERATORS
from near_miss_rotations import ROTATIONS
from near_miss_scores import SCORES

Change = Callable[[Editor], bool]
"""Changes the model in place; returns False if it has no place for the fault."""

NEAR_MISSES: dict[str, Change] = {**ROTATIONS, **SCORES, **MASKS, **CACHES, **OPERATORS}
"""Every fault by name."""


def near_miss(model: ir.Model, name: str, seed: int) -> ir.Model | None:
    """A copy of the model with one fault, the same for the same seed; None if the model has no place for it."""
    copy = model.clone()
    passes.ShapeInferencePass()(copy)
    editor = Editor(model=copy, rng=random.Random(zlib.crc32(name.encode()) + seed))
    if not NEAR_MISSES[name](editor):
        return None
    try:
        copy.graph.sort()
    except ValueError:  # what was exchanged depends on each other
        return None
    passes.RemoveUnusedNodesPass()(copy)
    return copy


def drawn(models: Mapping[str, ir.Model], count: int, seed: int) -> Iterator[tuple[str, str, int, ir.Model]]:
    """At most `count` near misses as (name of the model, fault, seed, changed model).

    The faults take turns, the models are drawn at random, and no draw comes twice.
    """
    rng = random.Random(seed)
    names, faults = list(models), list(NEAR_MISSES)
    seen: set[tuple[str, str, int]] = set()
    made = 0
    for turn in range(20 * count):
        fault = faults[turn % len(faults)]
        draw = (rng.choice(names), fault, rng.randrange(8))
        if draw in seen:
            continue
        seen.add(draw)
        changed = near_miss(models[draw[0]], fault, draw[2])
        if changed is not None:
            yield (*draw, changed)
            made += 1
            if made == count:
                return


Feeds = Mapping[str, np.ndarray]


def outputs(model: ir.Model, feeds: Feeds) -> list[np.ndarray]:
    """The outputs of ONNX Runtime without optimisations."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    data = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return list(session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()}))


def difference(model: ir.Model, changed: ir.Model, references: Sequence[Feeds]) -> float:
    """The largest relative difference between the outputs of both models, over all inputs.

    The difference of an output is relative to its largest value. It is infinite if the shapes differ, or if only one of
    both values is finite. Padding does not count: a query that sees no key may yield anything.
    """
    largest = 0.0
    for feeds in references:
        for old, new in zip(outputs(model, feeds), outputs(changed, feeds), strict=True):
            if old.shape != new.shape:
                return np.inf
            old, new = (_attended(values.astype(np.float64), feeds) for values in (old, new))
            if (np.isfinite(old) != np.isfinite(new)).any():
                return np.inf
            finite = np.isfinite(old)
            if finite.any():
                gap = np.abs(old - new)[finite].max() / max(np.abs(old[finite]).max(), 1e-30)
                largest = max(largest, float(gap))
    return largest


def _attended(values: np.ndarray, feeds: Feeds) -> np.ndarray:
    """Values (batch, tokens, ...), or of a cache (batch, heads, tokens, size), with zeros at padding."""
    mask, axis = feeds.get("attention_mask"), 2 if values.ndim == 4 else 1
    if mask is None or "decoder_input_ids" in feeds or values.ndim < 2 or values.shape[axis] > mask.shape[1]:
        return values
    seen = mask[:, mask.shape[1] - values.shape[axis] :].astype(bool)
    return np.where(seen.reshape([len(seen), *[1] * (axis - 1), -1, *[1] * (values.ndim - axis - 1)]), values, 0)
