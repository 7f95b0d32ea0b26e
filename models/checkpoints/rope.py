"""Rotary parameters of a config.json as those of our rotary encodings.

transformers 5 writes `rope_parameters` with `rope_type` and `rope_theta` in it, for some architectures one for each
kind of layer; before, `rope_theta` stood beside `rope_scaling`, whose `rope_type` was once called `type`. All mean the
same, and the table's own numbers win over those beside it. Scalings take what `posexport.models.scaling` says, by the
same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from posexport.errors import RequestError
from posexport.models.checkpoints.config import Config
from posexport.models.scaling import SCALINGS

Data = dict[str, Any]

_LENGTH = "original_max_position_embeddings"
_OWN = ("ntk",)
"""Scalings of ours that no config.json can name."""

_BY_LENGTHS = ("yarn", "longrope")
"""Scalings whose factor, where it isn't given, is how many times longer the context is than the trained one."""

TYPES: Mapping[str, str | None] = {"default": None} | {name: name for name in SCALINGS if name not in _OWN}
"""A `rope_type` and the scaling that it stands for."""


@attrs.frozen(kw_only=True)
class Rotary:
    """What an architecture makes of its rotary parameters: the default of theta and its names beside the table; the
    part of each head that turns, where the architecture has such a key, and its names; its types; the table that stands
    where none is given; and the trained length, where a key beside the table decides it."""

    theta: float = 10_000.0
    theta_names: tuple[str, ...] = ("rope_theta",)
    part: float | None = None
    part_names: tuple[str, ...] = ("partial_rotary_factor",)
    types: Mapping[str, str | None] = TYPES
    missing: Mapping[str, Any] = {}
    trained_length: int | None = None

    def read(self, config: Config, head_dim: int) -> Data:
        """Parameters that `rope` and `mrope` share, without `layout`."""
        return self.of(config, self.table(config), head_dim, self.theta_beside(config))

    def theta_beside(self, config: Config) -> float:
        """Theta where the table has none."""
        return config.number(*self.theta_names, default=self.theta)

    def table(self, config: Config) -> Config:
        """`rope_parameters`, or `rope_scaling` of before."""
        new, old = config.table("rope_parameters"), config.table("rope_scaling")
        if new.data and old.data:
            raise config.wrong("rope_scaling", "null where rope_parameters is given: drop one of them")
        given = new if new.data else old
        return given if given.data else Config(self.missing, config.where)

    def of(self, config: Config, table: Config, head_dim: int, theta: float) -> Data:
        """The same from a table; `theta` stands where it has none."""
        old = table.text("type", allowed=self.types, default="default")  # beside a rope_type it says nothing
        kind = self.types[table.text("rope_type", allowed=self.types, default=old)]
        found: Data = {"theta": table.number("rope_theta", default=theta)}
        if kind is not None:
            found |= {"scaling": kind, **self._scaling(config, table, kind)}
        if kind != "proportional":  # which has a part of its own
            part = self._part(config, table)
            found |= {"rotary_dim": int(head_dim * part)} if part < 1 else {}
        return found

    def _part(self, config: Config, table: Config) -> float:
        """How much of each head turns."""
        if self.part is None:
            for place in (config, table):
                place.must("partial_rotary_factor", None, 1)
            return 1.0
        part = table.number("partial_rotary_factor", default=config.number(*self.part_names, default=self.part))
        if not 0 < part <= 1:
            raise RequestError(f"{config.where}: partial_rotary_factor is {part}: it must be above 0, and at most 1.")
        return part

    def _scaling(self, config: Config, table: Config, kind: str) -> Data:
        found = {name: table.value(name) for name in SCALINGS[kind].takes if (kind, name) != ("dynamic", _LENGTH)}
        if _LENGTH in SCALINGS[kind].takes:
            given = self.trained_length or found.get(_LENGTH)
            found[_LENGTH] = _length(config, kind) if given is None else given
        if kind in _BY_LENGTHS and found["factor"] is None:
            trained = found[_LENGTH]
            if not isinstance(trained, int) or isinstance(trained, bool) or trained < 1:
                raise RequestError(f"{config.where}: {_LENGTH} is {trained!r}: it must be a whole number from 1.")
            found["factor"] = _length(config, kind) / trained
        if kind == "proportional" and found["partial_rotary_factor"] is None:
            found["partial_rotary_factor"] = 1.0
        return {name: value for name, value in found.items() if value is not None}


def _length(config: Config, kind: str) -> int:
    length = config.optional_integer("max_position_embeddings")
    if length is None:
        raise RequestError(f"{config.where}: max_position_embeddings is not there: scaling {kind} needs it.")
    return length


@attrs.frozen(kw_only=True)
class ByKind:
    """Rotary parameters for each kind of layer: the kinds' own defaults, and those kinds that a `rope_scaling` of
    before, which stood for the whole model, is for."""

    kinds: Mapping[str, Rotary]
    scaled: tuple[str, ...]

    def read(self, config: Config, head_dim: int, kind: str) -> Data:
        """Those of one kind of layer. All are read, so that no kind's unknown key goes unnoticed."""
        found = {name: self._of(config, head_dim, name) for name in self.kinds}
        return found[kind]

    def _of(self, config: Config, head_dim: int, kind: str) -> Data:
        rotary, old = self.kinds[kind], config.table("rope_scaling")
        new = config.table("rope_parameters").table(kind)
        if new.data and old.data:
            raise config.wrong("rope_scaling", "null where rope_parameters is given: drop one of them")
        table = old if old.data and kind in self.scaled else new
        return rotary.of(config, table, head_dim, rotary.theta_beside(config))


def axial_theta(config: Config, name: str) -> float:
    """Theta of a rotation over two axes, which knows no scaling; `name` is its key beside the table."""
    rotary = Rotary(theta_names=(name,), types={"default": None, "axial": None})
    found: float = rotary.read(config, 4)["theta"]
    return found
