"""What a benchmark runs on: sizes of the dimensions that the artifact takes, and seeded inputs of those sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport.artifact.paths import check_artifact
from posexport.bench.scenarios import Scenario
from posexport.custom_ops.unsupported import fits_grouped_batch
from posexport.errors import RequestError, unknown
from posexport.spec.contract import graph_inputs, resolved
from posexport.spec.fields import integer
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    from posexport.runtimes.base import Arrays

_DEFAULT = ((128, 0), (512, 0))
_DEFAULT_CACHED = ((512, 0), (1, 512))
"""New tokens and tokens in the cache before: two lengths, or a prefill and a step."""

_BUFFER, _ENCODER = 1024, 512
"""Places in a shared cache, where they suffice, and tokens of an encoder."""


@attrs.frozen(kw_only=True)
class Sizes:
    """The dimensions of one benchmark; None for those that the artifact hasn't.

    `past_seq` counts the tokens that a cache holds, also one of `max_seq` places.
    """

    batch: int = integer(1, "batch size")
    seq: int = integer(128, "tokens")
    past_seq: int | None = integer(None, "tokens in the cache", at_least=0, optional=True)
    max_seq: int | None = integer(None, "places in a shared cache", optional=True)
    encoder_seq: int | None = integer(None, "tokens of the encoder", optional=True)

    def __str__(self) -> str:
        return ",".join(f"{dim}={size}" for dim, size in self.to_dict().items())

    def to_dict(self) -> dict[str, int]:
        """The sizes that there are, by dimension."""
        return {dim: size for dim, size in attrs.asdict(self).items() if size is not None}


@attrs.frozen(kw_only=True)
class Subject:
    """An artifact that can be timed: its file, the ONNX file that torch's block is rebuilt from, and what it takes.

    `ranges` holds for each dimension the (smallest, preferred or None, largest or None) size, `manifest_warnings`
    what of its     manifest is not of it.
    """

    path: Path
    onnx: Path
    spec: Spec
    form: str
    opset: int
    plan_runtime: str | None
    ranges: Mapping[str, tuple[int, int | None, int | None]]
    manifest_warnings: tuple[str, ...] = ()

    def sizes(self, given: Sequence[str]) -> list[Sizes]:
        """The sizes of `--shape` options, or defaults that the artifact takes; RequestError for what it can't take."""
        defaults = [self._default(seq, past) for seq, past in (_DEFAULT_CACHED if self.spec.kv_cache else _DEFAULT)]
        found = [read_sizes(text, defaults[0], self._dimensions()) for text in given] or defaults
        return [self._check(self._with_buffer(size)) for size in dict.fromkeys(found)]

    def scenario(self, scenario: Scenario) -> Sizes:
        """The sizes of a scenario: what it doesn't name is as in the defaults; RequestError for what can't be taken."""
        seq, past = (_DEFAULT_CACHED if self.spec.kv_cache else _DEFAULT)[0]
        usual = self._default(seq, past)
        if scenario.kind == "decode":
            if self.spec.kv_cache is None:
                raise RequestError(
                    f"--scenario {scenario}: {self.path.name!r} has no cache, so give prefill or batch, or export it "
                    "with --kv-cache."
                )
            wanted: dict[str, Any] = {"batch": usual.batch, "seq": 1, "past_seq": scenario.size}
        elif scenario.kind == "prefill":
            wanted = {"batch": usual.batch, "seq": scenario.size, "past_seq": 0 if self.spec.kv_cache else None}
        else:
            wanted = {"batch": scenario.size}
        try:
            return self._check(self._with_buffer(attrs.evolve(usual, **wanted)))
        except RequestError as error:
            raise RequestError(f"--scenario {scenario}: {error}") from None

    def profile(self, sizes: Sequence[Sizes]) -> list[str]:
        """Requests for a plan that is built on the fly: it spans `sizes` and is tuned for the largest."""
        found = []
        for dim, (low, _, high) in self.ranges.items():
            values = [getattr(each, dim) for each in sizes]
            if low != high:
                found.append(f"{dim}={min(values)}:{max(values)}:{max(values)}")
        return found

    def _dimensions(self) -> tuple[str, ...]:
        """What a `--shape` may name."""
        return tuple(dict.fromkeys((*self.ranges, *(["past_seq"] if self.spec.kv_cache else []))))

    def _default(self, seq: int, past: int) -> Sizes:
        room = min(each for each in (self._most(), self.ranges.get("max_seq", (0, None, None))[2], seq + past) if each)
        past = min(past, room - 1)
        wanted = {"batch": 1, "seq": min(seq, room - past), "past_seq": past, "encoder_seq": _ENCODER}
        for dim, (low, best, high) in self.ranges.items():
            if dim in wanted:
                wanted[dim] = max(wanted[dim], low) if high is None else min(max(wanted[dim], low), high)
                wanted[dim] = wanted[dim] if best is None else best
        return Sizes(**{dim: size for dim, size in wanted.items() if dim in self._dimensions()})

    def _with_buffer(self, sizes: Sizes) -> Sizes:
        """With the places of a shared cache, where they were not named."""
        if "max_seq" not in self.ranges or sizes.max_seq is not None:
            return sizes
        low, best, high = self.ranges["max_seq"]
        usual = best or max(_BUFFER, sizes.seq + (sizes.past_seq or 0))
        return attrs.evolve(sizes, max_seq=min(max(usual, low), high or usual))

    def _most(self) -> int | None:
        """How many positions there are, where a table holds them."""
        return self.spec.token_limit()

    def _check(self, sizes: Sizes) -> Sizes:
        for dim, (low, _, high) in self.ranges.items():
            value = getattr(sizes, dim)
            if value < low or (high is not None and value > high):
                allowed = f"exactly {low}" if low == high else f"{low} to {high}" if high else f"{low} and more"
                raise RequestError(f"{dim} is {value}: {self.path.name!r} takes {allowed}, so give such a --shape.")
        past, limit = sizes.past_seq or 0, self._most()
        total = f"past_seq + seq is {past + sizes.seq}" if past else f"seq is {sizes.seq}"
        if limit is not None and past + sizes.seq > limit:
            raise RequestError(
                f"{total}: {self.spec.encoding.name} knows {limit} positions, so give --shape seq={limit} or less."
            )
        if sizes.max_seq is not None and past + sizes.seq > sizes.max_seq:
            raise RequestError(f"{total}: the cache has {sizes.max_seq} places, so give --shape fewer tokens.")
        fits = sizes.max_seq is None or fits_grouped_batch(sizes.batch, sizes.seq, past)
        if self.form == "contrib" and not fits:
            raise RequestError(
                f"batch is {sizes.batch}, past_seq {past} and seq {sizes.seq}: GroupQueryAttention, which "
                f"{self.path.name!r} uses, takes several tokens after others for batch=1 only, so give that, or seq=1."
            )
        return sizes


