"""Corners of lengths: keys hidden, windows dropped or invented, buffers that wrap, single rows of tables."""

from __future__ import annotations

import attrs
import numpy as np
import onnx

from mutation.artifacts import Artifact
from mutation.corners.family import (
    Apply,
    Fault,
    Random,
    family,
    inputs_named,
    key_aims,
    log_uniform,
    most_keys,
    on_input,
    on_visibility,
)
from mutation.inputs import REACH, Aim, Arrays
from mutation.surgery import (
    Change,
    Logits,
    Nodes,
    change_constants,
    change_input,
    change_value,
    constant_value,
    read_constant,
    sites,
)


@family("length", "keys from a column on hidden")
def _keys_hidden(artifact: Artifact, random: Random) -> Fault | None:
    if artifact.spec.position_axes > 1 and artifact.spec.position_limit():
        return None
    column = log_uniform(random, 60, most_keys(artifact))

    def hidden(at: Logits) -> str:
        return at.nodes.op("GreaterOrEqual", at.key(), at.nodes.const(column))

    return Fault(f"column {column}", on_visibility(True, hidden), key_aims(artifact, column + 1))


@family("length", "one key hidden")
def _one_key(artifact: Artifact, random: Random) -> Fault | None:
    if artifact.spec.position_axes > 1 and artifact.spec.position_limit():
        return None
    column = int(random.choice([log_uniform(random, 24, most_keys(artifact)), 128, 256, 512, 640, 1023, 1024]))

    def hidden(at: Logits) -> str:
        return at.nodes.op("Equal", at.key(), at.nodes.const(column))

    return Fault(f"column {column}", on_visibility(True, hidden), key_aims(artifact, column + 1))


@family("length", "a window that the spec lacks")
def _invented_window(artifact: Artifact, random: Random) -> Fault | None:
    spec = artifact.spec
    if not spec.causal or spec.kv_cache == "shared" or any(layer.window for layer in spec.distinct_layers()):
        return None
    window = log_uniform(random, 5, min(1500, most_keys(artifact)))

    def hidden(at: Logits) -> str:
        return at.nodes.op("GreaterOrEqual", at.distance(), at.nodes.const(window))

    return Fault(f"window {window}", on_visibility(True, hidden), key_aims(artifact, window + 2))


def _windows(artifact: Artifact) -> list[int]:
    return sorted({layer.window for layer in artifact.spec.distinct_layers() if layer.window})


