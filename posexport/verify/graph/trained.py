"""What a checkpoint's configuration says about its model's sizes, and sets of inputs that reach them.

A file of a whole model may have a table with fewer rows, or have lost a window, and still be right on a few tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from posexport.graphs.axes import ENCODER, PAST, SLOTS
from posexport.graphs.bands import Cost
from posexport.graphs.cases import Corner
from posexport.graphs.draw import Kinds
from posexport.graphs.roles import Role
from posexport.jsondata import is_whole
from posexport.runtimes.tokens import (
    has_dynamic_frequencies,
    length_of_short_frequencies,
    read_config,
    text_part,
    trained_length,
    vocabulary_of,
)
from posexport.spec.contract import Values
from posexport.verify.graph.cases import GraphCase

WORK = 6e10
"""The most multiply-adds of a set of inputs. Models with more than 100 million weights get fewer tokens."""

LONG, USUAL = 600, 131
"""The tokens of the longest prompt, and of a prompt that is tried whatever it costs."""

TABLE = 4096
"""The most rows of a table that is read whole, if that costs no more than WORK."""

CACHED = 2**26
"""The most numbers in a cache that is longer than a window."""

ROW = 64
"""The tokens of each row in the sets that read tables."""

BEYOND = 2
"""How many times the trained length positions go up to if angles change there (the scaling `dynamic`)."""

_WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention")
"""Settings of how many keys a query sees, in layers without full attention."""

_WINDOWS_OF_TOKENS = (
    *("window_size", "attention_window_size", "sliding_window_size"),  # GPT-Neo, RecurrentGemma, Inkling
    *("keep_window_size", "index_topk"),  # Doge and DeepSeek-V3.2 choose so many keys
)
"""The same settings under other names, in models that read tokens: in others, these are sizes of pictures."""

TABLES = {"token_ids": "token ids", "encoder_token_ids": "token ids of the encoder", "position_ids": "positions"}
"""The roles of inputs that are looked up in tables."""


@attrs.frozen(kw_only=True)
class Trained:
    """What the configuration says about a model; None if it doesn't.

    `vocabulary` is the number of rows of its table of tokens, `decoder_vocabulary` that of a decoder with another
    table than its encoder's. `length` is the number of positions that are tried: those that it was trained for, and
    more if its angles change only there. `other_angles` is the length from which on they change. `windows` are its
    windows.
    """

    vocabulary: int | None = None
    decoder_vocabulary: int | None = None
    length: int | None = None
    windows: tuple[int, ...] = ()
    other_angles: int | None = None

    @property
    def decodes(self) -> int | None:
        """How many tokens a row may have that is decoded step by step.

        Beyond `other_angles`, cached keys keep the angles of a short row, but one pass over the whole row gives them
        those of a long row.
        """
        return min(filter(None, (self.length, self.other_angles)), default=None)

    def roles(self, roles: Mapping[str, Role]) -> dict[str, Role]:
        """The roles with tokens of the model's vocabulary and positions that it was trained for.

        The tables of the file may have fewer rows.
        """
        of_encoder_decoder = any(".encoder." in name for name in roles)
        tokens = (self.decoder_vocabulary if of_encoder_decoder else None) or self.vocabulary
        rows = {"token_ids": tokens, "encoder_token_ids": self.vocabulary, "position_ids": self.length}
        return {name: attrs.evolve(role, rows=rows.get(role.kind) or role.rows) for name, role in roles.items()}

    def tables(self, roles: Mapping[str, Role]) -> dict[str, Role]:
        """The given roles of a file whose numbers are looked up in tables, with the model's numbers of rows."""
        own = self.roles(roles)
        return {name: own[name] for name, role in roles.items() if role.kind in TABLES and role.rows is not None}

    def corners(self, roles: Mapping[str, Role], weight_count: int, seed: int) -> Iterator[Corner]:
        """A long prompt, keys on both sides of each window, and every row of small tables.

        `roles` are those of the file itself.
        """
        affordable = _affordable(weight_count)
        most = min(self.length or LONG, LONG, max(int(affordable), USUAL))
        rng = np.random.default_rng((seed, 4))
        yield Corner(label="many tokens", batch=1, seq=most)
        cached = sum(_per_token(role) for role in roles.values())
        for window in self.windows:
            if cached and (window + 4) * cached <= CACHED and window + 4 <= (self.length or math.inf):
                yield Corner(label=f"past a window of {window}", batch=1, seq=4, past=window - 2)
                yield Corner(
                    label=f"window of {window} and more", batch=1, seq=2, past=window + int(rng.integers(2, 9))
                )
        if self.other_angles is not None:
            yield Corner(label="other angles", batch=2, seq=9, kinds=Kinds(positions="farthest"))
            yield Corner(label="step with other angles", batch=3, seq=1, past=11, kinds=Kinds(positions="farthest"))
        yield from self.table_corners(roles, weight_count)

    def length_corners(self, lengths: Iterable[int], weight_count: int) -> Iterator[Corner]:
        """As many tokens as a table has rows that is read by the number of tokens, and two fewer.

        Some of these tables begin with the third row.
        """
        most = min(self.length or TABLE, TABLE, max(int(_affordable(weight_count)), USUAL))
        for length in sorted({size for rows in lengths for size in (rows - 2, rows) if 0 < size <= most}):
            yield Corner(label="whole table", batch=1, seq=length)
            yield Corner(label="step to its end", batch=1, seq=1, past=length - 1)

    def table_corners(self, roles: Mapping[str, Role], weight_count: int) -> Iterator[Corner]:
        """Every row of tables that are not large."""
        affordable = _affordable(weight_count)
        rows = [role.rows or 0 for role in self.tables(roles).values()]
        rows = [count for count in rows if count <= min(TABLE, affordable)]
        if rows:
            seq = min(ROW, self.length or ROW)
            yield Corner(label="whole tables", batch=-(-max(rows) // seq), seq=seq, kinds=Kinds(positions="every"))

    def cost(self, roles: Mapping[str, Role], weight_count: int, outputs: Values) -> Cost:
        """The most that sets of inputs of many sizes may cost.

        That is the work of a few long prompts, and outputs and caches that fit in memory.
        """
        per_token = max(
            (math.prod(dim for dim in shape if isinstance(dim, int)) for shape, _ in outputs.values()), default=1
        )
        cached = sum(_per_token(role) for role in roles.values())
        return Cost(
            tokens=min(_affordable(weight_count), CACHED / max(per_token, 1)),
            cached=CACHED / max(cached, 1),
            longest=self.length,
        )

    def unread(self, tables: Mapping[str, Role], cases: Sequence[GraphCase]) -> dict[str, str]:
        """How many rows of which tables these cases did not read, by the name of the input that reads them."""
        found = {}
        for name, role in tables.items():
            rows = role.rows or 0
            read = {number for case in cases for number in np.unique(case.arrays[name]).tolist()}
            if len(read) < rows:
                found[name] = f"{rows - len(read)} of {rows} {TABLES[role.kind]} were not read"
        return found

    def lengths_not_shown(self, lengths: Iterable[int], cases: Sequence[GraphCase]) -> Iterator[str]:
        """Which tables that are read by the number of tokens were not read whole by these cases."""
        keys = max((max(case.keys, case.sizes.get(ENCODER, 0)) for case in cases), default=0)
        yield from (
            f"a table of {rows} rows is read by the number of tokens, and inputs had at most {keys}"
            for rows in sorted(lengths)
            if keys < min(rows, self.length or rows) - 2
        )

    def windows_not_shown(self, cases: Sequence[GraphCase]) -> Iterator[str]:
        """Which windows of the model these cases did not reach."""
        keys = max((case.keys for case in cases), default=0)
        yield from (f"no query had more keys than the window of {one}" for one in self.windows if keys <= one)

    def angles_not_shown(self, cases: Sequence[GraphCase]) -> Iterator[str]:
        """Whether these cases did not reach the positions from which on the angles of the model change."""
        farthest = max((case.keys - 1 if case.farthest is None else case.farthest for case in cases), default=0)
        if self.other_angles is not None and farthest < self.other_angles:
            yield f"no position was {self.other_angles} or more, from where on the model has other angles"


_OF_DECODERS = ("decoder_vocab_size", "tgt_vocab_size")
"""Keys of config.json for the number of tokens that only the decoder reads."""


def _is_size(value: object) -> bool:
    return is_whole(value) and value > 0


def trained(folder: Path) -> Trained:
    """What config.json in the folder of a checkpoint says."""
    config, length = read_config(folder / "config.json") or {}, trained_length(folder)
    changes = [length_of_short_frequencies(folder)]
    if length is not None and has_dynamic_frequencies(folder):
        changes, length = [*changes, length], BEYOND * length
    return Trained(
        vocabulary=vocabulary_of(folder),
        decoder_vocabulary=next(filter(_is_size, map(config.get, _OF_DECODERS)), None),
        length=length,
        windows=tuple(sorted({window for one in (config, text_part(config)) for window in _windows(one)})),
        other_angles=min(filter(None, changes), default=None),
    )


def _affordable(weight_count: int) -> float:
    """How many tokens a set of inputs may have."""
    return WORK / max(weight_count, 1)


def _windows(config: Mapping[str, Any]) -> Iterator[int]:
    """The windows of a configuration; none if all of its layers have full attention."""
    layers = config.get("layer_types", config.get("attention_layers"))
    full = isinstance(layers, list) and not {*map(str, layers)} - {"full_attention", "global"}
    if config.get("use_sliding_window") is False or full:
        return
    names = (*_WINDOWS, *(_WINDOWS_OF_TOKENS if _is_size(config.get("vocab_size")) else ()))
    yield from (config[name] for name in names if is_whole(config.get(name)) and config[name] > 1)


def _per_token(role: Role) -> int:
    """The numbers in a cache for each token of a row."""
    if role.kind != "past" or not {PAST, SLOTS} & {*role.axes}:
        return 0
    return math.prod(dim for dim in role.shape if isinstance(dim, int))
