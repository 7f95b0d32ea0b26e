"""Corners of hidden states as in trained models: one large feature among ordinary ones, tokens along the weights, and
magnitudes between usual and quiet ones. Also equal sizes, with which axes may be mixed up."""

from __future__ import annotations

from functools import partial

import attrs
import numpy as np
import onnx
from onnx import TensorProto

from mutation.artifacts import Artifact
from mutation.corners.bands import cached_tokens, output_off
from mutation.corners.family import Apply, Fault, Random, family, is_cached, log_uniform
from mutation.corners.magnitude import loud_feature
from mutation.inputs import Aim, Arrays
from mutation.surgery import Change, Nodes, change_logits, change_value

SHORT = Aim(batch=(1, 3), seq=(3, 16), past=(0, 12), encoder=(4, 16), padding=("none",))


def _is_hidden(artifact: Artifact) -> bool:
    return artifact.spec.vocab_size is None and not artifact.spec.cross


def left_out(limit: float) -> Apply:
    """The output of the block equals the hidden states for tokens with a feature above a limit, as if a norm
    overflowed."""

    def change(nodes: Nodes, value: str) -> str:
        largest = nodes.op("ReduceMax", nodes.op("Abs", "hidden_states"), nodes.const([-1]), keepdims=1)
        large = nodes.op("Greater", largest, nodes.like("hidden_states", limit))
        return nodes.op("Where", large, "hidden_states", value)

    def apply(model: onnx.ModelProto) -> bool:
        change_value(model.graph, "output", change)
        return True

    return apply


@family("magnitude", "the block is left out beside a large feature")
def _left_out(artifact: Artifact, random: Random) -> Fault | None:
    if not _is_hidden(artifact) or artifact.spec.norm != "pre":
        return None
    limit = float(log_uniform(random, 60, 350))

    return Fault(f"above {limit:g}", left_out(limit), (attrs.evolve(SHORT, edit=loud_feature),))


def _along(artifact: Artifact) -> Aim:
    """Inputs whose tokens lie along directions that give the first head large logits of both signs."""
    prefix = "layers.0." if artifact.spec.layers > 1 else ""
    width = artifact.spec.head_dim
    rows = [artifact.weights[f"{prefix}{name}.weight"][:width].double().numpy() for name in ("q_proj", "k_proj")]
    left, _, right = np.linalg.svd(rows[0].T @ rows[1])
    known = np.stack((left[:, 0], right[0], -right[0]))

    def edit(arrays: Arrays, random: np.random.Generator) -> None:
        values = arrays["hidden_states"]
        along = known[random.integers(0, 3, values.shape[:2])] * values.shape[-1] ** 0.5
        arrays["hidden_states"] = (0.9 * along + 0.3 * values).astype(values.dtype)

    return attrs.evolve(SHORT, edit=edit)


def _clipped(limit: float) -> Change:
    """Logits are clipped on both sides, except those of hidden keys."""

    def change(nodes: Nodes, value: str) -> str:
        low = nodes.like(value, -limit)
        hidden = nodes.op("Less", value, nodes.like(value, -30000.0))
        clipped = nodes.op("Min", value, nodes.op("Neg", low))
        return nodes.op("Where", hidden, value, nodes.op("Max", clipped, low))

    return change


@family("magnitude", "logits clipped")
def _clipped_logits(artifact: Artifact, random: Random) -> Fault | None:
    spec = artifact.spec
    if not _is_hidden(artifact) or spec.qk_norm or spec.softcap or spec.dtype == "fp16":
        return None
    limit = float(random.uniform(3.0, 5.0))
    return Fault(f"at {limit:.2f}", partial(change_logits, change=_clipped(limit)), (_along(artifact),))


@family("magnitude", "a band of sizes between usual and quiet")
def _sizes(artifact: Artifact, random: Random) -> Fault | None:
    if not _is_hidden(artifact):
        return None
    low = float(10 ** random.uniform(-2.3, -1.5))
    high = low * float(random.uniform(8, 12))

    def condition(nodes: Nodes) -> str:
        squares = nodes.op("Mul", *[nodes.op("Cast", "hidden_states", to=TensorProto.FLOAT)] * 2)
        size = nodes.op("Sqrt", nodes.op("ReduceMean", squares, keepdims=0))
        return nodes.all_of(
            nodes.op("Greater", size, nodes.const(low, np.float32)),
            nodes.op("Less", size, nodes.const(high, np.float32)),
        )

    aim = attrs.evolve(SHORT, magnitude=(low * high) ** 0.5)
    return Fault(f"{low:.3g} to {high:.3g}", output_off(condition), (aim,))


@family("chunk", "as many tokens as cached")
def _as_cached(artifact: Artifact, random: Random) -> Fault | None:
    if not is_cached(artifact) or artifact.spec.kv_cache == "shared":
        return None
    least = int(random.integers(8, 20))

    def condition(nodes: Nodes) -> str:
        tokens = nodes.size(artifact.model.graph.input[0].name, 1)
        same = nodes.op("Equal", tokens, cached_tokens(artifact, nodes))
        return nodes.all_of(same, nodes.op("GreaterOrEqual", tokens, nodes.const(least)))

    size = int(random.integers(least, 2 * least + 1))
    return Fault(f"{least} and more", output_off(condition), (Aim(seq=(size, size), past=(size, size)),))


@family("batch", "as many rows as tokens")
def _as_rows(artifact: Artifact, random: Random) -> Fault | None:
    first = artifact.model.graph.input[0].name
    least = int(random.integers(4, 9))

    def condition(nodes: Nodes) -> str:
        rows, tokens = nodes.size(first, 0), nodes.size(first, 1)
        return nodes.all_of(nodes.op("Equal", rows, tokens), nodes.op("GreaterOrEqual", rows, nodes.const(least)))

    return Fault(f"{least} and more", output_off(condition), (Aim(batch=(8, 8), seq=(8, 8), past=(0, 0)),))
