"""What a benchmark runs on: sizes of batch and sequence that the artifact takes, and seeded inputs of those sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport.errors import RequestError, unknown
from posexport.fields import integer
from posexport.spec import Spec

if TYPE_CHECKING:
    from posexport.runtimes.base import Arrays

_DEFAULT_SEQ = (128, 512)


@attrs.frozen(kw_only=True)
class Sizes:
    """The dimensions of one benchmark."""

    batch: int = integer(1, "batch size")
    seq: int = integer(128, "tokens")

    def __str__(self) -> str:
        return f"batch={self.batch},seq={self.seq}"


@attrs.frozen(kw_only=True)
class Subject:
    """An artifact that can be timed: its file, the ONNX file that torch's block is rebuilt from, and what it takes.

    `ranges` holds for "batch" and "seq" the (smallest, preferred or None, largest or None) size.
    """

    path: Path
    onnx: Path
    spec: Spec
    form: str
    opset: int
    plan_runtime: str | None
    ranges: Mapping[str, tuple[int, int | None, int | None]]

    def sizes(self, given: Sequence[str]) -> list[Sizes]:
        """The sizes of `--shape` options, or defaults that the artifact takes; RequestError for what it can't take."""
        if given:
            return [self._check(read_sizes(text, self._default(_DEFAULT_SEQ[0]))) for text in given]
        found = [self._default(seq) for seq in _DEFAULT_SEQ]
        return [self._check(size) for size in dict.fromkeys(found)]

    def profile(self, sizes: Sequence[Sizes]) -> list[str]:
        """Requests for a plan that is built on the fly: it spans `sizes` and is tuned for the largest."""
        found = []
        for dim, (low, _, high) in self.ranges.items():
            values = [getattr(each, dim) for each in sizes]
            if low != high:
                found.append(f"{dim}={min(values)}:{max(values)}:{max(values)}")
        return found

    def _default(self, seq: int) -> Sizes:
        wanted = {"batch": 1, "seq": min(seq, self.spec.encoding.position_limit() or seq)}
        for dim, (low, best, high) in self.ranges.items():
            wanted[dim] = best or min(max(wanted[dim], low), high or wanted[dim])
        return Sizes(**wanted)

    def _check(self, sizes: Sizes) -> Sizes:
        for dim, (low, _, high) in self.ranges.items():
            value = getattr(sizes, dim)
            if value < low or (high is not None and value > high):
                allowed = f"exactly {low}" if low == high else f"{low} to {high}" if high else f"{low} and more"
                raise RequestError(f"{dim} is {value}: {self.path.name!r} takes {allowed}, so give such a --shape.")
        limit = self.spec.encoding.position_limit()
        if limit is not None and sizes.seq > limit:
            raise RequestError(
                f"seq is {sizes.seq}: {self.spec.encoding.name} knows {limit} positions, "
                f"so give --shape seq={limit} or less."
            )
        return sizes


def read_subject(path: Path) -> Subject:
    """The artifact at `path`, .onnx or .plan; RequestError for any other file, and for what verify calls broken."""
    from posexport import subjects

    if path.suffix not in (".onnx", ".plan"):
        raise RequestError(f"{str(path)!r} is neither .onnx nor .plan: give an artifact of posexport.")
    found = subjects.read_subject(path)
    if found.broken is not None:
        raise RequestError(f"{str(path)!r} can't be timed, {found.broken}: export it anew.")
    return Subject(
        path=path,
        onnx=found.source.path,
        spec=found.spec,
        form=found.source.form,
        opset=found.source.opset,
        plan_runtime=found.only,
        ranges={
            dim: (low, low if low == high else found.tuned.get(dim), high) for dim, (low, high) in found.bounds.items()
        },
    )


def read_sizes(text: str, rest: Sizes) -> Sizes:
    """Sizes from `batch=1,seq=128`; a dimension that isn't named is taken from `rest`."""
    found: dict[str, Any] = {}
    for part in text.split(","):
        dim, equals, value = part.partition("=")
        dim = dim.strip()
        if not equals:
            raise RequestError(f"--shape {text!r} is not like batch=1,seq=128: write each dimension as NAME=SIZE.")
        if dim not in ("batch", "seq"):
            raise unknown("dimension in --shape", dim, ("batch", "seq"))
        found[dim] = value.strip()
    return attrs.evolve(rest, **found)


def seeded_inputs(spec: Spec, sizes: Sizes, seed: int) -> Arrays:
    """Inputs by the graph's names: unit normal values (or token ids), and consecutive positions or a grid's."""
    import numpy as np

    from posexport.runtimes.tensors import NUMPY_DTYPES

    random = np.random.default_rng(seed)
    inputs: Arrays = {}
    for name, (shape, dtype) in spec.inputs().items():
        dims = [dim if isinstance(dim, int) else getattr(sizes, dim) for dim in shape]
        if name == "position_ids":
            columns = math.isqrt(sizes.seq - 1) + 1
            ids = np.arange(sizes.seq)
            axes = [ids] if spec.encoding.axes == 1 else [ids % columns, ids // columns, *[ids * 0] * len(dims)]
            array = np.broadcast_to(np.stack(axes[: spec.encoding.axes], -1).reshape(dims[1:]), dims)
        elif name == "input_ids":
            array = random.integers(0, spec.vocab_size or 1, dims)
        else:
            array = random.standard_normal(dims, dtype=np.float32)
        inputs[name] = np.ascontiguousarray(array.astype(NUMPY_DTYPES[dtype]))
    return inputs
