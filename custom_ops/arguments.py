"""The arguments of an operator's call: bound by position or name, and checked against the shapes in its docstring.

A line of the docstring's "Args" names tensors with dtype and shape: `q: [B, S, num_heads*head_dim]`, `mask: int64 [B,
T]`, `cos, sin: [B, S, P] or [B, S, heads, P]`, `v: [B, T, D], in k's dtype`, `bias: float32 [B|1, S]`. A tensor without
a dtype may have any floating-point dtype. "float32" also accepts the float64 of a reference. Equal names mean equal
sizes. The name of an attribute means its value. What `help` shows is therefore what is checked.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posexport.errors import RequestError

Sizes = dict[str, Any]
"""Attributes and sizes of axes by name. None means not known yet."""


class CallError(RequestError, ValueError, TypeError):
    """Arguments that an operator does not accept. Users of torch can catch ValueError or TypeError."""


@dataclass(frozen=True)
class Derived:
    """A default that follows from `source`, another attribute or a size. Signatures show it as `text`."""

    text: str
    source: str = ""
    rule: Callable[[int], Any] = int

    def __repr__(self) -> str:
        return self.text


REQUIRED: Any = Derived("<required>")
"""The default of a required argument that follows optional ones."""

NUM_HEADS: Any = Derived("num_heads", "num_heads")
NUM_KV_HEADS: Any = Derived("past.shape[1]", "num_kv_heads")
HEAD_DIM: Any = Derived("weight.shape[0]", "head_dim")
SCALE: Any = Derived("head_dim**-0.5", "head_dim", lambda head_dim: head_dim**-0.5)

VARYING = ("B", "S", "T", "L", "past", "new")
"""The names of axes whose sizes may vary in a graph. The other sizes are fixed."""

_related: list[bool] = []
"""Not empty inside `related_sizes`."""


@contextmanager
def related_sizes() -> Iterator[None]:
    """In an export inside this block, docstrings make sizes equal or fixed. Use it if nobody said how axes vary.

    Otherwise, sizes that vary are not compared, because that would contradict the sizes that were given.
    """
    _related.append(True)
    try:
        yield
    finally:
        _related.pop()


_FLOATS = (torch.float32, torch.float64)
_DTYPES: Mapping[str, tuple[torch.dtype, ...]] = {"int64": (torch.int64,), "float32": _FLOATS}
_ARG = re.compile(r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {5,}.*)*)$", re.MULTILINE)
_SHAPE = re.compile(r"\[([^\]]*)\]")

_ATTRIBUTES: Mapping[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    bool: ((int,), "True or False"),
    Sequence[int]: ((list, tuple), "a list of whole numbers"),
}
"""The types of attributes, and their words in messages."""


class Axis:
    """One axis of a shape: a number, a name, or a sum of products of them. `|1` allows 1 too."""

    def __init__(self, text: str) -> None:
        size, _, one = text.strip().partition("|")
        self.text, self._broadcast = text.strip(), bool(one)
        self._varies = size.strip() in VARYING
        self._terms = [[factor.strip() for factor in term.split("*")] for term in size.split("+")]

    def unknown(self, sizes: Sizes) -> list[str]:
        """Return the names whose sizes are not known."""
        factors = (factor for term in self._terms for factor in term)
        return [factor for factor in factors if not factor.isdigit() and sizes.get(factor) is None]

    def problem(self, size: Any, sizes: Sizes) -> str | None:
        """Return why the axis cannot have this size, or None. Puts a size that becomes known into `sizes`."""
        traced = torch.compiler.is_dynamo_compiling()  # then sizes that vary look like numbers
        if type(size) is not int and (traced or not _related):
            return None
        size = size if self._varies else int(size)
        if self._broadcast and type(size) is int and size == 1:
            return None
        unknown = self.unknown(sizes)
        if unknown:
            return self._solve(size, unknown, sizes)
        if traced:
            return None
        expected = self._value(self._terms, sizes)
        return f"{self.text} is {expected}" if _is_plain(size) and _is_plain(expected) and size != expected else None

    def _value(self, terms: Sequence[Sequence[str]], sizes: Sizes) -> Any:
        values = [[int(factor) if factor.isdigit() else sizes[factor] for factor in term] for term in terms]
        return values[0][0] if [len(value) for value in values] == [1] else sum(map(math.prod, values))

    def _solve(self, size: Any, unknown: Sequence[str], sizes: Sizes) -> str | None:
        """Find the only unknown factor of a product. Does nothing if there are several."""
        if len(self._terms) > 1 or len(unknown) > 1:
            return None
        factors = [factor for factor in self._terms[0] if factor != unknown[0]]
        divisor = self._value([factors], sizes) if factors else 1
        if factors and (divisor < 1 or size % divisor):
            return f"{'*'.join(factors)} is {divisor}, which doesn't divide {size}"
        sizes[unknown[0]] = size // divisor if factors else size
        return None


def _is_plain(size: Any) -> bool:
    """Whether a size is a number or a single symbol. It is not a sum, such as the length of a grown cache."""
    return type(size) is int or (bool(_related) and size.node.expr.is_symbol)


class Kind(NamedTuple):
    """What is checked for a tensor. It is hashable unless its sizes are symbols of a graph."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class TensorRule:
    """What a tensor must be.

    `at`: its place among the arguments. `dtypes`: its dtypes; empty means any floating-point dtype. `like`: the place
    of the tensor whose dtype it shares. `shapes`: its shape by rank, each with its number among the allowed shapes.
    """

    name: str
    at: int
    optional: bool
    dtypes: tuple[torch.dtype, ...]
    like: int | None
    shapes: Mapping[int, tuple[int, tuple[Axis, ...]]]
    text: str

    def problem(self, kinds: Sequence[Any], sizes: Sizes) -> str | None:
        """Return what is wrong with the tensor, or None. `kinds` has a Kind for each tensor."""
        kind = kinds[self.at]
        if kind is None and self.optional:
            return None
        if not isinstance(kind, Kind):
            return f"is {kind!r}: it must be a tensor {self.text}"
        if not (kind.dtype in self.dtypes if self.dtypes else kind.dtype.is_floating_point):
            return f"is {kind.dtype}: it must be {self.dtypes[0] if self.dtypes else 'floating-point'}, so convert it"
        if self.like is not None and kind.dtype != kinds[self.like].dtype:
            return f"is {kind.dtype} beside {kinds[self.like].dtype}: both must have the same dtype, so convert one"
        shape = list(kind.shape)
        number, axes = self.shapes.get(len(shape), (-1, ()))
        if number < 0:
            return f"has shape {shape}: it must be {self.text}"
        if len(self.shapes) > 1 and sizes.setdefault("", number) != number:
            return f"has shape {shape}: of {self.text}, it must be the one that the other tensors have"
        for size, axis in zip(shape, axes, strict=True):
            problem = axis.problem(size, sizes)
            if problem is not None:
                return f"has shape {shape}: it must be {self.text}, and {problem}"
        return None


