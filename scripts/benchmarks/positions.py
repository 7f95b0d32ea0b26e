"""The cost of encodings beyond a block without one, with positions as data and with consecutive positions.

One block on ONNX Runtime's CPU provider, one process, two threads. Denormal numbers are treated as zeros. First
sessions over forms, targets and caches find the fastest file of an encoding in each mode. New sessions then time it
beside the fastest file of `none`. `relative`, `shaw` and `deberta` are also timed beside the block of their paper with
Transformer-XL's shift, written in plain torch and exported by torch. Results: docs/results/positions.json and
positions.md.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import kernels
import memory
import textbook
import timing
from results import Row, counted, made_on, record, rounded, table, with_interval, write_results
from timing import Contender, check_equal, decodes

from posexport import temporary
from posexport.bench import statistics
from posexport.bench.shapes import Sizes, seeded_inputs
from posexport.export.support import unsupported_reason
from posexport.models import ENCODINGS, read_spec
from posexport.runtimes.base import Arrays
from posexport.runtimes.tensorrt import api
from posexport.spec.spec import Spec

FORMS, MODES = ("decomposed", "native", "contrib"), ("consecutive", "data")
PREFILL, DECODE = "prefill:1024", "decode:2048"
SIZES: Mapping[str, Sizes] = {PREFILL: Sizes(seq=1024), DECODE: Sizes(seq=1, past_seq=2048, max_seq=2560)}
SCORES, BIASES, FUNCTIONS = (
    ("relative", "deberta", "shaw"),
    ("t5", "alibi", "sandwich", "kerple", "swin", "swinv2", "alibi2d"),
    ("fire", "cope"),
)
GOALS: Mapping[tuple[str, str], Mapping[str, float]] = {
    (PREFILL, "consecutive"): {
        **dict.fromkeys(SCORES, 2.0),
        **dict.fromkeys(BIASES, 1.25),
        **dict.fromkeys(FUNCTIONS, 2.5),
    },
    (PREFILL, "data"): {"cope": 3.5, "deberta": 3.5, "alibi2d": 1.25},  # alibi2d has no other mode
    (DECODE, "consecutive"): dict.fromkeys(ENCODINGS, 2.0),
    (DECODE, "data"): dict.fromkeys(ENCODINGS, 3.0),
}
"""The largest ratio to `none` of each encoding in a scenario and mode."""

PLANS = ("decomposed", "native")
"""The forms for which plans are built and their kernels counted."""

NONE, TEXTBOOK, TOKENS = "none", "textbook", 4096
LONGER: Mapping[str, Mapping[str, int]] = {
    **{name: {"window_size": math.isqrt(TOKENS)} for name in ("swin", "swinv2")},  # one window of all tokens
    "xpos": {"scale_base": 1024},  # its factors fit fp32 for 6 times as many positions
}
"""Parameters that an encoding needs to take `TOKENS` tokens."""

CHOOSING, CHOOSING_ROUNDS = 4, {PREFILL: 3, DECODE: 6}
SESSIONS, CONFIDENCE, BURSTS = 4, 0.99, {PREFILL: 1, DECODE: 7}
SESSION_SECONDS, ROUNDS = 1.5, (5, 20)

Rounds = Callable[[float], int]
"""Maps the seconds of a round to the number of rounds of a session."""


def measure(quick: bool) -> list[Row]:
    """The number of encodings that miss their goals. The figures themselves go to a page of their own."""
    warnings.simplefilter("ignore")
    timing.prepare_process()
    cells, peaks, plans = [], [], []
    with temporary.folder() as folder:
        plain = {
            (name, causal): _files(NONE, "data", name, Path(folder, f"none-{at}-{causal}"), causal)
            for at, name in enumerate(SIZES)
            for causal in ((True, False) if name == PREFILL else (True,))
        }
        for encoding in ["alibi"] if quick else [name for name in ENCODINGS if name != NONE]:
            for name in SIZES:
                if name == PREFILL or decodes(encoding):
                    with temporary.folder() as own:
                        cells += _measure(encoding, name, plain[name, decodes(encoding)], own, quick)
        for encoding in ["alibi"] if quick else ENCODINGS:
            for mode in modes_of(encoding):
                with temporary.folder() as own:
                    peaks.append({"encoding": encoding, "mode": mode, "peaks": _peaks(encoding, mode, own)})
                plans += plans_of(encoding, mode)
    if not quick:
        data = rounded({**record(), "cells": cells, "peaks": peaks, "plans": plans})
        write_results("positions", data, figures(data))
    return list(_goal_rows(cells))


def modes_of(encoding: str) -> tuple[str, ...]:
    """The kinds of positions in MODES that an encoding supports."""
    return MODES if spec_of(encoding, "data", None).encoding.can_be_consecutive() else ("data",)


def spec_of(encoding: str, mode: str, cache: str | None, causal: bool | None = None) -> Spec:
    """The block with an encoding. By default it is causal if the encoding is for decoders."""
    causal = decodes(encoding) if causal is None else causal
    return timing.block_spec(encoding, 768, 12, causal=causal, kv_cache=cache, positions=mode)


def caches(scenario: str) -> tuple[str | None, ...]:
    """The kinds of cache that the files of a scenario use."""
    return (None,) if scenario == PREFILL else ("concat", "shared")


def inputs_of(spec: Spec, scenario: str) -> Arrays:
    """The inputs of a scenario for a block. Both kinds of cache get the same numbers."""
    sizes = SIZES[scenario]
    if spec.kv_cache != "concat":
        return seeded_inputs(spec, sizes, 0)
    return timing.grown(seeded_inputs(attrs.evolve(spec, kv_cache="shared"), sizes, 0), sizes.past_seq or 0)


def named(form: str, cache: str | None) -> str:
    """The name of a file in the tables."""
    return f"{form}, shared buffers" if cache == "shared" else form


def _files(encoding: str, mode: str, scenario: str, folder: Path, causal: bool | None = None) -> dict[str, Contender]:
    """All files of an encoding in a mode."""
    contenders = dict[str, Contender]()
    for cache in caches(scenario):
        spec = spec_of(encoding, mode, cache, causal)
        inputs = inputs_of(spec, scenario)
        own = folder / f"{mode}-{cache}"
        own.mkdir(parents=True)
        for form, path in timing.write_forms(spec, own, FORMS)[0].items():
            contenders[named(form, cache)] = timing.of_file(path, inputs, **timing.FLUSHED)
    return contenders


def rounds_of(seconds: float) -> int:
    """The number of rounds of a session, given the seconds of one round."""
    return max(ROUNDS[0], min(ROUNDS[1], int(SESSION_SECONDS / seconds)))


def fastest(contenders: Mapping[str, Contender], kinds: Iterable[str], scenario: str) -> dict[str, str]:
    """The name of the fastest contender of each kind, found in separate sessions. Names have the form `kind: form`."""
    sessions = timing.time_sessions(contenders, CHOOSING, lambda _: CHOOSING_ROUNDS[scenario], BURSTS[scenario], 99)
    reference = next(iter(contenders))
    times = {name: [seconds] for name, seconds in timing.merged(sessions).items()}
    names = {kind: [name for name in contenders if name.startswith(f"{kind}: ")] for kind in kinds}
    return {kind: timing.ranking(times, each, reference)[0] for kind, each in names.items()}


def seconds_of(contenders: Mapping[str, Contender], rounds: Rounds, scenario: str) -> dict[str, list[float]]:
    """The times of contenders measured beside each other, over all sessions."""
    return timing.merged(timing.time_sessions(contenders, SESSIONS, rounds, BURSTS[scenario]))


def _measure(
    encoding: str, scenario: str, plain: Mapping[str, Contender], folder: Path, quick: bool
) -> list[dict[str, Any]]:
    """One cell for each mode of an encoding."""

    def rounds(seconds: float) -> int:
        return 3 if quick else rounds_of(seconds)

    modes = modes_of(encoding)
    kinds = {NONE: plain, **{mode: _files(encoding, mode, scenario, folder) for mode in modes}}
    if encoding in textbook.TEXTBOOKS and scenario == PREFILL:
        spec = spec_of(encoding, "consecutive", None)
        inputs = seeded_inputs(spec, SIZES[scenario], 0)
        kinds[TEXTBOOK] = {
            "torch-onnx 20": textbook.contender(folder / "textbook.onnx", spec, inputs, **timing.FLUSHED)
        }
    labelled = {f"{kind}: {form}": one for kind, files in kinds.items() for form, one in files.items()}
    check_equal({name: one for name, one in labelled.items() if not name.startswith(NONE)}, f"{encoding}, {scenario}")
    best = fastest(labelled, kinds, scenario)
    series = seconds_of({kind: labelled[name] for kind, name in best.items()}, rounds, scenario)
    cells = []
    for mode in modes:
        ratios = {
            other: attrs.asdict(statistics.ratio(series[mode], series[other], CONFIDENCE))
            for other in (NONE, TEXTBOOK)
            if other in series
        }
        goal = GOALS.get((scenario, mode), {}).get(encoding)
        cells.append(
            {
                "encoding": encoding,
                "scenario": scenario,
                "mode": mode,
                "best": best[mode].partition(": ")[2],
                "none": best[NONE].partition(": ")[2],
                "seconds": statistics.quantile(series[mode], 0.5),
                "rounds": len(series[mode]),
                "ratios": ratios,
                "goal": goal,
                "missed": goal is not None and ratios[NONE]["low"] > goal,
            }
        )
    return cells


def _peaks(encoding: str, mode: str, folder: Path) -> dict[str, float | str]:
    """The megabytes of each form for `TOKENS` tokens, above the memory of the process before the run; or why there are
    none."""
    spec = spec_of(encoding, mode, None)
    if encoding in LONGER:
        data = spec.to_dict()
        spec = read_spec({**data, "encoding": {**data["encoding"], **LONGER[encoding]}})
    if (limit := spec.token_limit()) is not None and limit < TOKENS:
        return {"every form": f"it takes {limit} tokens"}
    peaks: dict[str, float | str] = {}
    for form, path in timing.write_forms(spec, folder, FORMS)[0].items():
        result = memory.child(memory.of_form, argument=str(path))
        peaks[form] = result if isinstance(result, str) else result["value"]
    return peaks


def plans_of(encoding: str, mode: str) -> list[dict[str, Any]]:
    """For each form that TensorRT supports: the number of kernels of its plan, and whether attention is a single
    kernel; or the reason why there is no plan."""
    fields: dict[str, Any] = {"positions": mode, "causal": decodes(encoding), "dtype": "fp16"}
    spec, missing = timing.block_spec(encoding, 256, 4, **fields), api.can_build("tensorrt-rtx")
    rows = []
    for form in PLANS:
        row: dict[str, Any] = {"encoding": encoding, "mode": mode, "form": form}
        reason = unsupported_reason(spec, form, "tensorrt")
        why = missing if reason is None else reason.text
        if why is not None:
            rows.append({**row, "reason": why})
            continue
        made = kernels.kernels_of(spec, form, "tensorrt")
        rows.append({**row, "kernels": len(made.rows), "fused": made.attention_kernels == 1})
    return rows


def _goal_rows(cells: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    for scenario, mode in GOALS:
        here = [cell for cell in cells if (cell["scenario"], cell["mode"]) == (scenario, mode) and cell["goal"]]
        if here:
            missed = sum(cell["missed"] for cell in here)
            yield counted(f"{scenario}, {mode} positions: encodings above their goal", missed, 0, "encodings")


def figures(data: Mapping[str, Any]) -> list[str]:
    """The lines of the page for the data of the results file."""
    lines = [made_on(data)]
    for scenario in SIZES:
        lines += ["", f"### `{scenario}`", "", *_scenario(data["cells"], scenario)]
    lines += ["", f"### Memory of {TOKENS} tokens", "", *_memory(data["peaks"])]
    lines += ["", "### Kernels of TensorRT for RTX", "", *_plans(data["plans"])]
    return lines


def _plans(plans: Sequence[Mapping[str, Any]]) -> list[str]:
    by_block: dict[tuple[str, str], list[str]] = {}
    for plan in plans:
        count = f"not run: {plan['reason']}" if "reason" in plan else str(plan["kernels"])
        by_block.setdefault((plan["encoding"], plan["mode"]), []).append(
            count if plan.get("fused", True) else f"{count}, attention is several"
        )
    return table(
        ("encoding", "positions", *PLANS), [(*block, *cells) for block, cells in by_block.items()], left=("positions",)
    )


def _scenario(cells: Sequence[Mapping[str, Any]], scenario: str) -> list[str]:
    by_key = {(cell["encoding"], cell["mode"]): cell for cell in cells if cell["scenario"] == scenario}
    rows = []
    for encoding in dict.fromkeys(encoding for encoding, _ in by_key):
        row, notes = [encoding], []
        for mode in MODES:
            cell = by_key.get((encoding, mode))
            if cell is None:
                row += ["-", "-", "-"]
                continue
            goal = "-" if cell["goal"] is None else f"≤ {cell['goal']:g}{' missed' if cell['missed'] else ''}"
            row += [cell["best"], with_interval(cell["ratios"][NONE]), goal]
            if TEXTBOOK in cell["ratios"]:
                notes.append(f"{mode}: {with_interval(cell['ratios'][TEXTBOOK])} of the textbook's shift")
        rows.append((*row, "; ".join(notes) or "-"))
    columns = ("encoding", *(name for mode in MODES for name in (mode, f"× none, {mode}", f"goal, {mode}")), "notes")
    return table(columns, rows, left=MODES)


def _memory(peaks: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = []
    for entry in peaks:
        values = {form: value for form, value in entry["peaks"].items() if not isinstance(value, str)}
        why = "; ".join(str(value) for value in entry["peaks"].values() if isinstance(value, str))
        if values:
            least = min(values, key=lambda form: values[form])
            rows.append(
                (entry["encoding"], entry["mode"], f"{values[least]:.0f}", f"{max(values.values()):.0f}", least)
            )
        else:
            rows.append((entry["encoding"], entry["mode"], "-", "-", f"not run: {why}"))
    return table(("encoding", "positions", "least MB", "most MB", "form with the least"), rows, left=("positions",))
