"""The figures of docs/results/rewrite.md."""

from __future__ import annotations

import statistics
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from results import cell_text, made_on, table
from rewrite_data import File, NearMiss, Plan, Results, Speed, Time, ToolScore

OURS = ("posexport native", "posexport contrib")
SEVERAL = {"decoder": "decoders with caches", "tokens": "encoders of tokens", "image": "encoders of images"}


def figures(results: Results) -> list[str]:
    """The lines between the two comments of the page."""
    sections: list[tuple[str, Any, Callable[[Any], list[str]]]] = [
        ("suite", results.suite, _suite),
        ("near_misses", results.near_misses, _near_misses),
        ("speed", results.speed, _speed),
        ("tensorrt", results.tensorrt, _plans),
        ("suite", results.suite, _files),
    ]
    lines: list[str] = []
    for name, part, write in sections:
        if part:
            lines += [*write(part), "", made_on(results.machines[name], "Measured on: "), ""]
    return lines


def carried(file: File, tool: str) -> int:
    """The number of a file's attentions that are one operator after a tool ran."""
    score = file.scores.get(tool)
    return 0 if score is None else min(score.attentions, file.sites)


def done(file: File, tool: str) -> int:
    """The number of attentions in the form. posexport reports this for its own files. For other tools, an attention
    counts if it is one operator."""
    score = file.scores.get(tool)
    if score is None or score.recognised is None:
        return carried(file, tool)
    return min(score.recognised, file.sites)


def rotates(file: File, tool: str) -> bool:
    """Whether operators rotate queries and keys. As many rotations as attentions are enough, because some layers may
    have none."""
    score = file.scores.get(tool)
    return score is not None and score.rotations >= file.sites


def share(part: int, whole: int) -> str:
    """A share as `12 of 20 (60 %)`."""
    return f"{part} of {whole} ({part / whole:.0%})".replace("%", " %") if whole else "-"


def tools_of(files: Sequence[File]) -> list[str]:
    """The tools that scored all files, in their order."""
    return [tool for tool in files[0].scores if all(tool in file.scores for file in files)]


def _suite(files: Sequence[File]) -> list[str]:
    with_attention, rotating = [one for one in files if one.sites], [one for one in files if one.rope]
    sites, tools = sum(one.sites for one in files), tools_of(files)
    without = len(files) - len(with_attention)
    columns = ["tool", "attention in the form", "one operator", "files with RoPE by operators", "exact", "wrong"]
    columns += ["broken", "failed", "median CPU seconds", "nodes left"]
    rows: list[tuple[str, ...]] = []
    for tool in tools:
        scores = [one.scores[tool] for one in files]
        verdicts = Counter(score.verdict for score in scores)
        if verdicts["not run"] == len(files):
            rows.append((tool, *["-"] * (len(columns) - 2), f"not run: {scores[0].problem}"))
            continue
        before = sum(one.scores["as it is"].nodes for one in files if one.scores[tool].nodes)
        rows.append(
            (
                tool,
                share(sum(done(one, tool) for one in files), sites),
                share(sum(carried(one, tool) for one in files), sites),
                share(sum(rotates(one, tool) for one in rotating), len(rotating)),
                *(str(verdicts[verdict]) for verdict in ("exact", "wrong", "broken", "failed")),
                f"{statistics.median(score.seconds for score in scores):.1f}",
                f"{sum(score.nodes for score in scores) / max(before, 1):.0%}".replace("%", " %"),
            )
        )
    head = (
        f"{len(files)} files, of which {without} hold no attention; {sites} attentions, RoPE in {len(rotating)} files."
    )
    lines = ["## The suite", "", head, "", *table(columns, rows)]
    groups: list[tuple[str, Callable[[File], str]]] = [
        ("exporter", lambda one: one.exporter),
        ("kind of model", lambda one: SEVERAL.get(one.kind, "others")),
        ("encoding", lambda one: f"RoPE, {one.rope}" if one.rope else one.encoding),
    ]
    for title, key in groups:
        lines += [
            "",
            f"Attention in the form, or in one operator, by {title}:",
            "",
            *_grouped(with_attention, tools, title, key),
        ]
    return [*lines, *_kept(files), *_failures(files, tools)]


def _grouped(files: Sequence[File], tools: Sequence[str], title: str, key: Callable[[File], str]) -> list[str]:
    groups: dict[str, list[File]] = defaultdict(list)
    for one in files:
        groups[key(one)].append(one)
    rows = [
        (name, str(sum(one.sites for one in group)), *(str(sum(done(one, tool) for one in group)) for tool in tools))
        for name, group in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]
    return table((title, "attentions", *tools), rows)


def _kept(files: Sequence[File]) -> list[str]:
    """The attentions that were left as they were, grouped by reason."""
    reasons: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for one in files:
        for tool in OURS:
            for kept in one.scores[tool].kept if tool in one.scores else ():
                reasons[kept.code, kept.text][tool].append(one.name)
    rows = [
        (
            f"`{code}`: {text}",
            *(str(len(found[tool])) for tool in OURS),
            _names(name for tool in OURS for name in found[tool]),
        )
        for (code, text), found in sorted(reasons.items(), key=lambda item: -sum(map(len, item[1].values())))
    ]
    if not rows:
        return ["", "No attention was left as it was."]
    return [
        "",
        "### Attention that was left as it was, and why",
        "",
        *table(("reason", *OURS, "files"), rows, ("files",)),
    ]


