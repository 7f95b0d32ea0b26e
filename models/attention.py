"""One layer in torch: projections, the encoding's hooks, and posexport's attention operator.

Shape suffixes: B batch, S sequence, D hidden_size. Queries, keys and values stay [B, S, heads*head_dim], the layout of
the projections. The operators split the heads, so that each form can choose its own layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from posexport import custom_ops
from posexport.custom_ops.angles import constant_dtype
from posexport.custom_ops.differences import ahead
from posexport.models.weights import Shapes, layer_shapes, norm_names
from posexport.spec.encoding import AttentionContext
from posexport.spec.spec import Spec


class EncodingState(nn.Module):
    """The weights and constants of one encoding, by name. This is the `State` that its hooks read."""

    def __init__(self, spec: Spec, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec, self.encoding = spec, spec.encoding
        for name, shape in spec.encoding.weights(spec).items():
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(last, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        for name, values in spec.encoding.constants(spec, constant_dtype(dtype)).items():
            tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
            self.register_buffer(name, tensor.to(wide) if tensor.is_floating_point() else tensor, persistent=False)

    def __getitem__(self, name: str) -> Tensor:
        owner, _, last = name.rpartition(".")
        tensor: Tensor = getattr(self.get_submodule(owner), last)
        return tensor


@dataclass(frozen=True)
class SharedInputs:
    """The inputs that all layers share. An input that the block does not have is None.

    `tokens` [B, S, D] is the input of the first layer. All layers read sizes from it, so that these are the same value
    in the graph.

    `positions` int64 [B, S] or [B, S, axes], `k_positions` of the keys [B, T], `mask` int64 [B, T], `encoder` states
    [B, E, D], `write_indices` int64 [B] into shared caches.
    """

    tokens: Tensor
    positions: Tensor | None = None
    k_positions: Tensor | None = None
    mask: Tensor | None = None
    encoder: Tensor | None = None
    write_indices: Tensor | None = None


Cache = tuple[Tensor, Tensor]
"""Keys and values of one layer, each [B, K, P, head_dim]."""


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query attention, [B, S, D] to [B, S, D], over itself or over an encoder."""

    def __init__(self, spec: Spec, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec, shapes = spec, layer_shapes(spec)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            _linear(shapes, name, dtype) for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        )
        if spec.qk_norm_type == "rms":
            self.q_norm, self.k_norm = (
                nn.RMSNorm(spec.head_dim, eps=spec.norm_eps, dtype=dtype, device="meta") for _ in range(2)
            )
        self.sinks = nn.Parameter(torch.empty(spec.num_heads, dtype=dtype, device="meta")) if spec.sinks else None
        acts = spec.encoding.hook and not spec.encoding.at_input and not spec.cross
        self.encoding = EncodingState(spec, dtype) if acts else None

    def forward(self, x_BSD: Tensor, shared: SharedInputs, past: Cache | None) -> tuple[Tensor, Cache | None]:
        """Return attention with its projections, and the new cache if there is a cache."""
        spec, state, positions = self.spec, self.encoding, shared.positions
        source = x_BSD if shared.encoder is None else shared.encoder
        q, k, v = self.q_proj(x_BSD), self.k_proj(source), self.v_proj(source)
        if spec.qk_norm_type == "rms":
            q = custom_ops.head_norm(q, self.q_norm.weight, eps=spec.norm_eps or 0.0)
            k = custom_ops.head_norm(k, self.k_norm.weight, eps=spec.norm_eps or 0.0)
        if state is not None and positions is not None:
            q, k = state.encoding.rotate(state, q, k, positions)
        if spec.qk_norm_type == "l2":
            q, k = (custom_ops.head_norm(t, head_dim=spec.head_dim, eps=spec.norm_eps or 0.0) for t in (q, k))
        bias = context = None
        if state is not None:
            context = self._context(k, shared, past)
            if positions is not None:
                bias = self._bias(state, q, shared.tokens, context)
            q, score = state.encoding.score(state, q, context)
            bias = score if bias is None else bias
        inputs, attributes = (bias, shared.mask, self.sinks), spec.attention_attributes()
        present: list[Tensor] = []
        if past is None:
            out = custom_ops.attend(q, k, v, *inputs, **attributes)
        elif shared.write_indices is None:
            out, *present = custom_ops.attend_cached(q, k, v, *past, *inputs, **attributes)
        else:
            out, *present = custom_ops.attend_shared(q, k, v, *past, shared.write_indices, *inputs, **attributes)
        if state is not None and context is not None:
            values = state.encoding.values(state, q, present[0] if present else k, context, bias)
            out = out if values is None else out + values
        return self.o_proj(out), (present[0], present[1]) if present else None

    def _context(self, k: Tensor, shared: SharedInputs, past: Cache | None) -> AttentionContext:
        return AttentionContext(
            k=k,
            past=None if past is None else past[0],
            q_positions=shared.positions,
            k_positions=shared.positions if shared.k_positions is None else shared.k_positions,
            mask=shared.mask,
            sinks=self.sinks,
            write_indices=shared.write_indices,
            ahead=self._ahead(shared, past),
        )

    def _by_difference(self) -> bool:
        """Whether positions are consecutive and the encoding depends only on their differences."""
        return self.spec.consecutive and self.spec.encoding.by_difference(self.spec)

    def _ahead(self, shared: SharedInputs, past: Cache | None) -> Tensor | None:
        """Return the differences of positions if the encoding lays out one number for each (`Encoding.slides`)."""
        if not self._by_difference() or not self.spec.encoding.slides(self.spec):
            return None
        seq, write_indices = shared.tokens.shape[1], shared.write_indices
        total = (0 if past is None else past[0].shape[2]) + (seq if write_indices is None else 0)
        return ahead(seq, total, self.spec.causal, shared.tokens.device, write_indices)

    def _bias(self, state: EncodingState, q: Tensor, tokens: Tensor, context: AttentionContext) -> Tensor | None:
        """Return the bias of the encoding. If all rows of the batch have the same bias, it is computed once."""
        positions = context.positions()
        if self.spec.consecutive and state.encoding.in_order:
            return state.encoding.order_bias(state, q)
        if context.ahead is not None:
            numbers = state.encoding.ahead_bias(state, context.ahead)
            return None if numbers is None else custom_ops.difference_bias(numbers, tokens, self.spec.causal)
        if self._by_difference() and context.write_indices is None:
            positions = (positions[0][:1], positions[1][:1])
        return state.encoding.bias(state, *positions)


