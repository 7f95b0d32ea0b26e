"""Matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from posexport.graphs.kernels.registry import Call, kernel


@kernel("MatMul")
def matmul(call: Call, a: Tensor, b: Tensor) -> Tensor:
    """numpy's matmul."""
    return torch.matmul(a, b)


@kernel("Gemm")
def gemm(call: Call, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    """alpha * A B + beta * C."""
    a = a.T if call.get("transA", 0) else a
    b = b.T if call.get("transB", 0) else b
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    product = torch.mm(a, b)
    product = product if alpha == 1 else (alpha * product).to(a.dtype)
    return product if c is None else product + (c if beta == 1 else (beta * c).to(c.dtype))


@kernel("Einsum")
def einsum(call: Call, *operands: Tensor) -> Tensor:
    """numpy's einsum."""
    return torch.einsum(call.get("equation").replace(" ", ""), *operands)


@kernel("Det")
def det(call: Call, x: Tensor) -> Tensor:
    """Determinants of the last two dimensions."""
    determinants: Tensor = torch.linalg.det(x)
    return determinants
