"""Results and manifests as attrs classes: plain JSON data in and out, with the types checked.

A class is the schema. Its annotations say what a file may contain: `Literal["timed", "failed"]`, `int | None`,
`int | str`, `Mapping[str, Ratio]`, `tuple[Row, ...]`. Validators check the rest. Keys that the class doesn't have are
not read. A number may be written as an integer for a float. Nothing else is converted. cattrs does the work. It is
loaded when it is first used, so that posexport starts fast.

A class must be importable at run time: names in its annotations can't come from a TYPE_CHECKING block.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, TypeVar, Union, get_args, get_origin

import attrs

from posexport.errors import shown
from posexport.files import TEXT_LIMIT, read_bytes

if TYPE_CHECKING:
    import cattrs

T = TypeVar("T")

_UNWRITABLE = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)

LARGEST = 10**100
"""Larger numbers are not measurements, and their squares and ratios overflow a float."""

_DIGITS = 21  # of a number of 64 bits, with its sign

DEEPEST = 64
"""The most levels of lists and objects inside each other in JSON."""

OMITTED = "posexport.omitted"
"""Metadata of a field that is written only where it differs from its default."""

_origin: Callable[[Any], Any] = get_origin  # `dict` for `dict[str, int]`


def omitted(default: Any = attrs.NOTHING, **options: Any) -> Any:
    """A field that is written only where it differs from its default, which `factory` may make."""
    return attrs.field(default=default, metadata={OMITTED: True}, **options)


class DataError(ValueError):
    """Data that doesn't fit its class. The text names the place: `shapes[0].state is 'x', not one of ...`."""


def structure(data: Any, kind: type[T]) -> T:
    """An instance of the attrs class `kind` from plain data. DataError names the first place that doesn't fit."""
    try:
        return _converter().structure(data, kind)
    except Exception as error:  # cattrs groups errors by place; validators raise what they like
        raise DataError(_first(error)) from None


def unstructure(value: Any) -> Any:
    """Plain data that `json` can write: classes as tables in the order of their fields, tuples as lists."""
    return _converter().unstructure(value)


def read_json(path: Path) -> Any:
    """The content of a JSON file. DataError if it is not JSON, OSError if it can't be read."""
    return parse_json(read_bytes(path, TEXT_LIMIT))


def parse_json(text: bytes | str) -> Any:
    """The data of JSON text. DataError if it is not JSON, is nested too deep, or has a key twice."""
    if len(text) > TEXT_LIMIT:
        raise DataError("it is too long")
    try:
        data = json.loads(text, object_pairs_hook=_table, parse_int=whole_number)
    except DataError:
        raise
    except (ValueError, RecursionError):
        raise DataError("it is not JSON") from None
    _check_depth(data)
    return data


def json_sha256(data: Any) -> str:
    """The sha256 of plain data. The order of its keys doesn't matter."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value of JSON is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def whole_number(text: str) -> int:
    """A whole number of JSON. DataError beyond 64 bits, which no count, size or seed has."""
    if len(text) > _DIGITS or (number := int(text)).bit_length() > 64:
        raise DataError(f"it holds a whole number of {len(text)} digits")
    return number


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object. DataError if a key is in it twice, because readers may take different ones."""
    table = dict(pairs)
    if len(table) < len(pairs):
        raise DataError("a key stands in it twice")
    return table


def _check_depth(data: Any) -> None:
    """DataError for lists and objects that are nested deeper than DEEPEST, which would break recursive code."""
    level = [data]
    for _ in range(DEEPEST):
        level = [item for value in level if isinstance(value, dict | list) for item in _items(value)]
        if not level:
            return
    raise DataError(f"it is nested deeper than {DEEPEST} levels")


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


def writable(text: str) -> str:
    """Text without characters that XML 1.0 or UTF-8 can't hold. An engine's message or a file name may have some."""
    return _UNWRITABLE.sub("?", text)


def clean(value: Any) -> Any:
    """Data in which all texts are `writable`. Messages of engines and file names may not be."""
    match value:
        case str():
            return writable(value)
        case list():
            return [clean(item) for item in value]
        case dict():
            return {clean(key): clean(item) for key, item in value.items()}
    return value


