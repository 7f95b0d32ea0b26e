"""One layer in torch: projections, the encoding's hooks, and posexport's attention operator.

Shape suffixes: B batch, S sequence, D hidden_size. Queries, keys and values stay [B, S, heads*head_dim], the layout
of the projections; the operators split heads themselves, so that every form may choose its own layout.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posexport import custom_ops
from posexport.models.encoding import Encoding
from posexport.models.weights import norm_names
from posexport.spec import Spec


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
        for name, values in spec.encoding.constants(spec).items():
            tensor = torch.tensor(values, dtype=None if _integers(values) else torch.float64)
            if tensor.dtype == torch.float64 and dtype != torch.float64:
                tensor = tensor.float()  # never half: an angle in half precision is wrong from position 256 on
            self.register_buffer(name, tensor, persistent=False)

    def __getitem__(self, name: str) -> Tensor:
        owner, _, last = name.rpartition(".")
        tensor: Tensor = getattr(self.get_submodule(owner), last)
        return tensor


def _integers(values: object) -> bool:
    while isinstance(values, list):
        values = values[0]
    return isinstance(values, int)


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query self-attention, [B, S, D] to [B, S, D]."""

    def __init__(self, spec: Spec, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec
        q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = _linear(spec, "q_proj", spec.hidden_size, q_width, dtype)
        self.k_proj = _linear(spec, "k_proj", spec.hidden_size, kv_width, dtype)
        self.v_proj = _linear(spec, "v_proj", spec.hidden_size, kv_width, dtype)
        self.o_proj = _linear(spec, "o_proj", q_width, spec.hidden_size, dtype)
        assert isinstance(spec.encoding, Encoding)
        self.encoding = None if spec.encoding.at_input else EncodingState(spec, dtype)

    def attend(self, x_BSD: Tensor, positions: Tensor | None) -> Tensor:
        spec = self.spec
        q, k, v = self.q_proj(x_BSD), self.k_proj(x_BSD), self.v_proj(x_BSD)
        bias = None
        if self.encoding is not None and positions is not None:
            scheme = self.encoding.encoding
            q, k = scheme.rotate(self.encoding, q, k, positions)
            bias = scheme.bias(self.encoding, positions, positions)
            q, mixed = scheme.score(self.encoding, q, k, positions)
            bias = mixed if bias is None else bias
        out = custom_ops.attend(
            q, k, v, bias, spec.num_heads, spec.num_kv_heads, spec.scale, spec.causal, spec.window or 0
        )
        return self.o_proj(out)  # type: ignore[no-any-return]

    def forward(self, x_BSD: Tensor, positions: Tensor | None) -> Tensor:
        return self.attend(x_BSD, positions)


class TransformerLayer(Attention):
    """Attention and an MLP with norms and residuals, norms before each (pre) or after each residual sum (post)."""

    def __init__(self, spec: Spec, dtype: torch.dtype) -> None:
        super().__init__(spec, dtype)
        assert spec.norm_eps is not None and spec.intermediate_size is not None
        kind = nn.LayerNorm if spec.norm_type == "layernorm" else nn.RMSNorm
        for name in norm_names(spec):
            self.add_module(name, kind(spec.hidden_size, eps=spec.norm_eps, dtype=dtype, device="meta"))
        self.mlp = (GeluMlp if spec.mlp == "gelu" else SwigluMlp)(spec, dtype)

    def forward(self, x_BSD: Tensor, positions: Tensor | None) -> Tensor:
        first, second = (self.get_submodule(name) for name in norm_names(self.spec))
        if self.spec.norm == "pre":
            x_BSD = x_BSD + self.attend(first(x_BSD), positions)
            return x_BSD + self.mlp(second(x_BSD))  # type: ignore[no-any-return]
        x_BSD = first(x_BSD + self.attend(x_BSD, positions))
        return second(x_BSD + self.mlp(x_BSD))  # type: ignore[no-any-return]


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
