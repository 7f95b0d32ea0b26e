"""Faults of long caches: in wide blocks, at powers of two, before the end of a band, and in rows that begin anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import verify_helpers as plant
from helpers import small_spec
from mutation.surgery import Nodes, change_value, change_visibility

from posexport.runtimes import RUNTIMES
from posexport.spec.spec import Spec
from posexport.verify import verify
from posexport.verify.result import FAILED, Verdict

Mutate = Callable[[onnx.ModelProto], Any]

Condition = Callable[[Nodes], str]
"""A scalar of the main graph: whether a call is one of those where a fault shows."""

WIDE = {"hidden_size": 32, "num_heads": 32, "head_dim": 64, "causal": True, "kv_cache": "concat"}
"""A block whose cached tokens have 4,096 numbers each, as those of one with a hidden size of 2,048."""

USUAL = {"causal": True, "kv_cache": "concat"}


def verdict_of(folder: Path, spec: Spec, mutate: Mutate) -> Verdict:
    path = plant.plant(folder, "planted", spec, mutate)
    (verdict,) = verify([path], runtimes={"ort-cpu": RUNTIMES["ort-cpu"]}).verdicts
    return verdict


def within(nodes: Nodes, value: str, low: int, high: int) -> str:
    return nodes.all_of(
        nodes.op("GreaterOrEqual", value, nodes.const(low)), nodes.op("LessOrEqual", value, nodes.const(high))
    )


def steps(past: tuple[int, int], rows: tuple[int, int]) -> Condition:
    """Single tokens of so many rows after so many cached ones."""

    def condition(nodes: Nodes) -> str:
        return nodes.all_of(
            within(nodes, nodes.size("hidden_states", 0), *rows),
            within(nodes, nodes.size("hidden_states", 1), 1, 1),
            within(nodes, nodes.size("past_key", 2), *past),
        )

    return condition


def off(condition: Condition) -> Mutate:
    """The output is a tenth too large where a condition holds."""

    def change(nodes: Nodes, value: str) -> str:
        return nodes.op("Where", condition(nodes), nodes.op("Mul", value, nodes.like(value, 1.1)), value)

    return lambda model: change_value(model.graph, "output", change)


def hidden_from(key: int, rows: int) -> Mutate:
    """Keys from a number on are hidden from single tokens of at least so many rows."""

    def chosen(at: Any) -> str:
        nodes = at.nodes
        few = nodes.all_of(
            nodes.op("GreaterOrEqual", at.batch, nodes.const(rows)), nodes.op("Equal", at.seq, nodes.const(1))
        )
        middle = nodes.op("And", nodes.op("GreaterOrEqual", at.key(), nodes.const(key)), few)
        return nodes.op("And", middle, nodes.op("Greater", at.distance(), nodes.const(0)))

    return lambda model: change_visibility(model, True, chosen)


ANY = (1, 2**20)

FAULTS: dict[str, tuple[Spec, Mutate]] = {
    "a band of a wide block": (small_spec("rope", **WIDE), off(steps((900, 1700), (1, 1)))),
    "keys of a wide block in two rows": (small_spec("rope", **WIDE), hidden_from(1000, 2)),
    "2048 keys of a wide block": (small_spec("rope", **WIDE), off(steps((2047, 2047), ANY))),
    "2048 keys": (small_spec("rope", **USUAL), off(steps((2047, 2047), ANY))),
    "1025 keys": (small_spec("rope", **USUAL), off(steps((1024, 1024), ANY))),
    "127 keys": (small_spec("rope", **USUAL), off(steps((126, 126), ANY))),
    "steps before the end": (small_spec("rope", **USUAL), off(steps((2075, 2180), (1, 1)))),
    "rows before the end": (small_spec("rope", **USUAL), off(steps((2075, 2180), (2, 40)))),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_long_caches_fails(tmp_path: Path, name: str) -> None:
    spec, mutate = FAULTS[name]
    assert verdict_of(tmp_path, spec, mutate).state == FAILED
