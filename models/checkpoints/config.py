"""Reads a config.json key by key and records which keys were read. Any other key is an error.

A missing key has transformers' default, which the readers pass as `default`. Alternative names of a key come from older
versions. Models of several parts, such as text and images, have a table for each part.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Collection, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import attrs

from posexport.errors import RequestError
from posexport.jsondata import read_json
from posexport.spec.fields import LARGEST

T = TypeVar("T")

Data = dict[str, Any]
"""A layer, or a part of one, as plain data that `read_spec` takes."""

FILE = "config.json"

MOST = 2**31 - 1
"""The largest whole number in a config."""

NUMBER = f"a number from {-LARGEST:g} to {LARGEST:g}"


_IGNORED = tomllib.loads(files("posexport.models.checkpoints").joinpath("ignored_keys.toml").read_text("utf-8"))
COMMON = frozenset(_IGNORED["common"].split())
"""Keys that do not affect attention at inference in any config.json."""


def ignored_keys(model_type: str) -> frozenset[str]:
    """Return the keys that do not affect the attention of models of this type, including COMMON."""
    texts = [keys for model_types, keys in _IGNORED["models"].items() if model_type in model_types.split()]
    return COMMON.union(*map(str.split, texts))


def ignored_tensors(model_type: str) -> list[str]:
    """Return patterns of tensor names in the attention module of this model type that do not affect attention."""
    groups = _IGNORED["tensors"].items()
    return [name for types, names in groups if {"common", model_type} & {*types.split()} for name in names.split()]


INERT: Mapping[str, tuple[Any, ...]] = {
    "pruned_heads": ({}, None),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
}
"""Keys of any config.json that have no effect if they have one of these values."""


class Config:
    """A table of a config.json.

    `where` names the file. `inside` is the table's path in it (empty for the outermost). `known` are the keys that need
    not be read.
    """

    def __init__(self, data: Mapping[str, Any], where: str, inside: str = "", known: Collection[str] = ()) -> None:
        self.data, self.where, self._inside, self._known = data, where, inside, known
        self._read: set[str] = set()
        self._tables: dict[str, Config] = {}

    def value(self, *names: str, default: Any = None) -> Any:
        """Return the value of a key under any of its names. RequestError if two names have different values."""
        self._read.update(names)
        present = [name for name in names if name in self.data]
        values = {name: self.data[name] for name in present if self.data[name] is not None}
        first, *others = values.values() or (None,)
        if any(value != first for value in others):
            raise RequestError(
                f"{self.where}: {' and '.join(values)} are names of one key and differ: drop one of them."
            )
        return first if values else None if present else default

    def integer(self, *names: str, default: int, at_least: int = 1) -> int:
        """A whole number."""
        number = self.optional_integer(*names, default=default, at_least=at_least)
        return self._needed(number, names, _whole(at_least))

    def optional_integer(self, *names: str, default: int | None = None, at_least: int = 1) -> int | None:
        """A whole number, or None if the key is null."""
        allowed = _whole(at_least)
        return self._checked(names, default, lambda value: _is_number(value, (int,), at_least, MOST), allowed)

    def number(self, *names: str, default: float) -> float:
        """A finite number."""
        return self._needed(self.optional_number(*names, default=default), names, NUMBER)

    def optional_number(self, *names: str, default: float | None = None) -> float | None:
        """A finite number, or None if the key is null."""
        return self._checked(names, default, lambda value: _is_number(value, (int, float), -LARGEST, LARGEST), NUMBER)

    def flag(self, *names: str, default: bool) -> bool:
        """True or false."""
        value = self._checked(names, default, lambda value: isinstance(value, bool), "true or false")
        return self._needed(value, names, "true or false")

    def integers(self, *names: str, default: list[int] | None = None) -> list[int] | None:
        """A list of whole numbers from 0, or None if the key is null."""

        def fits(value: Any) -> bool:
            return isinstance(value, list) and all(isinstance(one, int) and 0 <= one < 2**31 for one in value)

        return self._checked(names, default, fits, "a list of whole numbers")

    def text(self, *names: str, allowed: Collection[str], default: str) -> str:
        """One of a few words."""
        value = self.value(*names, default=default)
        if not isinstance(value, str) or value not in allowed:
            raise self.wrong(names[0], f"one of {', '.join(allowed)}")
        return value

    def must(self, name: str, *allowed: Any, default: Any = None) -> None:
        """Raise RequestError for a key with a value that is not in `allowed`. The first of `allowed` is the default."""
        if self.value(name, default=allowed[0] if default is None else default) not in allowed:
            values = " or ".join(json.dumps(value) for value in allowed)
            raise self.wrong(name, f"{values}, because a block supports nothing else")

    def table(self, name: str, known: Collection[str] = ()) -> Config:
        """A table inside this one. It is empty if it is null or missing."""
        value = self.value(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, "a table")
        return self._tables.setdefault(name, Config(value or {}, self.where, f"{self._inside}{name}.", known))

    def wrong(self, name: str, allowed: str) -> RequestError:
        """The error for a key with a wrong value."""
        value = json.dumps(self.data[name]) if name in self.data else "missing"
        return RequestError(f"{self.where}: {self._inside}{name} is {value}: it must be {allowed}.")

    def refuse_unread(self, model_type: str) -> None:
        """Raise RequestError for the first key that was not read and is not known to be irrelevant to attention."""
        for key, value in self.data.items():
            inert = key in INERT and value in INERT[key]
            if key not in self._read and key not in self._known and not inert:
                missing = sorted({*self._read, *self._known} - self.data.keys())
                near = difflib.get_close_matches(key, missing, n=1, cutoff=0.85)
                hint = f"did you mean {near[0]!r}? If not, " if near else ""
                raise RequestError(
                    f"{self.where}: {self._inside}{key} is {json.dumps(value)[:80]}, and posexport doesn't know what "
                    f"that means for the attention of {model_type}: {hint}drop the key if it means nothing."
                )
        for table in self._tables.values():
            table.refuse_unread(model_type)

    def _checked(
        self, names: tuple[str, ...], default: T | None, fits: Callable[[Any], bool], allowed: str
    ) -> T | None:
        """Return the value of a key, or None if it is null. RequestError if it does not fit."""
        value: T | None = self.value(*names, default=default)
        if value is not None and not fits(value):
            raise self.wrong(next(name for name in names if name in self.data), allowed)
        return value

    def _needed(self, value: T | None, names: tuple[str, ...], allowed: str) -> T:
        """Return the value of a key. RequestError if it is null."""
        if value is None:
            raise self.wrong(names[0], allowed)
        return value


def _whole(at_least: int) -> str:
    return f"a whole number from {at_least} to {MOST}"


def _is_number(value: Any, kinds: tuple[type[int] | type[float], ...], low: float, high: float) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high


def open_config(path: Path) -> dict[str, Any]:
    """Read a config.json from the file or its folder. RequestError if it cannot be read or is not a table."""
    file = path / FILE if path.is_dir() else path
    try:
        data = read_json(file)
    except OSError as error:
        raise RequestError(
            f"{str(file)!r} can't be read ({error.strerror}): nothing is downloaded, so give the local folder of a "
            "checkpoint, or its config.json."
        ) from None
    except ValueError as error:
        if file.suffix != ".json":
            raise RequestError(
                f"{str(file)!r} is no config.json: give the checkpoint's folder, or its config.json for the shape "
                "alone."
            ) from None
        raise RequestError(f"{str(file)!r} can't be used ({error}): give a config.json of Hugging Face.") from None
    if not isinstance(data, dict):
        raise RequestError(f"{str(file)!r} holds no table: give a config.json of Hugging Face.")
    return data


@attrs.frozen(kw_only=True)
class Part:
    """The `table` of a config.json that is read, and its `model_type`.

    With `whole`, the whole file is read if it has no such table, as in older versions.
    """

    table: str
    model_type: str
    whole: bool = False


PARTS: Mapping[str, Part] = {
    "llama4": Part(table="text_config", model_type="llama4_text"),
    "gemma3": Part(table="text_config", model_type="gemma3_text"),
    "qwen2_vl": Part(table="text_config", model_type="qwen2_vl_text", whole=True),
    "qwen2_5_vl": Part(table="text_config", model_type="qwen2_5_vl_text", whole=True),
    "qwen3_vl": Part(table="text_config", model_type="qwen3_vl_text"),
    "llava": Part(table="vision_config", model_type="pixtral"),
    "mistral3": Part(table="vision_config", model_type="pixtral"),
}
"""Models of several parts, by their `model_type`."""


def part_of(data: Mapping[str, Any], where: str) -> tuple[str, Config]:
    """Return the model_type of the part that is read, and its table. Keys in `ignored_keys` of the part need not be
    read.

    Raises RequestError for an unknown key outside the table, or for a part with an unexpected model_type.
    """
    model_type = str(data.get("model_type"))
    if model_type not in PARTS:
        return model_type, Config(data, where, known=ignored_keys(model_type))
    part, outside = PARTS[model_type], COMMON.union(_IGNORED["outside"].split())
    ignored = ignored_keys(part.model_type)
    if part.whole and data.get(part.table) is None:
        return part.model_type, Config(data, where, known=outside | ignored)
    inner = Config(data, where).table(part.table, ignored)
    inner_type = inner.value("model_type", default=part.model_type)
    if inner_type not in (part.model_type, model_type):
        raise inner.wrong("model_type", f"{part.model_type}, which posexport reads of {model_type}")
    repeated = {key for key in data if key in inner.data and data[key] == inner.data[key]}
    Config(data, where, known=outside | repeated).refuse_unread(model_type)
    return part.model_type, inner
