"""Other corners: queries without keys, token ids, the order and sign of positions, single tokens, present keys."""

from __future__ import annotations

import onnx
from onnx import helper

from mutation.artifacts import Artifact
from mutation.corners.family import (
    Fault,
    Random,
    family,
    inputs_named,
    is_free,
    is_padded,
    key_aims,
    log_uniform,
    on_input,
    on_visibility,
)
from mutation.inputs import REACH, Aim, Arrays, Range
from mutation.surgery import Logits, Nodes, change_value


def _batches(nodes: Nodes, value: str, batch: int) -> str:
    """Whether a value has exactly one row (`batch` is 1), or at least `batch` rows. Kernels may differ so."""
    return nodes.op("Equal" if batch == 1 else "GreaterOrEqual", nodes.size(value, 0), nodes.const(batch))


def _batch_range(batch: int) -> Range:
    return (1, 1) if batch == 1 else (batch, 8)


@family("special", "a query without keys")
def _keyless(artifact: Artifact, random: Random) -> Fault | None:
    """In batches of some sizes, a row whose keys are all masked gives NaN, or is off by 0.1."""
    if not is_padded(artifact):
        return None
    batch, nan = int(random.integers(1, 4)), bool(random.integers(2))

    def change(nodes: Nodes, value: str) -> str:
        mask = "attention_mask"
        kept = nodes.op("ReduceMax", mask, nodes.const([1]), keepdims=1)
        empty = nodes.op("Equal", nodes.op("Unsqueeze", kept, nodes.const([2])), nodes.const(0))
        here = nodes.op("And", empty, _batches(nodes, mask, batch))
        wrong = nodes.like(value, float("nan")) if nan else nodes.op("Add", value, nodes.like(value, 0.1))
        return nodes.op("Where", here, wrong, value)

    def apply(model: onnx.ModelProto) -> bool:
        change_value(model.graph, "output", change)
        return True

    aims = (Aim(batch=_batch_range(batch), seq=(1, 9), past=(0, 9), encoder=(1, 9), padding=("keyless",)),)
    return Fault(f"{'NaN' if nan else 'off'}, batch {batch}{'' if batch == 1 else ' and more'}", apply, aims)


