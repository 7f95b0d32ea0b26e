"""One layer in torch: projections, the encoding's hooks, and posexport's attention operator.

Shape suffixes: B batch, S sequence, D hidden_size. Queries, keys and values stay [B, S, heads*head_dim], the layout
of the projections; the operators split heads themselves, so that every form may choose its own layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from posexport import custom_ops
from posexport.models.encoding import AttentionContext, Encoding
from posexport.models.weights import norm_names
from posexport.spec.spec import Spec


class EncodingState(nn.Module):
    """The weights and constants of one encoding, by name; what hooks know as `State`."""

    def __init__(self, spec: Spec, dtype: torch.dtype) -> None:
        super().__init__()
        assert isinstance(spec.encoding, Encoding)
        self.spec, self.encoding = spec, spec.encoding
        for name, shape in spec.encoding.weights(spec).items():
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(last, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")))
        # never half: an angle in half precision is wrong from position 256 on
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        for name, values in spec.encoding.constants(spec, wide).items():
            if not isinstance(values, Tensor):
                values = torch.tensor(values, dtype=None if _integers(values) else wide)
            self.register_buffer(name, values, persistent=False)

    def __getitem__(self, name: str) -> Tensor:
        owner, _, last = name.rpartition(".")
        tensor: Tensor = getattr(self.get_submodule(owner), last)
        return tensor


def _integers(values: object) -> bool:
    while isinstance(values, list):
        values = values[0]
    return isinstance(values, int)


@dataclass(frozen=True)
class SharedInputs:
    """What all layers share beside the tokens: [B, S] `positions` (or [B, S, axes]), those of the keys [B, T], the
    keys' `mask` [B, T], `encoder` states [B, E, D], and `write_indices` [B] into shared caches; None where absent."""

    positions: Tensor | None = None
    k_positions: Tensor | None = None
    mask: Tensor | None = None
    encoder: Tensor | None = None
    write_indices: Tensor | None = None


