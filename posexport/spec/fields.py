"""Validated fields for the frozen classes that describe a block: each says what it takes, in words.

Text is accepted wherever it reads as the field's type, so `--set theta=5e5`, TOML and JSON share one check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from posexport.errors import FieldError, unknown


def _field(
    default: Any, help: str, allowed: str, read: Callable[[Any], Any], optional: bool, typed: bool = False
) -> Any:
    def convert(value: Any, _: Any, field: attrs.Attribute[Any]) -> Any:
        if value is None and optional:
            return None
        try:
            return read(value)
        except (TypeError, ValueError, OverflowError):
            raise FieldError(field.name, f"is {value!r}: it must be {allowed}.") from None

    return attrs.field(
        default=default,
        converter=attrs.Converter(convert, takes_self=True, takes_field=True),
        metadata={"help": help, "allowed": allowed, "typed": typed},
    )


def check_types(kind: type[Any], data: Mapping[str, Any]) -> None:
    """FieldError where `data` for `kind` has a number, or true or false, as text: for files that have types of their
    own, as a command line has not."""
    for field in attrs.fields(kind):
        value = data.get(field.name)
        if isinstance(value, str) and field.metadata.get("typed"):
            raise FieldError(field.name, f"is {value!r}: it must be {field.metadata['allowed']}, without quotes.")


def integer(
    default: int | None, help: str, *, at_least: int = 1, at_most: int = 2**31 - 1, optional: bool = False
) -> Any:
    """A whole number between bounds; with `optional`, None means "derived from the rest"."""

    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise TypeError
        number = int(value)
        if not at_least <= number <= at_most:
            raise ValueError
        return number

    return _field(default, help, f"a whole number from {at_least} to {at_most}", read, optional, typed=True)


SMALLEST, LARGEST = 1e-30, 1e30
"""Numbers beyond come near the ends of fp32, where what is computed from them is 0 or infinite."""


def positive(default: float | None, help: str, *, optional: bool = False) -> Any:
    """A number above 0 whose fp32 is well within its range."""

    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise TypeError
        number = float(value)
        if not SMALLEST <= number <= LARGEST:
            raise ValueError
        return number

    return _field(default, help, f"a number from {SMALLEST:g} to {LARGEST:g}", read, optional, typed=True)


def numbers(help: str, *, whole: bool = False) -> Any:
    """A list of numbers above 0, or whole numbers from 0 with `whole`; None means "not given". Text has commas."""

    def read(value: Any) -> tuple[float, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        if not isinstance(parts, list | tuple) or not parts:
            raise TypeError
        return tuple(one(part) for part in parts)

    def one(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, str) if whole else (int, float, str)):
            raise TypeError
        number = int(value) if whole else float(value)
        low, high = (0, 2**31 - 1) if whole else (SMALLEST, LARGEST)
        if not low <= number <= high:
            raise ValueError
        return number

    kind = "whole numbers from 0" if whole else f"numbers from {SMALLEST:g} to {LARGEST:g}"
    return _field(None, help, f"a list of {kind}, such as {'4,6,6' if whole else '1,1.5,2'}", read, True)


def choice(default: str | None, options: Sequence[str], help: str, *, optional: bool = False) -> Any:
    """One of a few names."""

    def convert(value: Any, _: Any, field: attrs.Attribute[Any]) -> Any:
        if (value is None and optional) or value in options:
            return value
        raise unknown(field.name, str(value), options)

    return attrs.field(
        default=default,
        converter=attrs.Converter(convert, takes_self=True, takes_field=True),
        metadata={"help": help, "allowed": " or ".join(options)},
    )


def text(default: str | None, help: str) -> Any:
    """Text, such as a name or a path; None means "not given"."""

    def read(value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError
        return value

    return _field(default, help, "text", read, default is None)


def flag(default: bool | None, help: str) -> Any:
    """True or false; None means "not given"."""

    def read(value: Any) -> bool:
        words = {"true": True, "false": False}
        if isinstance(value, str) and value.lower() in words:
            return words[value.lower()]
        if not isinstance(value, bool):
            raise TypeError
        return value

    return _field(default, help, "true or false", read, default is None, typed=True)


def parsed(help: str, allowed: str, read: Callable[[Any], Any], default: Any = None) -> Any:
    """Whatever `read` makes of what is given; it raises TypeError or ValueError for what isn't `allowed`."""
    return _field(default, help, allowed, read, default is None)
