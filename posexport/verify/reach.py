"""How far inputs must go, and how far they went. This module imports no engine and no numpy."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from posexport.spec.spec import Spec

SEQ = 2_200
"""The keys that default inputs reach: beyond 2,048, at which many buffers and tables end. Windows and chunks may need
more."""


MOST = {"seq": 2**20, "batch": 2**12}
"""The largest sizes that may be asked for."""


@attrs.frozen(kw_only=True)
class Reach:
    """The most keys of a query and rows of a batch that inputs must have. `given`: the user asked for them."""

    seq: int
    batch: int = 1
    given: bool = False


def default_reach(spec: Spec) -> Reach:
    """A reach beyond every window and distance, and beyond two chunks."""
    asked = [SEQ, spec.saturation_distance() + 24]
    asked += [2 * layer.attention_chunk_size + 24 for layer in spec.distinct_layers() if layer.attention_chunk_size]
    limit = spec.token_limit()
    bounded = (spec.ordered or spec.consecutive) and limit is not None
    return Reach(seq=min(max(asked), limit or 0) if bounded else max(asked))


def reach_of(spec: Spec, sizes: Mapping[str, int]) -> Reach:
    """The default reach of a spec, with the user's sizes in place of its own."""
    return attrs.evolve(default_reach(spec), given=bool(sizes), **sizes)


def read_reach(value: object) -> dict[str, int]:
    """The sizes in "seq=4096,batch=8" or in a mapping; TypeError or ValueError for anything else."""
    pairs = value.items() if isinstance(value, Mapping) else [part.split("=") for part in str(value).split(",") if part]
    sizes = {str(name).strip(): int(size) for name, size in pairs}
    if (
        len(sizes) < len(pairs)
        or not set(sizes) <= {"seq", "batch"}
        or not all(0 < size <= MOST[name] for name, size in sizes.items())
    ):
        raise ValueError
    return sizes


@attrs.frozen(kw_only=True)
class Shown:
    """The most that sets of inputs had: keys of a query, rows of a batch, and the position farthest from 0.

    `position` is None for a graph that takes no positions. `tokens_of_many` is the largest number of tokens per row in
    batches of eight or more rows; None if no batch was so large, or if that is not known.
    """

    keys: int
    batch: int
    position: int | None
    tokens_of_many: int | None = None

    def __str__(self) -> str:
        position = "" if self.position is None else f", position {self.position}"
        many = "" if self.tokens_of_many is None else f" (8 of {self.tokens_of_many} tokens)"
        return f"{self.keys} keys, {self.batch} rows{many}{position}"
