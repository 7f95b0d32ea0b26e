"""Cosines and sines of a graph at positions that replace its own, in float64 or in its own dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import torch

from posexport.errors import RequestError
from posexport.graphs.attention.rotary import AngleSource
from posexport.graphs.evaluate import Evaluator
from posexport.graphs.kernels.dtypes import torch_dtype
from posexport.graphs.view import View
from posexport.rewrite.angles.positions import PositionSource
from posexport.rewrite.surgery import values_of
from posexport.runtimes.tensors import to_tensors

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[np.float64]]
    Whole = np.ndarray[Any, np.dtype[np.int64]]

MOST = 2**24
"""The end of positions: posexport.custom_ops.exact_sinusoids is exact up to here."""


_MANY = 2048
"""The positions of a row that are put in at once, if the graph takes another number of tokens there."""


class Trial:
    """The values of `sources` in `model`, a copy of the model of a view, on the view's inputs."""

    def __init__(self, view: View, sources: Sequence[AngleSource], model: ir.Model, *, wide: bool = True) -> None:
        self._sources, self._view, self._wide = sources, view, wide
        self._names = [source.value.name or "" for source in sources]
        self._evaluator = Evaluator(model, wide=wide)
        self._arrays = to_tensors(view.inputs.arrays)
        self._values = values_of(model)

    def at(self, source: PositionSource, positions: Whole) -> list[Array]:
        """Each value as [n, F] at positions [n]; RequestError if the graph doesn't take one of them."""
        shape = self._view.probe.shape(source.value)
        wider = (*shape[: source.tokens], _MANY, *shape[source.tokens + 1 :])
        if len(positions) >= _MANY:
            try:
                return self._in_parts(source, positions, wider)
            except RequestError:  # other values depend on the number of tokens
                pass
        return self._in_parts(source, positions, shape)

    def _in_parts(self, source: PositionSource, positions: Whole, shape: Sequence[int]) -> list[Array]:
        rows = 1 if source.batch is None else shape[source.batch]
        room = rows * shape[source.tokens]
        parts: list[list[Array]] = [[] for _ in self._names]
        for start in range(0, len(positions), room):
            part = positions[start : start + room]
            filled = np.concatenate((part, np.repeat(part[-1:], room - len(part))))
            for found, value in zip(parts, self._run(source, filled.reshape(rows, -1), shape), strict=True):
                if len(value) != room:
                    raise RequestError(f"{len(value)} angles are computed from {room} positions.")
                found.append(value[: len(part)])
        return [np.concatenate(part) for part in parts]

    def limit(self, source: PositionSource) -> int:
        """The number of positions that the graph takes, at most MOST: a table may end before; 0 for none."""
        low, high = 0, MOST
        while low < high:
            middle = high if high == MOST else (low + high + 1) // 2
            try:
                self.at(source, np.array([middle - 1]))
                low = middle
            except RequestError:
                high = middle - 1
        return low

    def _run(self, source: PositionSource, positions: Whole, shape: Sequence[int]) -> list[Array]:
        put = {source.value.name or "": source.laid_out(torch.from_numpy(positions), shape), **source.whole}
        known = {name: tensor for name, tensor in put.items() if name in self._values}
        kinds = self._view.dtypes([self._values[name] for name in known])
        given = {name: tensor.to(torch_dtype(kinds[name], self._wide)) for name, tensor in known.items()}
        values = self._evaluator.run(self._arrays | given, [*dict.fromkeys(self._names)])
        tokens = [one.by_token(values[name].double()) for one, name in zip(self._sources, self._names, strict=True)]
        if source.batch is None:
            if not all(bool((one == one[:1]).all()) for one in tokens):
                raise RequestError("Rows have angles of their own.")
            tokens = [one[:1] for one in tokens]
        return [one.flatten(0, 1).numpy() for one in tokens]


def near_and_far(limit: int, seed: int = 0) -> Whole:
    """Positions below a limit: the first ones, random ones up to each power of two, and the last one."""
    rng = np.random.default_rng(seed)
    found = [*range(min(limit, 6))]
    for power in range(3, MOST.bit_length()):
        top = min(2**power, limit)
        found += rng.integers(0, top, 8).tolist() if top > 6 else []
    return np.array(sorted({*found, limit - 1}), np.int64)


def far(limit: int, seed: int = 0) -> Whole:
    """The positions at which errors are stated: from 2^20, or from 3/4 of the limit if that is less, up to the
    limit."""
    rng = np.random.default_rng((seed, 1))
    start = min(2**20, limit * 3 // 4)
    found = {start, limit - 1, limit // 2} | set(rng.integers(start, limit, 40).tolist())
    return np.array(sorted(found), np.int64)
