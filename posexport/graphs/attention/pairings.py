"""Which features of a head a rotation combines into pairs, found by probing.

The usual pairings are tried first. To find others, all features whose index has a certain bit are set to zero, bit by
bit. Where the result is zero then gives this bit of each feature's partner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs
import torch

from posexport.graphs.attention.layouts import EXACT


@attrs.frozen(kw_only=True)
class Pairs:
    """Which of the 2P features of a head from `start` on form pairs: interleaved, or halves of `runs`.

    `sorted`: pairs (2i, 2i + 1) become the halves of one run.
    """

    interleaved: bool
    runs: tuple[int, ...]
    start: int = 0
    sorted: bool = False

    @property
    def count(self) -> int:
        """P, the number of pairs."""
        return sum(self.runs)

    def indices(self) -> tuple[list[int], list[int]]:
        """The features a and b of each pair, in the order of the angles."""
        return attrs.evolve(self, interleaved=True).results() if self.sorted else self.results()

    def results(self) -> tuple[list[int], list[int]]:
        """The features that a and b become after the rotation."""
        start = self.start
        if self.interleaved:
            return [start + 2 * i for i in range(self.count)], [start + 2 * i + 1 for i in range(self.count)]
        first, second = list[int](), list[int]()
        for run in self.runs:
            first += range(start, start + run)
            second += range(start + run, start + 2 * run)
            start += 2 * run
        return first, second

    def turned(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Features [B, H, S, D] with their pairs rotated by angles [B or 1, S, P]."""
        (first, second), (lower, upper) = self.indices(), self.results()
        result, a, b = heads.clone(), heads[..., first], heads[..., second]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        result[..., lower], result[..., upper] = a * cos - b * sin, a * sin + b * cos
        return result


Run = Callable[[Sequence[int]], torch.Tensor]
"""Gives what the graph makes of random features [B, H, S, D] in which the given features are zero."""


def pairings(still: list[torch.Tensor], moved: list[torch.Tensor], run: Run) -> Iterator[Pairs]:
    """The pairings with which `moved` may be computed from `still` [B, H, S, D], usual ones first."""
    size = still[0].shape[-1]
    changed = torch.zeros(size, dtype=torch.bool)
    for before, after in zip(still, moved, strict=True):
        if not torch.isfinite(after).all():
            return
        changed |= (after - before).abs().flatten(0, -2).amax(0) > EXACT * float(before.abs().max())
    if not changed.any():
        return
    tried: set[Pairs] = set()
    start, end = int(changed.nonzero().min()), int(changed.nonzero().max()) + 1
    for pairs in _usual(start, end - start):
        tried.add(pairs)
        yield pairs
    partners = _partners(run, size)
    found = None if partners is None else _pairs(partners)
    if found is not None and found not in tried:
        tried.add(found)
        yield found
    # features may be rotated only on other inputs, for example if all positions of an axis are zero here
    yield from (pairs for pairs in _usual(0, size) if pairs not in tried)


def _usual(start: int, width: int) -> Iterator[Pairs]:
    """The usual pairings of `width` features from `start` on."""
    if width % 2:
        return
    yield Pairs(interleaved=False, runs=(width // 2,), start=start)
    yield Pairs(interleaved=True, runs=(width // 2,), start=start)
    for runs in (2, 3, 4):
        if width % (2 * runs) == 0:
            yield Pairs(interleaved=False, runs=(width // (2 * runs),) * runs, start=start)
    if width > 2:
        yield Pairs(interleaved=False, runs=(width // 2,), start=start, sorted=True)


def _partners(run: Run, size: int) -> list[int] | None:
    """The other feature that each feature depends on, or itself if there is none; None if this is not mutual."""
    partners = [0] * size
    for bit in range(max(size - 1, 1).bit_length()):
        for on in (False, True):
            # features whose bit is `on` are zero; after the rotation, such a feature ...
            result = run([feature for feature in range(size) if bool(feature >> bit & 1) == on])
            if result.shape[-1] != size or not torch.isfinite(result).all():
                return None
            sizes = result.abs().flatten(0, -2).amax(0)
            limit = EXACT * max(float(sizes.max()), 1e-300)
            for feature in range(size):
                # ... isn't zero only if its partner has the other bit
                if bool(feature >> bit & 1) == on and sizes[feature] > limit:
                    partners[feature] |= (not on) << bit
                elif bool(feature >> bit & 1) == on:
                    partners[feature] |= on << bit
    mutual = all(partner < size and partners[partner] == at for at, partner in enumerate(partners))
    return partners if mutual else None


def _pairs(partners: list[int]) -> Pairs | None:
    """Partners as one pairing; None if they follow none of the known orders."""
    lower = [at for at, partner in enumerate(partners) if partner > at]
    if not lower:
        return None
    distances = {partners[at] - at for at in lower}
    if distances == {1}:
        start = lower[0]
        if any((at - start) % 2 for at in lower):
            return None
        return Pairs(interleaved=True, runs=((lower[-1] + 2 - start) // 2,), start=start)
    return _halves(partners, lower)


def _halves(partners: list[int], lower: list[int]) -> Pairs | None:
    """Halves of runs that follow each other. Some of their pairs may not be rotated."""
    runs = list[int]()
    start = end = -1
    while lower:
        half = partners[lower[0]] - lower[0]
        first = min(lower[0], len(partners) - 2 * half) if end < 0 else end
        inside = [at for at in lower if at < first + 2 * half]
        if first < 0 or any(partners[at] - at != half or not first <= at < first + half for at in inside):
            return None
        runs.append(half)
        start, end = (first if start < 0 else start), first + 2 * half
        lower = lower[len(inside) :]
    return Pairs(interleaved=False, runs=tuple(runs), start=start) if end <= len(partners) else None
