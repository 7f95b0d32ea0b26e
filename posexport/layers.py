"""What an encoding tells a spec, and what the layers of one block may differ in. Pure data; imports no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from posexport import fields
from posexport.errors import RequestError

if TYPE_CHECKING:
    from posexport.spec import Spec


@attrs.frozen(kw_only=True)
class EncodingParams:
    """The parameters of one encoding; a subclass is one row of the ENCODINGS table.

    `axes` is how many numbers make one position: 0 (the encoding ignores positions), 1, or more.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    axes: ClassVar[int] = 1
    at_input: ClassVar[bool] = False
    """True where it acts once, before the first layer, instead of in every layer."""
    in_cross: ClassVar[bool] = False
    """Whether it is defined where keys are those of an encoder: by acting at the input, or by not acting at all."""
    angular: ClassVar[bool] = False
    """Whether it takes cosines and sines of angles that are linear in integer positions."""
    multiplies: ClassVar[bool] = False
    """Whether fp32 products of positions and frequencies are its angles, which far out are as good as fp32 is."""
    holds: ClassVar[tuple[str, ...]] = ("permutation", "prefix", "finite")
    """The properties (posexport.properties) that it has."""
    takes_prefix: ClassVar[bool] = False
    """Whether the first tokens can be left as they are."""
    ordered: ClassVar[bool] = False
    """Whether positions must not fall along the sequence."""
    uncached: ClassVar[str | None] = None
    """Why it goes with no cache, as the end of a sentence; None where it does."""

    def check(self, spec: Spec) -> None:
        """Raise RequestError where these parameters don't fit the sizes of `spec`."""

    def default_scale(self, head_dim: int) -> float:
        """The factor on the logits where none is given."""
        return float(head_dim**-0.5)

    def properties(self, spec: Spec) -> tuple[str, ...]:
        """What holds whatever the weights are; names of posexport.properties."""
        return self.holds

    def products(self) -> bool:
        """`multiplies`, where the parameters don't rule it out."""
        return self.multiplies

    def reach(self) -> int | None:
        """The distance beyond which nothing changes any more, where there is one."""
        return None

    def position_limit(self) -> int | None:
        """The number of positions a trained table holds, or None where any position is defined."""
        return None


@attrs.frozen(kw_only=True)
class Layer:
    """One kind of layer in a pattern: its encoding, and what it has otherwise than the block; None where it hasn't."""

    encoding: EncodingParams
    window: int | None = fields.integer(None, "a query sees keys with |i - j| < window", optional=True)
    attention_chunk_size: int | None = fields.integer(None, "a query sees keys of its own run", optional=True)
    qk_norm: bool | None = fields.flag(None, "RMS norm of each head's query and key")

    def own(self) -> dict[str, Any]:
        """What it has otherwise, by name."""
        found = {name: getattr(self, name) for name in LAYER_FIELDS}
        return {name: value for name, value in found.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"encoding": encoding_dict(self.encoding), **self.own()}


LAYER_FIELDS = ("window", "attention_chunk_size", "qk_norm")
"""What layers of one block may differ in, beside their encoding."""


def encoding_dict(encoding: EncodingParams) -> dict[str, Any]:
    """An encoding as plain data, its `name` first."""
    return {"name": encoding.name, **attrs.asdict(encoding)}


def read_pattern(value: Any) -> tuple[Layer, ...]:
    """A pattern of layers; RequestError for anything else."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(layer, Layer) for layer in value):
        raise RequestError(f"layer_pattern is {value!r}: it must be a list of layers, each with an encoding.")
    return tuple(value)
