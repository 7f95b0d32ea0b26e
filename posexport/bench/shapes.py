"""The sizes at which a benchmark runs an artifact, and seeded inputs of those sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport.artifact.paths import check_artifact
from posexport.bench.scenarios import Scenario
from posexport.custom_ops.unsupported import fits_grouped_batch
from posexport.errors import RequestError, check_known
from posexport.spec.contract import graph_inputs, resolved, within
from posexport.spec.fields import integer, whole_number
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    from posexport.artifact.loaded import LoadedArtifact
    from posexport.artifact.signing import TrustedKey
    from posexport.runtimes.base import Arrays

BUFFER, ENCODER_TOKENS = 1024, 512
"""Places in a shared cache if these are enough, and tokens of an encoder."""

_NEVER_EMPTY = ("batch", "seq", "max_seq", "encoder_seq")
"""Dimensions of at least 1. Others may be 0, such as tokens in a cache or dimensions that only a file names."""


@attrs.frozen(kw_only=True)
class Sizes:
    """The dimensions of one benchmark. None for those that the file doesn't have.

    `others` are dimensions of graphs of other tools, such as the height of pictures.
    """

    batch: int = integer(1, "batch size")
    seq: int | None = integer(128, "tokens", optional=True)
    past_seq: int | None = integer(None, "tokens in the cache", at_least=0)  # also of a cache of `max_seq` places
    max_seq: int | None = integer(None, "places in a shared cache")
    encoder_seq: int | None = integer(None, "tokens of the encoder")
    others: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, sizes: Mapping[str, int | None]) -> Sizes:
        """The sizes by name. Names that are not fields are among `others`."""
        fields = {field.name for field in attrs.fields(cls)} - {"others"}
        known: dict[str, Any] = {name: size for name, size in sizes.items() if name in fields}
        others = ((name, size) for name, size in sizes.items() if name not in fields and size is not None)
        return cls(**known, others=tuple(sorted(others)))

    def __str__(self) -> str:
        return ",".join(f"{dim}={size}" for dim, size in self.to_dict().items())

    def to_dict(self) -> dict[str, int]:
        """The known sizes, by dimension."""
        known = attrs.asdict(self, filter=lambda field, size: field.name != "others" and size is not None)
        return {**known, **dict(self.others)}

    @property
    def tokens(self) -> int | None:
        """The new tokens of all rows. None if there are no tokens."""
        return None if self.seq is None else self.batch * self.seq


def load_for_bench(path: Path, trusted: Sequence[TrustedKey] = ()) -> LoadedArtifact:
    """The artifact at `path`, .onnx or .plan. RequestError for other files and graphs that break the contract.

    An ONNX file that contradicts its manifest is timed with a warning, unless one of the `trusted` keys must sign it.
    """
    check_artifact(path)
    from posexport.artifact.loaded import load_artifact

    artifact = load_artifact(path, trusted, lenient=not trusted)
    if artifact.contract_violation is not None:
        raise RequestError(f"{str(path)!r} can't be timed, {artifact.contract_violation}: export it anew.")
    return artifact


def sizes_of(artifact: LoadedArtifact, texts: Sequence[str]) -> list[Sizes]:
    """The sizes of `--shape` options, or defaults that fit. RequestError for what the artifact can't take."""
    defaults = _defaults(artifact)
    names = dimensions(artifact)
    given = [read_sizes(text, defaults[0], names) for text in texts] or defaults
    return [_checked(artifact, sizes) for sizes in dict.fromkeys(given)]


def scenario_sizes(artifact: LoadedArtifact, scenario: Scenario) -> Sizes:
    """The sizes of a scenario, and defaults for the others. RequestError for what the artifact can't take."""
    cached = artifact.spec.kv_cache is not None
    usual = _defaults(artifact)[0]
    if scenario.kind == "decode":
        if not cached:
            raise RequestError(
                f"--scenario {scenario}: {artifact.path.name!r} has no cache, so give prefill or batch, or export it "
                "with --kv-cache."
            )
        sizes = attrs.evolve(usual, seq=1, past_seq=scenario.size)
    elif scenario.kind == "prefill":
        sizes = attrs.evolve(usual, seq=scenario.size, past_seq=0 if cached else None)
    else:
        sizes = attrs.evolve(usual, batch=scenario.size)
    try:
        return _checked(artifact, sizes)
    except RequestError as error:
        raise RequestError(f"--scenario {scenario}: {error}") from None


def _defaults(artifact: LoadedArtifact) -> list[Sizes]:
    """A prefill and a step if there is a cache, otherwise two lengths."""
    tokens = ((512, 0), (1, 512)) if artifact.spec.kv_cache else ((128, 0), (512, 0))  # new tokens, and cached tokens
    return [_default(artifact, seq, past) for seq, past in tokens]


def dimensions(artifact: LoadedArtifact) -> tuple[str, ...]:
    """The dimensions that a `--shape` may name."""
    return tuple(dict.fromkeys((*artifact.bounds, *(["past_seq"] if artifact.spec.kv_cache else []))))