def _rules(doc: str, parameters: Mapping[str, inspect.Parameter]) -> list[TensorRule]:
    """Return the rules in the order of the docstring. Rules that cannot be solved at first are repeated at the end."""
    names, rules = list(parameters), []
    attributes = [name for name in names if parameters[name].annotation in (int, float, bool)]
    defaults = {name: parameters[name].default for name in attributes}
    known: Sizes = {  # without attributes that follow from a shape
        name: 1
        for name, value in defaults.items()
        if not isinstance(value, Derived) or value.source in {"", *attributes} - {name}
    }
    again = []
    for listed, text in _ARG.findall(inspect.cleandoc(doc)):
        shapes = [tuple(map(Axis, filter(None, shape.split(",")))) for shape in _SHAPE.findall(text)]
        if not shapes:
            continue
        like = re.search(r"in (\w+)'s dtype", text)
        for name in listed.split(", "):
            if name not in parameters or parameters[name].annotation not in (Tensor, Tensor | None):
                continue
            rule = TensorRule(
                name=name,
                at=names.index(name),
                optional=parameters[name].annotation != Tensor,
                dtypes=_DTYPES.get(text.split()[0], ()),
                like=None if like is None else names.index(like[1]),
                shapes={len(shape): (number, shape) for number, shape in enumerate(shapes)},
                text=" or ".join(f"[{', '.join(axis.text for axis in shape)}]" for shape in shapes),
            )
            rules.append(rule)
            unsolved = [axis.unknown(known) for shape in shapes for axis in shape]
            known |= {unknown[0]: 1 for unknown in unsolved if len(unknown) == 1}
            again += [rule] if any(len(unknown) > 1 for unknown in unsolved) else []
    return rules + again


