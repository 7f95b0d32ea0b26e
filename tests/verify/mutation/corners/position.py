"""Corners of positions: relative errors far out, clipping, narrow types, trained lengths."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from mutation.artifacts import Artifact
from mutation.corners.family import Apply, Fault, Random, family, is_cached, is_free, log_uniform, on_input
from mutation.inputs import Aim, Arrays, Range, position_reach
from mutation.surgery import Nodes, change_constants, insert, sites


def far_aims(artifact: Artifact, low: int, seq: Range = (2, 12)) -> tuple[Aim, ...]:
    """Aims at positions from `low` to about twice `low`, within the reach of the spec."""
    high = min(2 * low + 40, position_reach(artifact.spec))
    near = Aim(batch=(1, 2), seq=seq, past=(0, 6), positions=("gaps",), start=(low, max(low, high)))
    straddle = Aim(batch=(1, 2), seq=(8, 40), past=(0, 6), positions=("gaps",), start=(max(0, low - 4), low + 20))
    return (near,) if seq == (1, 1) else (near, straddle)


@family("position", "relative error far out")
def _relative_error(artifact: Artifact, random: Random) -> Fault | None:
    if not is_free(artifact):
        return None
    most = position_reach(artifact.spec)
    low = log_uniform(random, min(600, most // 4), most * 0.7)
    near = 0 < artifact.spec.saturation_distance() < 1000  # only short distances matter
    divisor = int(random.choice([8, 20] if near else [200, 1000]))

    def change(nodes: Nodes, value: str) -> str:
        off = nodes.op("Add", value, nodes.op("Div", value, nodes.const(divisor)))
        return nodes.op("Where", nodes.op("GreaterOrEqual", value, nodes.const(low)), off, value)

    return Fault(f"1/{divisor} from {low}", on_input("position_ids", change), far_aims(artifact, low))


@family("position", "positions clipped")
def _positions_clipped(artifact: Artifact, random: Random) -> Fault | None:
    if not is_free(artifact):
        return None
    most = position_reach(artifact.spec)
    choices = [log_uniform(random, min(600, most // 4), most * 0.7), 2**15, 2**17, 65535, 2**12, 2**14 - 1]
    clipped = int(random.choice([number for number in choices if number < most]))

    def change(nodes: Nodes, value: str) -> str:
        return nodes.op("Min", value, nodes.const(clipped))

    return Fault(f"at {clipped}", on_input("position_ids", change), far_aims(artifact, clipped))


@family("position", "positions wrap")
def _positions_wrap(artifact: Artifact, random: Random) -> Fault | None:
    if not is_free(artifact):
        return None
    most = position_reach(artifact.spec)
    wrap = int(2 ** random.integers(10, int(np.log2(most)) + 1)) if most > 1024 else 0
    if not 0 < wrap < most:
        return None

    def change(nodes: Nodes, value: str) -> str:
        return nodes.op("Mod", value, nodes.const(wrap))

    return Fault(f"at {wrap}", on_input("position_ids", change), far_aims(artifact, wrap - 6))


@family("position", "positions in a narrow type")
def _narrow(artifact: Artifact, random: Random) -> Fault | None:
    if not is_free(artifact):
        return None
    kinds = {
        "fp16": (TensorProto.FLOAT16, 2049),
        "bf16": (TensorProto.BFLOAT16, 257),
        "int16": (TensorProto.INT16, 2**15),
    }
    kind = str(random.choice(list(kinds)))
    elem_type, low = kinds[kind]
    if low >= position_reach(artifact.spec):
        return None

    def change(nodes: Nodes, value: str) -> str:
        if kind == "int16":  # wraps as int16 does, because the result of an out-of-range Cast is undefined
            moved = nodes.op("Add", value, nodes.const(2**15))
            return nodes.op("Sub", nodes.op("Mod", moved, nodes.const(2**16)), nodes.const(2**15))
        wide = nodes.op("Cast", nodes.op("Min", value, nodes.const(65504)), to=TensorProto.FLOAT)
        rounded = nodes.op("Cast", nodes.op("Cast", wide, to=elem_type), to=TensorProto.FLOAT)
        return nodes.op("Cast", rounded, to=TensorProto.INT64)

    return Fault(kind, on_input("position_ids", change), far_aims(artifact, low))


@family("position", "single tokens far out")
def _single_far(artifact: Artifact, random: Random) -> Fault | None:
    if not is_free(artifact) or not is_cached(artifact):
        return None
    most = position_reach(artifact.spec)
    low, off = log_uniform(random, 40, min(most * 0.7, 200_000)), log_uniform(random, 1, 30)

    def change(nodes: Nodes, value: str) -> str:
        one = nodes.op("Equal", nodes.size(value, 1), nodes.const(1))
        far = nodes.op("Greater", value, nodes.const(low))
        return nodes.op("Where", nodes.op("And", one, far), nodes.op("Add", value, nodes.const(off)), value)

    aims = far_aims(artifact, low, (1, 1))
    return Fault(f"{off} more beyond {low}", on_input("position_ids", change), aims)


@family("position", "several tokens far out")
def _several_far(artifact: Artifact, random: Random) -> Fault | None:
    """Far positions are wrong only if a call has several tokens."""
    if not is_free(artifact):
        return None
    most = position_reach(artifact.spec)
    low, seq = log_uniform(random, 40, min(most * 0.7, 100_000)), log_uniform(random, 2, 60)

    def change(nodes: Nodes, value: str) -> str:
        many = nodes.op("GreaterOrEqual", nodes.size(value, 1), nodes.const(seq))
        far = nodes.op("Greater", value, nodes.const(low))
        off = nodes.op("Add", value, nodes.op("Mod", value, nodes.const(2)))
        return nodes.op("Where", nodes.op("And", many, far), off, value)

    aims = far_aims(artifact, low, (seq, seq + 20))[:1]
    return Fault(f"{seq} tokens beyond {low}", on_input("position_ids", change), aims)


@family("position", "exact angles far out")
def _exact_far(artifact: Artifact, random: Random) -> Fault | None:
    if artifact.spec.angles != "exact":
        return None
    low, off = log_uniform(random, 2**16, 2**24 - 200), log_uniform(random, 1, 64)

    def change(nodes: Nodes, value: str) -> str:
        far = nodes.op("GreaterOrEqual", value, nodes.const(low))
        mixed = nodes.op("Add", value, nodes.op("Mod", value, nodes.const(off + 1)))
        return nodes.op("Where", far, mixed, value)

    return Fault(f"up to {off} more from {low}", on_input("position_ids", change), far_aims(artifact, low))


@family("position", "exact angles in fp32")
def _exact_single(artifact: Artifact, random: Random) -> Fault | None:
    """The last bit of positions is lost from a power of two on."""
    if artifact.spec.angles != "exact":
        return None
    bits = int(random.integers(18, 24))

    def change(nodes: Nodes, value: str) -> str:
        far = nodes.op("GreaterOrEqual", value, nodes.const(2**bits))
        even = nodes.op("Sub", value, nodes.op("Mod", value, nodes.const(2)))
        return nodes.op("Where", far, even, value)

    return Fault(f"odd ones from 2^{bits}", on_input("position_ids", change), far_aims(artifact, 2**bits))


@family("position", "trained length off")
def _trained_length(artifact: Artifact, random: Random) -> Fault | None:
    """Constants equal to the trained length are off by one or two, in comparisons and elsewhere."""
    trained = getattr(artifact.spec.encoding, "original_max_position_embeddings", None)
    if trained is None or getattr(artifact.spec.encoding, "scaling", None) not in ("dynamic", "longrope"):
        return None
    off = int(random.choice([-2, -1, 1, 2]))

    def apply(model: onnx.ModelProto) -> bool:
        return change_constants(
            model,
            lambda value: float(value.ravel()[0]) in (trained, trained - 1, trained + 1),
            lambda value: value + value.dtype.type(off),
        )

    def edge(arrays: Arrays, random: Random) -> None:
        positions = arrays["position_ids"]
        positions -= positions.max() - (trained + int(random.integers(-4, 4)))
        np.maximum(positions, 0, out=positions)

    aims = (Aim(batch=(1, 1), seq=(1, 12), past=(0, 6), edit=edge), *far_aims(artifact, trained))
    return Fault(f"{trained} {off:+d}", apply, aims)


def length_of(axis: int, at: int) -> Apply:
    """The largest position is taken only over index `at` of this axis of positions (a row, a token or an axis)."""

    def apply(model: onnx.ModelProto) -> bool:
        found = [site for site in sites(model, "ReduceMax") if "position" in site[2].input[0]]
        for holder, index, node in reversed(found):
            nodes = Nodes()
            node.input[0] = nodes.op("Gather", node.input[0], nodes.const([at]), axis=axis)
            insert(holder, index, nodes)
        return bool(found)

    return apply


@family("position", "length of some tokens")
def _some_length(artifact: Artifact, random: Random) -> Fault | None:
    """Only one row, or one token of each row, decides whether positions pass the trained length."""
    trained = getattr(artifact.spec.encoding, "original_max_position_embeddings", None)
    if trained is None or getattr(artifact.spec.encoding, "scaling", None) not in ("dynamic", "longrope"):
        return None
    axis, at = int(random.integers(2)), int(random.choice([0, -1]))

    def one_beyond(arrays: Arrays, random: Random) -> None:
        positions = arrays["position_ids"]
        positions %= trained
        row, token = (int(random.integers(size)) for size in positions.shape[:2])
        positions[row, token] = trained + int(random.integers(trained))

    aims = (Aim(batch=(1, 3), seq=(2, 40), past=(0, 20), positions=("gaps", "consecutive"), edit=one_beyond),)
    return Fault(f"{('row', 'token')[axis]} {at}", length_of(axis, at), aims)


@family("position", "trained length compared wrongly")
def _trained_edge(artifact: Artifact, random: Random) -> Fault | None:
    """Positions are off by one only if the largest position is the trained length, or only if it is one less."""
    trained = getattr(artifact.spec.encoding, "original_max_position_embeddings", None)
    if trained is None or getattr(artifact.spec.encoding, "scaling", None) not in ("dynamic", "longrope"):
        return None
    at, off = trained - int(random.integers(2)), int(random.choice([-1, 1]))

    def change(nodes: Nodes, value: str) -> str:
        longest = nodes.op("ReduceMax", value, keepdims=0)
        return nodes.op(
            "Where", nodes.op("Equal", longest, nodes.const(at)), nodes.op("Add", value, nodes.const(off)), value
        )

    def edge(arrays: Arrays, random: Random) -> None:
        positions = arrays["position_ids"]
        positions -= positions.max() - at
        np.maximum(positions, 0, out=positions)

    aims = (Aim(batch=(1, 2), seq=(2, 12), past=(0, 6), positions=("gaps",), start=(0, 400), edit=edge),)
    return Fault(f"{off:+d} where the last is {at}", on_input("position_ids", change), aims)