Cache = tuple[Tensor, Tensor]
"""Keys and values of one layer, each [B, K, P, head_dim]."""


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query attention, [B, S, D] to [B, S, D], over itself or an encoder."""

    def __init__(self, spec: Spec, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = _linear(spec, "q_proj", spec.hidden_size, q_width, dtype)
        self.k_proj = _linear(spec, "k_proj", spec.hidden_size, kv_width, dtype)
        self.v_proj = _linear(spec, "v_proj", spec.hidden_size, kv_width, dtype)
        self.o_proj = _linear(spec, "o_proj", q_width, spec.hidden_size, dtype)
        if spec.qk_norm_type == "rms":
            self.q_norm, self.k_norm = (
                nn.RMSNorm(spec.head_dim, eps=spec.norm_eps, dtype=dtype, device="meta") for _ in range(2)
            )
        self.sinks = nn.Parameter(torch.empty(spec.num_heads, dtype=dtype, device="meta")) if spec.sinks else None
        assert isinstance(spec.encoding, Encoding)
        acts = spec.encoding.hook and not spec.encoding.at_input and not spec.cross
        self.encoding = EncodingState(spec, dtype) if acts else None

    def attend(self, x_BSD: Tensor, around: SharedInputs, past: Cache | None) -> tuple[Tensor, Cache | None]:
        spec = self.spec
        source = x_BSD if around.encoder is None else around.encoder
        q, k, v = self.q_proj(x_BSD), self.k_proj(source), self.v_proj(source)
        if spec.qk_norm_type == "rms":
            q = custom_ops.head_norm(q, self.q_norm.weight, spec.head_dim, spec.norm_eps)
            k = custom_ops.head_norm(k, self.k_norm.weight, spec.head_dim, spec.norm_eps)
        shape = (
            spec.num_heads,
            spec.num_kv_heads,
            spec.scale,
            spec.causal,
            spec.window or 0,
            spec.attention_chunk_size or 0,
            spec.softcap or 0.0,
        )
        positions, scheme = around.positions, None if self.encoding is None else self.encoding.encoding
        if self.encoding is not None and scheme is not None and positions is not None:
            q, k = scheme.rotate(self.encoding, q, k, positions)
        if spec.qk_norm_type == "l2":
            q, k = (custom_ops.head_norm(t, None, spec.head_dim, spec.norm_eps) for t in (q, k))
        bias = scene = None
        if self.encoding is not None and scheme is not None:
            scene = self._scene(k, around, past)
            if positions is not None:
                bias = scheme.bias(self.encoding, *scene.positions())
            q, mixed = scheme.score(self.encoding, q, scene)
            bias = mixed if bias is None else bias
        added = (bias, around.mask, self.sinks)
        present: list[Tensor] = []
        if past is None:
            out = custom_ops.attend(q, k, v, *added, *shape)
        elif around.write_indices is None:
            out, *present = custom_ops.attend_cached(q, k, v, *past, *added, *shape)
        else:
            out, *present = custom_ops.attend_shared(q, k, v, *past, around.write_indices, *added, *shape)
        if self.encoding is not None and scheme is not None and scene is not None:
            more = scheme.values(self.encoding, q, scene, bias)
            out = out if more is None else out + more
        return self.o_proj(out), (present[0], present[1]) if present else None

    def _scene(self, k: Tensor, around: SharedInputs, past: Cache | None) -> AttentionContext:
        assert self.encoding is not None
        keys: Tensor | None = k if self.encoding.encoding.reads_keys else None
        if keys is not None and past is not None:
            keys = custom_ops.cached_keys(past[0], k, around.write_indices, self.spec.num_kv_heads)
        return AttentionContext(
            k=keys,
            q_positions=around.positions,
            k_positions=around.positions if around.k_positions is None else around.k_positions,
            mask=around.mask,
            sinks=self.sinks,
            write_indices=around.write_indices,
        )

    def forward(self, x_BSD: Tensor, around: SharedInputs, past: Cache | None) -> tuple[Tensor, Cache | None]:
        return self.attend(x_BSD, around, past)


class TransformerLayer(Attention):
    """Attention and an MLP with norms and residuals, norms before each (pre) or after each residual sum (post)."""

    def __init__(self, spec: Spec, dtype: torch.dtype) -> None:
        super().__init__(spec, dtype)
        assert spec.norm_eps is not None and spec.intermediate_size is not None
        kind = nn.LayerNorm if spec.norm_type == "layernorm" else nn.RMSNorm
        for name in norm_names(spec):
            self.add_module(name, kind(spec.hidden_size, eps=spec.norm_eps, dtype=dtype, device="meta"))
        self.mlp = (GeluMlp if spec.mlp == "gelu" else SwigluMlp)(spec, dtype)

    def forward(self, x_BSD: Tensor, around: SharedInputs, past: Cache | None) -> tuple[Tensor, Cache | None]:
        first, second = (self.get_submodule(name) for name in norm_names(self.spec))
        if self.spec.norm == "pre":
            attended, present = self.attend(first(x_BSD), around, past)
            x_BSD = x_BSD + attended
            return x_BSD + self.mlp(second(x_BSD)), present
        attended, present = self.attend(x_BSD, around, past)
        x_BSD = first(x_BSD + attended)
        return second(x_BSD + self.mlp(x_BSD)), present


class GeluMlp(nn.Module):
    """W2 gelu(W1 x), the exact (erf) gelu of BERT and ViT."""

    def __init__(self, spec: Spec, dtype: torch.dtype) -> None:
        super().__init__()
        assert spec.intermediate_size is not None
        self.fc1 = _linear(spec, "mlp.fc1", spec.hidden_size, spec.intermediate_size, dtype)
        self.fc2 = _linear(spec, "mlp.fc2", spec.intermediate_size, spec.hidden_size, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(x)))  # type: ignore[no-any-return]


class SwigluMlp(nn.Module):
    """W_down (silu(W_gate x) * W_up x), Shazeer 2020, arXiv:2002.05202."""

    def __init__(self, spec: Spec, dtype: torch.dtype) -> None:
        super().__init__()
        assert spec.intermediate_size is not None
        self.gate_proj = _linear(spec, "mlp.gate_proj", spec.hidden_size, spec.intermediate_size, dtype)
        self.up_proj = _linear(spec, "mlp.up_proj", spec.hidden_size, spec.intermediate_size, dtype)
        self.down_proj = _linear(spec, "mlp.down_proj", spec.intermediate_size, spec.hidden_size, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


def _linear(spec: Spec, name: str, width_in: int, width_out: int, dtype: torch.dtype) -> nn.Linear:
    return nn.Linear(width_in, width_out, bias=name in spec.bias, dtype=dtype, device="meta")
