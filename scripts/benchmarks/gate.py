"""`python scripts/benchmarks/gate.py`: the gate of `posexport bench` here: false alarms, and planted slowdowns caught.

One baseline is saved; then equal builds are held against it, again and again, and in between a build with pairs of
transposes planted into its graph. At rest it takes about a minute a run. Prints a line per run and a sum as JSON; exits
1 where an equal build was called slower, or most planted ones weren't.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import click
import onnx
from onnx import helper

from posexport.artifact import write_onnx
from posexport.bench import PROCESSES, bench
from posexport.bench_gate import bench_gated
from posexport.export import export
from posexport.files import write_json
from posexport.models import read_spec
from posexport.models.weights import seeded_weights

ALLOWED = 0.05


def plant(path: Path, pairs: int) -> None:
    """Transpose `hidden_states` to and fro `pairs` times, before anything else reads it.

    Halfway the value becomes a row and takes its shape again, so that optimizers can't fold the two into none.
    """
    model = onnx.load(path)
    graph, source = model.graph, model.graph.input[0].name
    flat = helper.make_tensor("plant.flat", onnx.TensorProto.INT64, [1], [-1])
    nodes, value = [], source
    for index in range(pairs):
        there, row, shape, again, back = (
            f"plant.{index}.{name}" for name in ("there", "row", "shape", "again", "back")
        )
        nodes.append(helper.make_node("Transpose", [value], [there], perm=[2, 1, 0]))
        nodes.append(helper.make_node("Reshape", [there, "plant.flat"], [row]))
        nodes.append(helper.make_node("Shape", [there], [shape]))
        nodes.append(helper.make_node("Reshape", [row, shape], [again]))
        nodes.append(helper.make_node("Transpose", [again], [back], perm=[2, 1, 0]))
        value = back
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


def main() -> int:
    """Run it as the options say."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--runs", type=int, default=20, help="equal builds")
    options.add_argument("--planted", type=int, default=3, help="builds with transposes planted")
    options.add_argument("--pairs", type=int, default=4, help="pairs of transposes planted into each")
    options.add_argument("--scenario", default="prefill:256")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        block, base = Path(folder) / "block.onnx", Path(folder) / "base.json"
        make(block)
        known = {"runtimes": ["ort-cpu"], "scenarios": [asked.scenario]}
        write_json(base, bench(block, processes=PROCESSES, **known).to_dict())  # type: ignore[arg-type]
        states: dict[str, Counter[str]] = {"equal": Counter(), "planted": Counter()}
        for kind, count in (("equal", asked.runs), ("planted", asked.planted)):
            if kind == "planted":
                plant(block, asked.pairs)
            for _ in range(count):
                found, gate = bench_gated(block, baseline=base, allowed=ALLOWED)
                (change,) = gate.changes
                states[kind][change.state] += 1
                told = "" if change.change is None else f"{change.change:.3f} ({change.low:.3f} to {change.high:.3f})"
                more = f"by {change.by}, {found.processes} processes, busy {found.busy:.0%} {change.reason}"
                click.echo(f"{kind:8} {change.state:10} {told} {more}")
    click.echo(json.dumps(states))
    return int(states["equal"]["slower"] > 0 or states["planted"]["slower"] * 2 <= asked.planted > 0)


if __name__ == "__main__":
    sys.exit(main())