def _failures(files: Sequence[File], tools: Sequence[str]) -> list[str]:
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for tool in tools[1:]:
        for one in files:
            score = one.scores[tool]
            if score.verdict in ("wrong", "broken", "failed", "unknown"):
                found[tool, score.verdict, _problem(score)].append(one.name)
    rows = [(*key, str(len(names)), _names(names)) for key, names in found.items()]
    if not rows:
        return []
    columns = ("tool", "verdict", "problem", "files", "which")
    return ["", "### Files that became another function, or could not be made", "", *table(columns, rows, columns)]


def _problem(score: ToolScore) -> str:
    return cell_text(score.problem)[:160] or (
        "not finite, or another shape" if score.error is None else "outputs differ"
    )


def _names(names: Iterable[str], most: int = 6) -> str:
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:most]) + (f" and {len(distinct) - most} more" if len(distinct) > most else "")


def _near_misses(rows: Sequence[NearMiss]) -> list[str]:
    """Counts by the first word of the fault, which says what it concerns."""
    columns = (
        "fault of",
        "kinds",
        "made",
        "left alone",
        "rewritten in part",
        "rewritten",
        "corrected",
        "broken",
        "crashed",
    )
    groups: dict[str, list[NearMiss]] = defaultdict(list)
    for one in rows:
        groups[one.fault.partition("_")[0]].append(one)
    cells = [
        (name, str(len({one.fault for one in group})), *(str(count) for count in _verdicts(group)))
        for name, group in [("all", list(rows)), *sorted(groups.items())]
    ]
    faults, files = len({one.fault for one in rows}), len({one.of for one in rows})
    head = f"{len(rows)} near misses of {files} files, {faults} kinds of faults."
    kinds = ", ".join(sorted({one.fault.replace("_", " ") for one in rows}))
    return ["## Near misses", "", head, "", *table(columns, cells), "", *textwrap.wrap(f"The kinds: {kinds}.", 120)]


def _verdicts(rows: Sequence[NearMiss]) -> Iterator[int]:
    """The number of near misses, and the number for each result."""
    yield len(rows)
    yield sum(one.verdict == "left alone" for one in rows)
    for whole in (False, True):
        yield sum(one.verdict == "rewritten, the same" and whole != bool(one.kept) for one in rows)
    for verdict in ("corrected", "broken", "crashed"):
        yield sum(one.verdict == verdict for one in rows)


def _speed(speed: Speed) -> list[str]:
    columns = ("file", "milliseconds", "× original", "interval", "times as fast", "error")
    lines = ["## Speed of a whole decoder"]
    sizes = f"{speed.parameters / 1e6:.0f} million parameters, {speed.layers} layers of {speed.hidden}"
    load = f"other work took {speed.machine_load:.0%} of the CPU".replace("%", " %")
    lines += ["", f"A Llama of {sizes}, fp32, {speed.threads} threads of ONNX Runtime's CPU provider; {load}."]
    scenarios: dict[str, list[Time]] = defaultdict(list)
    for cell in speed.cells:
        scenarios[cell.scenario].append(cell)
    for name, cells in scenarios.items():
        rows = [
            (
                cell.file,
                f"{cell.ms:.1f}",
                f"{cell.ratio.median:.2f}",
                f"{cell.ratio.low:.2f} to {cell.ratio.high:.2f}",
                f"{1 / cell.ratio.median:.2f}",
                f"{cell.error:.0e}",
            )
            for cell in cells
        ]
        lines += ["", f"`{name}`:", "", *table(columns, rows)]
    return lines


def _plans(rows: Sequence[Any]) -> list[str]:
    forms = list(dict.fromkeys(form for row in rows for form in row.files))
    columns = ["file", "attentions", *(f"{form}: {what}" for form in forms for what in ("kernels", "fused"))]
    cells = [
        (row.file, str(row.sites), *(text for form in forms for text in _plan(row.files.get(form)))) for row in rows
    ]
    problems = [
        f"- {row.file}, {form}: {plan.problem[:200]}"
        for row in rows
        for form, plan in row.files.items()
        if plan.problem
    ]
    return ["## TensorRT for RTX, fp16", "", *table(columns, cells), "", *problems]


def _plan(plan: Plan | None) -> tuple[str, str]:
    if plan is None or plan.problem:
        return "-", "not built" if plan is not None else "-"
    return str(plan.kernels), str(plan.fused)


def _files(files: Sequence[File]) -> list[str]:
    """Every file: the number of attentions in the form for each tool, with the verdict if it is not exact."""
    tools = tools_of(files)
    rows = [
        (one.name, one.encoding, one.rope or "-", str(one.sites), *(_cell(one, tool) for tool in tools))
        for one in files
    ]
    return ["## Every file", "", *table(("file", "encoding", "RoPE", "attentions", *tools), rows, ("encoding", "RoPE"))]


def _cell(file: File, tool: str) -> str:
    verdict = file.scores[tool].verdict
    return str(done(file, tool)) if verdict == "exact" else f"{done(file, tool)}, {verdict}"
