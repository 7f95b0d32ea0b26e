"""Families of corner mutants: graphs that are right except in one corner, whose place and size are drawn.

For an artifact and drawn numbers, a family gives a change of the graph and the inputs at which the fault should show.
Families do not depend on the test cases of verify. They follow what goes wrong in production, class by class (CLASSES).
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np
import onnx

from mutation.artifacts import Artifact
from mutation.inputs import REACH, Aim
from mutation.surgery import Change, Logits, change_input, change_visibility, copy_of

Random = np.random.Generator

CLASSES = {
    "grid": "limited grids: clipped rows, single cells, offsets without their bias",
    "padding": "padding: ignored from a column, on one side, in holes, in some rows, in large batches",
    "batch": "batches: a row reads another row's data, masks lost in large batches",
    "chunk": "chunks over a cache: causality lost, keys hidden",
    "length": "lengths: keys hidden, windows dropped or invented, buffers that wrap, single rows of tables",
    "position": "far positions: relative errors, clipping, narrow types, trained lengths",
    "magnitude": "magnitudes: epsilon, clipping, overflow, masks that are not low enough, quiet inputs",
    "special": "others: no keys, first and last token id, order and sign of positions, single tokens",
    "band": "bands of lengths without a cache, and from an encoder: outputs, causality, masks, positions",
    "step": "steps and chunks over a band of cached tokens, of one row or several: outputs, masks, positions",
    "own_size": "the block's own sizes: a full window or grid, a whole table, as many keys as the window",
    "reserve": "zeros in caches, free slots of a buffer, means before a norm, softmax of long rows",
    "plain": "prompts and caches of a few tokens, axes that stand still, rows of zeros, long padding, rows far behind",
    "served": "steps over an encoder, texts on several axes, large logits behind a norm, the oldest key of a window",
    "together": "values of a kind, negative positions and rows without a key, where there are many rows or tokens",
    "other_spec": "graphs of another block with these weights: another window, theta, layout, cap, norm, factor",
}
"""The faults of each class."""


Apply = Callable[[onnx.ModelProto], bool]
"""Changes a graph. Returns false if the graph has no place for the change."""


@attrs.frozen
class Fault:
    """A change of a graph, a text with its numbers, and the inputs at which the fault should show."""

    numbers: str
    apply: Apply
    aims: tuple[Aim, ...]


Family = Callable[[Artifact, Random], "Fault | None"]

FAMILIES: dict[str, tuple[str, Family]] = {}
"""Families by name: (class, the function that draws a fault)."""


def family(kind: str, name: str) -> Callable[[Family], Family]:
    """Register a function in FAMILIES under `name`, in the class `kind`."""

    def register(function: Family) -> Family:
        FAMILIES[name] = (kind, function)
        return function

    return register


def corner_mutant(artifact: Artifact, name: str, random: Random) -> tuple[onnx.ModelProto, Fault] | None:
    """A mutant of a family. None if the artifact has no such corner."""
    fault = FAMILIES[name][1](artifact, random)
    if fault is None:
        return None
    model = copy_of(artifact.model)
    return (model, fault) if fault.apply(model) else None


def log_uniform(random: Random, low: float, high: float) -> int:
    """An integer whose logarithm is drawn uniformly."""
    return round(float(np.exp(random.uniform(np.log(low), np.log(high)))))


def on_input(name: str, change: Change) -> Apply:
    """Readers of a graph input read the value that `change` makes of it."""

    def apply(model: onnx.ModelProto) -> bool:
        if all(value.name != name for value in model.graph.input):
            return False
        change_input(model, name, change)
        return True

    return apply


def inputs_named(artifact: Artifact, *names: str) -> list[str]:
    """The graph inputs with these names, of all layers."""
    inputs = [value.name for value in artifact.model.graph.input]
    return [name for name in inputs if name.split(".")[0] in names]


def first_input(artifact: Artifact) -> str:
    """The graph input that contains the tokens."""
    return str(artifact.model.graph.input[0].name)


def is_padded(artifact: Artifact) -> bool:
    """Whether there is an attention_mask."""
    return artifact.spec.padding_mask


def is_cached(artifact: Artifact) -> bool:
    """Whether there are past keys and values."""
    return artifact.spec.kv_cache is not None


def is_free(artifact: Artifact) -> bool:
    """Whether positions are an input without a limit."""
    return artifact.spec.position_axes > 0 and artifact.spec.position_limit() is None


def key_aims(artifact: Artifact, low: int) -> tuple[Aim, ...]:
    """Aims with at least `low` keys. Depending on the spec, keys are cached, come from an encoder, or are tokens."""
    high = min(low + 40, REACH.keys)
    if artifact.spec.cross:
        return (Aim(batch=(1, 2), encoder=(low, high), padding=("none",)),)
    whole = Aim(batch=(1, 1), seq=(low, high), past=(0, 0), padding=("none",))
    if not is_cached(artifact):
        return (whole,)
    step = Aim(batch=(1, 2), seq=(1, 4), past=(low, high), padding=("none",))
    return (step, whole) if low <= REACH.tokens - 40 else (step,)


def most_keys(artifact: Artifact) -> int:
    """The largest number of keys that a fault may need. Inputs can still be somewhat longer."""
    return REACH.keys - 100 if is_cached(artifact) or artifact.spec.cross else REACH.tokens - 60


def on_visibility(hide: bool, condition: Callable[[Logits], str]) -> Apply:
    """Keys for which a condition holds are hidden from queries (`hide`) or shown to them."""
    return lambda model: change_visibility(model, hide, condition)
