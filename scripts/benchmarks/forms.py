"""Latency of each form on ONNX Runtime's CPU provider against torch eager: prefills, and a decoding step over a cache.

All run in one process with two threads, in alternation with pauses. The reference is posexport's own block in torch,
with scaled_dot_product_attention. In a decoding step the caches of the reference grow, and it needs no mask because one
query sees all cached keys.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import timing
import torch
from results import Row, compared, not_run
from timing import THREADS, TORCH

from posexport import temporary
from posexport.bench.shapes import Sizes, seeded_inputs

FORMS, SESSIONS = ("decomposed", "function", "native", "contrib"), 4


@attrs.frozen
class Situation:
    """What is timed. `target` is the largest ratio of the best form's time to torch eager's; None means no target."""

    sizes: Sizes
    rounds: int
    burst: int
    cache: str | None
    target: float | None


STEP = Sizes(seq=1, past_seq=2048)
SITUATIONS = {
    "prefill of 128": Situation(Sizes(seq=128), 17, 3, None, 0.85),
    "prefill of 1024": Situation(Sizes(seq=1024), 7, 1, None, 1.0),
    "a step over 2048 in grown caches": Situation(STEP, 17, 7, "concat", None),
    "a step over 2048 in shared buffers of 2560": Situation(attrs.evolve(STEP, max_seq=2560), 17, 7, "shared", 0.35),
}


def measure(quick: bool) -> list[Row]:
    """For each situation a ratio for each form, and one for the best form if there is a target."""
    torch.set_num_threads(THREADS)
    with temporary.folder() as folder:
        return [row for name, case in SITUATIONS.items() for row in _rows(name, case, folder, quick)]


def _rows(name: str, case: Situation, folder: Path, quick: bool) -> list[Row]:
    spec, plain = (
        timing.block_spec("rope:layout=half", 1024, 16, causal=True, kv_cache=cache)
        for cache in (case.cache, "concat" if case.cache else None)
    )
    inputs = seeded_inputs(spec, case.sizes, 0)
    reference = timing.of_torch(timing.seeded_block(plain), timing.grown(inputs, case.sizes.past_seq or 0))
    files, missing = timing.write_forms(spec, folder, FORMS)
    contenders = {form: timing.of_file(path, inputs) for form, path in files.items()}
    timing.check_equal({TORCH: reference, **contenders}, name)
    sessions, rounds = (2, 3) if quick else (SESSIONS, case.rounds)
    series = timing.time_sessions({TORCH: reference, **contenders}, sessions, lambda seconds: rounds, case.burst)
    whole = timing.merged(series)
    rows = [compared(f"{name}, {form}", whole[form], whole[TORCH], None) for form in files]
    if case.target is not None:
        rows.append(best_form(name, series, list(files), case.target))
    return rows + [not_run(f"{name}, {form}", None, reason) for form, reason in missing.items()]


def best_form(name: str, series: timing.Series, forms: list[str], target: float) -> Row:
    """The ratio of the best form. The first session chooses the form and the others time it: the minimum of many noisy
    values would be too small."""
    best = timing.ranking(series, forms, TORCH)[0]
    later = timing.merged(series, 1)
    return compared(f"{name}, best form: {best}", later[best], later[TORCH], target, form=best)
