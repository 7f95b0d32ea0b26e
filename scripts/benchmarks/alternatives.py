"""posexport's best form against the alternatives that users have, for every encoding and scenario, on ONNX Runtime's
CPU.

One block, one process, two threads. All contenders treat denormal numbers as zeros. A first session over forms and
targets finds posexport's fastest form. New sessions then time it beside the alternatives, so that a lucky time in the
first session does not count. The alternatives are torch eager, torch.compile, torch's own ONNX export at three opsets,
and one of these files after two optimizers. A lower bound is measured too. Results: docs/results/alternatives.json and
alternatives.md.
"""

from __future__ import annotations

import itertools
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import timing
import torch
from results import Row, counted, made_on, record, rounded, table, with_interval, write_results
from timing import THREADS, TORCH, Contender, decodes

from posexport import temporary
from posexport.bench import alternatives, lower_bound, statistics
from posexport.bench.shapes import Sizes, seeded_inputs
from posexport.errors import RequestError
from posexport.models import ENCODINGS
from posexport.spec.spec import Spec

EXPORTED = {"torch-onnx 18": 18, "torch-onnx 20": 20, "torch-onnx 24": 24}
OPTIMIZED = {"ort-optimizer": alternatives.write_optimized, "ort-fusions": alternatives.write_fused}
PLAIN = "torch-onnx 20"
"""The file that the optimizers read."""

LOWER_BOUND, COMPILED, OWN_GROWN = "lower_bound", "torch-compile", "posexport, grown caches"
ALTERNATIVES = ("torch", COMPILED, *EXPORTED, *OPTIMIZED)
PLACES = ("fastest", "equal", "inconclusive")

FORMS, GROWN, SHARED = ("decomposed", "native", "contrib"), "concat", "shared"
SIZES: Mapping[str, Sizes] = {
    "prefill:128": Sizes(seq=128),
    "prefill:1024": Sizes(seq=1024),
    "batch:8": Sizes(batch=8, seq=128),
    "decode:2048": Sizes(seq=1, past_seq=2048, max_seq=2560),
}
FOR_ALL = ("prefill:1024", "decode:2048")
"""The scenarios measured for every encoding. The others are measured for `COMMON` only. torch.compile is measured only
for `COMMON`, in these two scenarios."""

SESSIONS, CONFIDENCE, BURSTS = 2, 0.99, {"decode:2048": 5, "prefill:128": 3}
SESSION_SECONDS, ROUNDS = 2.25, (4, 12)
"""The seconds of a session's rounds, and the fewest and most rounds."""

GOALS = {"prefill:1024": (LOWER_BOUND, 1.1, "the lower bound"), "decode:2048": (TORCH, 0.35, "torch eager")}
"""For a scenario: an alternative, the largest ratio to it, and its title."""


def measure(quick: bool) -> list[Row]:
    """The number of encodings that miss each goal. The figures themselves go to a page of their own."""
    warnings.simplefilter("ignore")
    timing.prepare_process()
    cells: list[dict[str, Any]] = []
    for encoding, cache in itertools.product(["rope"] if quick else ENCODINGS, (None, GROWN)):
        with temporary.folder() as folder:
            cells += _measure(encoding, cache, folder, quick)
    if not quick:
        data = rounded({**record(), "cells": cells})
        write_results("alternatives", data, figures(data))
    return goal_rows(cells)


def scenarios(encoding: str) -> list[str]:
    names = [name for name in SIZES if name in FOR_ALL or encoding in timing.COMMON]
    return [name for name in names if decodes(encoding) or not name.startswith("decode")]


def spec_of(encoding: str, cache: str | None) -> Spec:
    return timing.block_spec(encoding, 768, 12, causal=decodes(encoding), kv_cache=cache)


