"""Reads the rotary parameters of a config.json as parameters of our rotary encodings.

transformers 5 writes a table `rope_parameters` with `rope_type` and `rope_theta`. For some architectures it writes one
table for each type of layer. Older versions write `rope_theta` outside the table `rope_scaling`. Its `rope_type` was
first called `type`. All have the same meaning. Numbers in the table take precedence over numbers outside it. The
parameters of a scaling have the same names as in `posexport.models.scaling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from posexport.errors import RequestError
from posexport.models.checkpoints.architecture import FULL, SLIDING
from posexport.models.checkpoints.config import Config, Data
from posexport.models.scaling import SCALINGS

_LENGTH = "original_max_position_embeddings"

TYPES: Mapping[str, str | None] = {"default": None} | {name: name for name in SCALINGS if name != "ntk"}
"""Maps `rope_type` to our scaling. `ntk` has no name in config.json."""


@attrs.frozen(kw_only=True)
class Rotary:
    """How an architecture writes its rotary parameters.

    `theta` and `theta_names`: the default and the keys of theta outside the table. `part` and `part_names`: the default
    and the keys of the rotated part of each head; `part` is None if the architecture has no such key. `ignored`: keys
    outside the table that transformers does not read for this architecture. `types`: maps `rope_type` to a scaling.
    `missing`: the default of the table. `length`: the default of max_position_embeddings. `trained_length`: the default
    of the trained length outside the table, if the architecture has one.
    """

    length: int
    theta: float = 10_000.0
    theta_names: tuple[str, ...] = ("rope_theta",)
    part: float | None = None
    part_names: tuple[str, ...] = ("partial_rotary_factor",)
    ignored: tuple[str, ...] = ()
    types: Mapping[str, str | None] = TYPES
    missing: Mapping[str, Any] = {}
    trained_length: int | None = None

    def read(self, config: Config, head_dim: int) -> Data:
        """Read the parameters that `rope` and `mrope` share, without `layout`."""
        trained = config.optional_integer(_LENGTH, default=self.trained_length)
        table = self.table(config)
        parameters = self.of(config, table, head_dim, trained)
        if parameters.get("scaling") == "yarn" and table.data.get("truncate", True) is None:
            parameters["truncate"] = False  # in transformers null means false, but a missing key does not
        return parameters

    def table(self, config: Config) -> Config:
        """Return `rope_parameters`, or `rope_scaling` of older versions."""
        table = _new_or_old(config, config.table("rope_parameters"))
        given = table.data or config.value("rope_parameters") is not None  # an empty table means no scaling
        return table if given else Config(self.missing, config.where)

    def of(self, config: Config, table: Config, head_dim: int, trained: int | None = None) -> Data:
        """Do the same as `read` for a given table. Theta and the `trained` length outside it are defaults."""
        for key in self.ignored:
            config.value(key)
        theta = config.number(*self.theta_names, default=self.theta)
        old = table.text("type", allowed=self.types, default="default")  # ignored if rope_type is given
        kind = self.types[table.text("rope_type", allowed=self.types, default=old)]
        parameters: Data = {"theta": table.number("rope_theta", default=theta)}
        part = self._part(config, table, kind)
        if kind is not None:
            parameters |= {"scaling": kind, **self._scaling(config, table, kind, trained)}
        if kind == "proportional":
            parameters["partial_rotary_factor"] = part
        elif part < 1:
            parameters["rotary_dim"] = int(head_dim * part)
        return parameters

    def _part(self, config: Config, table: Config, kind: str | None) -> float:
        """Return the part of each head that rotates, from 0 to 1."""
        if self.part is None and kind != "proportional":
            for place in (config, table):
                place.must("partial_rotary_factor", None, 1)
            return 1.0
        default = 1.0 if self.part is None else self.part
        part = table.number("partial_rotary_factor", default=config.number(*self.part_names, default=default))
        if not 0 < part <= 1:
            raise RequestError(f"{config.where}: partial_rotary_factor is {part}: it must be above 0, and at most 1.")
        return part

    def _scaling(self, config: Config, table: Config, kind: str, trained: int | None) -> Data:
        names = set(SCALINGS[kind].takes) - ({_LENGTH} if kind == "dynamic" else {"partial_rotary_factor"})
        values = {name: table.value(name) for name in names}
        longest = config.optional_integer("max_position_embeddings") or self.length
        if _LENGTH in SCALINGS[kind].takes:
            inside = longest if values.get(_LENGTH) is None else values[_LENGTH]
            values[_LENGTH] = inside if trained is None or kind == "dynamic" else trained
        if kind in ("yarn", "longrope") and values["factor"] is None:
            length = values[_LENGTH]
            if not isinstance(length, int) or isinstance(length, bool) or length < 1:
                raise RequestError(f"{config.where}: {_LENGTH} is {length!r}: it must be a whole number from 1.")
            # longrope uses this only for its attention factor, which is 1 for ratios below 1
            values["factor"] = max(longest / length, 1.0) if kind == "longrope" else longest / length
        if kind == "yarn":  # 0 means the default; only one of the two mscales has no effect
            values |= {name: values[name] or None for name in ("beta_fast", "beta_slow")}
            both = values["mscale"] and values["mscale_all_dim"]
            values |= {} if both else {"mscale": None, "mscale_all_dim": None}
        return {name: value for name, value in values.items() if value is not None}


def _new_or_old(config: Config, new: Config) -> Config:
    """Return a table of rotary parameters, or `rope_scaling` of older versions if that table is empty."""
    old = config.table("rope_scaling")
    if new.data and old.data:
        raise config.wrong("rope_scaling", "null where rope_parameters is given: drop one of them")
    return new if new.data else old


def rope(config: Config, head_dim: int, rotary: Rotary, layout: str = "half") -> Data:
    """Return the encoding `rope`."""
    return {"name": "rope", "layout": layout, **rotary.read(config, head_dim)}


def rope_by_kind(
    config: Config, head_dim: int, slides: bool, full: Rotary, sliding: Rotary, scaled_sliding: bool
) -> Data:
    """Return the encoding `rope` of a layer with or without a window.

    Both tables are read, so that unknown keys of either are found. Older versions have one table `rope_scaling` for the
    whole model. It applies to layers with a window only if `scaled_sliding`.
    """
    parameters = {}
    for kind, rotary, scaled in ((FULL, full, True), (SLIDING, sliding, scaled_sliding)):
        new = config.table("rope_parameters").table(kind)
        table = _new_or_old(config, new)
        if (
            scaled
            and table is not new
            and "rope_type" not in table.data
            and table.value("type") not in (None, "default")
        ):
            raise config.wrong("rope_scaling", "with rope_type, because transformers ignores type in it here")
        parameters[kind] = rotary.of(config, table if scaled else new, head_dim)
        if parameters[kind].get("truncate") is False:
            raise table.wrong("truncate", "true or left out, because transformers ignores it here")
    return {"name": "rope", "layout": "half", **parameters[SLIDING if slides else FULL]}


def axial_theta(config: Config, name: str) -> float:
    """Return theta of a rotation over two axes, which has no scaling. `name` is its key outside the table."""
    rotary = Rotary(length=1, theta_names=(name,), types={"default": None, "axial": None})
    return float(rotary.read(config, 4)["theta"])
