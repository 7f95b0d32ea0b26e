"""The gate of `posexport bench`: false alarms for equal builds, and how many planted slowdowns it catches.

A new baseline is saved before every `RENEWED` rounds. Each round compares it with an equal build and, in some rounds,
with builds whose graphs contain planted transposes. How much longer the planted builds take is measured too. On an idle
machine this takes about a minute and a half per build. Results: docs/results/gate.json.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import click
import onnx
from onnx import helper
from results import RESULTS, Row, counted, record
from timing import block_spec, write_block

from posexport import temporary
from posexport.bench.benchmark import PROCESSES, BenchRun
from posexport.bench.gate import bench_gated, bench_to_keep
from posexport.bench.options import BenchOptions
from posexport.bench.regression import STEADY
from posexport.files import write_json

LIMIT, RUNS, RENEWED = 0.05, 4, 4
OPTIONS = BenchOptions(runtimes=("ort-cpu",), scenarios=("prefill:256",))

EQUAL, SLOW = "equal", "slow pair"
PLANTS: dict[str, dict[str, Any]] = {
    SLOW: {"perm": (2, 1, 0), "pairs": 1, "every": 2},
    "3 fast pairs": {"perm": (0, 2, 1), "pairs": 3, "every": 4},
}
"""The planted builds: `pairs` pairs of transposes by `perm` and back, in one of `every` rounds. ONNX Runtime has a fast
path for moving a single axis. It copies value by value if several axes move."""


def measure(quick: bool) -> list[Row]:
    """How often an equal build was called slower, and how often a build with a slow pair was not."""
    with temporary.folder() as folder:
        builds = {kind: folder / kind.replace(" ", "-") / "block.onnx" for kind in (EQUAL, *PLANTS)}
        for kind, path in builds.items():
            path.parent.mkdir()
            make(path)
            if kind in PLANTS:
                plant(path, PLANTS[kind]["pairs"], PLANTS[kind]["perm"])
        shares = {kind: _share(builds[EQUAL], builds[kind]) for kind in PLANTS}
        runs = _runs(builds, 1 if quick else RUNS)
    states = {kind: Counter(run["state"] for run in runs if run["kind"] == kind) for kind in builds}
    if not quick:
        scenario = {"runtimes": OPTIONS.runtimes, "scenarios": OPTIONS.scenarios}
        head = {"scenario": scenario, "limit": LIMIT, "steady": STEADY, "planted": PLANTS}
        write_json(RESULTS / "gate.json", {**record(), **head, "shares": shares, "states": states, "runs": runs})
    missed = states[SLOW].total() - states[SLOW]["slower"]
    return [
        counted("equal builds that were called slower", states[EQUAL]["slower"], 0, "builds", **states[EQUAL]),
        counted("slow builds that were not", missed, states[SLOW].total() // 2, "builds", **states[SLOW]),
    ]


def _runs(builds: dict[str, Path], count: int) -> list[dict[str, Any]]:
    shuffle, runs, baseline = random.Random(0), [], None
    for number in range(count):
        if baseline is None or number % RENEWED == 0:
            baseline = bench_to_keep(builds[EQUAL], OPTIONS)
        due = [EQUAL, *(kind for kind, plan in PLANTS.items() if number % plan["every"] == 0)]
        for kind in shuffle.sample(due, len(due)):
            result = bench_gated(builds[kind], baseline, LIMIT)
            head = {"kind": kind, "processes": result.processes, "machine_load": result.machine_load}
            runs += [{**head, **attrs.asdict(change)} for change in (result.gate.changes if result.gate else ())]
            click.echo(f"{kind}: {runs[-1]['state']}")
    return runs


def _share(plain: Path, planted: Path) -> dict[str, float]:
    """How much longer a planted build takes than a plain one in the same rounds, with its 95 % interval."""
    with BenchRun(planted, attrs.evolve(OPTIONS, processes=PROCESSES), previous_artifact=plain) as run:
        run.open_processes(run.planned)
        timing = run.result().shapes[0].timing("ort-cpu")
    if timing is None:
        raise RuntimeError("ort-cpu was not timed")
    ratio = timing.ratios["against"]
    return {"share": ratio.median - 1, "low": ratio.low - 1, "high": ratio.high - 1}


def make(path: Path, hidden: int = 256) -> None:
    """Write a small block that runs in about a millisecond."""
    write_block(block_spec("rope", hidden, 4, causal=True), path)


def plant(path: Path, pairs: int, perm: tuple[int, ...] = (2, 1, 0)) -> None:
    """Transpose `hidden_states` and transpose it back, `pairs` times, before anything else reads it.

    After each transpose the value is flattened and gets its shape back, so that optimizers cannot cancel two
    transposes.
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
    for node in graph.node:
        node.input[:] = [value if name == source else name for name in node.input]
    graph.initializer.append(helper.make_tensor("plant.flat", onnx.TensorProto.INT64, [1], [-1]))
    planted = [*nodes, *graph.node]
    del graph.node[:]
    graph.node.extend(planted)
    onnx.save(model, path)
