"""Two corners at once: values of some kind, negative positions or rows without a key, in large batches, in long rows,
over many cached or encoder tokens."""

from __future__ import annotations

from functools import partial

import attrs
import numpy as np
import onnx
from onnx import TensorProto

from mutation.artifacts import Artifact
from mutation.corners.bands import Condition, cached_tokens, input_off, output_off
from mutation.corners.family import Apply, Fault, Random, family, first_input, inputs_named, is_padded, log_uniform
from mutation.corners.magnitude import loud_feature
from mutation.inputs import Aim, Arrays, Range
from mutation.surgery import Nodes, change_value


@attrs.frozen
class Large:
    """Where a size is large: in words, as a condition in the graph, and the inputs that have it."""

    text: str
    holds: Condition
    aim: Aim


def draw_large(artifact: Artifact, random: Random) -> Large:
    """A large batch, long rows, many cached tokens or many of an encoder."""
    first, few = first_input(artifact), Aim(batch=(1, 3), seq=(2, 16), past=(0, 12), encoder=(4, 16), padding=("none",))
    kinds = ["rows", "tokens"] + ["cached"] * bool(artifact.spec.kv_cache) + ["encoder"] * artifact.spec.cross
    kind = str(random.choice(kinds))
    low, high, least = {"rows": (4, 17, 0), "tokens": (60, 400, 40), "cached": (30, 600, 40), "encoder": (40, 600, 40)}[
        kind
    ]
    size = log_uniform(random, low, high)
    sizes: Range = (size, size + max(least, 8))
    aim = {
        "rows": lambda: attrs.evolve(few, batch=sizes),
        "tokens": lambda: attrs.evolve(few, batch=(1, 2), seq=sizes, past=(0, 0)),
        "cached": lambda: attrs.evolve(few, past=sizes),
        "encoder": lambda: attrs.evolve(few, encoder=sizes),
    }[kind]()

    def holds(nodes: Nodes) -> str:
        length = {
            "rows": partial(nodes.size, first, 0),
            "tokens": partial(nodes.size, first, 1),
            "cached": partial(cached_tokens, artifact, nodes),
            "encoder": partial(nodes.size, "encoder_hidden_states", 1),
        }[kind]()
        return nodes.op("GreaterOrEqual", length, nodes.const(size))

    return Large(f"{size} {kind} and more", holds, aim)


def sized(name: str, low: float, high: float) -> Condition:
    """Whether the root mean square of an input lies between two numbers."""

    def condition(nodes: Nodes) -> str:
        squares = nodes.op("Mul", *[nodes.op("Cast", name, to=TensorProto.FLOAT)] * 2)
        size = nodes.op("Sqrt", nodes.op("ReduceMean", squares, keepdims=0))
        ends = nodes.const(low, np.float32), nodes.const(high, np.float32)
        return nodes.all_of(nodes.op("Greater", size, ends[0]), nodes.op("Less", size, ends[1]))

    return condition


def _both(large: Large, other: Condition) -> Condition:
    return lambda nodes: nodes.all_of(large.holds(nodes), other(nodes))


@family("together", "hidden states of some size off where there are many")
def _sizes(artifact: Artifact, random: Random) -> Fault | None:
    names = inputs_named(artifact, "hidden_states", "encoder_hidden_states")
    if not names:
        return None
    loud = 2.0 if artifact.spec.dtype == "fp16" else 6.0
    size = float(random.choice([1e-3, 0.05, loud]))
    name, low, high = str(random.choice(names)), size / 4, size * 4 if size < 1 else np.inf
    low = low if size < 1 else size / 1.3
    large = draw_large(artifact, random)
    aim = attrs.evolve(large.aim, magnitude=size)
    return Fault(f"{name} of size {size:g}, {large.text}", output_off(_both(large, sized(name, low, high))), (aim,))


@family("together", "large features clipped where there are many")
def _features(artifact: Artifact, random: Random) -> Fault | None:
    names = inputs_named(artifact, "hidden_states", "encoder_hidden_states")
    if not names or artifact.spec.dtype != "fp32" or artifact.spec.layers > 1:
        return None
    name, limit, large = str(random.choice(names)), float(random.uniform(40, 200)), draw_large(artifact, random)

    def clipped(nodes: Nodes, value: str) -> str:
        return nodes.op("Clip", value, nodes.like(value, -limit), nodes.like(value, limit))

    apply = input_off(name, large.holds, clipped)
    return Fault(f"{name} at {limit:.1f}, {large.text}", apply, (attrs.evolve(large.aim, edit=loud_feature),))


@family("together", "negative positions taken as 0 where there are many")
def _negative(artifact: Artifact, random: Random) -> Fault | None:
    if not artifact.spec.negative_positions or not artifact.spec.position_axes:
        return None
    large = draw_large(artifact, random)
    apply = input_off("position_ids", large.holds, lambda nodes, value: nodes.op("Max", value, nodes.const(0)))
    return Fault(large.text, apply, (attrs.evolve(large.aim, positions=("negative",)),))


def without_keys(condition: Condition) -> Apply:
    """The output of rows without a key is off where a condition holds."""

    def change(nodes: Nodes, value: str) -> str:
        kept = nodes.op("ReduceMax", "attention_mask", nodes.const([1]), keepdims=1)
        rows = nodes.op("Equal", nodes.op("Unsqueeze", kept, nodes.const([2])), nodes.const(0))
        wrong = nodes.op("And", rows, condition(nodes))
        return nodes.op("Where", wrong, nodes.op("Add", value, nodes.like(value, 0.1)), value)

    def apply(model: onnx.ModelProto) -> bool:
        change_value(model.graph, "output", change)
        return True

    return apply


@family("together", "a query without keys where there are many")
def _keyless(artifact: Artifact, random: Random) -> Fault | None:
    if not is_padded(artifact):
        return None
    large = draw_large(artifact, random)

    def keyless(arrays: Arrays, random: Random) -> None:
        arrays["attention_mask"][random.integers(len(arrays["attention_mask"]))] = 0

    return Fault(large.text, without_keys(large.holds), (attrs.evolve(large.aim, edit=keyless),))


@family("together", "tokens of one number off")
def _even(artifact: Artifact, random: Random) -> Fault | None:
    """Tokens whose features are alike have no variance."""
    names = inputs_named(artifact, "hidden_states", "encoder_hidden_states")
    if not names:
        return None
    name, single = str(random.choice(names)), bool(random.integers(2))

    def change(nodes: Nodes, value: str) -> str:
        ends = [nodes.op(kind, value, nodes.const([-1]), keepdims=1) for kind in ("ReduceMax", "ReduceMin")]
        zero = nodes.op("CastLike", nodes.const(0.0, np.float32), value)
        alike = nodes.op("And", nodes.op("Equal", *ends), nodes.op("Not", nodes.op("Equal", ends[0], zero)))
        if single:
            alike = nodes.op("And", alike, nodes.op("Equal", nodes.size(value, 1), nodes.const(1)))
        return nodes.op("Where", alike, nodes.like(value, np.nan), value)

    def even(arrays: Arrays, random: Random) -> None:
        arrays[name][:, random.integers(arrays[name].shape[1])] = random.choice([1.0, -1.0, 0.5])

    def apply(model: onnx.ModelProto) -> bool:
        return input_off(name, lambda nodes: nodes.const(True, bool), change)(model)

    aim = Aim(batch=(1, 3), seq=(1, 1) if single else (1, 12), encoder=(1, 1) if single else (1, 12), past=(0, 12))
    return Fault(
        f"{name}{', single tokens' if single else ''}", apply, (attrs.evolve(aim, padding=("none",), edit=even),)
    )
