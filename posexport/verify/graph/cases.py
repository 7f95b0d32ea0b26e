"""Sets of inputs for any ONNX file: drawn by role, or the user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np

from posexport.errors import RequestError, check_known, located, shown
from posexport.graphs.axes import BATCH, ENCODER, KEPT, PAST, SEQ, SLOTS, TOTAL, is_token_first
from posexport.graphs.cases import Corner, cases_of
from posexport.graphs.draw import DrawnInputs
from posexport.graphs.input_facts import takes_padding
from posexport.graphs.places import places_of
from posexport.graphs.roles import Role
from posexport.machine import give_freed_memory_back
from posexport.runtimes.base import Arrays
from posexport.runtimes.tensors import BF16, NUMPY_DTYPES, load_arrays, save_arrays
from posexport.spec.arrays import Array
from posexport.spec.contract import Values
from posexport.verify.cases import USUAL_POSITIONS
from posexport.verify.reach import Shown


@attrs.frozen(kw_only=True)
class GraphCase:
    """One set of inputs by the graph's names, and its sizes by meaning (posexport.graphs.axes).

    `visible` has, for an axis by its meaning, bool [batch, size]: True for tokens that are not padding. `farthest` is
    the position farthest from 0, None if the graph takes none.
    """

    name: str
    arrays: Arrays
    sizes: Mapping[str, int]
    visible: Mapping[str, Array]
    farthest: int | None = None

    @property
    def keys(self) -> int:
        """How many keys the last query has."""
        return self.sizes.get(TOTAL, 0) or self.sizes.get(SEQ, 0)

    @property
    def far_out(self) -> bool:
        """Whether a position lies beyond the usual range."""
        return self.farthest is not None and self.farthest >= USUAL_POSITIONS


def lay_on_disk(cases: list[GraphCase], folder: Path) -> None:
    """Move the arrays of the cases into files without names: they take memory only while they are read."""
    path = folder / "case.tensors"
    for at, case in enumerate(cases):
        save_arrays(path, case.arrays)
        cases[at] = attrs.evolve(case, arrays=load_arrays(path))
        path.unlink()
    give_freed_memory_back()


def drawn_cases(
    roles: Mapping[str, Role],
    seed: int,
    reach: Mapping[str, int] | None = None,
    more: int = 0,
    own: Sequence[Corner] = (),
    longest: int | None = None,
) -> list[GraphCase]:
    """Cases drawn by role, the same for the same seed.

    `reach` may ask for longer and larger ones. `own` are corners of this graph; their rows have at most `longest`
    tokens.
    """
    cases = []
    for drawn in cases_of(roles, seed, reach=reach or {}, more=more, own=own, longest=longest):
        has_tokens = any({SEQ, PAST, TOTAL} & set(role.axes) for role in roles.values())
        left_out = set() if has_tokens else {SEQ, PAST, TOTAL, SLOTS}
        left_out |= set() if any(ENCODER in role.axes for role in roles.values()) else {ENCODER}
        cases.append(
            GraphCase(
                name=drawn.label,
                arrays=drawn.arrays,
                sizes={axis: size for axis, size in drawn.sizes.items() if axis not in left_out},
                visible=_visible(drawn) if has_tokens else {},
                farthest=_farthest(roles, drawn.arrays, drawn.sizes[SEQ]),
            )
        )
    return cases


def _visible(drawn: DrawnInputs) -> dict[str, Array]:
    """Which tokens are not padding, by meaning."""
    tokens = drawn.tokens
    kept = {KEPT: tokens[:, -drawn.sizes[KEPT] :]} if KEPT in drawn.sizes else {}
    return {SEQ: tokens, TOTAL: drawn.keys, ENCODER: drawn.encoder_keys, SLOTS: drawn.slots, **kept}


def given_case(path: Path, arrays: Mapping[str, Array], inputs: Values, roles: Mapping[str, Role]) -> GraphCase:
    """The case with the arrays of the user's .npz file, for a graph with these inputs.

    Names, ranks, fixed sizes and dtypes must be the graph's; only a bf16 graph takes float32, which is rounded.
    RequestError for anything else, including NaN. `roles` are those that are known: they tell which tokens are padding.
    """
    ready: Arrays = {}
    named: dict[str, tuple[str, int]] = {}
    with located(f"inputs {str(path)!r}"):
        for name in arrays:
            check_known("array", name, inputs)
        for name, (shape, dtype) in inputs.items():
            if name not in arrays:
                raise RequestError(
                    f"they lack {shown(name)} {list(shape)} and have {', '.join(arrays) or 'none'}: add it."
                )
            array = arrays[name]
            fits = array.ndim == len(shape) or not shape
            if not fits or any(isinstance(d, int) and d != size for d, size in zip(shape, array.shape, strict=False)):
                raise RequestError(f"{shown(name)} has shape {list(array.shape)}, the graph takes {list(shape)}.")
            axes = roles[name].axes if name in roles else ()
            if any(size == 0 and axis in (BATCH, SEQ) for axis, size in zip(axes, array.shape, strict=False)):
                raise RequestError(
                    f"{shown(name)} has shape {list(array.shape)}, which holds nothing: give one row and one token at "
                    "least."
                )
            for dim, size in zip(shape, array.shape, strict=False):
                other, known = (
                    named.setdefault(dim, (name, size)) if isinstance(dim, str) and dim != "?" else ("", size)
                )
                if known != size:
                    raise RequestError(f"{shown(name)} has {size} of {shown(dim)}, and {shown(other)} has {known}.")
            ready[name] = _converted(name, array, dtype)
    sizes = _sizes_of(ready, roles)
    visible = _visible_of(ready, roles, sizes)
    farthest = _farthest(roles, ready, sizes.get(SEQ, 1))
    return GraphCase(name=path.name, arrays=ready, sizes=sizes, visible=visible, farthest=farthest)


def _farthest(roles: Mapping[str, Role], arrays: Arrays, tokens: int) -> int | None:
    """The position farthest from 0 in rows of so many tokens; None if no input has positions."""
    found = [
        max(int(arrays[name].max()), -int(arrays[name].min())) + (tokens - 1) * role.is_first_position
        for name, role in roles.items()
        if role.kind == "position_ids" and arrays[name].size
    ]
    return max(found, default=None)


def _visible_of(arrays: Arrays, roles: Mapping[str, Role], sizes: dict[str, int]) -> dict[str, Array]:
    """Which tokens are not padding, by meaning, as the first mask of rows and keys says; its keys count as a size.

    If nobody knows which keys are those of the new tokens, as in a buffer, none of these counts as padding.
    """
    for name, role in roles.items():
        array = arrays[name].T if is_token_first(role.axes) else arrays[name]
        if role.kind not in _MASKS or array.ndim != 2 or not takes_padding(role) or array.dtype.kind not in "bif":
            continue
        sizes.setdefault(TOTAL, array.shape[1])
        if BATCH not in sizes or SEQ not in sizes:
            return {}
        keys = (array != 0) == _MASKS[role.kind]
        free = max(sizes.get(SLOTS, 0) - keys.shape[1], 0)
        visible = {TOTAL: keys, SLOTS: np.pad(keys, ((0, 0), (0, free)))}
        places = _places_of_new(arrays, roles, sizes, keys.shape)
        return visible if places is None else {**visible, SEQ: np.take_along_axis(keys, places, 1)}
    return {}


_MASKS = {"attention_mask": True, "padding_mask": False}
"""Whether a mask of this role is true where a key is seen."""


def _places_of_new(
    arrays: Arrays, roles: Mapping[str, Role], sizes: Mapping[str, int], shape: tuple[int, ...]
) -> Array | None:
    """The places of the new tokens in a mask of this shape [rows, keys]; None if they aren't known.

    They are the last ones, except in a buffer, where another input says where they begin.
    """
    rows, width = shape
    begins = np.full(rows, width - sizes[SEQ])
    if SLOTS in sizes:
        stated = next((name for name, role in roles.items() if role.kind in _BEGINS and arrays[name].size), None)
        if stated is None:
            return None
        first = arrays[stated].reshape(-1)
        begins = first if BATCH in roles[stated].axes and len(first) == rows else np.full(rows, first[0])
    places = places_of(begins, sizes)
    return places if places.min() >= 0 and places.max() < width else None


_BEGINS = ("write_indices", "past_length", "cache_position")
"""Roles of inputs that say where the new tokens of a buffer begin."""


def _sizes_of(arrays: Arrays, roles: Mapping[str, Role]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for name, role in roles.items():
        for axis, size in zip(role.axes, arrays[name].shape, strict=False):
            if isinstance(axis, str):
                sizes.setdefault(axis, size)
    return sizes


def _converted(name: str, array: Array, dtype: str) -> Array:
    want = NUMPY_DTYPES.get(dtype) or np.dtype(dtype)
    if array.dtype == np.dtype("V2") and want == BF16:  # numpy writes bfloat16 like this
        array = array.view(BF16)
    if array.dtype != want and not (want == BF16 and array.dtype == np.float32):
        raise RequestError(f"{shown(name)} is {array.dtype}, the graph takes {want}: convert it with astype.")
    if want.kind not in "biu" and not np.isfinite(array.astype(np.float64)).all():
        raise RequestError(f"{shown(name)} holds NaN or Inf, every value must be finite.")
    return array.astype(want)


def reached(cases: list[GraphCase]) -> Shown | None:
    """What these cases reach; None without cases, and if there are no tokens or their number is not known."""
    if not any(BATCH in case.sizes and case.keys for case in cases):
        return None
    return Shown(
        keys=max(max(case.keys, case.sizes.get(ENCODER, 0)) for case in cases),
        batch=max(case.sizes.get(BATCH, 1) for case in cases),
        position=max((case.farthest for case in cases if case.farthest is not None), default=None),
    )