class Arguments:
    """The arguments of an operator's torch body. Its docstring gives dtypes and shapes."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self.signature = inspect.signature(body, eval_str=True)
        parameters = self.signature.parameters
        self.names = tuple(parameters)
        self.tensors = tuple(name for name, p in parameters.items() if p.annotation in (Tensor, Tensor | None))
        self._operator = body.__name__
        self._places = {name: at for at, name in enumerate(self.names)}
        self._defaults = [REQUIRED if p.default is p.empty else p.default for p in parameters.values()]
        self._rules = tuple(_rules(body.__doc__ or "", parameters))
        self._attributes = tuple(
            (at, name, *_ATTRIBUTES[parameters[name].annotation])
            for at, name in enumerate(self.names)
            if name not in self.tensors
        )
        self._derived = tuple(
            (at, name, self._defaults[at])
            for at, name, _, _ in self._attributes
            if isinstance(self._defaults[at], Derived) and self._defaults[at] is not REQUIRED
        )

        self._checked_once = functools.lru_cache(4096)(self._check)

    def torch_signature(self) -> inspect.Signature:
        """Return the signature without defaults. In a graph, every argument is given."""
        parameters = self.signature.parameters.values()
        return self.signature.replace(parameters=[p.replace(default=p.empty) for p in parameters])

    def complete(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return every argument of a call by position.

        TypeError for an argument that is missing or unknown. CallError for one that does not match the docstring.
        """
        values = self._bound(args, kwargs)
        kinds = tuple(
            [
                Kind(value.shape, value.dtype)
                if isinstance(value, Tensor)
                else tuple(value)
                if isinstance(value, list)
                else value
                for value in values
            ]
        )
        # Sizes of graphs have no hash. In eager mode, checks without the cache would take as long as an operator.
        check = self._check if torch.compiler.is_compiling() else self._checked_once
        for at, value in check(kinds):
            values[at] = value
        return values

    def _check(self, kinds: tuple[Any, ...]) -> list[tuple[int, Any]]:
        """Return the values of derived defaults with their places. `kinds` has a Kind for each tensor."""
        sizes: Sizes = {}
        for at, name, types, words in self._attributes:
            derived = isinstance(kinds[at], Derived)
            if not derived and not isinstance(kinds[at], types):
                raise CallError(f"{self._operator}: {name} is {kinds[at]!r}: it must be {words}.")
            sizes[name] = None if derived else kinds[at]
        self._derive(kinds, sizes)
        for rule in self._rules:
            problem = rule.problem(kinds, sizes)
            if problem is not None:
                raise CallError(f"{self._operator}: {rule.name} {problem}.")
        self._derive(kinds, sizes)
        for _, name, _ in self._derived:
            if sizes[name] is None:
                raise TypeError(f"{self._operator}() needs {name}")
        return [(at, sizes[name]) for at, name, default in self._derived if kinds[at] is default]

    def _derive(self, kinds: tuple[Any, ...], sizes: Sizes) -> None:
        """Put the defaults that follow from known values into `sizes`."""
        for at, name, default in self._derived:
            source = sizes.get(default.source)
            if kinds[at] is default and source is not None:
                sizes[name] = default.rule(source)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        values = [*args, *self._defaults[len(args) :]]
        for name, value in kwargs.items():
            at = self._places.get(name, -1)
            if at < len(args):  # unknown, or given twice
                self.signature.bind(*args, **kwargs)
            values[at] = value
        if len(values) > len(self.names):
            self.signature.bind(*args, **kwargs)
        for at, _, default in self._derived:
            if values[at] is None:
                values[at] = default
        for name, value in zip(self.names, values, strict=True):
            if value is REQUIRED:
                raise TypeError(f"{self._operator}() needs {name}")
        return values
