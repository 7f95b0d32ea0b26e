"""Presets: one attention layer of a public model each, as data in `posexport/spec/preset_files/<name>.toml`.

A file has the keys of `posexport export --config` that describe a block, and two of its own: `summary` says which model
and which of its layers it is, `source` is the public config or code that its numbers come from. Where the layers of a
model differ, `layer-pattern` has all kinds: one layer is the first kind, a stack the model's. A new preset is one file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import attrs

from posexport.errors import RequestError, unknown

FOLDER = files("posexport.spec").joinpath("preset_files")


@attrs.frozen(kw_only=True)
class Preset:
    """One preset: where it comes from, and the options that it stands for, named as in its file."""

    summary: str
    source: str
    options: Mapping[str, Any]


def preset_names() -> list[str]:
    """The names of all presets, sorted."""
    return sorted(file.name.removesuffix(".toml") for file in FOLDER.iterdir() if file.name.endswith(".toml"))


def read_preset(name: str) -> Preset:
    """The preset of a name; RequestError where there is none, or where it doesn't say what it is."""
    names = preset_names()
    if name not in names:
        raise unknown("preset", name, names)
    data = tomllib.loads(FOLDER.joinpath(f"{name}.toml").read_text(encoding="utf-8"))
    said = [data.pop(key, None) for key in ("summary", "source")]
    if not all(isinstance(text, str) and text for text in said):
        raise RequestError(f"preset {name!r} lacks its summary or its source: give both.")
    return Preset(summary=said[0], source=said[1], options=data)
