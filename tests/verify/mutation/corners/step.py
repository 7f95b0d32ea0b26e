"""Corners of steps and chunks over a band of cached tokens, with one row, a few or many."""

from __future__ import annotations

from mutation.artifacts import Artifact
from mutation.corners.bands import (
    ROWS,
    aim_at,
    draw_band,
    draw_table,
    far,
    mask_ignored,
    output_off,
    padded,
    positions_clipped,
    sizes_within,
    within,
)
from mutation.corners.family import Apply, Fault, Random, family, is_cached, is_free, is_padded, on_visibility
from mutation.inputs import REACH, Aim, Range
from mutation.surgery import Logits

ONE: Range = (1, 1)

Sizes = tuple[Range, Range, Range]
"""Rows, tokens and cached tokens."""


def _rows(random: Random) -> Range:
    return ROWS[int(random.integers(len(ROWS)))]


def _past(random: Random, most: int) -> Range:
    """A band of cached tokens. Its end is 1.9 to 5 times its beginning, and at least 31 more."""
    return draw_band(random, 1, most, most=5.0, width=31)


def _step(random: Random) -> Sizes:
    return _rows(random), ONE, _past(random, REACH.keys - 60)


def _chunk(random: Random) -> Sizes:
    short = bool(random.integers(2))
    ends = ((2, 6), (45, 70)) if short else ((50, 75), (180, 280))
    seq = int(random.integers(*ends[0])), int(random.integers(*ends[1]))
    rows = ONE if random.random() < 0.5 else (2, REACH.batch)
    return rows, seq, _past(random, REACH.keys - seq[1] - 20)


def _text(sizes: Sizes) -> str:
    rows, seq, past = (str(low) if low == high else f"{low}-{high}" for low, high in sizes)
    return f"{rows} rows, {seq} tokens after {past}"


def _aim(sizes: Sizes) -> Aim:
    rows, seq, past = sizes
    return aim_at(rows=rows, seq=seq, past=past)


def _off(artifact: Artifact, sizes: Sizes) -> Fault | None:
    if not is_cached(artifact):
        return None
    rows, seq, past = sizes
    return Fault(_text(sizes), output_off(sizes_within(artifact, rows=rows, seq=seq, past=past)), (_aim(sizes),))


def _unmasked(artifact: Artifact, sizes: Sizes) -> Fault | None:
    if not (is_cached(artifact) and is_padded(artifact)):
        return None
    rows, seq, past = sizes
    apply = mask_ignored(sizes_within(artifact, rows=rows, seq=seq, past=past))
    return Fault(_text(sizes), apply, (padded(_aim(sizes)),))


def _clipped(artifact: Artifact, sizes: Sizes, last: int) -> Fault | None:
    if not (is_cached(artifact) and is_free(artifact)):
        return None
    rows, seq, past = sizes
    apply = positions_clipped(sizes_within(artifact, rows=rows, seq=seq, past=past), last)
    return Fault(f"{_text(sizes)} at {last}", apply, (far(_aim(sizes), last),))


@family("step", "outputs off in steps over a band")
def _step_off(artifact: Artifact, random: Random) -> Fault | None:
    return _off(artifact, _step(random))


@family("step", "padding ignored in steps over a band")
def _step_mask(artifact: Artifact, random: Random) -> Fault | None:
    return _unmasked(artifact, _step(random))


@family("step", "positions clipped in steps over a band")
def _step_positions(artifact: Artifact, random: Random) -> Fault | None:
    return _clipped(artifact, _step(random), draw_table(random))


@family("step", "positions clipped in every step")
def _every_step(artifact: Artifact, random: Random) -> Fault | None:
    """One token over a cache of any length."""
    return _clipped(artifact, ((1, REACH.batch), ONE, (1, REACH.keys - 60)), draw_table(random))


@family("step", "outputs off in chunks over a band")
def _chunk_off(artifact: Artifact, random: Random) -> Fault | None:
    return _off(artifact, _chunk(random))


@family("step", "padding ignored in chunks over a band")
def _chunk_mask(artifact: Artifact, random: Random) -> Fault | None:
    return _unmasked(artifact, _chunk(random))


@family("step", "positions clipped in chunks over a band")
def _chunk_positions(artifact: Artifact, random: Random) -> Fault | None:
    return _clipped(artifact, _chunk(random), draw_table(random))


@family("step", "causality lost in chunks over a band")
def _chunk_causal(artifact: Artifact, random: Random) -> Fault | None:
    """Free slots of a shared buffer count as cached tokens here."""
    if not (artifact.spec.causal and is_cached(artifact)):
        return None
    rows, seq, past = sizes = _chunk(random)
    rows = rows if rows == ONE else (rows[0], 2**40)

    def lost(at: Logits) -> str:
        nodes = at.nodes
        return nodes.all_of(
            within(nodes, at.batch, rows),
            within(nodes, at.seq, seq),
            within(nodes, nodes.op("Sub", at.keys, at.seq), past),
            nodes.op("Less", at.distance(), nodes.const(0)),
        )

    apply: Apply = on_visibility(False, lost)
    return Fault(_text(sizes), apply, (_aim(sizes),))
