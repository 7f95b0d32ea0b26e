"""`scripts/benchmark`: compares posexport's speed and memory with their targets. Each figure is a ratio from one
run."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import click
from results import RESULTS, Row, machine_line, read_results, record, table, write_figures

from posexport.bench import rounds
from posexport.cli import console
from posexport.files import write_json

PARTS = {
    "startup": ("startup.measure", "Start-up"),
    "export": ("export_time.measure", "Export time, against torch.onnx.export of the same block in plain torch"),
    "memory": ("memory.measure_exports", "Export memory"),
    "stacks": ("memory.measure_stacks", "Stacks of layers: memory and time of an export and of verify's reference"),
    "forms": ("forms.measure", "Forms on ONNX Runtime's CPU, against torch eager: causal rope, hidden 1024, fp32"),
    "forms_memory": ("memory.measure_forms", "Memory of the forms on ONNX Runtime's CPU: the same block"),
    "alternatives": ("alternatives.measure", "The best form against its alternatives on ONNX Runtime's CPU"),
    "positions": ("positions.measure", "What encodings cost beyond a block without one, on ONNX Runtime's CPU"),
    "decoder": ("whole_decoder.measure", "A decoder of 100 million parameters on ONNX Runtime's CPU, fp32"),
    "model_export": ("whole_export.measure", "Export time of whole models: Llama-shaped checkpoints, beside mobius"),
    "kernels": ("kernels.measure", "TensorRT for RTX, fp16, hidden 256, 4 heads"),
    "tuning": ("tuning.measure", "What tune chooses, against timing everything"),
    "gate": ("gate.measure", "The gate of bench: equal builds, and planted slowdowns"),
}
"""The parts to measure: name to (function in this folder, title)."""

LONG = ("positions", "decoder", "tuning", "gate")
"""Parts that take half an hour or more. They are measured only if they are named."""

BUSY = 0.05
"""The largest share of the CPU that other work may take while figures to be kept are measured."""

COLUMNS = ("what", "ours", "theirs", "ratio or count", "interval", "target", "state")


@click.command()
@click.option("--only", "only", multiple=True, type=click.Choice(list(PARTS)), help="measure this part, repeatable")
@click.option("--quick", is_flag=True, help="few rounds and one encoding, to see that it works; writes nothing")
def main(only: tuple[str, ...], quick: bool) -> None:
    """Measure, print tables, and write docs/results/cpu.json and the figures of docs/results/benchmarks.md.

    alternatives, positions, tuning and gate have files of their own there. Parts that are not measured keep their
    figures. Exits 1 if a target is missed.
    """
    parts, missed = read_results("cpu"), False
    for name in only or [part for part in PARTS if part not in LONG]:
        (module, _, function), title = PARTS[name][0].partition("."), PARTS[name][1]
        load = rounds.MachineLoad()
        measure: Callable[[bool], list[Row]] = getattr(import_module(module), function)
        with console.steps(title):
            rows = measure(quick)
        data = [row.data() for row in rows]
        parts[name] = {"title": title, "machine_load": round(load.share(), 2), **record(), "rows": data}
        console.show_table(title, COLUMNS, map(_cells, data), right=COLUMNS[1:5])
        missed |= any(row.state == "failed" for row in rows)
    if not quick:
        parts = {name: parts[name] for name in PARTS if name in parts}
        write_json(RESULTS / "cpu.json", parts)
        write_figures("benchmarks.md", [line for part in parts.values() for line in _section(part)])
    raise SystemExit(int(missed))


def _section(part: dict[str, Any]) -> list[str]:
    machine = f"{machine_line(part['machine'])}; other work took {part['machine_load']:.0%} of the CPU."
    if part["machine_load"] > BUSY:
        machine += " **To be measured again at rest.**"
    return ["", f"### {part['title']}", "", machine, "", *table(COLUMNS, map(_cells, part["rows"]))]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    target = f"≤ {row['target']:g}" if "target" in row else "-"
    if row["state"] == "not run":
        return (row["what"], "-", "-", "-", "-", target, f"not run: {row['reason']}")
    details = row.get("details", {})
    times = (f"{details[key]:.4g} ms" if key in details else "-" for key in ("ours_ms", "theirs_ms"))
    value = f"{row['value']:.2f}" if row["unit"] in ("ratio", "s") else f"{row['value']:g}"
    interval = f"{row['low']:.2f} to {row['high']:.2f}" if "low" in row else "-"
    return (row["what"], *times, value, interval, target, row["state"])


if __name__ == "__main__":
    main()
