"""Latency of each form on ONNX Runtime CPU, against torch eager: prefills, and a decode step over cached positions.

All run in one process with 2 threads, in alternation with pauses; a turn is one untimed run, which wakes threads, and
the median of a few timed ones. The peer is posexport's own block in torch, with scaled_dot_product_attention. In a
decode step it grows its caches, and has no mask: one query sees all that is cached.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import attrs
import blocks
import numpy as np
import torch
from rows import Row, compared, measured, not_run

from posexport.artifact.onnx_artifact import write_onnx
from posexport.bench import statistics
from posexport.bench.shapes import Sizes, seeded_inputs
from posexport.errors import RequestError
from posexport.export import export
from posexport.models.block import build_block
from posexport.models.weights import seeded_weights
from posexport.runtimes import ort
from posexport.runtimes.base import Arrays
from posexport.runtimes.torch_eager import TorchRunner

BLOCK, HIDDEN, HEADS, THREADS = "rope:layout=half", 1024, 16, 2
FORMS = {
    "decomposed": ("decomposed", "portable"),
    "decomposed --target ort": ("decomposed", "ort"),
    "function": ("function", "portable"),
    "native": ("native", "portable"),
    "native --target ort": ("native", "ort"),
    "contrib": ("contrib", "portable"),
    "contrib --target ort": ("contrib", "ort"),
}
"""What is exported: name to (form, target)."""

SESSIONS = 4
"""Fresh sessions per form: where its memory lies makes a session a few per cent faster or slower for good."""
TORCH = "torch"


@attrs.frozen(kw_only=True)
class Situation:
    """What is timed: `target` is the most that the best form may take of torch eager's time, None for no target."""

    what: str
    sizes: Sizes
    rounds: int
    burst: int
    cache: str | None = None
    target: float | None = None


PAST, PLACES = 2048, 2560
SITUATIONS = (
    Situation(what="prefill of 128", sizes=Sizes(seq=128), rounds=17, burst=3, target=0.85),
    Situation(what="prefill of 1024", sizes=Sizes(seq=1024), rounds=7, burst=1, target=1.0),
    Situation(
        what=f"a step over {PAST} in grown caches",
        sizes=Sizes(seq=1, past_seq=PAST),
        rounds=17,
        burst=7,
        cache="concat",
    ),
    Situation(
        what=f"a step over {PAST} in shared buffers of {PLACES}",
        sizes=Sizes(seq=1, past_seq=PAST, max_seq=PLACES),
        rounds=17,
        burst=7,
        cache="shared",
        target=0.35,
    ),
)


def measure(quick: bool) -> list[Row]:
    """Per situation a ratio for each form and, where there is a target, one for the best of them."""
    torch.set_num_threads(THREADS)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for situation in SITUATIONS:
            rows += _rows(situation, Path(folder), 2 if quick else SESSIONS, 3 if quick else situation.rounds)
    return rows


def _rows(situation: Situation, folder: Path, sessions: int, rounds: int) -> list[Row]:
    spec = blocks.spec(BLOCK, HIDDEN, HEADS, causal=True, kv_cache=situation.cache)
    weights, inputs = seeded_weights(spec, 0), seeded_inputs(spec, situation.sizes, 0)
    peer = _torch(situation, weights)
    files, refused = {}, []
    for name, (form, target) in FORMS.items():
        try:
            model = export(spec, weights, form=form, target=target)
        except RequestError as error:
            refused.append(not_run(f"{situation.what}, {name}", None, str(error)))
            continue
        if target != "portable" and "posexport.target" not in model.metadata_props:
            continue  # the same file as that for all targets
        files[name] = folder / f"{form}-{target}.onnx"
        write_onnx(model, files[name])
    series: list[dict[str, list[float]]] = []
    for session in range(sessions):
        calls = {TORCH: peer.prepare(_peer_inputs(situation, inputs))}
        for name, file in files.items():
            runner = ort.load(file, {"threads": THREADS})
            error = _error(peer.run(_peer_inputs(situation, inputs)), runner.run(inputs))
            assert error < 1e-3, f"{situation.what}, {name}: its output differs from torch's by {error}"
            calls[name] = runner.prepare(inputs)
        turns = {name: _turn(call, situation.burst) for name, call in calls.items()}
        series.append(rounds.interleave(turns, rounds, seed=session))
    whole = {name: [seconds for each in series for seconds in each[name]] for name in (TORCH, *files)}
    rows = [measured(f"{situation.what}, {name}", whole[name], whole[TORCH]) for name in files]
    if situation.target is not None:
        rows.append(_best(situation, series, list(files)))
    return rows + refused


def _best(situation: Situation, series: list[dict[str, list[float]]], names: list[str]) -> Row:
    """The form that the first session finds fastest, judged by the others: the best of noise is none of its merit."""
    assert situation.target is not None
    first, rest = series[0], series[1:]
    best = min(names, key=lambda name: statistics.ratio(first[name], first[TORCH]).median)
    ours, theirs = ([seconds for each in rest for seconds in each[name]] for name in (best, TORCH))
    return compared(f"{situation.what}, best form: {best}", ours, theirs, situation.target, form=best)


def _torch(situation: Situation, weights: dict[str, torch.Tensor]) -> TorchRunner:
    cache = "concat" if situation.cache else None
    spec = blocks.spec(BLOCK, HIDDEN, HEADS, causal=True, kv_cache=cache)
    return TorchRunner(build_block(spec, weights), torch.float32, torch.device("cpu"))


def _peer_inputs(situation: Situation, inputs: Arrays) -> Arrays:
    """Without write_indices, and of the buffers what is written."""
    return {
        name: np.ascontiguousarray(array[:, :, : situation.sizes.past_seq]) if name.startswith("past_") else array
        for name, array in inputs.items()
        if name != "write_indices"
    }


def _error(theirs: Arrays, ours: Arrays) -> float:
    return float(np.abs(theirs["output"] - ours["output"]).max())


def _turn(call: Callable[[], float], burst: int) -> Callable[[], float]:
    def turn() -> float:
        call()
        return statistics.quantile([call() for _ in range(burst)], 0.5)

    return turn
