"""The user's own inputs from a .npz file, checked against a graph before anything runs on them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from posexport.errors import RequestError, unknown
from posexport.inputs import Bounds, Case
from posexport.runtimes.tensors import BF16, NUMPY_DTYPES
from posexport.spec import Spec

Array = np.ndarray[Any, Any]


def fit_inputs(
    path: Path,
    arrays: Mapping[str, Array],
    spec: Spec,
    inputs: Mapping[str, tuple[tuple[str | int, ...], str]],
    bounds: Bounds,
) -> tuple[Case, tuple[str, ...]]:
    """The case of the `arrays` from `path` for a graph with these `inputs`, and notes on what was rounded.

    Names, shapes and dtypes must be the graph's; only a bf16 graph takes float32, rounded, which a note says (the truth
    gets the same rounded values). Raises RequestError for anything else, NaN included.
    """
    for name in inputs:
        if name not in arrays:
            raise RequestError(
                f"inputs {str(path)!r} lack {name!r} {list(inputs[name][0])}: they have {', '.join(arrays) or 'none'}."
            )
    for name in arrays:
        if name not in inputs:
            raise unknown(f"array in inputs {str(path)!r}", name, inputs)
    sizes: dict[str, tuple[str, int]] = {}
    notes: list[str] = []
    ready = {}
    for name, (shape, dtype) in inputs.items():
        _check_shape(path, name, arrays[name], shape, bounds, sizes)
        ready[name] = _converted(path, name, arrays[name], dtype, notes)
    if "position_ids" in ready:
        _check_range(path, "position_ids", ready["position_ids"], spec.encoding.position_limit(), "the table has")
    if "input_ids" in ready:
        _check_range(path, "input_ids", ready["input_ids"], spec.vocab_size, "the vocabulary has")
    return Case(name=path.name, arrays=ready), tuple(notes)


def read_arrays(path: Path) -> dict[str, Array]:
    """Every array of the .npz file at `path` by name; RequestError where it is anything else, pickles included."""
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:  # numpy would leave its own open
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError
            arrays = {name: file[name] for name in file.files}
            if not all(isinstance(array, np.ndarray) for array in arrays.values()):  # numpy gives others as bytes
                raise ValueError
            return arrays
    except OSError as error:
        why = error.strerror or "not readable"
        raise RequestError(f"inputs {str(path)!r} can't be read ({why}): give a .npz file.") from None
    except Exception:  # damaged archives raise whatever zip, zlib and numpy's parser of headers come upon
        raise RequestError(
            f"inputs {str(path)!r} are not a .npz file of plain arrays: write it with numpy.savez."
        ) from None


def _check_shape(
    path: Path, name: str, array: Array, shape: tuple[str | int, ...], bounds: Bounds, sizes: dict[str, tuple[str, int]]
) -> None:
    def wrong(why: str) -> RequestError:
        return RequestError(
            f"inputs {str(path)!r}: {name!r} has shape {list(array.shape)}, the graph takes {list(shape)}{why}."
        )

    if array.ndim != len(shape):
        raise wrong("")
    for axis, (size, want) in enumerate(zip(array.shape, shape, strict=True)):
        if isinstance(want, int) and size != want:
            raise wrong("")
        dim = ("batch", "seq")[axis] if axis < 2 else None
        if dim is None:
            continue
        low, high = bounds[dim]
        if size < low or (high is not None and size > high):
            raise wrong(f", {dim} from {low} to {high or 'any'}")
        other, known = sizes.setdefault(dim, (name, size))
        if size != known:
            raise wrong(f" with one size of {dim}, and {other!r} has {known}")


def _converted(path: Path, name: str, array: Array, dtype: str, notes: list[str]) -> Array:
    want = NUMPY_DTYPES[dtype]
    if array.dtype == np.dtype("V2") and want == BF16:  # how numpy writes bfloat16
        array = array.view(BF16)
    if array.dtype != want and not (want == BF16 and array.dtype == np.float32):  # numpy has no bf16 to save
        accepted = "float32, which is rounded to bf16," if want == BF16 else f"{want},"
        raise RequestError(
            f"inputs {str(path)!r}: {name!r} is {array.dtype}, the graph takes {accepted} so convert it with astype."
        )
    if want.kind == "i":
        return array
    rounded = array.astype(want)
    if not np.isfinite(rounded.astype(np.float64)).all():
        raise RequestError(f"inputs {str(path)!r}: {name!r} holds NaN or Inf, every value must be finite.")
    if array.dtype != want and not (rounded.astype(np.float32) == array).all():
        notes.append(f"{name} was rounded from {array.dtype} to {dtype}")
    return rounded


def _check_range(path: Path, name: str, array: Array, limit: int | None, holder: str) -> None:
    """Rows of a table are numbered from 0; where there is none, any position is defined."""
    if limit is None:
        return
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= limit:
        raise RequestError(
            f"inputs {str(path)!r}: {name!r} reaches from {low} to {high}, {holder} rows 0 to {limit - 1}."
        )
