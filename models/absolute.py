"""Encodings that read the position of one token at a time, and the block without positions.

none         attention without positions: permuting the tokens permutes the outputs (NoPE)
learned      x_s + W[p_s], W [max_positions, D] (BERT: Devlin et al. 2019, arXiv:1810.04805, section 3)
sinusoidal   x_s + PE(p_s), PE(p)_2i = sin(p w_i), PE(p)_2i+1 = cos(p w_i), w_i = theta^(-2i/D)
             (Vaswani et al. 2017, arXiv:1706.03762, section 3.5)
temperature  q_i (1 + attn_scale log(1 + floor((p_i + 1) / floor_scale))), which keeps attention sharp over long
             contexts. Llama 4 has it in the layers without RoPE (Meta 2025, its code; after Nakanishi 2025,
             arXiv:2501.19399, eq. 1)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import attrs

from posexport import custom_ops
from posexport.models.angles import angle_constant, cos_sin, inexact, progression
from posexport.spec import fields
from posexport.spec.encoding import Encoding, State
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from posexport.spec.encoding import Constant


@attrs.frozen(kw_only=True)
class NoEncoding(Encoding):
    name = "none"
    summary = "no positional encoding"
    source = "Haviv et al. 2022, arXiv:2203.16634"
    axes = 0


@attrs.frozen(kw_only=True)
class Learned(Encoding):
    name = "learned"
    summary = "trained table of absolute positions, added to the input"
    source = "Devlin et al. 2019, arXiv:1810.04805 (BERT)"
    max_positions: int = fields.integer(512, "rows of the table")

    def weights(self, spec: Spec) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (self.max_positions, spec.hidden_size)}

    def position_limits(self) -> tuple[int, ...] | None:
        return (self.max_positions,)

    def embed(self, state: State, x_BSD: Tensor, positions: Tensor) -> Tensor:
        from torch.nn.functional import embedding  # one Gather in ONNX; indexing gives a GatherND of six nodes

        return x_BSD + embedding(positions, state["weight"])


@attrs.frozen(kw_only=True)
class Sinusoidal(Encoding):
    """Sines and cosines of the position, added to the input.

    `order` says whether sines or cosines come first. `layout` says whether they alternate, or each fill one half of the
    features.
    """

    name = "sinusoidal"
    summary = "fixed sines and cosines of the position, added to the input"
    source = "Vaswani et al. 2017, arXiv:1706.03762, section 3.5"
    angular = True
    theta: float = fields.positive(10_000.0, "base of the wavelengths")
    order: str = fields.choice("sin-cos", ("sin-cos", "cos-sin"), "which comes first")
    layout: str = fields.choice("interleaved", ("interleaved", "half"), "alternating features, or one half each")

    def problems(self, spec: Spec) -> Iterator[str]:
        if spec.hidden_size % 2:
            yield f"hidden_size {spec.hidden_size} is odd: sinusoidal pairs a sine with a cosine, so give an even one."
        yield from inexact(spec, self.theta)

    def constants(self, spec: Spec, dtype: torch.dtype) -> Mapping[str, Constant]:
        return {"frequencies": angle_constant(spec, dtype, progression(spec.hidden_size, self.theta))}

    def embed(self, state: State, x_BSD: Tensor, positions: Tensor) -> Tensor:
        cos, sin = cos_sin(positions, state["frequencies"])
        first, second = (sin, cos) if self.order == "sin-cos" else (cos, sin)
        return x_BSD + custom_ops.pair_features(first, second, self.layout == "interleaved").to(x_BSD.dtype)


@attrs.frozen(kw_only=True)
class Temperature(Encoding):
    name = "temperature"
    summary = "queries grow with the logarithm of their position (Llama 4's layers without RoPE)"
    source = "Meta 2025 (Llama 4), after Nakanishi 2025, arXiv:2501.19399, eq. 1"
    base_properties = ("norms", "permutation", "prefix", "finite")
    negative_positions = False  # the logarithm is undefined far below zero
    floor_scale: int = fields.integer(8192, "positions that share a factor")
    attn_scale: float = fields.positive(0.1, "weight of the logarithm")

    def position_edges(self) -> tuple[int, ...]:
        return (self.floor_scale - 1, 3 * self.floor_scale - 1)

    def query_factor(self, position: int) -> float:
        return 1 + self.attn_scale * math.log1p((position + 1) // self.floor_scale)

    def problems(self, spec: Spec) -> Iterator[str]:
        if spec.qk_norm_type == "l2":
            yield "qk_norm_type l2 was given with temperature, whose factor such a norm removes: drop one of them."

    def rotate(self, state: State, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return custom_ops.position_temperature(q, positions, self.floor_scale, self.attn_scale), k