@family("length", "window dropped or other")
def _window_other(artifact: Artifact, random: Random) -> Fault | None:
    """Every constant that is a window or an attention chunk size becomes another number."""
    layers = artifact.spec.distinct_layers()
    sizes = {size for layer in layers for size in (layer.window, layer.attention_chunk_size) if size}
    if not sizes:
        return None
    size = int(random.choice(sorted(sizes)))
    other = int(random.choice([size - 1, size + 1, 2 * size, 10**6, size // 2 or 1]))

    def apply(model: onnx.ModelProto) -> bool:
        return change_constants(
            model,
            lambda value: value.dtype.kind == "i" and int(value.ravel()[0]) == size,
            lambda value: np.full_like(value, other),
        )

    return Fault(f"{size} as {other}", apply, key_aims(artifact, min(size + 3, REACH.tokens)))


@family("length", "the buffer wraps")
def _wraps(artifact: Artifact, random: Random) -> Fault | None:
    names = inputs_named(artifact, "hidden_states", "input_ids", "encoder_hidden_states", "past_key", "past_value")
    if artifact.spec.position_axes > 1 and artifact.spec.position_limit():
        return None
    name = str(random.choice(names))
    axis = 2 if name.startswith("past") else 1
    most = REACH.tokens - 60 if axis == 1 and not name.startswith("encoder") else REACH.keys - 100
    length = int(random.choice([log_uniform(random, 64, most), 256, 512, 1024]))

    def change(nodes: Nodes, value: str) -> str:
        steps = nodes.steps(nodes.size(value, axis))
        return nodes.op("Gather", value, nodes.op("Mod", steps, nodes.const(length)), axis=axis)

    aim = Aim(batch=(1, 2), padding=("none",))
    if name.startswith("past"):
        aim = attrs.evolve(aim, past=(length + 1, length + 30), seq=(1, 4))
    elif name.startswith("encoder"):
        aim = attrs.evolve(aim, encoder=(length + 1, length + 30))
    else:
        aim = attrs.evolve(aim, seq=(length + 1, length + 30), past=(0, 3))
    return Fault(f"{name} at {length}", on_input(name, change), (aim,))


TABLES = {
    "learned": "encoding.weight",
    "t5": "encoding.relative_attention_bias.weight",
    "relative": "encoding.weight",
    "shaw": "encoding.",
    "deberta": "encoding.",
    "cope": "encoding.",
}
"""The prefix of the names of an encoding's tables."""


@family("length", "one row of a table misread")
def _table_row(artifact: Artifact, random: Random) -> Fault | None:
    prefix = TABLES.get(artifact.spec.encoding.name)
    tables = [
        (name, tensor.shape[0])
        for name, tensor in artifact.weights.items()
        if prefix and name.startswith(prefix) and tensor.ndim == 2 and "proj" not in name and tensor.shape[0] > 4
    ]
    if not tables:
        return None
    name, count = tables[int(random.integers(len(tables)))]
    row, other = (int(number) for number in random.choice(count, 2, replace=False))

    def change(nodes: Nodes, value: str) -> str:
        rows = np.arange(count)
        rows[row] = other
        return nodes.op("Gather", value, nodes.const(rows), axis=0)

    limit = artifact.spec.position_limit()

    def visit(arrays: Arrays, random: Random) -> None:
        positions = arrays["position_ids"]
        positions.flat[random.integers(positions.size)] = row

    distances = min(count, 900)
    aims = (
        (Aim(batch=(2, 3), seq=(8, 20), edit=visit),)
        if limit
        else (
            Aim(batch=(1, 2), seq=(60, 120), past=(0, 3), padding=("none",)),
            Aim(batch=(1, 1), seq=(distances, distances + 100), past=(0, 3), padding=("none",)),
            Aim(batch=(1, 1), seq=(1000, 1100), past=(0, 0), padding=("none",)),
        )
    )
    return Fault(f"row {row} of {name} as {other}", on_weight(name, change), aims)


def on_weight(name: str, change: Change) -> Apply:
    def apply(model: onnx.ModelProto) -> bool:
        if all(name not in node.input for node in model.graph.node):
            return False
        change_input(model, name, change)
        return True

    return apply


@family("length", "distances clipped")
def _distances(artifact: Artifact, random: Random) -> Fault | None:
    """The limit of a distance (the last row of a table, or the largest distance) becomes smaller."""
    saturation = artifact.spec.saturation_distance()
    if saturation < 20 or artifact.spec.encoding.name not in TABLES:
        return None
    low = log_uniform(random, 10, min(saturation - 1, REACH.tokens - 100))

    def apply(model: onnx.ModelProto) -> bool:
        for holder, index, node in sites(model, "Min", "Clip"):
            for at, name in enumerate(node.input):
                value = constant_value(holder, model, name)
                if value is not None and value.dtype.kind == "i" and value.size == 1 and int(value.ravel()[0]) > low:
                    read_constant(holder, index, at, np.full_like(value, low))
                    return True
        return False

    return Fault(f"{low} of {saturation}", apply, key_aims(artifact, low + 5))


@family("length", "outputs of long inputs off")
def _long_output(artifact: Artifact, random: Random) -> Fault | None:
    """Outputs of tokens from a drawn one on are a hundredth too large, as beyond the border of a tile."""
    if artifact.spec.position_axes > 1 and artifact.spec.position_limit():
        return None
    token = log_uniform(random, 30, REACH.tokens - 60)

    def change(nodes: Nodes, value: str) -> str:
        rows = nodes.column(nodes.size(value, 1), 3, 1)
        far = nodes.op("GreaterOrEqual", rows, nodes.const(token))
        return nodes.op("Where", far, nodes.op("Mul", value, nodes.like(value, 1.01)), value)

    def apply(model: onnx.ModelProto) -> bool:
        change_value(model.graph, "output", change)
        return True

    return Fault(f"token {token}", apply, (Aim(batch=(1, 1), seq=(token + 1, token + 30), past=(0, 3)),))


@family("length", "encoder tokens")
def _encoder(artifact: Artifact, random: Random) -> Fault | None:
    if not artifact.spec.cross:
        return None
    alone = bool(random.integers(2))
    least = log_uniform(random, 300, 1500)

    def change(nodes: Nodes, value: str) -> str:
        length = nodes.size(value, 1)
        if alone:
            return nodes.op("Where", nodes.op("Equal", length, nodes.const(1)), nodes.op("Neg", value), value)
        rows = nodes.column(length, 3, 1)
        far = nodes.op("GreaterOrEqual", rows, nodes.const(least))
        return nodes.op("Where", far, nodes.op("Mul", value, nodes.like(value, 0.5)), value)

    aim = Aim(encoder=(1, 1) if alone else (least + 1, least + 50), padding=("none",))
    return Fault("1" if alone else f"from {least}", on_input("encoder_hidden_states", change), (aim,))


@family("length", "keys and queries exchanged in number")
def _few_keys(artifact: Artifact, random: Random) -> Fault | None:
    """Cross-attention sees only as many keys as there are queries. The keys after them are hidden."""
    if not artifact.spec.cross:
        return None
    least = log_uniform(random, 2, 500)

    def hidden(at: Logits) -> str:
        nodes = at.nodes
        many = nodes.op("GreaterOrEqual", at.keys, nodes.const(least))
        return nodes.op("And", many, nodes.op("GreaterOrEqual", at.key(), at.seq))

    aims = (Aim(batch=(1, 2), seq=(1, 5), encoder=(max(least, 7), least + 30), padding=("none",)),)
    return Fault(f"from {least}", on_visibility(True, hidden), aims)


@family("length", "the tail of a tile")
def _tail(artifact: Artifact, random: Random) -> Fault | None:
    """If there are many keys, those after the last whole tile are hidden."""
    if artifact.spec.position_axes > 1 and artifact.spec.position_limit():
        return None
    tile, least = int(2 ** random.integers(3, 9)), log_uniform(random, 30, most_keys(artifact))

    def hidden(at: Logits) -> str:
        nodes = at.nodes
        whole = nodes.op("Sub", at.keys, nodes.op("Mod", at.keys, nodes.const(tile)))
        many = nodes.op("GreaterOrEqual", at.keys, nodes.const(max(least, tile + 1)))
        return nodes.op("And", many, nodes.op("GreaterOrEqual", at.key(), whole))

    aims = key_aims(artifact, max(least, tile + 1))
    return Fault(f"tiles of {tile} from {least} keys", on_visibility(True, hidden), aims)