@functools.cache
def _converter() -> cattrs.Converter:
    import cattrs
    from cattrs import cols, gen

    converter = cattrs.Converter()

    def plain(*kinds: type) -> Any:
        """Reads a value of one of these types. An integer is a number too."""
        accepted = (*kinds, int) if float in kinds else kinds
        words = " or ".join(_KINDS[kind] for kind in kinds)

        def read(value: Any, _: Any) -> Any:
            if type(value) not in accepted:
                raise ValueError(f"is {_shown(value)}, not {words}")
            if type(value) in (int, float) and not abs(value) < LARGEST:
                raise ValueError(f"is {_shown(value)}, not a finite number")
            return float(value) if kinds == (float,) else value

        return read

    def checked(kinds: Any, words: str, read: Callable[[Any, Any], Any]) -> Any:
        """Reads a value of one of these classes by `read`."""

        def structured(value: Any, kind: Any) -> Any:
            if not isinstance(value, kinds):
                raise ValueError(f"is {_shown(value)}, not {words}")
            return read(value, kind)

        return structured

    def table(kind: Any) -> Any:
        fields = attrs.fields(kind)
        required = [field.name for field in fields if field.init and field.default is attrs.NOTHING]
        read = gen.make_dict_structure_fn(kind, converter)

        def complete(value: Mapping[str, Any], kind: Any) -> Any:
            for name in required:
                if name not in value:
                    raise ValueError(f"lacks {name!r}")
            return read({field.name: value[field.name] for field in fields if field.name in value}, kind)

        return checked(Mapping, "an object", complete)

    def written(kind: Any) -> Any:
        names = [field.name for field in attrs.fields(kind)]
        omittable = [field.name for field in attrs.fields(kind) if field.metadata.get(OMITTED)]
        omitted: dict[str, Any] = dict.fromkeys(omittable, gen.override(omit_if_default=True))
        write = gen.make_dict_unstructure_fn(kind, converter, **omitted)

        def in_order(value: Any) -> dict[str, Any]:  # cattrs puts what may be omitted after everything else
            data = write(value)
            return {name: data[name] for name in names if name in data}

        return in_order if omitted else write

    def choice(kind: Any) -> Any:
        allowed = get_args(kind)

        def read(value: Any, _: Any) -> Any:
            if not any(value == item and type(value) is type(item) for item in allowed):
                raise ValueError(f"is {_shown(value)}, not one of {', '.join(map(str, allowed))}")
            return value

        return read

    def sequence(kind: Any) -> Any:
        item: Any = list[get_args(kind)[0]]  # type: ignore[misc]
        read = cols.list_structure_factory(item, converter)
        return checked((list, tuple), "a list", lambda value, kind: tuple(read(value, kind)))

    def mapping(kind: Any) -> Any:
        kinds: Any = dict[get_args(kind)]  # type: ignore[misc]
        return checked(Mapping, "an object", cols.mapping_structure_factory(kinds, converter))

    for kind in _KINDS:
        converter.register_structure_hook(kind, plain(kind))
    converter.register_structure_hook_factory(_is_plain_union, lambda kind: plain(*get_args(kind)))
    converter.register_structure_hook_factory(lambda kind: _origin(kind) is Literal, choice)
    converter.register_structure_hook_factory(_is_sequence, sequence)
    converter.register_structure_hook_factory(lambda kind: _origin(kind) in (dict, Mapping), mapping)
    converter.register_structure_hook_factory(attrs.has, table)
    converter.register_unstructure_hook_factory(attrs.has, written)
    converter.register_unstructure_hook(tuple, lambda value: [converter.unstructure(item) for item in value])
    return converter


def _is_sequence(kind: Any) -> bool:
    """Whether it is `tuple[X, ...]` or `list[X]`."""
    arguments = get_args(kind)
    origin = _origin(kind)
    return origin is list or (origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis)


def _is_plain_union(kind: Any) -> bool:
    """Whether it is a union of plain kinds, such as `str | float`."""
    return _origin(kind) in (types.UnionType, Union) and set(get_args(kind)) <= set(_KINDS)


_KINDS = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}


def _shown(value: Any) -> str:
    return "NaN" if isinstance(value, float) and math.isnan(value) else shown(value, 40)


def _first(error: BaseException, place: str = "") -> str:
    """The first error of a group with its place, as a clause."""
    if isinstance(error, BaseExceptionGroup):
        inner = error.exceptions[0]
        for note in getattr(inner, "__notes__", ()):
            name, index = getattr(note, "name", None), getattr(note, "index", None)
            if name is not None:
                place = f"{place}.{name}" if place else str(name)
            elif index is not None:
                place = f"{place}[{index}]"
        return _first(inner, place)
    text = str(error) if not isinstance(error, KeyError) else f"lacks {error}"
    return f"{place or 'it'} {text}"