@family("special", "a token id misread")
def _token_id(artifact: Artifact, random: Random) -> Fault | None:
    size = artifact.spec.vocab_size
    if size is None:
        return None
    token = int(random.choice([0, size - 1]))

    def change(nodes: Nodes, value: str) -> str:
        return nodes.op("Where", nodes.op("Equal", value, nodes.const(token)), nodes.const(size // 2), value)

    def visit(arrays: Arrays, random: Random) -> None:
        arrays["input_ids"].flat[random.integers(arrays["input_ids"].size)] = token

    return Fault(f"{token} of {size}", on_input("input_ids", change), (Aim(edit=visit),))


@family("special", "positions sorted")
def _sorted(artifact: Artifact, random: Random) -> Fault | None:
    spec = artifact.spec
    if spec.position_axes != 1 or spec.ordered:
        return None
    least = log_uniform(random, 8, 120)

    def change(nodes: Nodes, value: str) -> str:
        length = nodes.size(value, 1)
        nodes.made.append(
            helper.make_node(
                "TopK",
                [value, nodes.op("Unsqueeze", length, nodes.const([0]))],
                ["fault_sorted", "fault_order"],
                axis=1,
                largest=0,
            )
        )
        long = nodes.op("GreaterOrEqual", length, nodes.const(least))
        return nodes.op("Where", long, "fault_sorted", value)

    aim = Aim(batch=(1, 2), seq=(least, least + 30), positions=("shuffled",), padding=("none",), past=(0, 5))
    return Fault(f"from {least} tokens", on_input("position_ids", change), (aim,))


@family("special", "positions taken as consecutive")
def _consecutive(artifact: Artifact, random: Random) -> Fault | None:
    if artifact.spec.position_axes != 1:
        return None
    least, kind = log_uniform(random, 2, 100), str(random.choice(["gaps", "repeated"]))

    def change(nodes: Nodes, value: str) -> str:
        first = nodes.op("Slice", value, nodes.const([0]), nodes.const([1]), nodes.const([1]))
        length = nodes.size(value, 1)
        made = nodes.op("Add", first, nodes.column(length, 2, 1))
        return nodes.op("Where", nodes.op("GreaterOrEqual", length, nodes.const(least)), made, value)

    aim = Aim(batch=(1, 2), seq=(least, least + 20), positions=(kind,), start=(0, 40), padding=("none",))
    return Fault(f"{kind}, from {least} tokens", on_input("position_ids", change), (aim,))


ANY_SIGN = ("none", "rope", "sinusoidal", "rope2d", "mrope", "rope-mixed")
"""Encodings whose formula holds for negative positions, if all layers of a stack have one of them."""


@family("special", "negative positions taken as 0")
def _negative(artifact: Artifact, random: Random) -> Fault | None:
    names = {layer.encoding.name for layer in artifact.spec.distinct_layers()}
    if not is_free(artifact) or not names <= set(ANY_SIGN):
        return None

    def change(nodes: Nodes, value: str) -> str:
        return nodes.op("Max", value, nodes.const(0))

    aim = Aim(batch=(1, 2), seq=(4, 20), positions=("negative",), past=(0, 5))
    return Fault("below 0", on_input("position_ids", change), (aim,))


@family("special", "a single token")
def _single_token(artifact: Artifact, random: Random) -> Fault | None:
    """A call with one token is wrong in batches of some sizes, or only if nothing is cached."""
    batch, first = int(random.integers(1, 4)), bool(random.integers(2)) and artifact.spec.kv_cache == "concat"
    caches = inputs_named(artifact, "past_key")

    def change(nodes: Nodes, value: str) -> str:
        alone = nodes.op("And", nodes.op("Equal", nodes.size(value, 1), nodes.const(1)), _batches(nodes, value, batch))
        if first:
            alone = nodes.op("And", alone, nodes.op("Equal", nodes.size(caches[0], 2), nodes.const(0)))
        return nodes.op("Where", alone, nodes.op("Mul", value, nodes.like(value, 1.02)), value)

    def apply(model: onnx.ModelProto) -> bool:
        change_value(model.graph, "output", change)
        return True

    aims = (Aim(batch=_batch_range(batch), seq=(1, 1), past=(0, 0 if first else 20), padding=("none",)),)
    numbers = f"batch {batch}{'' if batch == 1 else ' and more'}{', nothing cached' if first else ''}"
    return Fault(numbers, apply, aims)


@family("special", "an unused cache read")
def _unused_slots(artifact: Artifact, random: Random) -> Fault | None:
    """The last slot of a shared buffer is seen, even by queries before it."""
    if artifact.spec.kv_cache != "shared":
        return None
    slots = log_uniform(random, 6, 400)

    def seen(at: Logits) -> str:
        nodes = at.nodes
        long = nodes.op("GreaterOrEqual", at.keys, nodes.const(slots))
        return nodes.op("And", long, nodes.op("Equal", at.key(), nodes.op("Sub", at.keys, nodes.const(1))))

    aim = Aim(batch=(1, 4), seq=(1, 6), past=(slots, slots + 20), padding=("none",))
    return Fault(f"from {slots} slots", on_visibility(False, seen), (aim,))


@family("special", "present keys or values off")
def _present(artifact: Artifact, random: Random) -> Fault | None:
    """The keys or values that are returned for the next call are wrong from a slot on. The attended ones are right."""
    names = [value.name for value in artifact.model.graph.output if value.name.startswith("present")]
    if not names:
        return None
    name, slot = str(random.choice(names)), log_uniform(random, 10, REACH.keys - 200)

    def apply(model: onnx.ModelProto) -> bool:
        inner = f"{name}_inner"
        for node in model.graph.node:
            node.output[:] = [inner if output == name else output for output in node.output]
            node.input[:] = [inner if value == name else value for value in node.input]
        nodes = Nodes()
        columns = nodes.column(nodes.size(inner, 2), 4, 2)
        far = nodes.op("GreaterOrEqual", columns, nodes.const(slot))
        wrong = nodes.op("Where", far, nodes.op("Mul", inner, nodes.like(inner, 1.01)), inner)
        nodes.made.append(helper.make_node("Identity", [wrong], [name], name="fault_present"))
        model.graph.node.extend(nodes.made)
        return True

    return Fault(f"{name} from {slot}", apply, key_aims(artifact, slot + 2))
