"""Corners of ordinary inputs: prompts and caches of a few tokens, pictures, rows of zeros, and rows that start late."""

from __future__ import annotations

import numpy as np
import onnx

from mutation.artifacts import Artifact
from mutation.corners.bands import aim_at, output_off, sizes_within
from mutation.corners.family import (
    Fault,
    Random,
    family,
    first_input,
    is_cached,
    is_free,
    is_padded,
    log_uniform,
    on_input,
)
from mutation.corners.reserve import scaled_by_largest
from mutation.corners.special import ANY_SIGN
from mutation.inputs import Aim, Arrays, Range
from mutation.surgery import Nodes


def _few(random: Random, low: int, most: int) -> Range:
    """A range from a small number to about twice that number."""
    first = log_uniform(random, low, most)
    return first, 2 * first + 1


def _few_rows(random: Random) -> Range:
    return (1, 1) if random.random() < 0.6 else (5, 8)


@family("plain", "outputs off for a few tokens")
def _short_prompt(artifact: Artifact, random: Random) -> Fault | None:
    rows, seq = _few_rows(random), _few(random, 2, 30)
    apply = output_off(sizes_within(artifact, rows=rows, seq=seq, past=(0, 0)))
    return Fault(f"{rows[0]} rows and more, {seq[0]} to {seq[1]} tokens", apply, (aim_at(rows=rows, seq=seq),))


@family("plain", "outputs off over a few cached tokens")
def _short_past(artifact: Artifact, random: Random) -> Fault | None:
    if not is_cached(artifact):
        return None
    rows, past = _few_rows(random), _few(random, 1, 20)
    seq = (1, 1) if random.random() < 0.7 else (2, 40)
    apply = output_off(sizes_within(artifact, rows=rows, seq=seq, past=past))
    text = f"{rows[0]} rows and more, {seq[0]} to {seq[1]} tokens after {past[0]} to {past[1]}"
    return Fault(text, apply, (aim_at(rows=rows, seq=seq, past=past),))


@family("plain", "outputs off in short chunks")
def _short_chunk(artifact: Artifact, random: Random) -> Fault | None:
    """Chunks of 2 to 6 tokens, as in speculative decoding."""
    if not is_cached(artifact):
        return None
    rows, first = _few_rows(random), log_uniform(random, 1, 600)
    past = (first, 4 * first + 8)
    apply = output_off(sizes_within(artifact, rows=rows, seq=(2, 6), past=past))
    text = f"{rows[0]} rows and more, 2 to 6 tokens after {past[0]} to {past[1]}"
    return Fault(text, apply, (aim_at(rows=rows, seq=(2, 6), past=past),))


@family("plain", "outputs off where an axis stands still")
def _still(artifact: Artifact, random: Random) -> Fault | None:
    """All positions of a row are the same along one axis, as all patches of a picture have the same time."""
    axes = artifact.spec.position_axes
    if axes == 0 or (axes > 1 and artifact.spec.position_limit() is not None):
        return None
    axis = int(random.integers(axes))

    def still(nodes: Nodes) -> str:
        along = "position_ids" if axes > 1 else nodes.op("Unsqueeze", "position_ids", nodes.const([2]))
        along = nodes.op("Gather", along, nodes.const([axis]), axis=2)
        ends = [nodes.op(kind, along, nodes.const([1]), keepdims=1) for kind in ("ReduceMax", "ReduceMin")]
        several = nodes.op("Greater", nodes.size(first_input(artifact), 1), nodes.const(3))
        return nodes.op("And", nodes.op("Equal", *ends), several)

    def stop(arrays: Arrays, random: Random) -> None:
        positions = arrays["position_ids"]
        positions.reshape(*positions.shape[:2], -1)[:, :, axis] = random.integers(0, 9)

    aim = Aim(batch=(1, 3), seq=(4, 60), edit=stop)
    return Fault(f"axis {axis}", output_off(still), (aim,))


@family("plain", "rows of zeros give NaN")
def _zero_rows(artifact: Artifact, random: Random) -> Fault | None:
    """The rows fill up a batch. Inputs are divided by the largest of their row and multiplied by it again."""
    name = first_input(artifact)
    if name != "hidden_states":
        return None

    def clear(arrays: Arrays, random: Random) -> None:
        arrays[name][random.integers(len(arrays[name]))] = 0

    return Fault("a row", on_input(name, scaled_by_largest([1, 2])), (Aim(batch=(1, 3), seq=(2, 20), edit=clear),))


@family("plain", "long left padding ignored")
def _long_padding(artifact: Artifact, random: Random) -> Fault | None:
    """If a row begins with at least a drawn number of masked columns, these become attended."""
    if not is_padded(artifact):
        return None
    least = log_uniform(random, 120, 500)

    def change(nodes: Nodes, mask: str) -> str:
        before = nodes.op("Equal", nodes.op("CumSum", mask, nodes.const(1)), nodes.const(0))
        count = nodes.op("ReduceSum", nodes.op("Cast", before, to=onnx.TensorProto.INT64), nodes.const([1]), keepdims=1)
        long = nodes.op("GreaterOrEqual", count, nodes.const(least))
        return nodes.op("Where", nodes.op("And", long, before), nodes.const(1), mask)

    def pad(arrays: Arrays, random: Random) -> None:
        arrays["attention_mask"][:] = 1
        arrays["attention_mask"][:, : least + int(random.integers(0, 100))] = 0

    aim = Aim(batch=(1, 1), seq=(1000, 1050), past=(0, 0), encoder=(1000, 1050), spare=(0, 0), edit=pad)
    return Fault(f"from {least} on", on_input("attention_mask", change), (aim,))


@family("plain", "rows that are far behind read elsewhere")
def _far_behind(artifact: Artifact, random: Random) -> Fault | None:
    """Rows of a shared buffer whose index is far below the largest one, as with requests that came later."""
    if artifact.spec.kv_cache != "shared":
        return None
    least = log_uniform(random, 30, 300)

    def change(nodes: Nodes, value: str) -> str:
        lowest = nodes.op("Sub", nodes.op("ReduceMax", value, keepdims=0), nodes.const(least))
        began = nodes.op("Greater", value, nodes.const(0))
        return nodes.op("Where", began, nodes.op("Max", value, lowest), value)

    def spread(arrays: Arrays, random: Random) -> None:
        indices = arrays["write_indices"]
        indices[:] = random.integers(1, max(2, int(indices.max()) - least), len(indices))
        indices[0] = least + 400

    aim = Aim(batch=(2, 4), seq=(1, 1), past=(least + 400, least + 420), padding=("none",), edit=spread)
    return Fault(f"by {least} and more", on_input("write_indices", change), (aim,))


@family("plain", "negative positions end")
def _negative_end(artifact: Artifact, random: Random) -> Fault | None:
    names = {layer.encoding.name for layer in artifact.spec.distinct_layers()}
    if not is_free(artifact) or not names <= set(ANY_SIGN) - {"none"}:
        return None
    lowest = -log_uniform(random, 90, 20_000)

    def far_below(arrays: Arrays, random: Random) -> None:
        arrays["position_ids"] += 2 * lowest

    aim = Aim(batch=(1, 2), seq=(4, 30), past=(0, 9), positions=("shuffled",), start=(0, 0), edit=far_below)
    if artifact.spec.position_axes > 1:
        aim = Aim(batch=(1, 2), seq=(4, 30), past=(0, 9), edit=far_below)
    change = on_input("position_ids", lambda nodes, value: nodes.op("Max", value, nodes.const(np.int64(lowest))))
    return Fault(f"at {lowest}", change, (aim,))
