"""Corners of zeros and free slots in caches, of the softmax of long rows, and of norms of inputs with a large mean."""

from __future__ import annotations

import attrs
import onnx
from onnx import helper

from mutation.artifacts import Artifact
from mutation.corners.bands import output_off
from mutation.corners.family import (
    Fault,
    Random,
    family,
    first_input,
    inputs_named,
    is_cached,
    log_uniform,
    on_input,
    on_visibility,
)
from mutation.corners.own_size import full_grid
from mutation.inputs import Aim, Arrays
from mutation.surgery import Change, Logits, Nodes, insert, sites


def scaled_by_largest(axes: list[int]) -> Change:
    """Values are divided by the largest magnitude along `axes` and multiplied by it again, as in a quantised cache.
    Zeros give 0 / 0 = NaN."""

    def change(nodes: Nodes, value: str) -> str:
        scale = nodes.op("ReduceMax", nodes.op("Abs", value), nodes.const(axes), keepdims=1)
        return nodes.op("Mul", nodes.op("Div", value, scale), scale)

    return change


@family("reserve", "zero slots of a buffer give NaN")
def _zero_slots(artifact: Artifact, random: Random) -> Fault | None:
    """The zeros are slots that are not written yet, or the whole buffer before the first prompt."""
    if artifact.spec.kv_cache != "shared":
        return None
    name, whole = str(random.choice(inputs_named(artifact, "past_key", "past_value"))), bool(random.random() < 0.3)

    def clear(arrays: Arrays, random: Random) -> None:
        written = 0 if whole else int(arrays["write_indices"].max())
        for other, values in arrays.items():
            if other.startswith("past_"):
                values[:, :, written:] = 0

    aim = Aim(batch=(1, 2), seq=(1, 8), past=(0, 0) if whole else (3, 30), spare=(2, 20), padding=("none",), edit=clear)
    change = scaled_by_largest([2, 3] if whole else [3])
    return Fault(f"{name}, {'all slots' if whole else 'each slot'}", on_input(name, change), (aim,))


@family("reserve", "zero rows of a cache give NaN")
def _zero_cached(artifact: Artifact, random: Random) -> Fault | None:
    """The zeros are slots of padding, as when caches of several lengths are merged."""
    if artifact.spec.kv_cache != "concat":
        return None
    name = str(random.choice(inputs_named(artifact, "past_key", "past_value")))

    def clear(arrays: Arrays, random: Random) -> None:
        count = 1 + int(random.integers(3))
        for other, values in arrays.items():
            if other.startswith("past_"):
                values[0, :, :count] = 0
        if "attention_mask" in arrays:
            arrays["attention_mask"][0, :count] = 0

    aim = Aim(batch=(2, 3), seq=(1, 4), past=(6, 30), padding=("none",), edit=clear)
    return Fault(name, on_input(name, scaled_by_largest([3])), (aim,))


def _free_slots(artifact: Artifact, nodes: Nodes) -> str:
    """The number of slots after the last token of the longest row."""
    ends = nodes.op("ReduceMax", "write_indices", keepdims=0)
    slots = nodes.size(inputs_named(artifact, "past_key")[0], 2)
    return nodes.op("Sub", slots, nodes.op("Add", ends, nodes.size(first_input(artifact), 1)))


@family("reserve", "far free slots are seen")
def _slots_seen(artifact: Artifact, random: Random) -> Fault | None:
    """Slots that are at least a drawn number after the last token are seen, in calls of one row or of any number."""
    if artifact.spec.kv_cache != "shared":
        return None
    least, alone = log_uniform(random, 8, 80), bool(random.integers(2))

    def seen(at: Logits) -> str:
        nodes = at.nodes
        end = nodes.op("Add", nodes.op("ReduceMax", "write_indices", keepdims=0), at.seq)
        parts = [nodes.op("GreaterOrEqual", at.key(), nodes.op("Add", end, nodes.const(least)))]
        if alone:
            parts.append(nodes.op("Equal", at.batch, nodes.const(1)))
        return nodes.all_of(*parts)

    def apply(model: onnx.ModelProto) -> bool:
        return on_visibility(False, seen)(model)

    aim = Aim(batch=(1, 1) if alone else (1, 3), seq=(1, 6), past=(5, 60), spare=(least + 1, 400), padding=("none",))
    return Fault(f"{least} behind the last{', one row' if alone else ''}", apply, (aim,))


