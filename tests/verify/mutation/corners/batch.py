"""Corners of batches: rows that read another row's data, masks lost in batches of many rows."""

from __future__ import annotations

from mutation.artifacts import Artifact
from mutation.corners.family import Apply, Fault, Random, family, inputs_named, log_uniform, on_input, on_visibility
from mutation.inputs import Aim, Arrays
from mutation.surgery import Logits, Nodes


@family("batch", "a row reads row 0")
def _row_reads(artifact: Artifact, random: Random) -> Fault | None:
    names = inputs_named(
        artifact,
        *("hidden_states", "input_ids", "encoder_hidden_states", "position_ids", "past_key", "past_value"),
        *("write_indices", "attention_mask"),
    )
    name, row, only = str(random.choice(names)), int(random.integers(1, 8)), bool(random.integers(2))

    def change(nodes: Nodes, value: str) -> str:
        rows = nodes.steps(nodes.size(value, 0))
        chosen = nodes.op("Equal" if only else "GreaterOrEqual", rows, nodes.const(row))
        return nodes.op("Gather", value, nodes.op("Where", chosen, nodes.const(0), rows), axis=0)

    kinds = ("consecutive", "gaps")
    aims = (
        Aim(batch=(row + 1, 8), seq=(4, 16), past=(3, 20), positions=kinds, start=(0, 300), encoder=(4, 20)),
        Aim(batch=(row + 1, 8), seq=(1, 1), past=(3, 20), positions=kinds, start=(0, 300), encoder=(4, 20)),
    )
    return Fault(f"{name} of row {row}{'' if only else ' and on'}", on_input(name, change), aims)


@family("batch", "a row reads the row before")
def _row_before(artifact: Artifact, random: Random) -> Fault | None:
    names = inputs_named(
        artifact, "hidden_states", "position_ids", "past_key", "past_value", "write_indices", "attention_mask"
    )
    if not names:
        return None
    name, batch, seq = str(random.choice(names)), int(random.integers(2, 7)), log_uniform(random, 1, 60)

    def change(nodes: Nodes, value: str) -> str:
        rows = nodes.steps(nodes.size(value, 0))
        large = nodes.op("GreaterOrEqual", nodes.size(value, 0), nodes.const(batch))
        first = artifact.model.graph.input[0].name
        long = nodes.op("GreaterOrEqual", nodes.size(first, 1), nodes.const(seq))
        before = nodes.op("Max", nodes.op("Sub", rows, nodes.const(1)), nodes.const(0))
        return nodes.op("Gather", value, nodes.op("Where", nodes.op("And", large, long), before, rows), axis=0)

    kinds = ("consecutive", "gaps")
    aim = Aim(batch=(batch, 8), seq=(seq, seq + 20), past=(3, 20), positions=kinds, start=(0, 300))
    return Fault(f"{name}, batch {batch}, {seq} tokens", on_input(name, change), (aim,))


@family("batch", "causal mask lost in a batch")
def _causal_batch(artifact: Artifact, random: Random) -> Fault | None:
    if not artifact.spec.causal:
        return None
    batch, seq = int(random.integers(2, 8)), log_uniform(random, 2, 200)

    def lost(at: Logits) -> str:
        nodes = at.nodes
        large = nodes.op("GreaterOrEqual", at.batch, nodes.const(batch))
        long = nodes.op("GreaterOrEqual", at.seq, nodes.const(seq))
        return nodes.all_of(large, long, nodes.op("Less", at.distance(), nodes.const(0)))

    aim = Aim(batch=(batch, 8), seq=(seq, seq + 20), past=(0, 20))
    return Fault(f"batch {batch}, {seq} tokens", on_visibility(False, lost), (aim,))


def rows_turned_around(name: str, low: int, high: int, steps: bool) -> Apply:
    """In batches of `low` to `high` rows, an input [batch, seq, ...] has its rows in reverse order. If `steps` is true,
    only in calls with one token."""

    def change(nodes: Nodes, value: str) -> str:
        count, rows = nodes.size(value, 0), nodes.steps(nodes.size(value, 0))
        turned = nodes.op("Sub", nodes.op("Sub", count, nodes.const(1)), rows)
        least = nodes.op("GreaterOrEqual", count, nodes.const(low))
        wrong = nodes.op("And", least, nodes.op("LessOrEqual", count, nodes.const(high)))
        if steps:
            wrong = nodes.op("And", wrong, nodes.op("Equal", nodes.size(value, 1), nodes.const(1)))
        return nodes.op("Gather", value, nodes.op("Where", wrong, turned, rows), axis=0)

    return on_input(name, change)


@family("batch", "rows in another order in batches of some sizes")
def _rows_turned_around(artifact: Artifact, random: Random) -> Fault | None:
    name = inputs_named(artifact, "hidden_states", "input_ids")[0]
    low, steps = log_uniform(random, 2, 25), bool(random.integers(2))
    high = int(1.6 * low)
    aim = Aim(batch=(low, high), seq=(1, 1) if steps else (2, 12), past=(0, 40), encoder=(2, 30))
    what = f"{name} of {low} to {high} rows{' in steps' if steps else ''}"
    return Fault(what, rows_turned_around(name, low, high, steps), (aim,))


@family("batch", "first key hidden in a batch")
def _hidden_batch(artifact: Artifact, random: Random) -> Fault | None:
    batch, column = int(random.integers(3, 8)), int(random.integers(0, 12))

    def hidden(at: Logits) -> str:
        large = at.nodes.op("GreaterOrEqual", at.batch, at.nodes.const(batch))
        return at.nodes.op("And", large, at.nodes.op("Equal", at.key(), at.nodes.const(column)))

    aim = Aim(batch=(batch, 8), seq=(13, 40), past=(0, 20), encoder=(13, 40), padding=("none",))
    return Fault(f"key {column}, batch {batch}", on_visibility(True, hidden), (aim,))


@family("batch", "row that begins at 0 is written elsewhere")
def _begins_at_zero(artifact: Artifact, random: Random) -> Fault | None:
    if artifact.spec.kv_cache != "shared":
        return None
    most = int(random.integers(1, 5))

    def change(nodes: Nodes, value: str) -> str:
        highest = nodes.op("ReduceMax", value, nodes.const([0]), keepdims=1)
        small = nodes.op("Less", value, nodes.const(most))
        return nodes.op("Where", small, highest, value)

    def zero(arrays: Arrays, random: Random) -> None:
        arrays["write_indices"][random.integers(arrays["write_indices"].size)] = 0

    aim = Aim(batch=(2, 6), seq=(1, 8), past=(5, 40), edit=zero)
    return Fault(f"below {most}", on_input("write_indices", change), (aim,))
