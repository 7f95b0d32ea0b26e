"""The sizes at which a benchmark runs a graph, by the roles of its inputs (posexport.graphs.roles).

A dimension is named as in `--shape` of posexport's own files (`batch`, `seq`, `past_seq`, `max_seq`, `encoder_seq`), by
its meaning (`height`), or as in the file (`past_sequence_length`).
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from posexport.bench.scenarios import Scenario
from posexport.bench.shapes import BUFFER, ENCODER_TOKENS, Sizes, check_grouped, check_places, pairs_of, tokens_text
from posexport.errors import RequestError, check_known
from posexport.graphs.axes import BATCH, CACHED, ENCODER, PAST, SEQ, SLOTS, TOTAL
from posexport.graphs.roles import Role
from posexport.graphs.sizes import fitted, fixed_sizes
from posexport.spec.fields import whole_number

NAMES = {BATCH: "batch", SEQ: "seq", PAST: "past_seq", SLOTS: "max_seq", ENCODER: "encoder_seq"}
"""The fields of Sizes by the meaning of an axis."""

_ONLY_A_NAME = "dim "
"""The prefix of the meaning of a dimension if only its name is known."""


def _name(axis: str) -> str:
    """What `--shape` calls the meaning of an axis."""
    return NAMES.get(axis, axis.removeprefix(_ONLY_A_NAME))


@attrs.frozen(kw_only=True)
class GraphSizes:
    """The sizes that a graph can take. `file` is the name of its file."""

    file: str
    roles: Mapping[str, Role]

    @property
    def axes(self) -> list[str]:
        """The meanings of its dimensions, without sums of other dimensions."""
        axes = dict.fromkeys(axis for role in self.roles.values() for axis in role.axes if isinstance(axis, str))
        counted = {*CACHED} - {"past"} & {role.kind for role in self.roles.values()}
        if counted or SLOTS in axes:  # PAST is how much of a buffer is filled
            axes[PAST] = None
        return [axis for axis in axes if axis != TOTAL]

    def names(self) -> dict[str, str]:
        """The meaning of each dimension by the names that it has, the file's own last."""
        names = {_name(axis): axis for axis in self.axes}
        for role in self.roles.values():
            for dim, axis in zip(role.shape, role.axes, strict=True):
                if isinstance(dim, str) and dim != "?" and isinstance(axis, str) and axis != TOTAL:
                    names.setdefault(dim, axis)
        return names

    def defaults(self) -> list[Sizes]:
        """A prefill and a step if there is a cache, otherwise two lengths, as near as the graph allows."""
        tokens = ((512, 0), (1, 512)) if PAST in self.axes else ((128, 0), (512, 0))
        return list(dict.fromkeys(self._sizes(self._fitted({SEQ: seq, PAST: past})) for seq, past in tokens))

    def read(self, text: str) -> Sizes:
        """The sizes of a `--shape`, and defaults for the others. RequestError if the graph can't take them."""
        names = self.names()
        given: dict[str, int] = {}
        for name, value in pairs_of(text).items():
            check_known("dimension in --shape", name, names)
            if names[name] in given:
                raise RequestError(f"--shape {text!r} gives {name} twice: give it once.")
            given[names[name]] = whole_number(name, value, at_least=0 if names[name] == PAST else 1)
        return self.checked(given)

    def scenario(self, scenario: Scenario) -> Sizes:
        """The sizes of a scenario. The others are defaults. RequestError if the graph can't take them."""
        axes, problem = self.axes, ""
        if scenario.kind == "decode":
            asked = {SEQ: 1, PAST: scenario.size}
            problem = "" if PAST in axes else "has no cache, so give prefill or batch"
        elif scenario.kind == "prefill":
            asked = {SEQ: scenario.size, **({PAST: 0} if PAST in axes else {})}
            problem = "" if SEQ in axes else "takes no tokens, so give batch"
        else:
            asked = {BATCH: scenario.size}
        if problem:
            raise RequestError(f"--scenario {scenario}: {self.file!r} {problem}.")
        try:
            return self.checked(asked)
        except RequestError as error:
            raise RequestError(f"--scenario {scenario}: {error}") from None

    def like(self, sizes: Sizes) -> Sizes:
        """The sizes of another file for the dimensions that this one has too. The others are defaults."""
        known, names = sizes.to_dict(), self.names()
        return self.checked({names[name]: size for name, size in known.items() if name in names})

    def asked(self, sizes: Sizes) -> dict[str, int]:
        """The sizes by meaning, as posexport.graphs.draw expects them."""
        known, names = sizes.to_dict(), self.names()
        return {names[name]: size for name, size in known.items() if name in names}

    def checked(self, given: Mapping[str, int]) -> Sizes:
        """The `given` sizes by meaning. The others are defaults. RequestError if the graph can't take them."""
        first = self._fitted({SEQ: 512 if PAST in self.axes else 128, PAST: 0})
        usual = {axis: first[axis] for axis in self.axes if axis != SLOTS}
        sizes = self._fitted({**usual, **given})
        fixed = fixed_sizes(self.roles.values())
        for axis, size in given.items():
            if fixed.get(axis, size) != size:
                raise RequestError(
                    f"{_name(axis)} is {size}: {self.file!r} takes exactly {fixed[axis]}, so give such a --shape."
                )
        self._check_tokens({**sizes, **given}, fixed)
        for axis, size in given.items():
            if sizes[axis] != size:
                raise RequestError(
                    f"{_name(axis)} is {size}: {self.file!r} takes {sizes[axis]}, so give such a --shape."
                )
        return self._sizes(sizes)

    def _check_tokens(self, sizes: Mapping[str, int], fixed: Mapping[str, int]) -> None:
        """RequestError for more tokens than the graph can take.

        A buffer, a table of positions and a mask of fixed length have limits. GroupQueryAttention takes several tokens
        after others only for a batch of 1.
        """
        past, seq = sizes[PAST] if PAST in self.axes else 0, sizes[SEQ]
        total = tokens_text(seq, past)
        if SLOTS in self.axes:
            check_places(seq, past, sizes[SLOTS])
        rows = [role.rows for role in self.roles.values() if role.kind == "position_ids" and role.rows]
        if rows and past + seq > min(rows):
            raise RequestError(
                f"{total}: the table of positions has {min(rows)} rows, so give --shape seq={min(rows)} or less."
            )
        if SLOTS not in self.axes and fixed.get(TOTAL, past + seq) != past + seq:
            raise RequestError(f"{total}: {self.file!r} takes exactly {fixed[TOTAL]} tokens, so give such a --shape.")
        if any(role.grouped for role in self.roles.values()):
            check_grouped(self.file, sizes[BATCH], seq, past)

    def _fitted(self, asked: Mapping[str, int]) -> dict[str, int]:
        """All sizes by meaning: those that are asked for, and usual ones, as near as the graph allows."""
        places = max(BUFFER, asked.get(SEQ, 0) + asked.get(PAST, 0))
        return fitted(self.roles, {BATCH: 1, ENCODER: ENCODER_TOKENS, SLOTS: places, **asked})

    def _sizes(self, sizes: Mapping[str, int]) -> Sizes:
        """The sizes of a benchmark from sizes by meaning.

        Dimensions without a usual name are included only if they may vary.
        """
        fixed = fixed_sizes(self.roles.values())
        others = {axis.removeprefix(_ONLY_A_NAME): sizes[axis] for axis in self.axes if axis not in {**NAMES, **fixed}}
        known = {NAMES[axis]: sizes[axis] for axis in self.axes if axis in NAMES}
        return Sizes.of({"seq": None, **known, **others})
