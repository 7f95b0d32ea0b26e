"""Complex tensors of a traced module, for torch's exporter.

ONNX has no operators for complex numbers. torch's exporter writes them as pairs of real numbers on a last axis of
length 2 (torch.view_as_real), but has translations for only some of torch's operators. This module writes others as the
same operator on the pairs: those that move or copy numbers (such as the lookup of rotations by position) or multiply by
real ones. Fourier transforms become products with tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

_aten = torch.ops.aten


def without_complex_operators(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with these operators on pairs; the same program if nothing is complex."""
    values = (node.meta.get("val") for node in program.graph.nodes)
    if not any(isinstance(value, torch.Tensor) and value.is_complex() for value in values):
        return program
    table = {operator: _for_complex(on_pairs) for operator, on_pairs in _ON_PAIRS.items()} | _TRANSFORMS
    without: torch.export.ExportedProgram = program.run_decompositions(table)
    return without


def _for_complex(on_pairs: Callable[..., Any]) -> Callable[..., Any]:
    """A decomposition that declines unless an argument or the requested dtype is complex."""

    def decomposed(*args: Any, **options: Any) -> Any:
        dtype = options.get("dtype")
        found = any(map(_is_complex, args)) or (dtype is not None and dtype.is_complex)
        return on_pairs(*args, **options) if found else NotImplemented

    return decomposed


def _is_complex(value: Any) -> bool:
    return value.is_complex() if isinstance(value, torch.Tensor) else isinstance(value, complex)


def _behind(value: Any) -> Any:
    """A real factor of pairs: a number, or a tensor with a last axis of length 1 for the pairs."""
    return _aten.unsqueeze(value, -1) if isinstance(value, torch.Tensor) else value