class TransformerLayer(Attention):
    """Attention and an MLP with norms and residuals. Norms come before each (pre) or after each residual sum (post)."""

    def __init__(self, spec: Spec, dtype: torch.dtype) -> None:
        super().__init__(spec, dtype)
        assert spec.norm_eps is not None  # every spec of a transformer block has it
        norm = nn.LayerNorm if spec.norm_type == "layernorm" else nn.RMSNorm
        for name in norm_names(spec):
            self.add_module(name, norm(spec.hidden_size, eps=spec.norm_eps, dtype=dtype, device="meta"))
        self.mlp = (GeluMlp if spec.mlp == "gelu" else SwigluMlp)(spec, dtype)

    def forward(self, x_BSD: Tensor, shared: SharedInputs, past: Cache | None) -> tuple[Tensor, Cache | None]:
        first, second = (self.get_submodule(name) for name in norm_names(self.spec))
        if self.spec.norm == "pre":
            attended, present = super().forward(first(x_BSD), shared, past)
            x_BSD = x_BSD + attended
            return x_BSD + self.mlp(second(x_BSD)), present
        attended, present = super().forward(x_BSD, shared, past)
        x_BSD = first(x_BSD + attended)
        return second(x_BSD + self.mlp(x_BSD)), present


class GeluMlp(nn.Module):
    """W2 gelu(W1 x), the exact (erf) gelu of BERT and ViT."""

    def __init__(self, spec: Spec, dtype: torch.dtype) -> None:
        super().__init__()
        self.fc1, self.fc2 = (_linear(layer_shapes(spec), f"mlp.{name}", dtype) for name in ("fc1", "fc2"))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(x)))  # type: ignore[no-any-return]


class SwigluMlp(nn.Module):
    """W_down (silu(W_gate x) * W_up x), Shazeer 2020, arXiv:2002.05202."""

    def __init__(self, spec: Spec, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            _linear(layer_shapes(spec), f"mlp.{name}", dtype) for name in ("gate_proj", "up_proj", "down_proj")
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


def _linear(shapes: Shapes, name: str, dtype: torch.dtype) -> nn.Linear:
    width_out, width_in = shapes[f"{name}.weight"]
    return nn.Linear(width_in, width_out, bias=f"{name}.bias" in shapes, dtype=dtype, device="meta")
