"""The user's own inputs (posexport.runtimes.npz), checked against a graph before anything runs on them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from posexport.custom_ops.unsupported import fits_grouped_batch
from posexport.errors import RequestError, check_known, located
from posexport.runtimes.tensors import BF16, NUMPY_DTYPES
from posexport.spec.arrays import Array
from posexport.spec.contract import SUMS, Bounds, Shape, Values, graph_inputs, sizes_of
from posexport.spec.spec import Spec
from posexport.verify.cases import Case

FARTHEST = 2**62 - 2**32
"""The position farthest from 0: the difference of two of them, with as many tokens as fit into memory after each, fits
into int64."""


def fit_inputs(
    path: Path, arrays: Mapping[str, Array], spec: Spec, inputs: Values, bounds: Bounds, form: str = "decomposed"
) -> tuple[Case, tuple[str, ...]]:
    """The case with `arrays` from `path` for a graph of `spec` in `form` with `inputs`, and notes on what was rounded.

    Names, shapes and dtypes must be the graph's, and masks and write_indices must be usable. Only a bf16 graph takes
    float32, which is rounded: a note says so, and the float64 reference gets the same rounded values. Raises
    RequestError for anything else, including NaN.
    """
    with located(f"inputs {str(path)!r}"):
        for name in arrays:
            check_known("array", name, inputs)
    for name in inputs:
        if name not in arrays:
            raise RequestError(
                f"inputs {str(path)!r} lack {name!r} {list(inputs[name][0])}: they have {', '.join(arrays) or 'none'}."
            )
    expected = graph_inputs(spec)
    sizes: dict[str, tuple[str, int]] = {}
    notes: list[str] = []
    ready = {}
    with located(f"inputs {str(path)!r}"):
        for name, (shape, dtype) in inputs.items():
            _check_shape(name, arrays[name], shape, expected[name][0], bounds, sizes)
            ready[name] = _converted(name, arrays[name], dtype, notes)
        _check_sums(sizes)
        _check_positions(ready, spec, *sizes["seq"])
        if "input_ids" in ready and spec.vocab_size is not None:
            _check_rows("input_ids", ready["input_ids"], "the vocabulary has", spec.vocab_size)
        if "attention_mask" in ready and not np.isin(ready["attention_mask"], (0, 1)).all():
            raise RequestError("'attention_mask' holds other numbers than 0 and 1: write 1 where a key may be seen.")
        if "write_indices" in ready:
            _check_writes(ready, sizes["max_seq"][1], sizes["seq"][1], form)
    return Case(name=path.name, arrays=ready, sizes=sizes_of(expected, ready)), tuple(notes)


def _check_positions(ready: Mapping[str, Array], spec: Spec, of_tokens: str, seq: int) -> None:
    """RequestError if positions lie beyond the last one; the input `of_tokens` has `seq` tokens."""
    if "position_ids" in ready:
        first, last = int(ready["position_ids"].min()), int(ready["position_ids"].max())
        if max(-first, last) > FARTHEST:
            raise RequestError(
                f"'position_ids' reach from {first} to {last}, at most {FARTHEST} from 0 are taken, so that distances "
                "fit into int64: give smaller ones."
            )
        limits = spec.position_limits() or ()
        placed = ready["position_ids"] if spec.consecutive else ready["position_ids"][:, spec.prefix_tokens :]
        if not (limits or spec.negative_positions) and placed.size and placed.min() < 0:
            names = ", ".join(dict.fromkeys(kind.encoding.name for kind in spec.distinct_layers()))
            raise RequestError(
                f"'position_ids' reach down to {placed.min()}, {names} is only defined for positions from 0 on: give "
                "none below."
            )
        for axis, rows in enumerate(limits):
            numbers = ready["position_ids"] if len(limits) == 1 else ready["position_ids"][..., axis]
            numbers = numbers + np.arange(seq) if spec.consecutive else numbers
            _check_rows("position_ids", numbers, "the table has", rows)
        return
    limit = spec.token_limit() if spec.consecutive else None
    if limit is not None and seq > limit:
        raise RequestError(f"{of_tokens!r} has {seq} tokens, and there are {limit} positions: give no more tokens.")


def _check_rows(name: str, numbers: Array, holder: str, rows: int) -> None:
    """RequestError if numbers are not rows of a table."""
    if not ((numbers >= 0) & (numbers < rows)).all():
        span = f"{numbers.min()} to {numbers.max()}"
        raise RequestError(f"{name!r} reaches from {span}, {holder} rows 0 to {rows - 1}.")


def _check_shape(
    name: str, array: Array, shape: Shape, dims: Shape, bounds: Bounds, sizes: dict[str, tuple[str, int]]
) -> None:
    """RequestError unless an array has the graph's `shape`, whose dimensions the spec calls `dims`."""

    def wrong(why: str) -> RequestError:
        first = ", the first position of each row" if name == "position_ids" and dims[1:] == (1,) else ""
        return RequestError(f"{name!r} has shape {list(array.shape)}, the graph takes {list(shape)}{first}{why}.")

    if array.ndim != len(shape):
        raise wrong("")
    for size, want, dim in zip(array.shape, shape, dims, strict=True):
        if isinstance(want, int) and size != want:
            raise wrong("")
        if isinstance(dim, int):
            continue
        low, high = bounds.get(dim, (1, None))
        if size < low or (high is not None and size > high):
            raise wrong(f", {dim} from {low} to {high or 'any'}")
        other, known = sizes.setdefault(dim, (name, size))
        if size != known:
            raise wrong(f" with one size of {dim}, and {other!r} has {known}")


