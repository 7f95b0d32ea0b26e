"""`scripts/benchmark`: posexport's speed and memory against their targets, each as a ratio measured in one run."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from rows import Row
from tools import machine_line, versions

from posexport.bench import rounds
from posexport.cli import console
from posexport.files import staged, write_json

PARTS = {
    "startup": ("startup", "Start-up"),
    "export": ("export_time", "Export time, against torch.onnx.export of the same block in plain torch"),
    "memory": ("memory", "Export memory"),
    "stacks": ("stacks", "Stacks of layers: memory and time of an export and of the reference of `verify`"),
    "ort": ("ort_latency", "ONNX Runtime on the CPU, against torch's own opset-18 export of the plain block"),
    "forms": ("forms", "Forms on ONNX Runtime's CPU, against torch eager: causal rope, hidden 1024, 16 heads, fp32"),
    "forms_memory": ("forms_memory", "Memory of the forms on ONNX Runtime's CPU: the same block"),
    "peers": ("peers", "posexport's best form against its peers on ONNX Runtime's CPU (docs/results/alternatives.md)"),
    "kernels": ("kernels", "TensorRT for RTX, fp16, hidden 256, 4 heads"),
}
"""What is measured: name to (file here, title)."""

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "docs/results/cpu.json", ROOT / "docs/results/benchmarks.md"
_BLOCK = re.compile(r"(?<=<!-- figures -->\n).*?(?=<!-- end of figures -->)", re.DOTALL)


@click.command()
@click.option("--only", "only", multiple=True, type=click.Choice(list(PARTS)), help="measure this part, repeatable")
@click.option("--quick", is_flag=True, help="few rounds and one encoding, to see that it works; writes nothing")
def main(only: tuple[str, ...], quick: bool) -> None:
    """Measure, print a table, and write docs/results/cpu.json and the tables of docs/results/benchmarks.md.

    Parts that aren't measured keep their figures. Exits 1 where a target is missed.
    """
    stored = {} if quick else _read()
    missed = False
    for name, (home, title) in PARTS.items():
        if only and name not in only:
            continue
        others = rounds.Others()
        measure: Callable[[bool], list[Row]] = import_module(home).measure
        with console.steps(title):
            rows = measure(quick)
        part = {"title": title, "machine_load": round(others.share(), 2), "rows": [row.data() for row in rows]}
        stored[name] = {"machine": machine_line(), "versions": versions(), **part}
        console.show_table(title, COLUMNS, [_cells(row) for row in stored[name]["rows"]], right=COLUMNS[1:5])
        missed |= any(row.state == "failed" for row in rows)
    if not quick:
        parts = {name: stored[name] for name in PARTS if name in stored}
        write_json(RESULTS, parts)
        _write_page(parts)
    raise SystemExit(int(missed))


COLUMNS = ("what", "ours", "theirs", "ratio or count", "interval", "target", "state")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    target = f"≤ {row['target']:g}" if "target" in row else "-"
    if row["state"] == "not run":
        return (row["what"], "-", "-", "-", "-", target, f"not run: {row['reason']}")
    details = row.get("details", {})
    times = (f"{details[key]:.4g} ms" if key in details else "-" for key in ("ours_ms", "theirs_ms"))
    value = f"{row['value']:.2f}" if row["unit"] == "ratio" else f"{row['value']:g}"
    interval = f"{row['low']:.2f} to {row['high']:.2f}" if "low" in row else "-"
    return (row["what"], *times, value, interval, target, row["state"])


def _write_page(parts: dict[str, Any]) -> None:
    lines = []
    for part in parts.values():
        lines += ["", f"### {part['title']}", "", f"{part['machine']}; other work took {part['busy']:.0%} of the CPU."]
        lines += ["", f"| {' | '.join(COLUMNS)} |", "| --- | --: | --: | --: | --: | --: | --- |"]
        lines += [f"| {' | '.join(_cells(row))} |" for row in part["rows"]]
    text = PAGE.read_text(encoding="utf-8")
    page = _BLOCK.sub(lambda _: "\n".join(lines).lstrip("\n") + "\n", text)
    with staged() as files:
        files.write(PAGE, lambda file: file.write(page.encode()))


def _read() -> dict[str, Any]:
    import json

    return dict(json.loads(RESULTS.read_bytes())) if RESULTS.exists() else {}


if __name__ == "__main__":
    main()
