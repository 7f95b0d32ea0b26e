"""Presets: the attention of a public model, as data in `posexport/spec/preset_files/<name>.toml`.

A file has the keys of `posexport export --config` that describe a block, and two more. `summary` names the model and
its layers. `source` is the public config or code with these numbers. If the layers of a model differ, `layer-pattern`
lists all kinds: one layer is the first kind, a stack follows the pattern. A new preset is one file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import attrs

from posexport.errors import RequestError, check_known

FOLDER = files("posexport.spec").joinpath("preset_files")


@attrs.frozen(kw_only=True)
class Preset:
    """One preset: the model, the source of its numbers, and its options, named as in the file."""

    summary: str
    source: str
    options: Mapping[str, Any]


def preset_names() -> list[str]:
    """Return the names of all presets, sorted."""
    return sorted(file.name.removesuffix(".toml") for file in FOLDER.iterdir() if file.name.endswith(".toml"))


def read_preset(name: str) -> Preset:
    """Return the preset of a name. RequestError if there is none, or if its summary or source is missing."""
    names = preset_names()
    check_known("preset", name, names)
    options = tomllib.loads(FOLDER.joinpath(f"{name}.toml").read_text(encoding="utf-8"))
    summary, source = options.pop("summary", None), options.pop("source", None)
    if not (isinstance(summary, str) and summary and isinstance(source, str) and source):
        raise RequestError(f"preset {name!r} lacks its summary or its source: give both.")
    return Preset(summary=summary, source=source, options=options)
