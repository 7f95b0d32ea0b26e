"""Corners of magnitudes: epsilon, clipping, overflow, masks that are not low enough, quiet inputs."""

from __future__ import annotations

from functools import partial

import attrs
import numpy as np
import onnx

from mutation.artifacts import Artifact
from mutation.corners.family import Apply, Fault, Random, family, first_input, inputs_named, log_uniform, on_input
from mutation.inputs import Aim, Arrays, zero_rows
from mutation.surgery import (
    LOWEST,
    Change,
    Nodes,
    at_most,
    change_logits,
    change_value,
    constant_value,
    mask_sites,
    read_constant,
    sites,
)


def _quiet(artifact: Artifact) -> tuple[Aim, ...]:
    shape = Aim(batch=(1, 2), seq=(4, 16), past=(0, 12), encoder=(4, 16), padding=("none",))
    return (attrs.evolve(shape, magnitude=1e-3), attrs.evolve(shape, edit=zero_rows))


def loud_feature(arrays: Arrays, random: Random, tokens: slice = slice(None)) -> None:
    """Make one feature of these tokens 400 times larger."""
    for name, values in arrays.items():
        if name in ("hidden_states", "encoder_hidden_states"):
            values[:, tokens, random.integers(values.shape[-1])] *= 400


loud_first = partial(loud_feature, tokens=slice(1))


def _loud(artifact: Artifact) -> tuple[Aim, ...]:
    shape = Aim(batch=(1, 2), seq=(4, 16), past=(0, 12), encoder=(4, 16), padding=("none",))
    half = artifact.spec.dtype == "fp16"
    return (
        shape,
        attrs.evolve(shape, magnitude=6.0),
        attrs.evolve(shape, edit=loud_feature),
        *(() if half else (attrs.evolve(shape, magnitude=12.0),)),
    )


@family("magnitude", "epsilon of a norm")
def _norm_epsilon(artifact: Artifact, random: Random) -> Fault | None:
    factor = float(random.choice([0.0, 0.1, 10.0, 100.0, 1e3]))

    def apply(model: onnx.ModelProto) -> bool:
        named = [
            attribute for _, _, node in sites(model) for attribute in node.attribute if attribute.name == "epsilon"
        ]
        added = [
            (holder, index, at, value)
            for holder, index, node in sites(model, "Add", "Max")
            for at, name in enumerate(node.input)
            if name not in artifact.weights
            and (value := constant_value(holder, model, name)) is not None
            and value.dtype.kind == "f"
            and value.size == 1
            and 0 < float(value.ravel()[0]) < 1e-3
        ]
        for attribute in named:
            attribute.f *= factor
        for holder, index, at, value in reversed(added):
            read_constant(holder, index, at, np.asarray(value * value.dtype.type(factor), value.dtype))
        return bool(named or added)

    return Fault(f"times {factor:g}", apply, _quiet(artifact))


def _projections(model: onnx.ModelProto) -> list[str]:
    """The outputs of the nodes that read the transposed weights q_proj, k_proj and v_proj."""
    made = []
    for node in model.graph.node:
        if node.op_type == "Transpose" and node.input[0].endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            made += [other.output[0] for other in model.graph.node if node.output[0] in list(other.input)]
    return made


def _on_projection(random: Random, change: Change) -> Apply:
    which = random.random()

    def apply(model: onnx.ModelProto) -> bool:
        names = _projections(model)
        if not names:
            return False
        change_value(model.graph, names[int(which * len(names))], change)
        return True

    return apply


def _clip(limit: float) -> Change:
    """Values are clipped at -limit and limit."""
    return lambda nodes, value: nodes.op("Clip", value, nodes.like(value, -limit), nodes.like(value, limit))


@family("magnitude", "values clipped")
def _values_clipped(artifact: Artifact, random: Random) -> Fault | None:
    limit = round(float(random.uniform(3.5, 12)), 2)
    return Fault(f"at {limit}", _on_projection(random, _clip(limit)), _loud(artifact))


@family("magnitude", "inputs clipped")
def _inputs_clipped(artifact: Artifact, random: Random) -> Fault | None:
    names = inputs_named(artifact, "hidden_states", "encoder_hidden_states")
    if not names:
        return None
    name, limit = str(random.choice(names)), round(float(random.uniform(3.5, 30)), 2)
    return Fault(f"{name} at {limit}", on_input(name, _clip(limit)), _loud(artifact))


