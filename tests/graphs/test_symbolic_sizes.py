"""Equal symbolic sizes are equal numbers for all dimensions.

The oracle is integer arithmetic: every expression is computed both with sizes and with integers.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posexport.graphs.symbolic_sizes import Size, Symbols, product

NAMES = ("batch", "seq", "past")

Expression = Callable[[Symbols, dict[str, int]], tuple[Size, int]]
"""Returns a size, and its number for these dimensions."""


def dimension(name: str) -> Expression:
    return lambda symbols, numbers: (symbols.dimension(name, 1), numbers[name])


def number(value: int) -> Expression:
    return lambda symbols, numbers: (Size(value), value)


def total(one: Expression, other: Expression) -> Expression:
    def made(symbols: Symbols, numbers: dict[str, int]) -> tuple[Size, int]:
        (a, x), (b, y) = one(symbols, numbers), other(symbols, numbers)
        return symbols.total([a, b]), x + y

    return made


def difference(one: Expression, other: Expression) -> Expression:
    def made(symbols: Symbols, numbers: dict[str, int]) -> tuple[Size, int]:
        (a, x), (b, y) = one(symbols, numbers), other(symbols, numbers)
        return symbols.difference(a, b), x - y

    return made


def multiplied(one: Expression, other: Expression) -> Expression:
    def made(symbols: Symbols, numbers: dict[str, int]) -> tuple[Size, int]:
        (a, x), (b, y) = one(symbols, numbers), other(symbols, numbers)
        return a * b, x * y

    return made


def divided(one: Expression, by: int) -> Expression:
    def made(symbols: Symbols, numbers: dict[str, int]) -> tuple[Size, int]:
        size, value = one(symbols, numbers)
        return symbols.floor_quotient(size, by), value // by

    return made


def joined(children: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    return st.one_of(
        st.builds(total, children, children),
        st.builds(difference, children, children),
        st.builds(multiplied, children, children),
        st.builds(divided, children, st.integers(1, 6)),
    )


EXPRESSIONS = st.recursive(
    st.one_of(st.sampled_from(NAMES).map(dimension), st.integers(-4, 6).map(number)), joined, max_leaves=8
)
DIMENSIONS = st.fixed_dictionaries({name: st.integers(1, 50) for name in NAMES})


@settings(deadline=None)
@given(st.lists(EXPRESSIONS, min_size=2, max_size=6), st.lists(DIMENSIONS, min_size=3, max_size=3))
def test_equal_sizes_are_equal_numbers(expressions: list[Expression], tries: list[dict[str, int]]) -> None:
    symbols = Symbols()
    found = [[one(symbols, numbers) for one in expressions] for numbers in tries]
    for row in found:
        for size, value in row:
            if size.is_fixed:
                assert value == size.number
            least = symbols.least(size)
            assert least is None or value >= least
            for other, same in row:
                assert size != other or value == same


@settings(deadline=None)
@given(EXPRESSIONS, EXPRESSIONS, DIMENSIONS)
def test_a_quotient_is_exact(one: Expression, other: Expression, numbers: dict[str, int]) -> None:
    symbols = Symbols()
    a, b = (made(symbols, numbers)[0] for made in (one, other))
    assert b.number == 0 or symbols.quotient(a * b, b) == a
    left = symbols.quotient(a, b)
    assert left is None or left * b == a


@settings(deadline=None)
@given(EXPRESSIONS, EXPRESSIONS, EXPRESSIONS, DIMENSIONS)
def test_laws_of_arithmetic(a: Expression, b: Expression, c: Expression, numbers: dict[str, int]) -> None:
    symbols = Symbols()
    x, y, z = (one(symbols, numbers)[0] for one in (a, b, c))
    assert symbols.total([x, y]) == symbols.total([y, x])
    assert symbols.total([symbols.total([x, y]), z]) == symbols.total([x, symbols.total([y, z])])
    assert symbols.difference(symbols.total([x, y]), y) == symbols.total([x])
    assert symbols.total([x * y, x * z]) == symbols.total([x * symbols.total([y, z])])


def test_lengths_of_layers_that_follow_each_other() -> None:
    """Two convolutions with kernels 8 and 3 and strides 4 and 2 give the length floor(n / 8) - 1."""
    symbols = Symbols()
    length = symbols.dimension("frames", 1)

    def convolved(size: Size, places: int, step: int) -> Size:
        return symbols.total([symbols.floor_quotient(symbols.total([size, Size(-places)]), step), Size(1)])

    after = convolved(convolved(length, 8, 4), 3, 2)
    assert after == symbols.total([symbols.floor_quotient(length, 8), Size(-1)])


@given(st.integers(1, 60), st.integers(0, 70), st.integers(1, 9), st.integers(0, 5))
def test_what_a_quotient_is_at_least_bounds_the_length(length: int, places: int, step: int, least: int) -> None:
    """A convolution accepts a length if its output is long enough."""
    symbols = Symbols()
    size = symbols.dimension("frames", 1)
    left = symbols.floor_quotient(symbols.total([size, Size(-places)]), step)
    symbols.assume(left, least)
    bound = symbols.least(size)
    assert bound is not None and (length < bound) == ((length - places) // step < least or length < 1)


@pytest.mark.parametrize("operator", ["Min", "Max"])
def test_what_is_no_polynomial_is_a_symbol_of_its_own(operator: str) -> None:
    symbols = Symbols()
    length = symbols.dimension("seq", 1)
    bounded = symbols.other(operator, length, Size(256))
    assert bounded == symbols.other(operator, length, Size(256))
    assert bounded != length and not bounded.is_fixed
    assert symbols.quotient(product([length, Size(32)]), bounded) is None
    assert symbols.least(bounded) is None