def _check_sums(sizes: Mapping[str, tuple[str, int]]) -> None:
    """RequestError if a dimension is not the sum of its parts."""
    for total, parts in SUMS.items():
        if total in sizes:
            name, size = sizes[total]
            terms = [sizes[part][1] for part in parts]
            if size != sum(terms):
                raise RequestError(
                    f"{name!r} has {total} {size}, it must be {' + '.join(parts)}, {' + '.join(map(str, terms))}."
                )


def _check_writes(ready: Mapping[str, Array], max_seq: int, seq: int, form: str) -> None:
    """RequestError if new keys have no place in a shared cache, or if GroupQueryAttention can't take them."""
    writes = ready["write_indices"]
    if writes.min() < 0 or writes.max() > max_seq - seq:
        raise RequestError(
            f"'write_indices' reach from {writes.min()} to {writes.max()}, {seq} new tokens in a cache of {max_seq} "
            f"begin at 0 to {max_seq - seq}."
        )
    if form != "contrib":
        return
    if not fits_grouped_batch(len(writes), seq, int(writes.max())):
        raise RequestError(
            f"they add {seq} tokens to caches of {len(writes)} rows: GroupQueryAttention, which this file uses, takes "
            "one token for each, or one row."
        )
    behind = np.arange(max_seq) >= writes[:, None]
    for name, array in ready.items():
        if name.startswith("past_") and np.where(behind[:, None, :, None], array, 0).any():
            raise RequestError(
                f"{name!r} is not zero from write_indices on, where GroupQueryAttention, which this file uses, leaves "
                "nothing else: set it to zero there."
            )


def _converted(name: str, array: Array, dtype: str, notes: list[str]) -> Array:
    want = NUMPY_DTYPES[dtype]
    if array.dtype == np.dtype("V2") and want == BF16:  # numpy writes bfloat16 like this
        array = array.view(BF16)
    if array.dtype != want and not (want == BF16 and array.dtype == np.float32):  # numpy can't save bf16
        accepted = "float32, which is rounded to bf16," if want == BF16 else f"{want},"
        raise RequestError(f"{name!r} is {array.dtype}, the graph takes {accepted} so convert it with astype.")
    if want.kind == "i":
        return array
    rounded = array.astype(want)
    if not np.isfinite(rounded.astype(np.float64)).all():
        raise RequestError(f"{name!r} holds NaN or Inf, every value must be finite.")
    if array.dtype != want and not (rounded.astype(np.float32) == array).all():
        notes.append(f"{name} was rounded from {array.dtype} to {dtype}")
    return rounded
