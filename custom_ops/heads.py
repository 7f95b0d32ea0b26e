"""The heads of attention: their attributes, and the layouts of queries, keys and values by heads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from posexport.custom_ops import ir
from posexport.custom_ops.arguments import CallError
from posexport.custom_ops.operator import Ops


@dataclass(frozen=True)
class Heads:
    """The attributes of logits, in the order of the operators. 0 for `window` and `chunk` means none.

    Raises CallError for invalid numbers of heads, or a negative window or chunk.
    """

    num_heads: int
    num_kv_heads: int
    scale: float
    causal: bool
    window: int
    chunk: int

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise CallError(
                f"num_heads is {self.num_heads} and num_kv_heads {self.num_kv_heads}: each key head serves the same "
                "number of query heads, so give a num_kv_heads that divides num_heads."
            )
        if self.window < 0 or self.chunk < 0:
            raise CallError(f"window is {self.window} and chunk {self.chunk}: each is 0 for none, or more.")

    @property
    def local(self) -> bool:
        """Whether a window or chunks hide distant keys."""
        return bool(self.window or self.chunk)

    @property
    def group(self) -> int:
        """The number of query heads for each key head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class CappedHeads(Heads):
    """The attributes of attention, in the order of the operators. 0 for `softcap` means none."""

    softcap: float


def to_heads(t: Tensor, num_heads: int) -> Tensor:
    """Reshape [B, S, heads*head_dim] to [B, heads, S, head_dim]. Keys of a cache already have that shape."""
    heads: Tensor = t if t.dim() == 4 else t.unflatten(-1, (num_heads, -1)).transpose(1, 2)
    return heads


def heads_onnx(op: Ops, t: ir.Value, num_heads: int) -> ir.Value:
    """Reshape [B, S, heads*head_dim] to [B, heads, S, head_dim]."""
    return op.Transpose(op.Reshape(t, [0, 0, num_heads, -1]), perm=[0, 2, 1, 3])


def split_onnx(op: Ops, t: ir.Value, heads: Heads) -> ir.Value:
    """Reshape [B, T, K*head_dim] to [B, T, N, head_dim]. Each key head is repeated for the query heads that read it."""
    t = op.Reshape(t, [0, 0, heads.num_kv_heads, -1])
    if heads.group > 1:
        # only constant shapes, because computed shapes cost TensorRT shape kernels on the host
        t = op.Expand(op.Unsqueeze(t, [3]), [1, 1, 1, heads.group, 1])
        t = op.Reshape(t, [0, 0, heads.num_heads, -1])
    return t


def repeated_onnx(op: Ops, t: ir.Value, heads: Heads, head_dim: int) -> ir.Value:
    """Expand [B, K, T, head_dim] to [B, N, T, head_dim]. Each key head is repeated for the query heads that read it."""
    if heads.group == 1:
        return t
    return op.Reshape(op.Expand(op.Unsqueeze(t, [2]), [1, 1, heads.group, 1, 1]), [0, heads.num_heads, -1, head_dim])