def read_subject(path: Path) -> Subject:
    """The artifact at `path`, .onnx or .plan; RequestError for any other file, and for what verify calls broken."""
    check_artifact(path)
    from posexport.artifact import loaded

    found = loaded.load_artifact(path)
    if found.contract_violation is not None:
        raise RequestError(f"{str(path)!r} can't be timed, {found.contract_violation}: export it anew.")
    return Subject(
        path=path,
        onnx=found.source.path,
        spec=found.spec,
        form=found.source.form,
        opset=found.source.opset,
        plan_runtime=found.required_runtime,
        manifest_warnings=tuple(f"{path}: {note}" for note in found.manifest_warnings),
        ranges={
            dim: (low, low if low == high else found.optimal_sizes.get(dim), high)
            for dim, (low, high) in found.bounds.items()
        },
    )


def read_sizes(text: str, rest: Sizes, allowed: Sequence[str] = ("batch", "seq")) -> Sizes:
    """Sizes from `batch=1,seq=128`; a dimension that isn't named is taken from `rest`."""
    found: dict[str, Any] = {}
    for part in text.split(","):
        dim, equals, value = part.partition("=")
        dim = dim.strip()
        if not equals:
            raise RequestError(f"--shape {text!r} is not like batch=1,seq=128: write each dimension as NAME=SIZE.")
        if dim not in allowed:
            raise unknown("dimension in --shape", dim, allowed)
        if dim in found:
            raise RequestError(f"--shape {text!r} gives {dim} twice: give it once.")
        found[dim] = value.strip()
    return attrs.evolve(rest, **found)


def seeded_inputs(spec: Spec, sizes: Sizes, seed: int) -> Arrays:
    """Inputs by the graph's names: unit normal values (or token ids), and consecutive positions or a grid's, behind
    those of `past_seq` tokens in the cache. Nothing is padded."""
    import numpy as np

    from posexport.runtimes.tensors import NUMPY_DTYPES

    random = np.random.default_rng(seed)
    inputs: Arrays = {}
    past = sizes.past_seq or 0
    array: Any
    for name, (shape, dtype) in graph_inputs(spec).items():
        dims = [resolved(dim, sizes.to_dict()) for dim in shape]
        if name == "position_ids":
            columns = math.isqrt(past + sizes.seq - 1) + 1
            ids = past + np.arange(sizes.seq)
            axes = [ids] if spec.position_axes == 1 else [ids % columns, ids // columns, *[ids * 0] * len(dims)]
            array = np.broadcast_to(np.stack(axes[: spec.position_axes], -1).reshape(dims[1:]), dims)
        elif name == "input_ids":
            array = random.integers(0, spec.vocab_size or 1, dims)
        elif name == "attention_mask":
            array = np.ones(dims)
        elif name == "write_indices":
            array = np.full(dims, past)
        else:
            array = random.standard_normal(dims, dtype=np.float32)
            if spec.kv_cache == "shared" and name.startswith("past_"):
                array[:, :, past:] = 0  # nothing is written there yet
        inputs[name] = np.ascontiguousarray(array.astype(NUMPY_DTYPES[dtype]))
    return inputs
