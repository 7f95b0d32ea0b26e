"""A pattern of layers as users write it: `rope:window=1024,none` becomes one table per layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posexport.errors import RequestError, check_known, shown
from posexport.models import ENCODINGS
from posexport.spec.spec import LAYER_FIELDS


def check_layers_follow(options: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """RequestError for an option `given` on the command line that layers of a file's pattern set themselves."""
    pattern = options.get("layer_pattern")
    if pattern is None or "layer_pattern" in given:
        return
    layer_keys = {key for _, keys, _ in read_parts(pattern) for key in keys}
    for name in given:
        if name in layer_keys:
            raise RequestError(
                f"{name} was given, but layers of layer_pattern have a {name} of their own: give layer_pattern too, or "
                "drop it."
            )


def parameters_of(pairs: tuple[str, ...]) -> dict[str, str]:
    """`--set key=value` options as a table."""
    parameters = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise RequestError(f"parameter {pair!r} is not KEY=VALUE: write it like theta=500000.")
        if key.strip() in parameters:
            raise RequestError(f"parameter {key.strip()} is given twice: drop one.")
        parameters[key.strip()] = value.strip()
    return parameters


def check_reach(
    layers: list[dict[str, Any]], sizes: Mapping[str, Any], pattern: Any, parameters: Mapping[str, Any]
) -> None:
    """RequestError for an option for all layers that every layer of the pattern overrides."""
    unused = [name for name in LAYER_FIELDS if name in sizes and all(name in layer for layer in layers)]
    unused += [name for name in parameters if all(name in keys for _, keys, _ in read_parts(pattern))]
    if unused:
        raise RequestError(
            f"{unused[0]} was given, but every layer of layer_pattern has one of its own: drop one of them."
        )


def read_pattern(value: Any, base: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Layers as `read_spec` takes them, from text such as "rope:window=1024*5,rope:theta=1e6", or a list of its parts.

    A part is the name of an encoding, followed by its parameters and fields of a layer after colons; `*N` repeats it.
    An encoding with the name of `base` takes the parameters of `base` that it does not set itself.
    """
    layers: list[dict[str, Any]] = []
    for name, given, count in read_parts(value):
        check_known("encoding in layer_pattern", name, ENCODINGS)
        fields = {key: given.pop(key) for key in LAYER_FIELDS if key in given}
        encoding = {**(base if name == base["name"] else {}), "name": name, **given}
        layers += [{"encoding": encoding, **fields}] * count
    return layers


def read_parts(value: Any) -> list[tuple[str, dict[str, str], int]]:
    """(encoding, parameters, repetitions) of each part of a pattern; RequestError for a part that can't be read."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list) or not parts or not all(isinstance(part, str) for part in parts):
        raise RequestError(f"layer_pattern is {shown(value)}: it must be names of encodings, such as rope*3,none.")
    read = []
    for part in parts:
        text, star, count = part.strip().partition("*")
        name, *pairs = text.split(":")
        counted = count.isascii() and count.isdecimal() and 0 < int(count[:5]) < 10000
        if (star and not counted) or not all("=" in pair for pair in pairs):
            raise RequestError(
                f"layer_pattern has {part!r}: write NAME, or NAME:key=value:key=value, and *N behind it to repeat it, "
                "N from 1 to 9999."
            )
        read.append((name, parameters_of(tuple(pairs)), int(count) if star else 1))
    return read
