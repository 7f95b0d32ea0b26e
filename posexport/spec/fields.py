"""Validated fields of the frozen classes that describe a block. Each field states what it accepts.

None is accepted if it is the default. Text is accepted if it can be read as the field's type, so that `--set
theta=5e5`, TOML and JSON share one check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from posexport.errors import FieldError, shown, unknown


def stated(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that were given: None and () mean "not given"."""
    return {name: value for name, value in options.items() if value is not None and value != ()}


def parsed(help: str, allowed: str, read: Callable[[Any], Any], default: Any = None, *, typed: bool = False) -> Any:
    """Return a field whose value is the result of `read`.

    `read` raises TypeError or ValueError for a value that is not `allowed`. `typed`: a file format with numbers and
    booleans must not give the value as text.
    """

    def convert(value: object, _: object, field: attrs.Attribute[Any]) -> object:
        if value is None and default is None:
            return None
        try:
            return read(value)
        except (TypeError, ValueError, OverflowError):
            raise FieldError(field.name, f"is {shown(value)}: it must be {allowed}.") from None

    return attrs.field(
        default=default,
        converter=attrs.Converter(convert, takes_self=True, takes_field=True),
        metadata={"help": help, "allowed": allowed, "typed": typed},
    )


def check_types(kind: type[Any], data: Mapping[str, Any]) -> None:
    """Raise FieldError if `data` for `kind` contains a number or a boolean as text.

    This is for file formats with types of their own, unlike a command line.
    """
    for field in attrs.fields(kind):
        value = data.get(field.name)
        if isinstance(value, str) and field.metadata.get("typed"):
            raise FieldError(field.name, f"is {shown(value)}: it must be {field.metadata['allowed']}, without quotes.")


SMALLEST, LARGEST = 1e-30, 1e30
"""Limits of real-valued parameters. Closer to the ends of fp32, results would be 0 or infinite."""


def _number(value: object, kind: type[int] | type[float], low: float, high: float) -> float:
    accepted = (int, str) if kind is int else (int, float, str)
    if isinstance(value, bool) or not isinstance(value, accepted):
        raise TypeError
    number = kind(value)
    if not low <= number <= high:
        raise ValueError
    return number


def integer(
    default: int | None, help: str, *, at_least: int = 1, at_most: int = 2**31 - 1, optional: bool = False
) -> Any:
    """A whole number between bounds. None means "derived from other fields"; `optional` accepts it beside a default."""

    def read(value: Any) -> Any:
        return None if optional and value is None else _number(value, int, at_least, at_most)

    return parsed(help, _whole(at_least, at_most), read, default, typed=True)


def whole_number(name: str, value: object, *, at_least: int = 1, at_most: int = 2**31 - 1) -> int:
    """Return the whole number between bounds that `value` is or says. FieldError under `name` for any other value."""
    try:
        return int(_number(value, int, at_least, at_most))
    except (TypeError, ValueError, OverflowError):
        raise FieldError(name, f"is {shown(value)}: it must be {_whole(at_least, at_most)}.") from None


def _whole(at_least: int, at_most: int) -> str:
    return f"a whole number from {at_least} to {at_most}"


def positive(default: float | None, help: str, *, at_most: float = LARGEST) -> Any:
    """A number from SMALLEST to `at_most`. None means "derived from other fields"."""
    allowed = f"a number from {SMALLEST:g} to {at_most:g}"
    return parsed(help, allowed, lambda value: _number(value, float, SMALLEST, at_most), default, typed=True)


def number(default: float, help: str, *, at_least: float, at_most: float) -> Any:
    """A number between bounds."""
    allowed = f"a number from {at_least:g} to {at_most:g}"
    return parsed(help, allowed, lambda value: _number(value, float, at_least, at_most), default, typed=True)


def numbers(help: str, *, whole: bool = False) -> Any:
    """A list of numbers above 0, or with `whole` of whole numbers from 0. None means "not given". Text has commas."""

    def read(value: object) -> tuple[float, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not parts:
            raise TypeError
        if whole:
            return tuple(_number(part, int, 0, 2**31 - 1) for part in parts)
        return tuple(_number(part, float, SMALLEST, LARGEST) for part in parts)

    kind = "whole numbers from 0" if whole else f"numbers from {SMALLEST:g} to {LARGEST:g}"
    return parsed(help, f"a list of {kind}, such as {'4,6,6' if whole else '1,1.5,2'}", read)


def choice(default: str | None, options: Sequence[str], help: str) -> Any:
    """One of a few names. None means "not given"."""

    def convert(value: object, _: object, field: attrs.Attribute[Any]) -> object:
        if (value is None and default is None) or value in options:
            return value
        raise unknown(field.name, value if isinstance(value, str) else shown(value), options)

    return attrs.field(
        default=default,
        converter=attrs.Converter(convert, takes_self=True, takes_field=True),
        metadata={"help": help, "allowed": " or ".join(options)},
    )


def text(default: str | None, help: str) -> Any:
    """Text, such as a name or a path. None means "not given"."""

    def read(value: object) -> str:
        if not isinstance(value, str):
            raise TypeError
        return value

    return parsed(help, "text", read, default)


def flag(default: bool | None, help: str) -> Any:
    """True or false. None means "not given"."""

    def read(value: object) -> bool:
        words = {"true": True, "false": False}
        if isinstance(value, str) and value.lower() in words:
            return words[value.lower()]
        if not isinstance(value, bool):
            raise TypeError
        return value

    return parsed(help, "true or false", read, default, typed=True)
