"""Rotary encodings over one axis: each pair of queries and keys rotates by an angle that is linear in the position.

rope     pair i of a head rotates by p * w_i, w_i = theta^(-2i/rotary_dim) (Su et al. 2021, arXiv:2104.09864, eq. 34),
         or by scaled frequencies (posexport.models.scaling)
xpos     the same, and query pair i times z_i^(p/scale_base), key pair i times its inverse, z_i = (2i/n + gamma) /
         (1 + gamma) (Sun et al. 2022, arXiv:2212.10554, section 3.2)

A pair is (2i, 2i+1) in the `interleaved` layout and (i, i + n/2) of the n rotated features in the `half` layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

import attrs

from posexport import custom_ops
from posexport.models.angles import angle_constant, cos_sin, inexact, progression
from posexport.models.scaling import SCALINGS, scaling_of, settle
from posexport.spec import fields
from posexport.spec.encoding import Encoding, State
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from posexport.spec.encoding import Constant

LAYOUTS = ("interleaved", "half")


@attrs.frozen(kw_only=True)
class Rotary(Encoding):
    """Base of rotary encodings. Queries and keys rotate by `cos_sin`, paired by `pairing`.

    The first `prefix_tokens` tokens do not rotate.
    """

    base_properties: ClassVar[tuple[str, ...]] = ("norms", "shift", "permutation", "prefix", "finite")
    angular = True
    takes_prefix = True

    def cos_sin(self, state: State, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of positions: [B, S, P], or [B, S, heads, P] if each head has its own."""
        return cos_sin(positions, state["frequencies"])

    def runs(self, spec: Spec) -> list[int]:
        """Return the number of pairs of each run. Within a run, the two halves form the pairs."""
        return [spec.head_dim // 2]

    def pairing(self, spec: Spec) -> tuple[int, bool, list[int]]:
        """Return head_dim, whether pairs are interleaved, and the runs, as `custom_ops.rotate` takes them."""
        return spec.head_dim, getattr(self, "layout", "half") == "interleaved", self.runs(spec)

    def turns(self, state: State, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return `cos_sin`, without rotation for the first `prefix_tokens` tokens."""
        cos, sin = self.cos_sin(state, positions)
        prefix = state.spec.prefix_tokens
        return custom_ops.keep_prefix(cos, sin, prefix) if prefix else (cos, sin)

    def rotate(self, state: State, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.turns(state, positions)
        layout = self.pairing(state.spec)
        return custom_ops.rotate(q, cos, sin, *layout), custom_ops.rotate(k, cos, sin, *layout)


@attrs.frozen(kw_only=True)
class Rope(Rotary):
    name = "rope"
    summary = "rotary: queries and keys turn by angles linear in the position"
    source = "Su et al. 2021, arXiv:2104.09864, eq. 34"
    theta: float = fields.positive(10_000.0, "base of the wavelengths")
    layout: str = fields.choice("interleaved", LAYOUTS, "pairs (2i, 2i+1), or (i, i + rotary_dim/2)")
    rotary_dim: int | None = fields.integer(None, "features of a head that rotate (default: all)")
    scaling: str | None = fields.choice(None, tuple(SCALINGS), "how frequencies change for longer contexts")
    factor: float | None = fields.positive(None, "how many times longer the context is")
    original_max_position_embeddings: int | None = fields.integer(
        None, "the length that the model was trained at", at_least=2
    )
    attention_factor: float | None = fields.positive(None, "factor on cosines and sines (yarn, longrope)")
    beta_fast: float | None = fields.positive(None, "pairs with more turns keep their frequency (yarn)")
    beta_slow: float | None = fields.positive(None, "pairs with fewer turns are slowed down (yarn)")
    mscale: float | None = fields.positive(None, "weight of ln factor in the attention factor (yarn)")
    mscale_all_dim: float | None = fields.positive(None, "the same, what it is divided by (yarn)")
    truncate: bool | None = fields.flag(None, "the ramp between beta_fast and beta_slow ends at whole pairs (yarn)")
    short_factor: tuple[float, ...] | None = fields.numbers("what frequencies are divided by up to that length")
    long_factor: tuple[float, ...] | None = fields.numbers("what frequencies are divided by beyond it (longrope)")
    low_freq_factor: float | None = fields.positive(None, "pairs with fewer turns are slowed down (llama3)")
    high_freq_factor: float | None = fields.positive(None, "pairs with more turns are kept (llama3)")
    partial_rotary_factor: float | None = fields.positive(None, "part of the pairs that turn (proportional)")

    def __attrs_post_init__(self) -> None:
        settle(self)

    def dim(self, spec: Spec) -> int:
        """Return the number of features of a head that rotate."""
        return self.rotary_dim or spec.head_dim

    def problems(self, spec: Spec) -> Iterator[str]:
        dim = self.dim(spec)
        if dim % 2 or dim > spec.head_dim:
            yield f"rotary_dim is {dim} with head_dim {spec.head_dim}: it must be even and at most head_dim."
        if self.scaling in ("ntk", "dynamic") and dim < 4:
            yield f"scaling {self.scaling} with {dim} features that turn: it needs 4 or more."
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if factors is not None and len(factors) != dim // 2:
                yield f"{name} has {len(factors)} numbers: {dim} features turn in pairs, so it must have {dim // 2}."
        yield from inexact(spec, self.theta)
        if spec.angles == "exact" and self.scaling == "dynamic":
            yield (
                "scaling dynamic was given with angles exact: its frequencies depend on the length at run time, so "
                "they are no constants; give angles parity, or another scaling."
            )

    def constants(self, spec: Spec, dtype: torch.dtype) -> Mapping[str, Tensor]:
        scaling = scaling_of(self)

        def frequencies(dtype: torch.dtype) -> Mapping[str, Tensor]:
            return scaling.frequencies(self.theta, self.dim(spec), dtype, **scaling.parameters_of(self))

        def constant(name: str) -> Tensor:
            return angle_constant(spec, dtype, lambda dtype: frequencies(dtype)[name])

        return {name: constant(name) for name in frequencies(dtype)}

    def properties(self, spec: Spec) -> tuple[str, ...]:
        # angles that depend on the length depend on the largest position
        return ("norms", "permutation", "finite") if scaling_of(self).by_length else self.base_properties

    def rounding(self, spec: Spec, position: int, keys: int) -> float:
        # Powers that are computed at run time are off by three or more units in the last place. Beyond position 2^16
        # such angles mean little, and a wider limit would hide every fault.
        return min(position, 2**16) * 2.0**-20 if self.scaling == "dynamic" else 0.0

    def position_edges(self) -> tuple[int, ...]:
        length = self.original_max_position_embeddings
        return (length,) if length is not None and scaling_of(self).by_length else ()

    def cos_sin(self, state: State, positions: Tensor) -> tuple[Tensor, Tensor]:
        scaling, length = scaling_of(self), self.original_max_position_embeddings
        if self.scaling == "longrope":
            both = state["short_frequencies"], state["long_frequencies"]
            frequencies = custom_ops.length_frequencies(positions, *both, limit=length or 0)
        else:
            frequencies = state["frequencies"]
        if self.scaling == "dynamic":
            scaled = {"theta": self.theta, "factor": self.factor or 1.0}
            frequencies = custom_ops.ntk_frequencies(
                positions, frequencies, **scaled, limit=length or 0, dim=self.dim(state.spec)
            )
        scale = self.attention_factor or scaling.attention_factor(**scaling.parameters_of(self))
        return cos_sin(positions, frequencies, scale)

    def runs(self, spec: Spec) -> list[int]:
        return [self.dim(spec) // 2]


@attrs.frozen(kw_only=True)
class XPos(Rotary):
    """RoPE whose scores decay with distance: queries shrink with their position and keys grow, at a rate per pair.

    Positions must not decrease along the sequence. The block must be causal, because keys ahead of a query would grow.
    """

    name = "xpos"
    summary = "rotary with a decay: queries and keys are scaled by powers of the position"
    source = "Sun et al. 2022, arXiv:2212.10554, section 3.2"
    base_properties = ("shift", "permutation", "prefix", "finite")
    takes_prefix = False
    ordered = True
    theta: float = fields.positive(10_000.0, "base of the wavelengths")
    layout: str = fields.choice("interleaved", LAYOUTS, "pairs (2i, 2i+1), or (i, i + head_dim/2)")
    scale_base: int = fields.integer(512, "positions within which the slowest pair keeps its size")
    gamma: float = fields.positive(0.4, "the higher, the slower the decay")

    def problems(self, spec: Spec) -> Iterator[str]:
        if spec.head_dim % 2:
            yield f"head_dim is {spec.head_dim}: xpos turns pairs, so it must be even."
        if not spec.causal:
            yield "xpos was given without causal: keys ahead of a query would grow, so add causal."
        if spec.qk_norm_type == "l2":
            yield "qk_norm_type l2 was given with xpos, whose decay such a norm removes: drop one of them."
        yield from inexact(spec, self.theta)

    def position_limits(self) -> tuple[int, ...] | None:
        return (6 * self.scale_base,)  # beyond it, the scaled keys of a cache overflow fp16

    def constants(self, spec: Spec, dtype: torch.dtype) -> Mapping[str, Constant]:
        import torch

        dim = spec.head_dim
        pairs = torch.arange(0, dim, 2, dtype=dtype)
        return {
            "frequencies": angle_constant(spec, dtype, progression(dim, self.theta)),
            "decay": ((pairs / dim + self.gamma) / (1 + self.gamma)).log() / self.scale_base,
        }

    def rotate(self, state: State, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos_sin(state, positions)
        decay = custom_ops.position_powers(positions, state["decay"], state.spec.kv_cache is None)
        layout = self.pairing(state.spec)
        q = custom_ops.rotate(q, cos * decay, sin * decay, *layout)
        return q, custom_ops.rotate(k, cos / decay, sin / decay, *layout)
