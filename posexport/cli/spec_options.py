"""Options that describe a block: one per field of Spec, made from the field itself, plus `--set`, `--config` and
`--preset`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import attrs
import click

from posexport.errors import RequestError, unknown
from posexport.files import read_toml
from posexport.layers import LAYER_FIELDS
from posexport.models import ENCODINGS, read_spec
from posexport.presets import read_preset
from posexport.spec import CACHES, Spec

_FLAGS = ("causal", "padding_mask", "cross", "qk_norm", "sinks", "bias", "scale_embedding")
_BIAS_HELP = "every projection has a bias (with --weights: as the file has them)"


def spec_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for every field of a spec; those not given arrive as None."""
    command = field_options(command, [field.name for field in attrs.fields(Spec)])
    return click.option("--encoding", metavar="NAME", help="one of: " + ", ".join(ENCODINGS))(command)


def field_options(command: Callable[..., Any], names: Collection[str]) -> Callable[..., Any]:
    """Add an option for each of these fields of a spec but its encoding, and `--set`."""
    for field in reversed(attrs.fields(Spec)):
        if field.name == "encoding" or field.name not in names:
            continue
        name = field.name.replace("_", "-")
        if field.name in _FLAGS:
            text = _BIAS_HELP if field.name == "bias" else field.metadata["help"]
            option = click.option(f"--{name}/--no-{name}", field.name, default=None, help=f"{text}  [default: no]")
        else:
            shown = "" if field.default in (None, ()) else f"  [default: {field.default}]"
            kind = field.metadata["allowed"].upper() if " or " in field.metadata["allowed"] else "N"
            kind = "PATTERN" if field.name == "layer_pattern" else kind
            metavar = kind.replace(" OR ", "|").lower() if "|" in kind.replace(" OR ", "|") else kind
            # bare `--kv-cache` is the first kind
            bare: dict[str, Any] = {"is_flag": False, "flag_value": CACHES[0]} if field.name == "kv_cache" else {}
            help = field.metadata["help"] + shown
            option = click.option(f"--{name}", field.name, metavar=metavar, help=help, **bare)
        command = option(command)
    return click.option(
        "--set",
        "parameters",
        metavar="KEY=VALUE",
        multiple=True,
        help="a parameter of the encoding, repeatable; 'posexport list' shows them",
    )(command)


def read_config(path: Path, known: Collection[str]) -> dict[str, Any]:
    """The options in a TOML file, named as on the command line (`-` or `_`), `[set]` a table; unknown ones refused."""
    return known_options(read_toml(path, "config"), f"config {str(path)!r}", known)


def known_options(data: Mapping[str, Any], where: str, known: Collection[str]) -> dict[str, Any]:
    """The options of a file that `where` names in words; RequestError for what isn't one."""
    options: dict[str, Any] = {}
    for key, value in data.items():
        name = key.replace("-", "_")
        if name not in known and name != "set":
            raise unknown(f"key in {where}", key, [*known, "set"])
        if name in options:
            raise RequestError(f"{where} gives {name} twice, with '-' and with '_': drop one.")
        options[name] = value
    if not isinstance(options.get("set", {}), dict):
        raise RequestError(f"{where}: set must be a table of parameters, such as [set] theta = 500000.")
    return options


def preset_options(name: str) -> dict[str, Any]:
    """The options that a preset stands for, all of them fields of a spec, and `set`."""
    return known_options(read_preset(name).options, f"preset {name!r}", [field.name for field in attrs.fields(Spec)])


def check_layers_follow(options: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse what is `given` on the command line where layers of a file's pattern have their own: it would not win."""
    pattern = options.get("layer_pattern")
    if pattern is None or "layer_pattern" in given:
        return
    own = {key for part in _pattern_parts(pattern) for key in _read_layer(part)[1]}
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


def spec_of(options: Mapping[str, Any], parameters: Mapping[str, Any]) -> Spec:
    """The spec that the options describe; None means "not given"."""
    encoding = options.get("encoding")
    if encoding is None and options.get("layer_pattern") is not None:
        encoding = _read_layer(_pattern_parts(options["layer_pattern"])[0])[0]
    if encoding is None:
        raise RequestError(f"no encoding was given: add --encoding with one of {', '.join(ENCODINGS)}.")
    if "name" in parameters:
        raise unknown(f"parameter of {encoding}", "name", [])
    names = (field.name for field in attrs.fields(Spec) if field.name != "encoding")
    sizes = {name: options[name] for name in names if options.get(name) is not None}
    data = {"encoding": {"name": encoding, **parameters}, **sizes}
    if "layer_pattern" in sizes:
        layers = data["layer_pattern"] = read_pattern(sizes["layer_pattern"], data["encoding"])
        if encoding not in {layer["encoding"]["name"] for layer in layers}:
            raise RequestError(
                f"encoding {encoding} was given, but no layer of layer_pattern has it: drop one of them."
            )
        _check_reach(layers, sizes, _pattern_parts(options["layer_pattern"]), parameters)
        data["encoding"] = layers[0]["encoding"]
    return read_spec(data)


def _check_reach(
    layers: list[dict[str, Any]], sizes: Mapping[str, Any], parts: list[str], parameters: Mapping[str, Any]
) -> None:
    """RequestError for what is given for all layers where each has it otherwise."""
    given = [_read_layer(part)[1] for part in parts]
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
    for part in _pattern_parts(value):
        name, given, count = _read_layer(part)
        if name not in ENCODINGS:
            raise unknown("encoding in layer_pattern", name, ENCODINGS)
        own = {key: given.pop(key) for key in LAYER_FIELDS if key in given}
        encoding = {**(base if name == base["name"] else {}), "name": name, **given}
        layers += [{"encoding": encoding, **own}] * count
    return layers


def _pattern_parts(value: Any) -> list[str]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list) or not parts or not all(isinstance(part, str) for part in parts):
        raise RequestError(f"layer_pattern is {value!r}: it must be names of encodings, such as rope*3,none.")
    return parts


def _read_layer(part: str) -> tuple[str, dict[str, str], int]:
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
