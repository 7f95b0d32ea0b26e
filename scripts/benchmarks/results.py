"""What all parts use: rows with their targets, the record of the machine, and the figures of a page."""

from __future__ import annotations

import json
import platform
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from posexport.bench import statistics
from posexport.files import staged, write_json
from posexport.machine import describe_cpu, machine, versions

RESULTS = Path(__file__).resolve().parents[2] / "docs/results"
PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime-gpu", "onnxruntime", "tensorrt", "tensorrt-rtx")
MACHINE = ("cpu", "vendor", "instruction_sets", "architecture", "cores", "logical_cpus", "memory", "os")


@attrs.frozen(kw_only=True)
class Row:
    """One figure. `state` is passed, failed, not run, or measured (if there is no target). `target` is the largest
    ratio or count that passes."""

    what: str
    target: float | None
    state: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    unit: str = "ratio"
    details: dict[str, Any] = attrs.field(factory=dict)
    reason: str = ""

    def data(self) -> dict[str, Any]:
        """The row as plain data with four significant digits and without empty fields."""
        return dict(rounded({name: value for name, value in attrs.asdict(self).items() if value not in (None, "", {})}))


def counted(what: str, value: float, target: float | None, unit: str, **details: Any) -> Row:
    """A row for a value without noise. It passes if the value is at most the target."""
    state = "measured" if target is None else "passed" if value <= target else "failed"
    return Row(what=what, target=target, state=state, value=value, unit=unit, details=details)


def compared(what: str, ours: Sequence[float], theirs: Sequence[float], target: float | None, **details: Any) -> Row:
    """A row for two series of seconds from the same rounds. It passes if the median ratio is at most the target."""
    ratio = statistics.ratio(ours, theirs)
    times = {"ours_ms": statistics.summarize(ours).median * 1e3, "theirs_ms": statistics.summarize(theirs).median * 1e3}
    details = {**times, "rounds": len(ours), "confidence": ratio.confidence, **details}
    return attrs.evolve(counted(what, ratio.median, target, "ratio", **details), low=ratio.low, high=ratio.high)


def not_run(what: str, target: float | None, reason: str) -> Row:
    """A row for something that could not be measured here."""
    return Row(what=what, target=target, state="not run", reason=reason)


def record() -> dict[str, Any]:
    """The machine and the versions that the figures depend on. Unknown values are None."""
    facts = {**machine(), "os": platform.system()}
    return {"machine": {name: facts[name] for name in MACHINE}, "versions": versions(PACKAGES)}


def machine_line(facts: Mapping[str, Any]) -> str:
    """The CPU, the memory and the system in one line."""
    cpu = describe_cpu(facts) if facts["cpu"] else f"CPU model not recorded, {facts['logical_cpus']} cores"
    return f"{cpu}, {facts['memory'] / 2**30:.0f} GiB, {facts['os']} {facts['architecture']}"


def made_on(results: Mapping[str, Any], start: str = "", end: str = "") -> str:
    """The machine and the versions of results as a paragraph of a page, between `start` and `end`."""
    used = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return textwrap.fill(f"{start}{machine_line(results['machine'])}; {used}.{end}", 120)


def with_interval(ratio: Mapping[str, float]) -> str:
    """A ratio as tables show it: `1.02 (0.97-1.08)`."""
    return f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"


def cell_text(text: str) -> str:
    """Text for a cell of a Markdown table, with the special characters replaced."""
    return text.replace("|", "\\|").replace("<", "‹").replace(">", "›")


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] = ()) -> list[str]:
    """A table in Markdown. Columns are aligned to the right, except for the first, the last and those in `left`."""
    marks = ["---" if name in (columns[0], columns[-1], *left) else "--:" for name in columns]
    return [f"| {' | '.join(cells)} |" for cells in (columns, marks, *rows)]


def read_results(name: str) -> dict[str, Any]:
    """The committed results of that name; empty if there are none yet."""
    path = RESULTS / f"{name}.json"
    return dict(json.loads(path.read_bytes())) if path.exists() else {}


def write_results(name: str, data: Mapping[str, Any], lines: Sequence[str]) -> None:
    """Write results, and the figures of their page."""
    write_json(RESULTS / f"{name}.json", data)
    write_figures(f"{name}.md", lines)


def write_figures(page: str, lines: Sequence[str]) -> None:
    """Replace the figures of a page in docs/results. They are between two HTML comments."""
    path, figures = RESULTS / page, "\n".join(lines).strip("\n") + "\n"
    block = re.compile(r"(?<=<!-- figures -->\n).*?(?=<!-- end of figures -->)", re.DOTALL)
    text = block.sub(lambda _: figures, path.read_text(encoding="utf-8"))
    with staged() as files:
        files.write(path, lambda file: file.write(text.encode()))


def rounded(value: Any) -> Any:
    """Plain data with floats at four significant digits."""
    if isinstance(value, Mapping):
        return {name: rounded(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(entry) for entry in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
