"""The angles by which pairs of features are rotated, measured at chosen positions and expressed as frequencies.

    cos + i sin = amplitude * exp(i sum over axes of p_axis * frequency[axis, pair])

Positions are set if the graph takes them as an input. Otherwise they are the places of the tokens in a row, or the
cells of a grid of patches. An angle is known only modulo a full turn, so the measured positions grow by a factor of at
most 1.5 from one to the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import attrs
import numpy as np
import torch

from posexport.errors import RequestError
from posexport.graphs.attention.measure import Measure, Positions, angles_in
from posexport.graphs.attention.rotary import Rotary
from posexport.graphs.axes import BATCH, PAST, SEQ
from posexport.graphs.places import FAR

Array = np.ndarray

SHORT = 4
"""The length of a row that no encoding treats as long."""

LONG_ROW = 512
"""The length of the row that is measured if positions are places."""

STILL = 1e-9
"""A pair whose complex number differs from 1 by at most this is not rotated."""

LINEAR = 5e-3
"""How many radians an angle may differ from a multiple of its frequency: tables in half precision are this exact."""

EVEN, ROUNDED = 1e-5, 3e-7
"""How much amplitudes may differ in parts of one, unless cosines and sines differ from numbers of 16 bits by at most
ROUNDED."""


@attrs.frozen(kw_only=True)
class Turning:
    """A measured rotation.

    `frequencies` [axes, P] are those of short rows, in radians per position. `spread` is the largest difference between
    an angle and its multiple of the frequency. `reach` is the farthest position that was tried. If longer rows have
    other frequencies, `long` are those of rows that are longer than `edge` positions, and `longest` those of the
    longest row that was tried. `growth` [P] is the growth of the logarithm of the amplitude with each position. The
    first `prefix` tokens are not rotated. `inputs`: whether positions are inputs; otherwise they are places.
    """

    frequencies: Array
    amplitude: float
    spread: float
    reach: int
    inputs: bool
    prefix: int = 0
    edge: int | None = None
    long: Array | None = None
    longest: Array | None = None
    growth: Array | None = None

    @property
    def tolerance(self) -> float:
        """The possible error of a frequency, in radians per position."""
        return 2 * self.spread / max(self.reach, 1)


class NotLinear(Exception):
    """Angles are not multiples of positions."""


class OtherRows(Exception):
    """Rows are not rotated by their own positions."""


class AngleProbe:
    """The rotations of the pairs of features at chosen positions, as complex numbers."""

    def __init__(self, measure: Measure, rotary: Rotary) -> None:
        self._measure, self._rotary = measure, rotary
        self._values = [rotary.cos.value, rotary.sin.value]
        self.axes = measure.axes_of(self._values)
        self._own_prefix = max(rotary.cos.prefix, rotary.sin.prefix)
        self.prefix = 0
        self.limit = min(measure.position_limit(self._values) or FAR, FAR)
        if self.axes is not None:
            turns = self._row([[1] * self.axes] * self._room(8))
            still = np.abs(turns - 1).max(-1) <= STILL
            self.prefix = int(np.cumprod(still).sum()) % max(len(still), 1)
            self.limit = self._reached(self.limit)

    def _reached(self, limit: int) -> int:
        """The number of positions, up to `limit`, that the graph takes along each axis. A table may end earlier."""
        low, high = 2, limit
        while low < high:
            middle = high if high == limit else (low + high + 1) // 2
            try:
                self._row([[middle - 1] * (self.axes or 1)] * self._room(1))
                low = middle
            except RequestError:
                high = middle - 1
        return low

    def at(self, positions: Positions) -> Array:
        """Complex [n, P] at positions [n, axes], which follow each other in one row.

        If the graph fixes the length of rows, several rows are run.
        """
        room = self._room(len(positions) + self.prefix) - self.prefix
        parts = []
        for start in range(0, len(positions), room):
            part = [*positions[start : start + room]]
            filled = [part[0]] * self.prefix + part + [part[-1]] * (room - len(part) if room < len(positions) else 0)
            filled += [part[-1]] * (self._room(len(filled)) - len(filled))
            parts.append(self._row(filled)[self.prefix :][: len(part)])
        return np.concatenate(parts)

    def places(self, seq: int, past: int = 0, sides: Mapping[str, int] | None = None) -> Array:
        """Complex [S, P] of the tokens of a row after `past` others, or of an image with these `sides`."""
        return self._turns(*self._measure.run(self._values, seq=seq, past=past, sides=sides)[0])

    def check_rows(self) -> None:
        """Raise OtherRows if rows have their own positions and a row is not rotated by its own."""
        assert self.axes is not None
        if self._measure.shares_positions(self._values):
            return
        seq = self._room(4)
        rows = [[[(3 * row + place + 1) % self.limit] * self.axes for place in range(seq)] for row in range(3)]
        if self._measure.sizes(seq, batch=len(rows))[BATCH] != len(rows):
            return
        values = self._measure.run(self._values, batch=len(rows), seq=seq, positions=rows)[0]
        angles = [angles_in(*pair) for pair in zip((self._rotary.cos, self._rotary.sin), values, strict=True)]
        for number, row in enumerate(rows):
            own = self._measure.run(self._values, seq=seq, positions=row)[0]
            alone = [angles_in(*pair) for pair in zip((self._rotary.cos, self._rotary.sin), own, strict=True)]
            for several, single in zip(angles, alone, strict=True):
                if len(several) != len(rows) or (several[number] - single[0]).abs().max() > STILL:
                    raise OtherRows

    def _room(self, wanted: int) -> int:
        return self._measure.sizes(wanted)[SEQ]

    def _row(self, positions: Positions) -> Array:
        return self._turns(*self._measure.run(self._values, seq=len(positions), positions=positions)[0])

    def _turns(self, cos: object, sin: object) -> Array:
        rotary = self._rotary
        first, second = angles_in(rotary.cos, cos), angles_in(rotary.sin, sin)  # type: ignore[arg-type]
        skipped = [self._own_prefix - source.prefix for source in (rotary.cos, rotary.sin)]
        turns: Array = first[0, skipped[0] :].numpy() + 1j * second[0, skipped[1] :].numpy()
        return turns


def turning_of(measure: Measure, rotary: Rotary) -> Turning:
    """The frequencies of a rotation over positions that are inputs or places. Raises NotLinear and OtherRows."""
    probe = AngleProbe(measure, rotary)
    if probe.axes is None:
        return _by_places(measure, rotary, probe)
    probe.check_rows()
    axes = probe.axes
    found = []
    for axis in range(axes):
        ladder = [[p if at == axis else 0 for at in range(axes)] for p in (0, 1, 2, SHORT - 1)]
        found.append(_linear(np.array([0, 1, 2, SHORT - 1]), probe.at(ladder)))
    frequencies = np.stack([one.frequencies[0] for one in found])
    short = attrs.evolve(found[0], frequencies=frequencies, inputs=True, prefix=probe.prefix)
    if axes > 1:
        return _several_axes(probe, short)
    return _far(probe, short)


def _several_axes(probe: AngleProbe, short: Turning) -> Turning:
    """`short` with its frequencies refined at far positions of each axis."""
    refined, spread, reach = [], 0.0, 0
    for axis in range(len(short.frequencies)):
        far = _ladder(probe.limit)
        ladder = [[int(p) if at == axis else 0 for at in range(len(short.frequencies))] for p in far]
        one = _linear(far, probe.at(ladder))
        refined.append(one.frequencies[0])
        spread, reach = max(spread, one.spread), max(reach, one.reach)
    return attrs.evolve(short, frequencies=np.stack(refined), spread=spread, reach=reach)


def _far(probe: AngleProbe, short: Turning) -> Turning:
    """The frequencies of one axis at far positions, and the length beyond which they differ."""
    far = _ladder(probe.limit)
    try:
        whole = _linear(far, probe.at([[int(p)] for p in far]))
    except NotLinear:
        whole = None
    if whole is not None and _same(whole, short):
        return attrs.evolve(whole, inputs=True, prefix=probe.prefix)
    longest = _step(probe, probe.limit - 1)
    if np.abs(longest - short.frequencies[0]).max() <= 1e-7:
        raise NotLinear
    below, above = SHORT, probe.limit  # lengths with the short frequencies, and with others
    while above - below > 1:
        middle = (below + above) // 2
        same = np.abs(_step(probe, middle - 1) - short.frequencies[0]).max() <= 1e-12
        below, above = (middle, above) if same else (below, middle)
    return attrs.evolve(short, edge=below, long=_step(probe, above - 1), longest=longest, reach=probe.limit - 1)


def _step(probe: AngleProbe, last: int) -> Array:
    """The frequencies [P] of a row that ends at the position `last`."""
    turns = probe.at([[0], [1], [last]])
    return np.asarray(np.angle(turns[1] / turns[0]))


def _same(one: Turning, other: Turning) -> bool:
    """Whether short and long rows have the same frequencies, apart from errors.

    Errors of float32 constants count as such: they show only at far positions.
    """
    error = max(4 * other.spread, min(4 * one.spread, 1e-6), 1e-12)
    return bool(np.abs(one.frequencies - other.frequencies).max() <= error / (SHORT - 1))


def _by_places(measure: Measure, rotary: Rotary, probe: AngleProbe) -> Turning:
    values = [rotary.cos.value, rotary.sin.value]
    turns = _long_row(probe)
    count = len(turns)
    whole = _linear(np.arange(count), turns)
    if measure.varies(SEQ):
        few = probe.places(SHORT)
        if len(few) != SHORT or np.abs(few - turns[:SHORT]).max() > max(2 * whole.spread, 1e-9):
            raise NotLinear
    if measure.varies(PAST) and "past" in measure.kinds_of(values):
        later = probe.places(2, 9)  # of new tokens, or of all keys if they are rotated together with their cache
        if len(later) not in (2, 11) or np.abs(later - turns[11 - len(later) : 11]).max() > max(2 * whole.spread, 1e-9):
            raise NotLinear
    return whole


def _long_row(probe: AngleProbe) -> Array:
    """The rotations of a row that is as long as the graph takes."""
    seq = LONG_ROW
    while True:
        try:
            return probe.places(seq)
        except RequestError:  # beyond the end of a table
            seq //= 2
            if seq < SHORT:
                raise


def _ladder(limit: int) -> Array:
    """Positions from 0 to `limit` - 1. Each is 1.5 times the one before, rounded down, or 1 more."""

    def steps() -> Iterator[int]:
        position = 0
        while position < limit:
            yield position
            position = max(position + 1, position * 3 // 2)
        yield limit - 1

    return np.array(sorted(set(steps())))


def _linear(positions: Array, turns: Array) -> Turning:
    """The frequencies [1, P] of rotations [n, P] at positions [n], which begin at 0.

    Raises NotLinear if the angles are not multiples of the positions, or if there is only one position.
    """
    if len(positions) < 2:
        raise NotLinear
    sizes = np.abs(turns)
    if sizes.min() <= 0 or not np.isfinite(sizes).all() or np.abs(np.angle(turns[0])).max() > LINEAR:
        raise NotLinear
    amplitude, growth = float(sizes.mean()), _growth(positions, sizes)
    if growth is None and np.abs(sizes - amplitude).max() > (LINEAR if _is_half(turns) else EVEN) * amplitude:
        raise NotLinear
    frequencies = np.zeros(turns.shape[1])
    weight = 0.0
    for position, turn in zip(positions[1:], turns[1:], strict=True):
        expected = position * frequencies
        angle = expected + np.angle(turn * np.exp(-1j * expected))
        # a weighted mean: an angle at a farther position gives a more exact frequency
        weight += float(position) ** 2
        frequencies = frequencies + (angle - expected) * position / weight
    rest = np.angle(turns * np.exp(-1j * positions[:, None] * frequencies))
    spread = float(np.abs(rest).max())
    if spread > LINEAR or not math.isfinite(spread):
        raise NotLinear
    return Turning(
        frequencies=frequencies[None],
        amplitude=amplitude if growth is None else 1.0,
        spread=spread,
        reach=int(positions[-1]),
        inputs=False,
        growth=growth,
    )


def _is_half(turns: Array) -> bool:
    """Whether cosines and sines [n, P], the first of which is 1 times a number, are numbers of fp16 or bf16.

    Then they may be rounded, and their squares add up to other numbers than 1.
    """
    numbers = torch.from_numpy(np.stack([turns.real, turns.imag]))
    for values in (numbers, numbers / turns[0].real.max()):
        for dtype in (torch.float16, torch.bfloat16):
            if float((values.to(dtype).double() - values).abs().max()) <= ROUNDED:
                return True
    return False


def _growth(positions: Array, sizes: Array) -> Array | None:
    """How much the logarithms of amplitudes [n, P] grow with each position; None if they don't change evenly."""
    logarithms = np.log(sizes)
    slopes, starts = np.polyfit(positions, logarithms, 1)
    rest = np.abs(logarithms - starts - positions[:, None] * slopes).max()
    grows = float(np.abs(slopes).max()) * positions[-1]
    return slopes if grows > STILL and rest <= STILL * max(grows, 1.0) else None
