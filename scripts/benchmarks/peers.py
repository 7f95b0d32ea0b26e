"""posexport's best form against what users have without it, for every encoding and scenario, on ONNX Runtime's CPU.

Peers are torch eager, torch.compile, torch's own ONNX export at opsets 18, 20 and 24 (`alternatives`), and that file
through ONNX Runtime's transformers optimizer and through onnxscript's fusions; beside them stands the lower bound. One
block, one process, two threads. A first race finds posexport's fastest form, over forms and targets; fresh sessions
then time it beside all peers, so that luck in the race is no merit. Results: docs/results/peers.json
and alternatives.md.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import peers_cells as cells
import peers_genai as genai
import peers_page as page
import torch
from blocks import PLAIN
from peers_cells import COMPILED, LOWER_BOUND, PEERS, TORCH, Cell
from rows import Row, counted

from posexport.bench import rounds, statistics
from posexport.errors import RequestError

SESSIONS, CONFIDENCE = 2, 0.99
WIDE = 1.25
"""An interval that holds 1 and reaches beyond this leaves open which is faster."""

RACE_SECONDS, CELL_SECONDS = 1.5, 4.5
FEWEST, MOST = 4, 12
"""Rounds of one session; within them the seconds above decide."""

BURSTS = {"decode": 5, "prefill:128": 3}
OF_BOUND, OF_EAGER = 1.1, 0.35
"""Most that prefill:1024 may take of the lower bound, and decode:2048 of torch eager."""


def measure(quick: bool) -> list[Row]:
    """How many encodings miss each goal; the figures themselves go to a page of their own."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(cells.THREADS)
    found: list[dict[str, Any]] = []
    for encoding in cells.encodings(quick):
        with tempfile.TemporaryDirectory() as folder:
            shelf = cells.Programs(encoding, Path(folder))
            found += [_measured(shelf, scenario, quick) for scenario in cells.scenarios(encoding)]
    builder = genai.measure(quick)
    if not quick:
        page.write(found, builder)
    return _goals(found)


def _measured(shelf: cells.Programs, scenario: str, quick: bool) -> dict[str, Any]:
    compiled = shelf.encoding in PLAIN and scenario in cells.EVERYWHERE and not quick
    cell = _sound(shelf.cell(scenario, compiled))
    burst = next((count for name, count in BURSTS.items() if scenario.startswith(name)), 1)
    best, grown = _race(cell, burst)
    chosen = {LOWER_BOUND, *PEERS, best, grown} & set(cell.entries)
    missing = dict(cell.missing)
    if COMPILED not in chosen:
        missing[COMPILED] = "compiled for the textbook's eight encodings only, in the two scenarios of all"
    series: dict[str, list[float]] = {name: [] for name in chosen}
    for session in range(SESSIONS):
        turns = cells.turns(cell, burst, chosen)
        rounds = 3 if quick else _rounds(turns, burst, CELL_SECONDS / SESSIONS)
        for name, seconds in rounds.interleave(turns, rounds, seed=session).items():
            series[name] += seconds
    ratios = {
        cells.OWN_GROWN if name == grown else name: attrs.asdict(statistics.ratio(series[best], values, CONFIDENCE))
        for name, values in series.items()
        if name != best
    }
    return {
        "encoding": shelf.encoding,
        "scenario": scenario,
        "best": best,
        "grown": grown,
        "seconds": {name: statistics.quantile(values, 0.5) for name, values in series.items()},
        "ratios": ratios,
        "rounds": len(series[best]),
        "missing": {name: why for name, why in missing.items() if name in PEERS or name.startswith(PEERS)},
        **judged(scenario, ratios),
    }


def judged(scenario: str, ratios: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """`place`: fastest, equal (an interval holds 1), inconclusive (one that does is wide), or slower with the peers in
    `slower_than`; `missed`: goals surely missed."""
    against = {name: found for name, found in ratios.items() if name in PEERS}
    slower = [name for name, found in against.items() if found["low"] > 1]
    surely = all(found["high"] < 1 for found in against.values())
    wide = any(found["low"] <= 1 <= found["high"] and found["high"] > WIDE for found in against.values())
    missed = []
    if scenario == "prefill:1024" and ratios[LOWER_BOUND]["low"] > OF_BOUND:
        missed.append(f"above {OF_BOUND} of the lower bound")
    if scenario.startswith("decode") and ratios[TORCH]["low"] > OF_EAGER:
        missed.append(f"above {OF_EAGER} of torch eager")
    place = "slower" if slower else "fastest" if surely else "inconclusive" if wide else "equal"
    return {"place": place, "slower_than": slower, "missed": missed}


def _sound(cell: Cell) -> Cell:
    """Without the candidates that compute something else, or can't be compiled."""
    entries, missing = dict(cell.entries), dict(cell.missing)
    if COMPILED in entries:
        try:
            entries[COMPILED].load().run(entries[COMPILED].inputs)
        except Exception as error:  # it needs a compiler of the system's
            missing[COMPILED] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
            del entries[COMPILED]
    for name, error in cells.check(attrs.evolve(cell, entries=entries)).items():
        if not error < 1e-3:
            missing[name] = f"its output differs from torch's by {error:.2g}"
            del entries[name]
    return attrs.evolve(cell, entries=entries, missing=missing)


def _race(cell: Cell, burst: int) -> tuple[str, str]:
    """The fastest form of posexport by a few rounds of its own, and the fastest whose cache is no shared buffer."""
    names = {name for name, entry in cell.entries.items() if entry.ours}
    if not names:
        raise RequestError(f"no form unsupported {cell.encoding} in {cell.scenario}.")
    turns = cells.turns(cell, burst, names | {TORCH})
    found = rounds.interleave(turns, _rounds(turns, burst, RACE_SECONDS), seed=99)
    order = sorted(sorted(names), key=lambda name: statistics.ratio(found[name], found[TORCH]).median)
    return order[0], next((name for name in order if not name.endswith(cells.BUFFERED)), order[0])


def _rounds(turns: Mapping[str, Any], burst: int, seconds: float) -> int:
    """As many rounds as fit."""
    cost = sum((1 + burst) * turn() + rounds.PAUSE for turn in turns.values())
    return max(FEWEST, min(MOST, int(seconds / cost)))


def _goals(found: list[dict[str, Any]]) -> list[Row]:
    rows = []
    for scenario in cells.SIZES:
        here = [each for each in found if each["scenario"] == scenario]
        if not here:
            continue
        slower = [each["encoding"] for each in here if each["place"] == "slower"]
        rows.append(counted(f"{scenario}: encodings in which a peer is surely faster", len(slower), 0, "encodings"))
        missed = [each["encoding"] for each in here if each["missed"]]
        goal = {"prefill:1024": f"{OF_BOUND} of the lower bound", "decode:2048": f"{OF_EAGER} of torch eager"}.get(
            scenario
        )
        if goal is not None:
            rows.append(counted(f"{scenario}: encodings surely above {goal}", len(missed), 0, "encodings"))
    return rows