@family("reserve", "outputs off where many slots are free")
def _slots_output(artifact: Artifact, random: Random) -> Fault | None:
    if artifact.spec.kv_cache != "shared":
        return None
    least = log_uniform(random, 64, 250)

    def many(nodes: Nodes) -> str:
        return nodes.op("Greater", _free_slots(artifact, nodes), nodes.const(least))

    aim = Aim(batch=(1, 3), seq=(1, 12), past=(0, 60), spare=(least + 1, 600), padding=("none",))
    return Fault(f"more than {least}", output_off(many), (aim,))


@family("reserve", "variance as a difference of means")
def _naive_variance(artifact: Artifact, random: Random) -> Fault | None:
    """A decomposed LayerNorm whose variance is the mean of squares minus the square of the mean."""
    if not inputs_named(artifact, "hidden_states"):
        return None
    half = artifact.spec.dtype == "fp16"

    def apply(model: onnx.ModelProto) -> bool:
        norms = list(sites(model, "LayerNormalization"))
        for holder, index, node in reversed(norms):
            nodes, value = Nodes(), node.input[0]
            epsilon = next((each.f for each in node.attribute if each.name == "epsilon"), 1e-5)
            mean = nodes.op("ReduceMean", value, nodes.const([-1]), keepdims=1)
            squares = nodes.op("ReduceMean", nodes.op("Mul", value, value), nodes.const([-1]), keepdims=1)
            variance = nodes.op("Sub", squares, nodes.op("Mul", mean, mean))
            variance = nodes.op("Max", variance, nodes.like(value, 0.0))
            root = nodes.op("Sqrt", nodes.op("Add", variance, nodes.like(value, epsilon)))
            made = nodes.op("Mul", nodes.op("Div", nodes.op("Sub", value, mean), root), node.input[1])
            if len(node.input) > 2 and node.input[2]:
                made = nodes.op("Add", made, node.input[2])
            nodes.made.append(helper.make_node("Identity", [made], [node.output[0]]))
            del holder.node[index]
            insert(holder, index, nodes)
        return bool(norms)

    def shift(arrays: Arrays, random: Random) -> None:
        hidden = arrays["hidden_states"]
        hidden += hidden.dtype.type(random.uniform(4, 12) if half else random.uniform(100, 300))

    return Fault("every LayerNorm", apply, (Aim(batch=(1, 2), seq=(4, 24), padding=("none",), edit=shift),))


@family("reserve", "softmax without its maximum in long rows")
def _plain_softmax(artifact: Artifact, random: Random) -> Fault | None:
    """With more keys than a drawn number, exponentials of large logits overflow. Rows without keys stay right."""
    least = log_uniform(random, 64, 200)

    def apply(model: onnx.ModelProto) -> bool:
        found = list(sites(model, "Softmax"))
        for holder, index, node in reversed(found):
            nodes, logits, softmax = Nodes(), node.input[0], f"{node.output[0]}_right"
            powers = nodes.op("Exp", logits)
            plain = nodes.op("Div", powers, nodes.op("ReduceSum", powers, nodes.const([-1]), keepdims=1))
            largest = nodes.op("ReduceMax", logits, nodes.const([-1]), keepdims=1)
            attended = nodes.op("Greater", largest, nodes.like(logits, -1e4))
            chosen = nodes.op("And", attended, nodes.op("Greater", nodes.size(logits, -1), nodes.const(least)))
            nodes.made.append(helper.make_node("Softmax", [logits], [softmax], axis=-1))
            made = nodes.op("Where", chosen, plain, softmax)
            nodes.made.append(helper.make_node("Identity", [made], [node.output[0]]))
            del holder.node[index]
            insert(holder, index, nodes)
        return bool(found)

    cells = full_grid(artifact) or 2 * least
    if cells <= least:
        return None
    keys = (least + 1, min(2 * least, cells))
    loud = Aim(batch=(1, 1), seq=keys, encoder=keys, padding=("none",), magnitude=8)
    if not is_cached(artifact):
        return Fault(f"more than {least} keys", apply, (loud,))

    def loud_cache(arrays: Arrays, random: Random) -> None:
        for name, values in arrays.items():
            if name.startswith("past_key"):
                values *= values.dtype.type(8)

    return Fault(f"more than {least} keys", apply, (loud, attrs.evolve(loud, seq=(1, 4), edit=loud_cache)))
