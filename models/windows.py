"""Encodings of windows of a grid: a bias for each offset of two cells (x = column, y = row) and each head.

swin    B[(p_i - p_j)_y, (p_i - p_j)_x], trained (Liu et al. 2021, arXiv:2103.14030, eq. 4)
swinv2  16 sigmoid(MLP(offsets on a log scale)), and logits that are cosines of queries and keys times a trained factor
        per head (Liu et al. 2022, arXiv:2111.09883, eq. 2 to 4)

The batch holds windows, as in Swin's code: [batch * windows, window_size^2 tokens, hidden_size].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import attrs

from posexport import custom_ops
from posexport.errors import RequestError
from posexport.models.biases import ON_A_GRID
from posexport.spec import fields
from posexport.spec.encoding import Encoding, State
from posexport.spec.spec import Spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from posexport.spec.encoding import Constant


@attrs.frozen(kw_only=True)
class Swin(Encoding):
    """A trained bias for each offset within a window, and each head."""

    name: ClassVar[str] = "swin"
    summary: ClassVar[str] = "trained bias per offset within a window, and head"
    source: ClassVar[str] = "Liu et al. 2021, arXiv:2103.14030, eq. 4"
    axes: ClassVar[int] = 2
    hook: ClassVar[str] = "bias"
    base_properties: ClassVar[tuple[str, ...]] = ("shift", "permutation", "prefix", "finite")
    no_cache_reason: ClassVar[str | None] = ON_A_GRID
    window_size: int = fields.integer(7, "columns and rows of a window", at_most=1024)

    def position_limit(self) -> int | None:
        return self.window_size

    def weights(self, spec: Spec) -> Mapping[str, tuple[int, ...]]:
        return {"relative_position_bias_table": ((2 * self.window_size - 1) ** 2, spec.num_heads)}

    def bias(self, state: State, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        table = state["relative_position_bias_table"]
        return custom_ops.window_bias(q_positions, k_positions, table, self.window_size)


MLP_WIDTH = 512


@attrs.frozen(kw_only=True)
class SwinV2(Encoding):
    """A continuous bias from an MLP of log-spaced offsets, and scaled cosine attention."""

    name: ClassVar[str] = "swinv2"
    summary: ClassVar[str] = "bias from an MLP of log-spaced offsets within a window, and cosine attention"
    source: ClassVar[str] = "Liu et al. 2022, arXiv:2111.09883, eq. 2 to 4"
    axes: ClassVar[int] = 2
    hook: ClassVar[str] = "bias"
    base_properties: ClassVar[tuple[str, ...]] = ("shift", "permutation", "prefix", "finite")
    no_cache_reason: ClassVar[str | None] = ON_A_GRID
    window_size: int = fields.integer(8, "columns and rows of a window", at_least=2, at_most=1024)
    pretrained_window_size: int | None = fields.integer(
        None, "window_size in the training of the MLP (default: window_size)", at_least=2, optional=True
    )

    def default_scale(self, head_dim: int) -> float:
        return 1.0

    def check(self, spec: Spec) -> None:
        if spec.scale != 1.0:
            raise RequestError(
                f"scale is {spec.scale:g} with swinv2: its trained logit_scale replaces the scale, so drop it."
            )
        if spec.qk_norm:
            raise RequestError("qk_norm was given with swinv2, which takes cosines of queries and keys: drop it.")

    def position_limit(self) -> int | None:
        return self.window_size

    def weights(self, spec: Spec) -> Mapping[str, tuple[int, ...]]:
        return {
            "continuous_position_bias_mlp.0.weight": (MLP_WIDTH, 2),
            "continuous_position_bias_mlp.0.bias": (MLP_WIDTH,),
            "continuous_position_bias_mlp.2.weight": (spec.num_heads, MLP_WIDTH),
            "logit_scale": (spec.num_heads, 1, 1),
        }

    def seeded(self, name: str, values: Tensor) -> Tensor:
        if name == "logit_scale":
            return values * 0.1 + math.log(10.0)
        return values * 0.05 if values.shape[-1] == MLP_WIDTH and values.ndim == 2 else values

    def constants(self, spec: Spec, dtype: torch.dtype) -> Mapping[str, Constant]:
        import torch

        reach = self.window_size - 1
        offsets = torch.arange(-reach, reach + 1, dtype=torch.int64).to(dtype)
        rows = torch.stack(torch.meshgrid(offsets, offsets, indexing="ij"), -1).flatten(0, 1)
        rows = rows / ((self.pretrained_window_size or self.window_size) - 1) * 8
        return {"coordinates": torch.sign(rows) * torch.log2(torch.abs(rows) + 1.0) / math.log2(8)}

    def rotate(self, state: State, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        head_dim = state.spec.head_dim
        return (
            custom_ops.cosine_heads(q, state["logit_scale"], head_dim),
            custom_ops.cosine_heads(k, None, head_dim),
        )

    def bias(self, state: State, q_positions: Tensor, k_positions: Tensor) -> Tensor | None:
        layers = [state[f"continuous_position_bias_mlp.{name}"] for name in ("0.weight", "0.bias", "2.weight")]
        table = custom_ops.window_table(state["coordinates"], *layers)
        return custom_ops.window_bias(q_positions, k_positions, table, self.window_size)
