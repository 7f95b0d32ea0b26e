"""The letters of the axes in an Einsum equation, with and without an ellipsis. The oracle is torch."""

from __future__ import annotations

import onnx_ir as ir
import pytest
import torch

from posexport.graphs.equations import letters_of

CASES = {
    "none": ("bhsd,btd->bhst", [(2, 3, 4, 5), (2, 6, 5)]),
    "no axes": ("..., f -> ... f", [(), (4,)]),
    "two axes": ("... i d, ... j d -> ... i j", [(2, 3, 4, 5), (2, 3, 6, 5)]),
    "more axes of one operand": ("...id,...jd->...ij", [(2, 3, 4, 5), (3, 6, 5)]),
    "axes that broadcast": ("...id,...jd->...ij", [(2, 3, 4, 5), (1, 6, 5)]),
    "letters behind it": ("b...d,d->b...", [(2, 3, 4, 5), (5,)]),
    "letters that are taken": ("...AB,...B->...A", [(2, 4, 5), (2, 5)]),
}


def node_of(equation: str) -> ir.Node:
    return ir.node("Einsum", [ir.Value(name="a"), ir.Value(name="b")], {"equation": equation})


@pytest.mark.parametrize("name", CASES)
def test_letters_stand_for_an_ellipsis(name: str) -> None:
    equation, shapes = CASES[name]
    torch.manual_seed(0)
    operands = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    letters = letters_of(node_of(equation), [*map(len, shapes)])
    assert letters is not None
    parts, result = letters
    assert [*map(len, parts)] == [*map(len, shapes)]
    sizes: dict[str, int] = {}
    for part, shape in zip(parts, shapes, strict=True):
        sizes |= {letter: max(size, sizes.get(letter, 1)) for letter, size in zip(part, shape, strict=True)}
    expected = torch.einsum(equation.replace(" ", ""), *operands)
    assert tuple(sizes[letter] for letter in result) == expected.shape
    torch.testing.assert_close(torch.einsum(f"{','.join(parts)}->{result}", *operands), expected)


@pytest.mark.parametrize("equation", ["ij,jk", "ijk,jk->ik", "i...jk,jk->ik", "ij->ij", ""])
def test_what_fits_no_two_matrices_has_no_letters(equation: str) -> None:
    assert letters_of(node_of(equation), [2, 2]) is None
