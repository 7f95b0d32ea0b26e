"""The figures of docs/results/alternatives.md from docs/results/alternatives.json."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from results import machine_line, table

EXPORTED = {18: "torch-onnx 18", 20: "torch-onnx 20", 24: "torch-onnx 24"}
OPTIMIZED = ("ort-optimizer", "ort-fusions")
LOWER_BOUND, COMPILED, OWN_GROWN = "lower_bound", "torch-compile", "posexport, grown caches"
ALTERNATIVES = ("torch", COMPILED, *EXPORTED.values(), *OPTIMIZED)
PLACES = ("fastest", "equal", "inconclusive")
SCENARIOS = ("prefill:128", "prefill:1024", "batch:8", "decode:2048")


def figures(data: Mapping[str, Any]) -> list[str]:
    """The lines of the page for results as they stand in the file."""
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    by_scenario = {name: [cell for cell in data["cells"] if cell["scenario"] == name] for name in SCENARIOS}
    columns = ("scenario", "encodings", *PLACES, "slower", "goal missed")
    summary = [_summary(name, cells) for name, cells in by_scenario.items() if cells]
    lines = [
        textwrap.fill(f"{machine_line(data['machine'])}; {versions}.", 120),
        "",
        *table(columns, summary, left=("slower",)),
    ]
    for name, cells in by_scenario.items():
        if cells:
            lines += ["", f"### `{name}`", "", *_cells(cells), "", *_reasons(cells)]
    return lines


def _summary(scenario: str, cells: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    slower, missed = (
        ", ".join(f"`{cell['encoding']}`" for cell in cells if cell[key]) or "-" for key in ("slower_than", "missed")
    )
    return (
        scenario,
        str(len(cells)),
        *(str(sum(cell["place"] == at for cell in cells)) for at in PLACES),
        slower,
        missed,
    )


def _cells(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    shown = [name for name in (*ALTERNATIVES, OWN_GROWN, LOWER_BOUND) if any(name in cell["ratios"] for cell in cells)]
    rows = []
    for cell in cells:
        place = f"slower than {', '.join(cell['slower_than'])}" if cell["slower_than"] else cell["place"]
        ratios = (_ratio(cell["ratios"][name]) if name in cell["ratios"] else "-" for name in shown)
        milliseconds = f"{cell['seconds'][cell['best']] * 1e3:.2f}"
        rows.append((cell["encoding"], cell["best"], milliseconds, *ratios, "; ".join([place, *cell["missed"]])))
    columns = ("encoding", "posexport", "ms", *(f"× {name.replace('_', ' ')}" for name in shown), "verdict")
    return table(columns, rows, left=("posexport",))


def _ratio(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"


def _reasons(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why an alternative has no figure: each reason once, with its encodings."""
    encodings: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        for name, reason in cell["missing"].items():
            if name in ALTERNATIVES:
                encodings.setdefault((name, reason.rstrip(".")), []).append(cell["encoding"])
    return [
        textwrap.fill(f"- {name}, not run: {reason} ({'all' if len(names) == len(cells) else ', '.join(names)}).", 120)
        for (name, reason), names in encodings.items()
    ]