def _measure(encoding: str, cache: str | None, folder: Path, quick: bool) -> list[dict[str, Any]]:
    names = [name for name in scenarios(encoding) if (SIZES[name].past_seq is None) == (cache is None)]
    if not names:
        return []
    spec, buffers = spec_of(encoding, cache), spec_of(encoding, SHARED if cache else None)
    forms, _ = timing.write_forms(spec, folder, FORMS)
    buffered = timing.write_forms(buffers, folder, FORMS)[0] if cache else {}
    files, missing = _write_alternatives(spec, next(iter(forms.values())), folder)
    block, cells = timing.seeded_block(spec), []
    for name in names:
        inputs = seeded_inputs(buffers, SIZES[name], 0)
        plain, notes = timing.grown(inputs, SIZES[name].past_seq or 0), dict(missing)
        ours = {form: timing.of_file(path, plain, **timing.FLUSHED) for form, path in forms.items()}
        ours |= {
            f"{form}, shared buffers": timing.of_file(path, inputs, **timing.FLUSHED) for form, path in buffered.items()
        }
        others = {TORCH: timing.of_torch(block, plain)}
        others |= {other: timing.of_file(path, plain, **timing.FLUSHED) for other, path in files.items()}
        if encoding in timing.COMMON and name in FOR_ALL and not quick:
            torch.compiler.reset()  # earlier compiled blocks count against the limit of recompilations
            others[COMPILED] = timing.of_torch(torch.compile(block, dynamic=False), plain)  # type: ignore[arg-type]
        else:
            notes[COMPILED] = "compiled for the common encodings only, in the two scenarios of all"
        _leave_out_wrong(ours, others[TORCH], notes)
        _leave_out_wrong(others, others[TORCH], notes)
        others[LOWER_BOUND] = Contender(lambda: lower_bound.of_spec(spec, "cpu", THREADS), plain)
        cell = {"encoding": encoding, "scenario": name, **_compare(ours, others, BURSTS.get(name, 1), quick)}
        cells.append({**cell, "missing": notes, **judged(name, cell["ratios"])})
    return cells


