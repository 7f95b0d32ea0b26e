"""A pattern of layers as people write it: `rope:window=1024,none` becomes one table per layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posexport.errors import RequestError, unknown
from posexport.models import ENCODINGS
from posexport.spec.spec import LAYER_FIELDS


def check_layers_follow(options: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse what is `given` on the command line where layers of a file's pattern have their own: it would not win."""
    pattern = options.get("layer_pattern")
    if pattern is None or "layer_pattern" in given:
        return
    own = {key for part in pattern_parts(pattern) for key in read_layer(part)[1]}
    for name in given:
        if name in own:
            raise RequestError(
                f"{name} was given, but layers of layer_pattern have a {name} of their own: give layer_pattern too, or "
                "drop it."
            )


def parameters_of(pairs: tuple[str, ...]) -> dict[str, str]:
    """`--set key=value` options as a table."""
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise RequestError(f"--set {pair!r} is not KEY=VALUE: write it like --set theta=500000.")
        if key.strip() in found:
            raise RequestError(f"--set {key.strip()} is given twice: drop one.")
        found[key.strip()] = value.strip()
    return found


def check_reach(
    layers: list[dict[str, Any]], sizes: Mapping[str, Any], parts: list[str], parameters: Mapping[str, Any]
) -> None:
    """RequestError for what is given for all layers where each has it otherwise."""
    given = [read_layer(part)[1] for part in parts]
    lost = [name for name in LAYER_FIELDS if name in sizes and all(name in layer for layer in layers)]
    lost += [name for name in parameters if all(name in own for own in given)]
    if lost:
        raise RequestError(
            f"{lost[0]} was given, but every layer of layer_pattern has one of its own: drop one of them."
        )


def read_pattern(value: Any, base: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Layers as `read_spec` takes them from text such as "rope:window=1024*5,rope:theta=1e6", or a list of its parts.

    Each is the name of an encoding with parameters of its own, or fields of a layer, behind colons; `*N` repeats it.
    An encoding of the same name as `base` has its parameters too, where it gives no others.
    """
    layers: list[dict[str, Any]] = []
    for part in pattern_parts(value):
        name, given, count = read_layer(part)
        if name not in ENCODINGS:
            raise unknown("encoding in layer_pattern", name, ENCODINGS)
        own = {key: given.pop(key) for key in LAYER_FIELDS if key in given}
        encoding = {**(base if name == base["name"] else {}), "name": name, **given}
        layers += [{"encoding": encoding, **own}] * count
    return layers


def pattern_parts(value: Any) -> list[str]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list) or not parts or not all(isinstance(part, str) for part in parts):
        raise RequestError(f"layer_pattern is {value!r}: it must be names of encodings, such as rope*3,none.")
    return parts


def read_layer(part: str) -> tuple[str, dict[str, str], int]:
    """The name of a part of a pattern, what it gives behind colons, and how often it stands."""
    text, star, count = part.strip().partition("*")
    name, *pairs = text.split(":")
    counted = count.isascii() and count.isdecimal() and 0 < int(count[:5]) < 10000
    if (star and not counted) or not all("=" in pair for pair in pairs):
        raise RequestError(
            f"layer_pattern has {part!r}: write NAME, or NAME:key=value:key=value, and *N behind it to repeat it, N "
            "from 1 to 9999."
        )
    return name, parameters_of(tuple(pairs)), int(count) if star else 1
