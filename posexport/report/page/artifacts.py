"""Artifacts on the page: the kernels of plans with fused attention marked, and the shape of graphs, form by form.

The graph is read as it lies in the file; the chain is its longest path from the block's input to its output.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from posexport.errors import RequestError
from posexport.jsondata import unstructure
from posexport.report.page.blocks import Block, Cell, Chain, Section, Step, Table, listed, number, plural
from posexport.report.page.sources import clean

MARKS = {"★": re.compile(r".*Attention|Softmax"), "◆": re.compile(r"Rotary.*|.*Bias|.*Sinusoids|Sin|Cos")}
"""Which operators and functions compute attention, and which positions."""

MOST_STEPS = 60
"""Steps of a chain that are shown."""

MOST_OPEN = 24
"""Rows up to which a table stands open."""

_MANIFEST = {
    "file": str, "form": str, "runtime": {"name": str, "version": str}, "sizes?": {"plan?": float, "scratch?": float},
    "spec": {"encoding": {"name": str}, "dtype": str},
    "kernels": {
        "count?": int, "fused_attention?": bool, "attention_kernels?": int, "attention_layers?": int,
        "host_steps?": int, "unknown?": str, "rows": [{"name": str, "type": str, "nodes": [str]}],
    },
}  # fmt: skip


@attrs.frozen(kw_only=True)
class Graph:
    """One ONNX file: how often each operator stands in it, in functions those of their bodies, and its longest path."""

    name: str
    told: str
    operators: Counter[str]
    inside: Counter[str]
    chain: tuple[str, ...]


def sections(
    artifacts: Sequence[tuple[Path, str]], known: Mapping[str, str], advance: Callable[[str], object]
) -> list[Section]:
    """Sections for plans and for ONNX files; RequestError names a file that can't be read.

    `known` is, by name, who verified and timed them.
    """
    plans, graphs = [], []
    for path, name in artifacts:
        advance(name)
        if path.suffix == ".plan":
            plans.append(_plan(path, name, known[name]))
        else:
            graphs.append(read_graph(path, name))
    found = []
    if plans:
        lead = "What TensorRT's builder made of each graph. Rows marked ★ are fused attention: one kernel for it all."
        blocks = tuple(block for each in plans for block in each)
        found.append(Section(id="kernels", title="Kernels of plans", lead=lead, blocks=blocks))
    if graphs:
        found.append(_graphs(graphs, known))
    return found


def _plan(path: Path, name: str, known: str) -> list[Block]:
    from posexport.artifact.manifest import matches_manifest, read_manifest
    from posexport.runtimes.tensorrt.kernels import Kernel

    manifest = read_manifest(path)
    if manifest is None:
        raise RequestError(f"{str(path)!r} has no manifest {path.name}.json: build it with 'posexport compile'.")
    manifest = clean(unstructure(manifest))
    told, found = manifest["kernels"], []
    for at, row in enumerate(told["rows"], 1):
        fused = Kernel(name=row["name"], type=row["type"]).attention
        mark = Cell(text="★ fused attention", tone="best") if fused else Cell(text="")
        found.append((number(str(at), at), Cell(text=row["name"]), Cell(text=row["type"]), mark,
                      Cell(text=listed(row["nodes"], 6), more=", ".join(row["nodes"]))))  # fmt: skip
    if told.get("count") is None:
        said = f"kernels are not known: {told.get('unknown') or 'the builder did not say'}"
    else:
        fused_all = {True: "attention fused", False: "attention not fused"}.get(
            told.get("fused_attention"), "fusion not known"
        )
        said = f"{plural(told['count'], 'kernel')}, {plural(told.get('host_steps') or 0, 'host step')}; {fused_all}"
    runtime, sizes = manifest["runtime"], manifest.get("sizes") or {}
    said += f"; {runtime['name']} {runtime['version']}"
    said += f"; plan {sizes['plan'] / 1e6:,.2f} MB" if sizes.get("plan") else ""
    said += "" if matches_manifest(path) else "; the manifest does not match the file"
    title = f"{name}: {_told(manifest['spec'], manifest['form'])}"
    note = f"{said[:1].upper()}{said[1:]}. {known}"
    columns = ("", "kernel", "type", "", "ONNX nodes")
    folded = f"{title}: {said}" if len(found) > MOST_OPEN else ""
    return [Table(caption=title, columns=columns, rows=tuple(found), right=(0,), note=note, folded=folded)]


def _told(spec: dict[str, Any], form: str) -> str:
    return f"{spec['encoding']['name']}, {form}, {spec['dtype']}"


def read_graph(path: Path, name: str) -> Graph:
    """The shape of one file."""
    from posexport.artifact.onnx_artifact import read_onnx

    artifact = read_onnx(path)
    graph = artifact.model.graph
    bodies = {
        function.name: Counter(clean(node.op_type) for node in function.node) for function in artifact.model.functions
    }
    operators = Counter(_operator(node) for node in graph.node)
    inside: Counter[str] = Counter()
    for node in graph.node:
        inside += bodies.get(node.op_type, Counter())
    told = f"{_told(artifact.spec.to_dict(), artifact.form)}, opset {artifact.opset}"
    start, end = graph.input[0].name, graph.output[0].name
    return Graph(name=name, told=clean(told), operators=operators, inside=inside, chain=longest(graph.node, start, end))


def _operator(node: Any) -> str:
    domain = {"": "", "ai.onnx": "", "com.microsoft": "ms."}.get(node.domain, f"{node.domain}.")
    return str(clean(f"{domain}{node.op_type}"))


def longest(nodes: Sequence[Any], start: str, end: str) -> tuple[str, ...]:
    """The operators on the longest path from the value `start` to the value `end`; nodes come in topological order."""
    best: dict[str, tuple[int, Any, str]] = {start: (0, None, "")}
    for node in nodes:
        reached = [name for name in node.input if name in best]
        if not reached:
            continue
        source = max(reached, key=lambda name: best[name][0])
        for name in node.output:
            best[name] = (best[source][0] + 1, node, source)
    found = []
    while end in best and best[end][1] is not None:
        _, node, end = best[end]
        found.append(_operator(node))
    return tuple(reversed(found))


def _graphs(graphs: Sequence[Graph], known: Mapping[str, str]) -> Section:
    lead = (
        "The operators in each file, and the longest path from its input to its output. What computes attention is "
        "marked ★, what computes positions ◆."
    )
    names = sorted({name for graph in graphs for name in (*graph.operators, *graph.inside)})
    total = [number(str(graph.operators.total()), graph.operators.total()) for graph in graphs]
    rows = [(Cell(text="all nodes"), *total)]
    rows += [(Cell(text=f"{name} {mark}".strip()), *(_count(graph, name) for graph in graphs))
             for name in names for mark in (_mark(name),)]  # fmt: skip
    table = Table(
        caption="Operators by artifact", columns=("operator", *(graph.name for graph in graphs)),
        rows=tuple(rows), right=tuple(range(1, 1 + len(graphs))),
        note="A number behind + stands in the bodies of the file's own functions.",
        folded=f"Operators by artifact: {plural(len(rows), 'row')}" if len(rows) > MOST_OPEN else "",
    )  # fmt: skip
    chains = [_chain(graph, known[graph.name]) for graph in graphs]
    return Section(id="graphs", title="Shape of the graphs", lead=lead, blocks=(*chains, table))


def _count(graph: Graph, name: str) -> Cell:
    outside, inside = graph.operators[name], graph.inside[name]
    text = f"{outside or ''}{f' +{inside}' if inside else ''}".strip() or "–"
    return number(text, outside + inside)


def _mark(name: str) -> str:
    bare = name.rpartition(".")[2]
    return next((mark for mark, names in MARKS.items() if names.fullmatch(bare)), "")


def _chain(graph: Graph, known: str) -> Chain:
    steps: list[Step] = []
    for name in graph.chain:
        if steps and steps[-1].text == name:
            steps[-1] = attrs.evolve(steps[-1], times=steps[-1].times + 1)
        else:
            steps.append(Step(text=name, mark=_mark(name)))
    note = f"{plural(graph.operators.total(), 'node')} in all, {len(graph.chain)} on the longest path"
    if len(steps) > MOST_STEPS:
        note += f", the first {MOST_STEPS} steps shown"
    return Chain(title=f"{graph.name}: {graph.told}", note=f"{note}. {known}", steps=tuple(steps[:MOST_STEPS]))