def _write_alternatives(spec: Spec, source: Path, folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """The files of the alternatives, and the reasons why others are missing."""
    files: dict[str, Path] = {}
    missing: dict[str, str] = {}
    for name in (*EXPORTED, *OPTIMIZED):
        path = folder / f"{name}.onnx"
        try:
            if name in EXPORTED:
                alternatives.write_plain(source, path, EXPORTED[name])
            elif PLAIN not in files or not OPTIMIZED[name](files[PLAIN], path, spec):
                missing[name] = f"it fuses nothing of {PLAIN}, so it is that file"
                continue
            files[name] = path
        except RequestError as error:
            missing[name] = str(error)
    return files, missing


def _leave_out_wrong(contenders: dict[str, Contender], reference: Contender, notes: dict[str, str]) -> None:
    """Drop contenders whose output is wrong, or that cannot run. `notes` gets the reason."""
    for name, contender in list(contenders.items()):
        try:
            error = timing.error_of(contender, reference)
            reason = f"its output differs from torch's by {error:.2g}" if not error < 1e-3 else None
        except Exception as failure:  # for example, torch.compile needs a compiler of the system
            reason = f"{type(failure).__name__}: {str(failure).splitlines()[0][:120]}"
        if reason is not None:
            notes[name] = reason
            del contenders[name]


def _compare(ours: dict[str, Contender], others: dict[str, Contender], burst: int, quick: bool) -> dict[str, Any]:
    """Find the best of `ours` in a separate session, then time it beside the others in new sessions. posexport's best
    file with a growing cache is timed too, if it is another file."""

    def rounds(seconds: float) -> int:
        return 3 if quick else max(ROUNDS[0], min(ROUNDS[1], int(SESSION_SECONDS / seconds)))

    first = timing.time_sessions({**ours, TORCH: others[TORCH]}, 1, rounds, burst, 99)
    order = timing.ranking(first, list(ours), TORCH)
    best, own_grown = order[0], next((name for name in order if not name.endswith("shared buffers")), order[0])
    chosen = {**others, best: ours[best], own_grown: ours[own_grown]}
    sessions = timing.time_sessions(chosen, SESSIONS, rounds, burst)
    series = timing.merged(sessions)
    seconds = {name: statistics.quantile(values, 0.5) for name, values in series.items()}
    ratios = {
        OWN_GROWN if name == own_grown else name: attrs.asdict(statistics.ratio(series[best], values, CONFIDENCE))
        for name, values in series.items()
        if name != best
    }
    return {"best": best, "seconds": seconds, "ratios": ratios, "rounds": len(series[best])}


def judged(scenario: str, ratios: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """The verdict on posexport in a scenario.

    `place` is fastest, slower (than the alternatives in `slower_than`), equal (an interval contains 1) or inconclusive
    (such an interval reaches beyond 1.25). `missed` lists the goals that lie below the whole interval.
    """
    others = {name: ratio for name, ratio in ratios.items() if name in ALTERNATIVES}
    slower = [name for name, ratio in others.items() if ratio["low"] > 1]
    fastest = all(ratio["high"] < 1 for ratio in others.values())
    wide = any(ratio["low"] <= 1 <= ratio["high"] and ratio["high"] > 1.25 for ratio in others.values())
    place = "slower" if slower else "fastest" if fastest else "inconclusive" if wide else "equal"
    goals = [GOALS[scenario]] if scenario in GOALS else []
    missed = [f"above {limit} of {title}" for name, limit, title in goals if ratios[name]["low"] > limit]
    return {"place": place, "slower_than": slower, "missed": missed}


def goal_rows(cells: Sequence[Mapping[str, Any]]) -> list[Row]:
    """For each scenario, the number of encodings for which an alternative is faster, or that miss the goal."""
    rows = []
    for scenario in SIZES:
        here = [cell for cell in cells if cell["scenario"] == scenario]
        slower, missed = (sum(bool(cell[key]) for cell in here) for key in ("slower_than", "missed"))
        if here:
            rows.append(counted(f"{scenario}: encodings for which an alternative is faster", slower, 0, "encodings"))
        if here and scenario in GOALS:
            _, limit, title = GOALS[scenario]
            rows.append(counted(f"{scenario}: encodings above {limit} of {title}", missed, 0, "encodings"))
    return rows


def figures(data: Mapping[str, Any]) -> list[str]:
    """The lines of the page for the data of the results file."""
    by_scenario = {name: [cell for cell in data["cells"] if cell["scenario"] == name] for name in SIZES}
    columns = ("scenario", "encodings", *PLACES, "slower", "goal missed")
    summary = [_summary(name, cells) for name, cells in by_scenario.items() if cells]
    lines = [made_on(data), "", *table(columns, summary, left=("slower",))]
    for name, cells in by_scenario.items():
        if cells:
            lines += ["", f"### `{name}`", "", *_cells(cells), "", *_reasons(cells)]
    return lines


def _summary(scenario: str, cells: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    slower, missed = (
        ", ".join(f"`{cell['encoding']}`" for cell in cells if cell[key]) or "-" for key in ("slower_than", "missed")
    )
    places = (str(sum(cell["place"] == place for cell in cells)) for place in PLACES)
    return (scenario, str(len(cells)), *places, slower, missed)


def _cells(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    shown = [name for name in (*ALTERNATIVES, OWN_GROWN, LOWER_BOUND) if any(name in cell["ratios"] for cell in cells)]
    rows = []
    for cell in cells:
        place = f"slower than {', '.join(cell['slower_than'])}" if cell["slower_than"] else cell["place"]
        ratios = (with_interval(cell["ratios"][name]) if name in cell["ratios"] else "-" for name in shown)
        milliseconds = f"{cell['seconds'][cell['best']] * 1e3:.2f}"
        rows.append((cell["encoding"], cell["best"], milliseconds, *ratios, "; ".join([place, *cell["missed"]])))
    columns = ("encoding", "posexport", "ms", *(f"× {name.replace('_', ' ')}" for name in shown), "verdict")
    return table(columns, rows, left=("posexport",))


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
