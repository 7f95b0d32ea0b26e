"""Absolute encodings: a vector per position, added to the input before the first layer.

learned      x_s + W[p_s], W [max_positions, D] (BERT: Devlin et al. 2019, arXiv:1810.04805, section 3)
sinusoidal   x_s + PE(p_s), PE(p)_2i = sin(p w_i), PE(p)_2i+1 = cos(p w_i), w_i = theta^(-2i/D)
             (Vaswani et al. 2017, arXiv:1706.03762, section 3.5)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import attrs

from posexport import custom_ops
from posexport.errors import RequestError
from posexport.models.angles import angle_constant, check_exact, cos_sin
from posexport.models.frequencies import progression
from posexport.spec import fields
from posexport.spec.encoding import Encoding, State
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from posexport.spec.encoding import Constant


@attrs.frozen(kw_only=True)
class Learned(Encoding):
    """A trained table of positions."""

    name: ClassVar[str] = "learned"
    summary: ClassVar[str] = "trained table of absolute positions, added to the input"
    source: ClassVar[str] = "Devlin et al. 2019, arXiv:1810.04805 (BERT)"
    hook: ClassVar[str] = "embed"
    at_input: ClassVar[bool] = True
    in_cross: ClassVar[bool] = True
    max_positions: int = fields.integer(512, "rows of the table")

    def weights(self, spec: Spec) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (self.max_positions, spec.hidden_size)}

    def position_limit(self) -> int | None:
        return self.max_positions

    def embed(self, state: State, x_BSD: Tensor, positions: Tensor) -> Tensor:
        from torch.nn.functional import embedding  # one Gather in ONNX; indexing would give a GatherND of six nodes

        return x_BSD + embedding(positions, state["weight"])


@attrs.frozen(kw_only=True)
class Sinusoidal(Encoding):
    """Sines and cosines of the position at geometrically spaced frequencies.

    `order` says which comes first; `layout` whether they alternate, or sines fill one half and cosines the other.
    """

    name: ClassVar[str] = "sinusoidal"
    summary: ClassVar[str] = "fixed sines and cosines of the position, added to the input"
    source: ClassVar[str] = "Vaswani et al. 2017, arXiv:1706.03762, section 3.5"
    angular: ClassVar[bool] = True
    hook: ClassVar[str] = "embed"
    at_input: ClassVar[bool] = True
    in_cross: ClassVar[bool] = True
    theta: float = fields.positive(10_000.0, "base of the wavelengths")
    order: str = fields.choice("sin-cos", ("sin-cos", "cos-sin"), "which comes first")
    layout: str = fields.choice("interleaved", ("interleaved", "half"), "alternating features, or one half each")

    def check(self, spec: Spec) -> None:
        if spec.hidden_size % 2:
            raise RequestError(
                f"hidden_size {spec.hidden_size} is odd: sinusoidal pairs a sine with a cosine, so give an even one."
            )
        check_exact(spec, self.theta)

    def uses_fp32_products(self) -> bool:
        return True

    def constants(self, spec: Spec, dtype: torch.dtype) -> Mapping[str, Constant]:
        return {"frequencies": angle_constant(spec, dtype, progression(spec.hidden_size, self.theta))}

    def embed(self, state: State, x_BSD: Tensor, positions: Tensor) -> Tensor:
        cos, sin = cos_sin(positions, state["frequencies"])
        first, second = (sin, cos) if self.order == "sin-cos" else (cos, sin)
        table = custom_ops.pair_features(first, second, self.layout == "interleaved")
        return x_BSD + table.to(x_BSD.dtype)