def _as_complex(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """A real or complex number or tensor as a complex tensor whose parts have this dtype."""
    if isinstance(value, torch.Tensor):
        if value.is_complex():
            return torch.view_as_complex(torch.view_as_real(value).to(dtype))
        return torch.complex(value.to(dtype), torch.zeros_like(value, dtype=dtype))
    number = complex(value)
    return torch.complex(_aten.full([], number.real, dtype=dtype), _aten.full([], number.imag, dtype=dtype))


def _joined(pairs: torch.Tensor | Sequence[torch.Tensor]) -> Any:
    return torch.view_as_complex(pairs) if isinstance(pairs, torch.Tensor) else [*map(torch.view_as_complex, pairs)]


def _along(operator: Any, axis: int = 1, new_axes: int = 0) -> Callable[..., Any]:
    """An operator on pairs whose argument number `axis` is one axis or several.

    The axes are counted from the front, so that the axis of the pairs stays last. `new_axes` is the number of axes that
    the operator adds.
    """

    def on_pairs(x: torch.Tensor, *args: Any) -> Any:
        given = [*args, *[0] * (axis - len(args))]  # the default of every operator below is the first axis
        axes, rank = given[axis - 1], x.dim() + new_axes
        given[axis - 1] = axes % rank if isinstance(axes, int) else [each % rank for each in axes]
        return _joined(operator(torch.view_as_real(x), *given))

    return on_pairs


def _of_sizes(operator: Any, last: int) -> Callable[..., Any]:
    """An operator with an argument that has a size for each axis; `last` is the size for the axis of the pairs."""

    def on_pairs(x: torch.Tensor, sizes: Sequence[Any], **options: Any) -> Any:
        return _joined(operator(torch.view_as_real(x), [*sizes, last], **options))

    return on_pairs


def _squeezed(x: torch.Tensor, axes: int | Sequence[int] | None = None) -> torch.Tensor:
    """The tensor without those of these axes (by default all) that have length 1; torch keeps the others."""
    given = range(x.dim()) if axes is None else [axes] if isinstance(axes, int) else axes
    single = [axis % x.dim() for axis in given if x.shape[axis] == 1]
    pairs = torch.view_as_real(x)
    return torch.view_as_complex(_aten.squeeze.dims(pairs, single) if single else pairs)


def _index(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    return torch.view_as_complex(_aten.index.Tensor(torch.view_as_real(x), indices))


def _gather(x: torch.Tensor, axis: int, index: torch.Tensor) -> torch.Tensor:
    pairs = _aten.expand(_aten.unsqueeze(index, -1), [*index.shape, 2])
    return torch.view_as_complex(_aten.gather(torch.view_as_real(x), axis % x.dim(), pairs))


def _embedding(weight: torch.Tensor, ids: torch.Tensor, *_: Any) -> torch.Tensor:
    return _index(weight, [ids])


def _of_two(operator: Any) -> Callable[..., Any]:
    """An operator on two values, at least one of them complex.

    torch's exporter already handles two complex tensors of one dtype.
    """

    def on_pairs(a: Any, b: Any, **options: Any) -> Any:
        if all(isinstance(each, torch.Tensor) and each.dtype == torch.result_type(a, b) for each in (a, b)):
            return NotImplemented
        dtype = torch.result_type(a, b).to_real()
        return operator(_as_complex(a, dtype), _as_complex(b, dtype), **options)

    return on_pairs


def _multiplied(a: Any, b: Any) -> Any:
    """Products; a real factor scales both parts."""
    if _is_complex(a) and _is_complex(b):
        return _of_two(_aten.mul.Tensor)(a, b)
    real, pairs = (a, b) if _is_complex(b) else (b, a)
    if isinstance(pairs, complex):
        return torch.complex(real * pairs.real, real * pairs.imag)
    return torch.view_as_complex(torch.view_as_real(pairs) * _behind(real))


def _divided(a: Any, b: Any) -> Any:
    """Quotients; a real divisor divides both parts."""
    if _is_complex(b):
        return _of_two(_aten.div.Tensor)(a, b)
    return torch.view_as_complex(torch.view_as_real(a) / _behind(b))


def _copied(x: torch.Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
    return _as_complex(x, (dtype or x.dtype).to_real())


def _exponential(x: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_real(x)
    real, angle = pairs.select(-1, 0), pairs.select(-1, 1)
    return torch.complex(real.exp() * angle.cos(), real.exp() * angle.sin())


def _fourier(x: torch.Tensor, axes: Sequence[int], forward: bool, norm: str | None) -> torch.Tensor:
    """A discrete Fourier transform by tables of cosines and sines.

    ONNX Runtime's DFT loses half of the digits if a size is not a power of 2, and TensorRT has none.
    """
    pairs = torch.view_as_real(_as_complex(x, x.dtype.to_real()))
    real, imaginary = pairs.select(-1, 0), pairs.select(-1, 1)
    power = -0.5 if norm == "ortho" else -1.0 if (norm == "forward") == forward else 0.0
    for axis in axes:
        places = torch.arange(x.shape[axis], device=x.device)
        count = places[-1:] + 1  # a tensor, because a quotient by a dynamic size has no translation
        angles = 2 * math.pi * (places[:, None] * places % count).to(real.dtype) / count
        scale = count.to(real.dtype) ** power
        cosines, sines = angles.cos() * scale, angles.sin() * (-scale if forward else scale)
        real, imaginary = real.movedim(axis, -1), imaginary.movedim(axis, -1)
        real, imaginary = real @ cosines - imaginary @ sines, real @ sines + imaginary @ cosines
        real, imaginary = real.movedim(-1, axis), imaginary.movedim(-1, axis)
    return torch.complex(real, imaginary)


def _transform(forward: bool, usual: Sequence[int] | None) -> Callable[..., Any]:
    """A transform along the given axes, by default the `usual` ones (None: all). One that cuts or pads stays."""

    def transformed(x: torch.Tensor, size: Any = None, dim: Any = None, norm: str | None = None) -> Any:
        axes = usual if dim is None else [dim] if isinstance(dim, int) else dim
        return _fourier(x, range(x.dim()) if axes is None else axes, forward, norm) if size is None else NotImplemented

    return transformed


_ON_PAIRS: dict[Any, Callable[..., Any]] = {
    _aten.unsqueeze.default: _along(_aten.unsqueeze.default, new_axes=1),
    _aten.squeeze.default: _squeezed,
    _aten.squeeze.dim: _squeezed,
    _aten.squeeze.dims: _squeezed,
    _aten.select.int: _along(_aten.select.int),
    _aten.index_select.default: _along(_aten.index_select.default),
    _aten.unbind.int: _along(_aten.unbind.int),
    _aten.split.Tensor: _along(_aten.split.Tensor, axis=2),
    _aten.split_with_sizes.default: _along(_aten.split_with_sizes.default, axis=2),
    _aten.expand.default: _of_sizes(_aten.expand.default, -1),
    _aten.repeat.default: _of_sizes(_aten.repeat.default, 1),
    _aten.index.Tensor: _index,
    _aten.gather.default: _gather,
    _aten.embedding.default: _embedding,
    _aten._to_copy.default: _copied,
    _aten.add.Tensor: _of_two(_aten.add.Tensor),
    _aten.sub.Tensor: _of_two(_aten.sub.Tensor),
    _aten.mul.Tensor: _multiplied,
    _aten.div.Tensor: _divided,
    _aten.exp.default: _exponential,
}

_TRANSFORMS: dict[Any, Callable[..., Any]] = {
    _aten.fft_fft.default: _transform(True, [-1]),
    _aten.fft_ifft.default: _transform(False, [-1]),
    _aten.fft_fft2.default: _transform(True, [-2, -1]),
    _aten.fft_ifft2.default: _transform(False, [-2, -1]),
    _aten.fft_fftn.default: _transform(True, None),
    _aten.fft_ifftn.default: _transform(False, None),
}
