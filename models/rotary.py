"""Rotary encodings over one axis: queries and keys are turned, pair by pair, by angles that are linear in the position.

rope     pair i of a head turns by p * w_i, w_i = theta^(-2i/rotary_dim) (Su et al. 2021, arXiv:2104.09864, eq. 34), or
         by scaled frequencies (posexport.models.scaling)
xpos     the same, and query pair i times z_i^(p/scale_base), key pair i times its inverse, z_i = (2i/n + gamma) /
         (1 + gamma) (Sun et al. 2022, arXiv:2212.10554, section 3.2)

A pair is (2i, 2i+1) in the `interleaved` layout and (i, i + n/2) of the n rotated features in the `half` layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import attrs

from posexport import custom_ops
from posexport.errors import RequestError
from posexport.models import scaling
from posexport.models.angles import angle_constant, check_exact, cos_sin
from posexport.models.frequencies import inverse_frequencies, progression
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
    """Base of rotary encodings: queries and keys rotate by `cos_sin`, paired by `pairing`; the first `prefix_tokens`
    tokens don't rotate."""

    hook: ClassVar[str] = "rotate"
    base_properties: ClassVar[tuple[str, ...]] = ("norms", "shift", "permutation", "prefix", "finite")
    angular: ClassVar[bool] = True
    takes_prefix: ClassVar[bool] = True

    def uses_fp32_products(self) -> bool:
        return True

    def cos_sin(self, state: State, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions, [B, S, P], or [B, S, heads, P] where each head has its own."""
        return cos_sin(positions, state["frequencies"])

    def pairing(self, spec: Spec) -> tuple[bool, list[int]]:
        """Whether pairs are interleaved, and the pairs of each run otherwise, as `custom_ops.rotate` takes them."""
        return False, [spec.head_dim // 2]

    def turns(self, state: State, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`cos_sin`, without rotation of the first `prefix_tokens` tokens."""
        cos, sin = self.cos_sin(state, positions)
        prefix = state.spec.prefix_tokens
        return custom_ops.keep_prefix(cos, sin, prefix) if prefix else (cos, sin)

    def rotate(self, state: State, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.turns(state, positions)
        layout = (state.spec.head_dim, *self.pairing(state.spec))
        return custom_ops.rotate(q, cos, sin, *layout), custom_ops.rotate(k, cos, sin, *layout)


@attrs.frozen(kw_only=True)
class Rope(Rotary):
    """Rotary position embedding over one axis, of the whole head or of its first `rotary_dim` features."""

    name: ClassVar[str] = "rope"
    summary: ClassVar[str] = "rotary: queries and keys turn by angles linear in the position"
    source: ClassVar[str] = "Su et al. 2021, arXiv:2104.09864, eq. 34"
    theta: float = fields.positive(10_000.0, "base of the wavelengths")
    layout: str = fields.choice("interleaved", LAYOUTS, "pairs (2i, 2i+1), or (i, i + rotary_dim/2)")
    rotary_dim: int | None = fields.integer(None, "features of a head that rotate (default: all)", optional=True)
    scaling: str | None = fields.choice(
        None, tuple(scaling.SCALINGS), "how frequencies change for longer contexts", optional=True
    )
    factor: float | None = fields.positive(None, "how many times longer the context is", optional=True)
    original_max_position_embeddings: int | None = fields.integer(
        None, "the length that the model was trained at", at_least=2, optional=True
    )
    attention_factor: float | None = fields.positive(
        None, "factor on cosines and sines (yarn, longrope)", optional=True
    )
    beta_fast: float | None = fields.positive(None, "pairs with more turns keep their frequency (yarn)", optional=True)
    beta_slow: float | None = fields.positive(None, "pairs with fewer turns are slowed down (yarn)", optional=True)
    mscale: float | None = fields.positive(None, "weight of ln factor in the attention factor (yarn)", optional=True)
    mscale_all_dim: float | None = fields.positive(None, "the same, what it is divided by (yarn)", optional=True)
    truncate: bool | None = fields.flag(None, "the ramp between beta_fast and beta_slow ends at whole pairs (yarn)")
    short_factor: tuple[float, ...] | None = fields.numbers("what frequencies are divided by up to that length")
    long_factor: tuple[float, ...] | None = fields.numbers("what frequencies are divided by beyond it (longrope)")
    low_freq_factor: float | None = fields.positive(
        None, "pairs with fewer turns are slowed down (llama3)", optional=True
    )
    high_freq_factor: float | None = fields.positive(None, "pairs with more turns are kept (llama3)", optional=True)
    partial_rotary_factor: float | None = fields.positive(
        None, "part of the pairs that turn (proportional)", optional=True
    )

    def __attrs_post_init__(self) -> None:
        scaling.settle(self)

    def dim(self, spec: Spec) -> int:
        """The number of features of a head that rotate."""
        return self.rotary_dim or spec.head_dim

    def check(self, spec: Spec) -> None:
        dim = self.dim(spec)
        if dim % 2 or dim > spec.head_dim:
            raise RequestError(
                f"rotary_dim is {dim} with head_dim {spec.head_dim}: it must be even and at most head_dim."
            )
        if self.scaling in ("ntk", "dynamic") and dim < 4:
            raise RequestError(f"scaling {self.scaling} with {dim} features that turn: it needs 4 or more.")
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if factors is not None and len(factors) != dim // 2:
                raise RequestError(
                    f"{name} has {len(factors)} numbers: {dim} features turn in pairs, so it must have {dim // 2}."
                )
        check_exact(spec, self.theta)
        if spec.angles == "exact" and self.scaling == "dynamic":
            raise RequestError(
                "scaling dynamic was given with angles exact: its frequencies depend on the length at run time, so "
                "they are no constants; give angles parity, or another scaling."
            )

    def constants(self, spec: Spec, dtype: torch.dtype) -> Mapping[str, Constant]:
        return self.tensors(spec, dtype)

    def tensors(self, spec: Spec, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """Frequencies, or with exact angles turns, by name."""
        dim = self.dim(spec)

        def constant(name: str) -> Tensor:
            return angle_constant(spec, dtype, lambda dtype: self._frequencies(dim, dtype)[name])

        return {name: constant(name) for name in self._frequencies(dim, dtype)}

    def _frequencies(self, dim: int, dtype: torch.dtype) -> Mapping[str, Tensor]:
        if self.scaling is None:
            return {"frequencies": inverse_frequencies(dim, self.theta, dtype)}
        row = scaling.SCALINGS[self.scaling]
        return row.frequencies(self.theta, dim, dtype, **row.parameters_of(self))

    def properties(self, spec: Spec) -> tuple[str, ...]:
        if self.scaling is not None and scaling.SCALINGS[self.scaling].by_length:
            return ("norms", "permutation", "finite")  # angles depend on the largest position
        return self.base_properties

    def cos_sin(self, state: State, positions: Tensor) -> tuple[Tensor, Tensor]:
        scale = 1.0
        if self.scaling is not None:
            row = scaling.SCALINGS[self.scaling]
            scale = self.attention_factor or row.attention_factor(**row.parameters_of(self))
        if self.scaling == "longrope":
            frequencies = custom_ops.length_frequencies(
                positions,
                state["short_frequencies"],
                state["long_frequencies"],
                self.original_max_position_embeddings,
            )
        elif self.scaling == "dynamic":
            frequencies = custom_ops.ntk_frequencies(
                positions,
                state["frequencies"],
                self.theta,
                self.factor,
                self.original_max_position_embeddings,
                self.dim(state.spec),
            )
        else:
            frequencies = state["frequencies"]
        return cos_sin(positions, frequencies, scale)

    def pairing(self, spec: Spec) -> tuple[bool, list[int]]:
        return self.layout == "interleaved", [self.dim(spec) // 2]


@attrs.frozen(kw_only=True)
class XPos(Rotary):
    """RoPE whose scores decay with distance: queries shrink with their position and keys grow, at a rate per pair.

    Positions must not decrease along the sequence, and the block must be causal: keys ahead of a query would grow.
    """

    name: ClassVar[str] = "xpos"
    summary: ClassVar[str] = "rotary with a decay: queries and keys are scaled by powers of the position"
    source: ClassVar[str] = "Sun et al. 2022, arXiv:2212.10554, section 3.2"
    base_properties: ClassVar[tuple[str, ...]] = ("shift", "permutation", "prefix", "finite")
    takes_prefix: ClassVar[bool] = False
    ordered: ClassVar[bool] = True
    theta: float = fields.positive(10_000.0, "base of the wavelengths")
    layout: str = fields.choice("interleaved", LAYOUTS, "pairs (2i, 2i+1), or (i, i + head_dim/2)")
    scale_base: int = fields.integer(512, "positions within which the slowest pair keeps its size")
    gamma: float = fields.positive(0.4, "the higher, the slower the decay")

    def check(self, spec: Spec) -> None:
        if spec.head_dim % 2:
            raise RequestError(f"head_dim is {spec.head_dim}: xpos turns pairs, so it must be even.")
        if not spec.causal:
            raise RequestError("xpos was given without causal: keys ahead of a query would grow, so add causal.")
        if spec.qk_norm_type == "l2":
            raise RequestError(
                "qk_norm_type l2 was given with xpos, whose decay such a norm removes: drop one of them."
            )
        check_exact(spec, self.theta)

    def position_limit(self) -> int | None:
        return 6 * self.scale_base  # beyond, the scaled keys of a cache overflow fp16

    def constants(self, spec: Spec, dtype: torch.dtype) -> Mapping[str, Constant]:
        import torch

        dim = spec.head_dim
        pairs = torch.arange(0, dim, 2, dtype=dtype)
        return {
            "frequencies": angle_constant(spec, dtype, progression(dim, self.theta)),
            "decay": ((pairs / dim + self.gamma) / (1 + self.gamma)).log() / self.scale_base,
        }

    def pairing(self, spec: Spec) -> tuple[bool, list[int]]:
        return self.layout == "interleaved", [spec.head_dim // 2]

    def rotate(self, state: State, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos_sin(state, positions)
        decay = custom_ops.position_powers(positions, state["decay"], state.spec.kv_cache is None)
        layout = (state.spec.head_dim, *self.pairing(state.spec))
        return (
            custom_ops.rotate(q, cos * decay, sin * decay, *layout),
            custom_ops.rotate(k, cos / decay, sin / decay, *layout),
        )
