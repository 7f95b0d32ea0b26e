"""Lengths as polynomials of the graph's dimensions, which show that two lengths are equal on all inputs.

    3 * batch * (past + seq)

A length that is not a polynomial, such as the minimum of two lengths, is a symbol of its own. The same operator on the
same lengths gives the same symbol.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping

import attrs


@attrs.frozen
class Size:
    """An integer times symbols (posexport.graphs.symbolic_sizes.Symbols), which are sorted."""

    number: int
    symbols: tuple[int, ...] = ()

    @property
    def is_fixed(self) -> bool:
        """Whether it is a number."""
        return not self.symbols

    def __mul__(self, other: Size) -> Size:
        number = self.number * other.number
        return Size(number, tuple(sorted(self.symbols + other.symbols)) if number else ())


Shape = tuple[Size, ...]

ONE = Size(1)


class Symbols:
    """The symbols of one graph. A symbol stands for a dimension, a sum, or the result of an operator."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._sums: dict[int, tuple[Size, ...]] = {}
        self._quotients: dict[int, tuple[Size, int]] = {}
        self._exact: dict[int, tuple[Size, Size]] = {}
        self._least: dict[int, int] = {}
        self._most: dict[int, set[Size]] = {}
        self._broadcasts: dict[int, tuple[Size, ...]] = {}

    def dimension(self, name: Hashable, least: int = 0) -> Size:
        """A dimension of the graph's inputs, which is at least `least` (0 or more)."""
        symbol = self._symbol(("dimension", name))
        self._least[symbol] = min(least, self._least.get(symbol, least))
        return Size(1, (symbol,))

    def other(self, *key: Hashable) -> Size:
        """A number about which only its computation is known."""
        return Size(1, (self._symbol(key),))

    def bounded(self, *key: Hashable, most: Iterable[Size]) -> Size:
        """A number that is known to be at most each of `most`."""
        size = self.other(*key)
        self._most.setdefault(size.symbols[0], set()).update(most)
        return size

    def is_at_most(self, one: Size, other: Size) -> bool:
        """Whether a size is known never to be larger than another one."""
        if one == other:
            return True
        if any(self.is_at_most(one, size) for size in self.broadcast_of(other)):
            return True
        if one.number == 1 and len(one.symbols) == 1:
            return any(self.is_at_most(bound, other) for bound in self._most.get(one.symbols[0], ()))
        return False

    def broadcast(self, sizes: Collection[Size]) -> Size:
        """The length of an axis on which these lengths are broadcast: the largest; the others equal it or are 1."""
        common = self.other("broadcast", *sorted(sizes, key=repr))
        self._broadcasts[common.symbols[0]] = tuple(sizes)
        known = [least for size in sizes if (least := self.least(size)) is not None]
        if len(known) == len(sizes):
            self.assume(common, min(known))
        return common

    def broadcast_of(self, size: Size) -> tuple[Size, ...]:
        """The lengths that are broadcast to a length; empty if it is not a broadcast length."""
        is_symbol = size.number == 1 and len(size.symbols) == 1
        return self._broadcasts.get(size.symbols[0], ()) if is_symbol else ()

    def parts_of(self, size: Size) -> set[int]:
        """The symbols that a size is made of, also those in its sums, broadcasts and exact quotients."""
        found, pending = set[int](), [*size.symbols]
        while pending:
            symbol = pending.pop()
            if symbol not in found:
                found.add(symbol)
                inner = (*self._sums.get(symbol, ()), *self._broadcasts.get(symbol, ()), *self._exact.get(symbol, ()))
                pending += [one for part in inner for one in part.symbols]
        return found

    def total(self, terms: Iterable[Size]) -> Size:
        """The sum of sizes."""
        numbers: Counter[tuple[int, ...]] = Counter()
        for term in terms:
            for part in self._expanded(term):
                numbers[part.symbols] += part.number
        parts = [Size(number, symbols) for symbols, number in sorted(numbers.items()) if number]
        if len(parts) < 2:
            return parts[0] if parts else Size(0)
        common = parts[0]
        for part in parts[1:]:
            common = Size(math.gcd(common.number, part.number), _shared(common.symbols, part.symbols))
        rests = tuple(Size(part.number // common.number, _without(part.symbols, common.symbols)) for part in parts)
        symbol = self._symbol(("sum", rests))
        self._sums[symbol] = rests
        return common * Size(1, (symbol,))

    def difference(self, one: Size, other: Size) -> Size:
        """One size minus another."""
        return self.total([one, Size(-other.number, other.symbols)])

    def quotient(self, one: Size, other: Size) -> Size | None:
        """The size that gives `one` if multiplied by `other`; None if there is none."""
        if not one.number and other.number:
            return one
        if not other.number or one.number % other.number or Counter(other.symbols) - Counter(one.symbols):
            return None
        return Size(one.number // other.number, _without(one.symbols, other.symbols))

    def exact_quotient(self, one: Size, other: Size) -> Size:
        """The size that gives `one` if multiplied by `other`, for inputs on which it exists."""
        found = self.quotient(one, other)
        if found is None:
            found = self.other("Div", one, other)
            self._exact[found.symbols[0]] = (one, other)
        return found

    @contextlib.contextmanager
    def supposing(self) -> Iterator[None]:
        """Forget afterwards which divisions turned out to be exact, and new bounds: what requires them may never
        run."""
        before = dict(self._exact), dict(self._least)
        yield
        self._exact, self._least = before

    def solution(self, one: Size, other: Size) -> tuple[Size, int] | None:
        """The symbol, and its number, for which two sizes are equal; None unless there is exactly one solution."""
        one, other = self._reduced(one, other)
        if one.is_fixed:
            one, other = other, one
        if len(one.symbols) != 1 or other.symbols or not one.number or other.number % one.number:
            return None
        return Size(1, one.symbols), other.number // one.number

    def is_above_one(self, size: Size) -> bool:
        """Whether a size can't be 1 or less."""
        if (self.least(size) or 0) > 1:
            return True
        one, other = self._reduced(size, ONE)
        return not other.symbols and bool(one.number) and bool(other.number % one.number)

    def _reduced(self, one: Size, other: Size) -> tuple[Size, Size]:
        """Two sizes without exact quotients and common symbols, with the same ratio as before."""
        for _ in range(len(self._exact)):
            one, other = self._without_quotient(*self._without_quotient(one, other)[::-1])[::-1]
        common = _shared(one.symbols, other.symbols)
        return Size(one.number, _without(one.symbols, common)), Size(other.number, _without(other.symbols, common))

    def _without_quotient(self, one: Size, other: Size) -> tuple[Size, Size]:
        """Two sizes, multiplied by the divisor of an exact quotient in the first size."""
        for symbol in one.symbols:
            if symbol in self._exact:
                whole, divisor = self._exact[symbol]
                return Size(one.number, _without(one.symbols, (symbol,))) * whole, other * divisor
        return one, other

    def floor_quotient(self, one: Size, divisor: int) -> Size:
        """The largest integer that isn't larger than a size divided by a number above 0."""
        constant = sum(part.number for part in self._expanded(one) if part.is_fixed)
        rest = self.difference(one, Size(constant))
        if rest.number == 1 and len(rest.symbols) == 1 and rest.symbols[0] in self._quotients:
            inner, by = self._quotients[rest.symbols[0]]
            return self.floor_quotient(self.total([inner, Size(constant * by)]), by * divisor)
        whole, left = divmod(constant, divisor)
        numerator = self.total([rest, Size(left)])
        quotient = self.quotient(numerator, Size(divisor))
        if quotient is None and numerator.is_fixed:
            quotient = Size(numerator.number // divisor)
        if quotient is None:
            symbol = self._symbol(("floor quotient", numerator, divisor))
            self._quotients[symbol] = (numerator, divisor)
            least = self.least(numerator)
            if least is not None and least >= 0:
                self._least[symbol] = least // divisor
            quotient = Size(1, (symbol,))
        return self.total([quotient, Size(whole)])

    def assume(self, size: Size, least: int) -> None:
        """Note that a size is at least `least`, if it is a symbol or a multiple of one, plus a number."""
        rest = [part for part in self._expanded(size) if not part.is_fixed]
        if len(rest) == 1 and rest[0].number > 0 and len(rest[0].symbols) == 1:
            (symbol,) = rest[0].symbols
            constant = sum(part.number for part in self._expanded(size) if part.is_fixed)
            bound = -((constant - least) // rest[0].number)  # rounded up
            bound = self._least[symbol] = max(self._least.get(symbol, bound), bound)
            if symbol in self._quotients:
                numerator, divisor = self._quotients[symbol]
                self.assume(numerator, bound * divisor)

    def note_length(self, size: Size) -> None:
        """Note that a size is a length, so at least 0, if it is a symbol about which nothing else is known."""
        if size.number == 1 and len(size.symbols) == 1:
            (symbol,) = size.symbols
            if symbol not in self._sums and symbol not in self._quotients:
                self._least.setdefault(symbol, 0)

    def least(self, size: Size) -> int | None:
        """A lower bound of a size; None if none is known."""
        bound = 0
        for part in self._expanded(size):
            known = [self._least[symbol] for symbol in part.symbols if symbol in self._least]
            if len(known) < len(part.symbols) or (part.number < 0 and part.symbols):
                return None
            bound += part.number * math.prod(known)
        return bound

    def value(self, size: Size, known: Mapping[int, int]) -> int | None:
        """The number that a size is for these `known` symbols; None if it has others."""
        factors = [self._value(symbol, known) for symbol in size.symbols]
        return size.number * math.prod(one for one in factors if one is not None) if None not in factors else None

    def _value(self, symbol: int, known: Mapping[int, int]) -> int | None:
        if symbol in known:
            return known[symbol]
        if symbol in self._quotients:
            numerator, divisor = self._quotients[symbol]
            number = self.value(numerator, known)
            return None if number is None else number // divisor
        if symbol in self._broadcasts:
            meeting = {self.value(size, known) for size in self._broadcasts[symbol]}
            above = meeting - {1}
            return None if None in meeting or len(above) > 1 else above.pop() if above else 1
        if symbol in self._exact:
            one, other = (self.value(size, known) for size in self._exact[symbol])
            return None if one is None or not other or one % other else one // other
        terms = [self.value(term, known) for term in self._sums.get(symbol, ())]
        return sum(one for one in terms if one is not None) if terms and None not in terms else None

    def is_within(self, size: Size, factor: int, number: int) -> bool:
        """Whether a size is a number, or multiplies lengths by at most `factor` and adds at most `number` to them."""
        parts = self._expanded(size)
        return size.is_fixed or all(abs(part.number) <= (factor if part.symbols else number) for part in parts)

    def _expanded(self, size: Size) -> list[Size]:
        """A size as terms that contain no sums."""
        for at, symbol in enumerate(size.symbols):
            if symbol in self._sums:
                rest = Size(size.number, size.symbols[:at] + size.symbols[at + 1 :])
                return [part for term in self._sums[symbol] for part in self._expanded(rest * term)]
        return [size] if size.number else []

    def _symbol(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def product(sizes: Iterable[Size]) -> Size:
    """The product of all sizes."""
    return math.prod(sizes, start=ONE)


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted((Counter(one) & Counter(other)).elements()))


def _without(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted((Counter(one) - Counter(other)).elements()))
