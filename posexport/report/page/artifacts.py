"""Artifacts on the page: what verified and timed each, the kernels of plans, and the shape of graphs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from posexport.artifact.graph_shape import GraphShape, read_graph_shape
from posexport.artifact.manifest import PlanManifest, matches_manifest, read_manifest_of
from posexport.bench.evidence import ArtifactSummary, Mention
from posexport.bench.result import TIMED
from posexport.errors import RequestError
from posexport.report.page.blocks import Block, Cell, Chain, Section, Table, cells, number
from posexport.report.page.graphs import graph_blocks
from posexport.report.page.summary import TONES, Finding, Highlights
from posexport.report.text import MARKS, listed, megabytes, plural, seconds
from posexport.verify.result import FAILED, NOT_RUN, PASSED

OPERATOR_MARKS = {"★": re.compile(r".*Attention|Softmax"), "◆": re.compile(r"Rotary.*|.*Bias|.*Sinusoids|Sin|Cos")}
"""The operators and functions that compute attention, and those that compute positions."""

_MOST_STEPS = 60  # the steps of a chain that are shown
_MOST_OPEN = 24  # rows of a table that starts open
_WORST_FIRST = (FAILED, PASSED, NOT_RUN)


def evidence_section(artifacts: Sequence[ArtifactSummary]) -> tuple[Section, Highlights]:
    """The table of artifacts, and findings about what was not verified or not timed."""
    table = Table(
        caption="Evidence for each artifact",
        columns=("artifact", "verified", "timed"),
        rows=[(artifact.name, _verified(artifact), _timed(artifact)) for artifact in artifacts],
    ).fold("Every artifact", _MOST_OPEN)
    lead = "Results belong to files by their sha256, or by name where either has none."
    timings = [mention for artifact in artifacts for mention in artifact.about(timing=True)[0]]
    if len({mention.by_tune for mention in timings if mention.state == TIMED}) > 1:
        lead += " Times by tune and by bench are of different runs: don't compare them."
    findings = tuple(finding for artifact in artifacts for finding in _findings(artifact))
    return Section(id="artifacts", title="Artifacts", lead=lead, blocks=[table]), Highlights(findings=findings)


def sentence(artifact: ArtifactSummary) -> str:
    """What verified and timed an artifact."""
    return f"Verified: {_verified(artifact).text}. Timed: {_timed(artifact).text}."


def _verified(artifact: ArtifactSummary) -> Cell:
    verdicts, stale = artifact.about(timing=False)
    if not verdicts:
        return _none(stale)
    worst = {_text(mention): state for state in _WORST_FIRST[::-1] for mention in verdicts if mention.state == state}
    names = {state: [name for name in worst if worst[name] == state] for state in _WORST_FIRST}
    idle = names[NOT_RUN]
    texts = {
        FAILED: f"failed on {listed(names[FAILED], 5)}",
        PASSED: listed(names[PASSED], 5),
        NOT_RUN: f"not run on {plural(len(idle), 'runtime') if len(idle) > 1 else listed(idle)}",
    }
    states = [state for state in _WORST_FIRST if names[state]]
    text = "; ".join(f"{MARKS[state]} {texts[state]}" for state in states)
    return Cell(text, more=f"not run on {', '.join(idle)}" if idle else "", tone=TONES.get(states[0], "good"))


def _timed(artifact: ArtifactSummary) -> Cell:
    timings, stale = artifact.about(timing=True)
    if not timings:
        return _none(stale)
    times = [_text(timing) for timing in timings if timing.state == TIMED]
    if times:
        return Cell(listed(times, 3), more="; ".join(times))
    state = FAILED if any(timing.state == FAILED for timing in timings) else NOT_RUN
    return Cell(f"{MARKS[state]} {state} on {listed([_text(timing) for timing in timings])}", tone=TONES[state])


def _text(mention: Mention) -> str:
    if mention.seconds is None:
        return f"{mention.runtime}{' (by tune)' * mention.by_tune}"
    place = ", ".join(filter(None, (mention.runtime, mention.scenario, "by tune" * mention.by_tune)))
    return f"{'⚠ ' * mention.busy}{seconds(mention.seconds)} ({place})"


def _none(stale: Sequence[str]) -> Cell:
    text = f"⚠ stale: {listed(stale)} is of other bytes" if stale else "· no result on this page"
    return Cell(text, tone="away")


def _findings(artifact: ArtifactSummary) -> Iterator[Finding]:
    """Findings about missing and stale verdicts and timings."""
    missing = []
    for kind, again, timing in (("verdict", "verify", False), ("timing", "time", True)):
        mentions, stale = artifact.about(timing)
        if stale and not mentions:
            reason = f"its {kind} in {listed(stale)} is of other bytes (stale): {again} it again"
            yield Finding(state=NOT_RUN, who=artifact.name, reason=reason)
        elif all(mention.state == NOT_RUN for mention in mentions):
            missing.append(kind)
    if missing:
        yield Finding(state=NOT_RUN, who=artifact.name, reason=f"no {' and no '.join(missing)} on this page")


def file_sections(
    artifacts: Sequence[tuple[Path, str]], evidence: Mapping[str, str], advance: Callable[[str], object]
) -> Iterator[Section]:
    """Sections for plans and for ONNX files. RequestError names a file that can't be read.

    `evidence` says by name what verified and timed them.
    """
    plans, graphs = [], []
    for path, name in artifacts:
        advance(name)
        if path.suffix == ".plan":
            plans.append(_plan(path, name, evidence[name]))
        else:
            graphs.append(read_graph_shape(path, name))
    if plans:
        lead = "What TensorRT's builder made of each graph. Rows marked ★ are fused attention: one kernel for it all."
        yield Section(id="kernels", title="Kernels of plans", lead=lead, blocks=plans)
    if graphs:
        yield _graphs(graphs, evidence, advance)


def _plan(path: Path, name: str, evidence: str) -> Table:
    manifest = read_manifest_of(PlanManifest, path)
    if manifest is None:
        raise RequestError(f"{str(path)!r} has no manifest {path.name}.json: build it with 'posexport compile'.")
    kernels, rows = manifest.kernels, []
    for at, kernel in enumerate(kernels.rows, 1):
        mark = Cell("★ fused attention", tone="best") if kernel.attention else ""
        nodes = Cell(listed(kernel.nodes, 6), more=", ".join(kernel.nodes))
        rows.append((number(at), kernel.name, kernel.type, mark, nodes))
    if kernels.count is None:
        texts = [f"kernels are unknown: {kernels.unknown or 'the builder did not report them'}"]
    else:
        fusion = {True: "attention fused", False: "attention not fused", None: "fusion unknown"}
        texts = [f"{plural(kernels.count, 'kernel')}, {plural(kernels.host_steps or 0, 'host step')}"]
        texts += [fusion[kernels.fused_attention]]
    texts += [f"{manifest.runtime.name} {manifest.runtime.version}"]
    texts += [f"plan {megabytes(size)}"] if (size := manifest.sizes.get("plan")) else []
    texts += [] if matches_manifest(path) else ["the manifest does not match the file"]
    text = "; ".join(texts)
    title = f"{name}: {_content(manifest)}"
    return Table(
        caption=title,
        columns=("", "kernel", "type", "", "ONNX nodes"),
        rows=rows,
        note=f"{text[:1].upper()}{text[1:]}. {evidence}",
        folded=f"{title}: {text}" if len(rows) > _MOST_OPEN else "",
    )


def _content(manifest: PlanManifest) -> str:
    if manifest.spec is None:
        return f"a graph without a spec, opset {manifest.opset}"
    spec = manifest.block()
    return f"{spec.encoding.name}, {manifest.form}, {spec.dtype}"


def _graphs(graphs: Sequence[GraphShape], evidence: Mapping[str, str], advance: Callable[[str], object]) -> Section:
    lead = (
        "The operators in each file, and the longest path from its input to its output. What computes attention is "
        "marked ★, what computes positions ◆."
    )
    names = sorted({name for graph in graphs for name in (*graph.operators, *graph.inside)})
    rows = [cells("all nodes", *(number(graph.operators.total()) for graph in graphs))]
    rows += [cells(f"{name} {_mark(name)}".strip(), *(_count(graph, name) for graph in graphs)) for name in names]
    table = Table(
        caption="Operators by artifact",
        columns=("operator", *(graph.name for graph in graphs)),
        rows=rows,
        note="A number behind + stands in the bodies of the file's own functions.",
    ).fold("Operators by artifact", _MOST_OPEN)
    blocks: list[Block] = []
    for graph in graphs:
        blocks.append(_chain(graph, evidence[graph.name]))
        if graph.graph is not None:
            advance(f"attention of {graph.name}")
            blocks += graph_blocks(graph.graph, graph.name)
    return Section(id="graphs", title="Shape of the graphs", lead=lead, blocks=[*blocks, table])


def _count(graph: GraphShape, name: str) -> Cell:
    outside, inside = graph.operators[name], graph.inside[name]
    text = f"{outside or ''}{f' +{inside}' if inside else ''}".strip() or "–"
    return Cell(text, value=outside + inside)


def _mark(name: str) -> str:
    bare = name.rpartition(".")[2]
    return next((mark for mark, names in OPERATOR_MARKS.items() if names.fullmatch(bare)), "")


def _chain(graph: GraphShape, evidence: str) -> Chain:
    runs = [(name, len(list(run))) for name, run in itertools.groupby(graph.path)]
    steps = [(_mark(name), name + (f" ×{times}" if times > 1 else "")) for name, times in runs]
    note = f"{plural(graph.operators.total(), 'node')} in all, {len(graph.path)} on the longest path"
    note += f", the first {_MOST_STEPS} steps shown" if len(steps) > _MOST_STEPS else ""
    return Chain(title=f"{graph.name}: {graph.summary}", note=f"{note}. {evidence}", steps=steps[:_MOST_STEPS])
