"""`python scripts/benchmarks/gate.py`: the gate of `posexport bench` here: false alarms, and planted slowdowns caught.

A baseline is saved anew before every `RENEWED` rounds. Some rounds hold builds against it into whose graph
transposes are planted (`PLANTS`), and each an equal one then. How much longer the planted ones take is measured too. At
rest it takes about a minute and a half a build. Prints a line per build and a sum; `--save` writes all as JSON after
each round, and goes on with what is there. Exits 1 where an equal build was called slower, or most of those with a slow
pair weren't.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import click
import onnx
from onnx import helper
from tools import machine_line

from posexport.artifact.onnx_artifact import write_onnx
from posexport.bench.benchmark import PROCESSES, BenchRun
from posexport.bench.gate import bench_gated, bench_to_keep
from posexport.bench.options import BenchOptions
from posexport.bench.regression import STEADY
from posexport.bench.result import Benchmark, read_benchmark
from posexport.export import export
from posexport.files import write_json
from posexport.models import read_spec
from posexport.models.weights import seeded_weights

ALLOWED = 0.05
RENEWED = 5
NAME = "block.onnx"


@attrs.frozen
class Plant:
    """Pairs of transposes, to and fro by `perm`, in the builds of every so many rounds."""

    perm: tuple[int, ...]
    pairs: int
    every: int


SLOW = "slow pair"
PLANTS = {SLOW: Plant((2, 1, 0), 1, 2), "3 fast pairs": Plant((0, 2, 1), 3, 4)}
"""ONNX Runtime has a fast way for an axis that moves alone, and goes value by value where several do."""

EQUAL = "equal"


def plant(path: Path, pairs: int, perm: tuple[int, ...] = PLANTS[SLOW].perm) -> None:
    """Transpose `hidden_states` to and fro `pairs` times, before anything else reads it.

    Halfway and between pairs the value becomes a row and takes its shape again, so that optimizers can't fold two
    transposes into none.
    """
    model = onnx.load(path)
    graph, source = model.graph, model.graph.input[0].name
    nodes, value = [], source
    for index, order in enumerate((perm, tuple(map(perm.index, range(len(perm))))) * pairs):
        there, row, shape, again = (f"plant.{index}.{name}" for name in ("there", "row", "shape", "again"))
        nodes.append(helper.make_node("Transpose", [value], [there], perm=order))
        nodes.append(helper.make_node("Reshape", [there, "plant.flat"], [row]))
        nodes.append(helper.make_node("Shape", [there], [shape]))
        nodes.append(helper.make_node("Reshape", [row, shape], [again]))
        value = again
    flat = helper.make_tensor("plant.flat", onnx.TensorProto.INT64, [1], [-1])
    for node in graph.node:
        for at, name in enumerate(node.input):
            if name == source:
                node.input[at] = value
    graph.initializer.append(flat)
    old = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *old])
    onnx.save(model, path)


def make(path: Path, hidden: int = 256) -> None:
    """A small block, in which a run takes about a millisecond."""
    spec = read_spec({"encoding": {"name": "rope"}, "hidden_size": hidden, "num_heads": 4, "causal": True})
    write_onnx(export(spec, seeded_weights(spec, 0)), path)


def share(plain: Path, planted: Path, scenario: str) -> dict[str, float]:
    """How much longer a planted build takes than a plain one in the same rounds, with its 95 % interval."""
    options = BenchOptions(runtimes=("ort-cpu",), scenarios=(scenario,), processes=PROCESSES)
    with BenchRun(planted, options, previous_artifact=plain) as run:
        run.open_processes(run.planned)
        timed = run.result().shapes[0].timing("ort-cpu")
    assert timed is not None
    ratio = timed.ratios["against"]
    return {"share": ratio.median - 1, "low": ratio.low - 1, "high": ratio.high - 1}


def held(block: Path, base: Benchmark) -> dict[str, Any]:
    """One build held against a baseline, as plain data."""
    found = bench_gated(block, base, ALLOWED)
    assert found.gate is not None
    (change,) = found.gate.changes
    return {**attrs.asdict(change), "processes": found.processes, "machine_load": found.machine_load}


def _known(path: Path | None, head: dict[str, Any]) -> dict[str, Any]:
    """What was measured before in the same way."""
    if path is None or not path.exists():
        return {}
    data: dict[str, Any] = json.loads(path.read_bytes())
    return data if all(data.get(key) == value for key, value in head.items()) else {}


def _states(runs: list[dict[str, Any]], kinds: Iterable[str]) -> dict[str, Counter[str]]:
    """How often each kind of build was judged how."""
    return {kind: Counter(run["state"] for run in runs if run["kind"] == kind) for kind in kinds}


def main() -> int:
    """Run it as the options say."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--runs", type=int, default=20, help="rounds, each of an equal build at least")
    options.add_argument("--scenario", default="prefill:256")
    options.add_argument("--save", type=Path, help="write the result as JSON, such as docs/results/gate.json")
    asked = options.parse_args()
    if asked.runs < 1:
        options.error("--runs must be above 0")
    shuffle = random.Random(0)
    head = {"machine": machine_line(), "scenario": asked.scenario, "limit": ALLOWED, "steady": STEADY}
    head |= {"planted": {kind: attrs.asdict(each) | {"perm": list(each.perm)} for kind, each in PLANTS.items()}}
    known = _known(asked.save, head)
    shares, runs = known.get("shares", {}), list(known.get("runs", ()))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        blocks = {kind: folder / kind.replace(" ", "-") / NAME for kind in (EQUAL, *PLANTS)}
        for kind, block in blocks.items():
            block.parent.mkdir()
            make(block)
            if kind in PLANTS:
                plant(block, PLANTS[kind].pairs, PLANTS[kind].perm)
        for kind in PLANTS:
            if kind not in shares:
                shares[kind] = share(blocks[EQUAL], blocks[kind], asked.scenario)
                click.echo(f"{kind}: takes {shares[kind]['share']:.1%} longer")
        for number in range(sum(run["kind"] == EQUAL for run in runs), asked.runs):
            base = folder / f"base{number // RENEWED}.json"
            if not base.exists():
                fresh = bench_to_keep(blocks[EQUAL], BenchOptions(runtimes=("ort-cpu",), scenarios=(asked.scenario,)))
                write_json(base, fresh.to_dict())
            saved = read_benchmark(base)
            due = [EQUAL, *(kind for kind, each in PLANTS.items() if number % each.every == 0)]
            for kind in sorted(shuffle.sample(due, len(due)), key=EQUAL.__eq__):  # with the equal one a round is done
                run = held(blocks[kind], saved)
                runs.append({"kind": kind, "baseline": number // RENEWED, "baseline_processes": saved.processes, **run})
                told = "" if run["change"] is None else f"{run['change']:.3f} ({run['low']:.3f} to {run['high']:.3f})"
                more = f"by {run['by']}, {run['processes']} processes, busy {run['busy']:.0%} {run['reason']}"
                click.echo(f"{kind:12} {run['state']:10} {told} {more}")
            if asked.save is not None:
                write_json(asked.save, {**head, "shares": shares, "states": _states(runs, blocks), "runs": runs})
    states = _states(runs, blocks)
    for kind, counted in states.items():
        took = f" (takes {shares[kind]['share']:.1%} longer)" if kind in shares else ""
        click.echo(f"{kind}{took}: {', '.join(f'{count} {state}' for state, count in counted.items())}")
    return int(states[EQUAL]["slower"] > 0 or states[SLOW]["slower"] * 2 <= states[SLOW].total())


if __name__ == "__main__":
    sys.exit(main())