def _usual(artifact: LoadedArtifact, dim: str, size: int) -> int:
    """The size that a plan is tuned for, or otherwise the size nearest to `size` that the artifact takes."""
    return within(artifact.optimal_sizes.get(dim, size), artifact.bounds[dim])


def _default(artifact: LoadedArtifact, seq: int, past: int) -> Sizes:
    """The usual sizes with `seq` new tokens after `past` cached ones, as far as the artifact has room for them."""
    places = artifact.bounds.get("max_seq", (0, None))[1]
    room = min(limit for limit in (artifact.spec.token_limit(), places, seq + past) if limit)
    past = min(past, room - 1)
    usual = {"batch": 1, "seq": min(seq, room - past), "past_seq": past, "encoder_seq": ENCODER_TOKENS}
    usual |= {dim: _usual(artifact, dim, size) for dim, size in usual.items() if dim in artifact.bounds}
    return Sizes.of({dim: size for dim, size in usual.items() if dim in dimensions(artifact)})


def _checked(artifact: LoadedArtifact, sizes: Sizes) -> Sizes:
    """The sizes, with places of a shared cache if they were not named. RequestError if they don't fit."""
    seq = sizes.seq or 1
    if "max_seq" in artifact.bounds and sizes.max_seq is None:
        places = max(BUFFER, seq + (sizes.past_seq or 0))
        sizes = attrs.evolve(sizes, max_seq=_usual(artifact, "max_seq", places))
    name, spec, limit = artifact.path.name, artifact.spec, artifact.spec.token_limit()
    for dim, (low, high) in artifact.bounds.items():
        size = getattr(sizes, dim)
        if size < low or (high is not None and size > high):
            span = f"exactly {low}" if low == high else f"{low} to {high}" if high else f"{low} and more"
            raise RequestError(f"{dim} is {size}: {name!r} takes {span}, so give such a --shape.")
    past = sizes.past_seq or 0
    if limit is not None and past + seq > limit:
        raise RequestError(
            f"{tokens_text(seq, past)}: {spec.encoding.name} knows {limit} positions, so give --shape seq={limit} or "
            "less."
        )
    if sizes.max_seq is not None:
        check_places(seq, past, sizes.max_seq)
        if artifact.source.form == "contrib":
            check_grouped(name, sizes.batch, seq, past)
    return sizes


def tokens_text(seq: int, past: int) -> str:
    """How many tokens there are, as the start of a message."""
    return f"past_seq + seq is {past + seq}" if past else f"seq is {seq}"


def check_places(seq: int, past: int, places: int) -> None:
    """RequestError for more tokens than a buffer has places."""
    if past + seq > places:
        raise RequestError(f"{tokens_text(seq, past)}: the cache has {places} places, so give --shape fewer tokens.")


def check_grouped(file: str, batch: int, seq: int, past: int) -> None:
    """RequestError for sizes that GroupQueryAttention doesn't take, which the file uses."""
    if not fits_grouped_batch(batch, seq, past):
        raise RequestError(
            f"batch is {batch}, past_seq {past} and seq {seq}: GroupQueryAttention, which {file!r} uses, takes several "
            "tokens after others for batch=1 only, so give that, or seq=1."
        )


def read_sizes(text: str, defaults: Sizes, dimensions: Sequence[str] = ("batch", "seq")) -> Sizes:
    """Sizes from `batch=1,seq=128`. Dimensions that are not named are taken from `defaults`."""
    given: dict[str, Any] = pairs_of(text)
    for dim in given:
        check_known("dimension in --shape", dim, dimensions)
    return attrs.evolve(defaults, **given)


def pairs_of(text: str) -> dict[str, str]:
    """The sizes in `batch=1,seq=128` by dimension, as text. RequestError for other text and invalid sizes.

    Whether a file has such dimensions is not checked here.
    """
    given: dict[str, str] = {}
    for part in text.split(","):
        dim, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise RequestError(f"--shape {text!r} is not like batch=1,seq=128: write each dimension as NAME=SIZE.")
        if dim in given:
            raise RequestError(f"--shape {text!r} gives {dim} twice: give it once.")
        whole_number(dim, value, at_least=0 if dim not in _NEVER_EMPTY else 1)
        given[dim] = value
    return given


def seeded_inputs(spec: Spec, sizes: Sizes, seed: int) -> Arrays:
    """Inputs by the graph's names: unit normal values (or token ids), and positions after `past_seq` cached tokens.

    The positions are consecutive, or those of a grid. Nothing is padded.
    """
    import numpy as np

    from posexport.runtimes.tensors import NUMPY_DTYPES

    random = np.random.default_rng(seed)
    inputs: Arrays = {}
    past, seq = sizes.past_seq or 0, sizes.seq or 1
    array: Any
    for name, (shape, dtype) in graph_inputs(spec).items():
        dims = [resolved(dim, sizes.to_dict()) for dim in shape]
        if name == "position_ids" and spec.consecutive:
            array = np.full(dims, past)
        elif name == "position_ids":
            columns = math.isqrt(past + seq - 1) + 1
            ids = past + np.arange(seq)
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