@family("magnitude", "cached values clipped")
def _cache_clipped(artifact: Artifact, random: Random) -> Fault | None:
    names = inputs_named(artifact, "past_key", "past_value")
    if not names:
        return None
    name, limit = str(random.choice(names)), round(float(random.uniform(3.0, 15)), 2)

    def loud(arrays: Arrays, random: Random) -> None:
        arrays[name] *= arrays[name].dtype.type(random.uniform(1, 8))

    aim = Aim(batch=(1, 2), seq=(1, 8), past=(4, 30), padding=("none",), edit=loud)
    return Fault(f"{name} at {limit}", on_input(name, _clip(limit)), (aim,))


@family("magnitude", "softmax without its maximum")
def _plain_softmax(artifact: Artifact, random: Random) -> Fault | None:
    limit = float(random.choice([30.0, 60.0, 88.0]))
    if artifact.spec.dtype == "fp16":
        limit = 10.0

    def apply(model: onnx.ModelProto) -> bool:
        """Cap logits instead of subtracting their maximum."""
        return change_logits(model, at_most(limit))

    return Fault(f"capped at {limit}", apply, _loud(artifact))


@family("magnitude", "overflow in half precision")
def _overflow(artifact: Artifact, random: Random) -> Fault | None:
    """Values that would overflow fp16 after a factor become infinite, as if a product were summed in fp16."""
    limit = round(65504 / float(2.0 ** random.integers(6, 12)), 1)

    def change(nodes: Nodes, value: str) -> str:
        large = nodes.op("Greater", nodes.op("Abs", value), nodes.like(value, limit))
        infinite = nodes.op("CastLike", nodes.const(np.inf, np.float32), value)
        return nodes.op("Where", large, infinite, value)

    return Fault(f"above {limit}", _on_projection(random, change), _loud(artifact))


def masked_with(low: float) -> Apply:
    """Hidden keys get this logit."""

    def apply(model: onnx.ModelProto) -> bool:
        places = mask_sites(model)
        for site in reversed(places):
            old = constant_value(site.holder, model, site.node.input[2])
            assert old is not None
            if float(old.ravel()[0]) < LOWEST * 1e-34:
                read_constant(site.holder, site.index, 2, np.full_like(old, low))
        return bool(places)

    return apply


@family("magnitude", "mask not low enough")
def _shallow_mask(artifact: Artifact, random: Random) -> Fault | None:
    half, large = artifact.spec.dtype == "fp16", random.random() < 0.3
    low = -1e4 if large and not half else float(-log_uniform(random, 18, 120))

    shape = Aim(batch=(1, 2), seq=(6, 16), past=(2, 12), encoder=(6, 16), padding=("left", "right", "holes"))
    loud = (
        attrs.evolve(shape, edit=loud_feature) if low == -1e4 else attrs.evolve(shape, magnitude=6.0 if half else 12.0)
    )
    first = attrs.evolve(shape, past=(0, 0), padding=("none",), edit=loud_first)
    return Fault(f"{low:g}", masked_with(low), (shape, loud, first))


@family("magnitude", "quiet values lost")
def _quiet_lost(artifact: Artifact, random: Random) -> Fault | None:
    limit = float(10 ** random.uniform(-4.5, -2.5))
    if artifact.spec.dtype == "fp16":
        limit = max(limit, 1e-4)

    def change(nodes: Nodes, value: str) -> str:
        small = nodes.op("Less", nodes.op("Abs", value), nodes.like(value, limit))
        return nodes.op("Where", small, nodes.like(value, 0.0), value)

    return Fault(f"below {limit:.2g}", _on_projection(random, change), _quiet(artifact))


@family("magnitude", "rows of zeros give NaN")
def _zero_rows_nan(artifact: Artifact, random: Random) -> Fault | None:
    name = first_input(artifact)
    if name != "hidden_states":
        return None

    def change(nodes: Nodes, value: str) -> str:
        total = nodes.op("ReduceSum", nodes.op("Abs", value), nodes.const([-1]), keepdims=1)
        return nodes.op("Mul", value, nodes.op("Div", total, total))

    return Fault("0 / 0", on_input(name, change), (Aim(edit=zero_rows, batch=(1, 2), seq=(3, 9), padding=("none",)),))
