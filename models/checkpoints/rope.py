"""Reads the rotary parameters of a config.json as parameters of our rotary encodings.

transformers 5 writes a table `rope_parameters` with `rope_type` and `rope_theta`, for some architectures one table for
each kind of layer. Older versions write `rope_theta` outside the table `rope_scaling`, whose `rope_type` was first
called `type`. All mean the same; numbers in the table take precedence over those outside. The parameters of a scaling
have the same names as in `posexport.models.scaling`.
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
_UNNAMED = ("ntk",)
"""Our scalings that have no name in config.json."""

_BY_LENGTHS = ("yarn", "longrope")
"""Scalings whose factor defaults to the context length divided by the trained length."""

TYPES: Mapping[str, str | None] = {"default": None} | {name: name for name in SCALINGS if name not in _UNNAMED}
"""`rope_type` to our scaling."""


@attrs.frozen(kw_only=True)
class Rotary:
    """How an architecture writes its rotary parameters.

    `theta` and `theta_names`: the default and the keys of theta outside the table. `part` and `part_names`: the default
    and the keys of the rotated part of each head, None where the architecture has no such key. `types`: `rope_type` to
    scaling. `missing`: the table's default. `trained_length`: the trained length where a key outside the table sets it.
    """

    theta: float = 10_000.0
    theta_names: tuple[str, ...] = ("rope_theta",)
    part: float | None = None
    part_names: tuple[str, ...] = ("partial_rotary_factor",)
    types: Mapping[str, str | None] = TYPES
    missing: Mapping[str, Any] = {}
    trained_length: int | None = None

    def read(self, config: Config, head_dim: int) -> Data:
        """Parameters that `rope` and `mrope` share, without `layout`."""
        return self.of(config, self.table(config), head_dim, self.theta_outside(config))

    def theta_outside(self, config: Config) -> float:
        """Theta outside the table, for tables that have none."""
        return config.number(*self.theta_names, default=self.theta)

    def table(self, config: Config) -> Config:
        """`rope_parameters`, or `rope_scaling` of older versions."""
        new, old = config.table("rope_parameters"), config.table("rope_scaling")
        if new.data and old.data:
            raise config.wrong("rope_scaling", "null where rope_parameters is given: drop one of them")
        table = new if new.data else old
        return table if table.data else Config(self.missing, config.where)

    def of(self, config: Config, table: Config, head_dim: int, theta: float) -> Data:
        """As `read`, from a given table; `theta` is the default."""
        old = table.text("type", allowed=self.types, default="default")  # ignored where rope_type is given
        kind = self.types[table.text("rope_type", allowed=self.types, default=old)]
        parameters: Data = {"theta": table.number("rope_theta", default=theta)}
        if kind is not None:
            parameters |= {"scaling": kind, **self._scaling(config, table, kind)}
        if kind != "proportional":  # that scaling reads the part itself
            part = self._part(config, table)
            parameters |= {"rotary_dim": int(head_dim * part)} if part < 1 else {}
        return parameters

    def _part(self, config: Config, table: Config) -> float:
        """The part of each head that rotates, from 0 to 1."""
        if self.part is None:
            for place in (config, table):
                place.must("partial_rotary_factor", None, 1)
            return 1.0
        part = table.number("partial_rotary_factor", default=config.number(*self.part_names, default=self.part))
        if not 0 < part <= 1:
            raise RequestError(f"{config.where}: partial_rotary_factor is {part}: it must be above 0, and at most 1.")
        return part

    def _scaling(self, config: Config, table: Config, kind: str) -> Data:
        values = {name: table.value(name) for name in SCALINGS[kind].takes if (kind, name) != ("dynamic", _LENGTH)}
        if _LENGTH in SCALINGS[kind].takes:
            length = self.trained_length or values.get(_LENGTH)
            values[_LENGTH] = _length(config, kind) if length is None else length
        if kind in _BY_LENGTHS and values["factor"] is None:
            trained = values[_LENGTH]
            if not isinstance(trained, int) or isinstance(trained, bool) or trained < 1:
                raise RequestError(f"{config.where}: {_LENGTH} is {trained!r}: it must be a whole number from 1.")
            values["factor"] = _length(config, kind) / trained
        if kind == "proportional" and values["partial_rotary_factor"] is None:
            values["partial_rotary_factor"] = 1.0
        return {name: value for name, value in values.items() if value is not None}


def _length(config: Config, kind: str) -> int:
    length = config.optional_integer("max_position_embeddings")
    if length is None:
        raise RequestError(f"{config.where}: max_position_embeddings is missing: scaling {kind} needs it.")
    return length


@attrs.frozen(kw_only=True)
class ByKind:
    """Rotary parameters for each kind of layer. `scaled` are the kinds to which `rope_scaling` applies, the table of
    older versions for the whole model."""

    kinds: Mapping[str, Rotary]
    scaled: tuple[str, ...]

    def read(self, config: Config, head_dim: int, kind: str) -> Data:
        """The parameters of one kind of layer. All kinds are read, so that unknown keys of any kind are noticed."""
        return {name: self._of(config, head_dim, name) for name in self.kinds}[kind]

    def _of(self, config: Config, head_dim: int, kind: str) -> Data:
        rotary, old = self.kinds[kind], config.table("rope_scaling")
        new = config.table("rope_parameters").table(kind)
        if new.data and old.data:
            raise config.wrong("rope_scaling", "null where rope_parameters is given: drop one of them")
        table = old if old.data and kind in self.scaled else new
        return rotary.of(config, table, head_dim, rotary.theta_outside(config))


def axial_theta(config: Config, name: str) -> float:
    """Theta of a rotation over two axes, which has no scaling; `name` is its key outside the table."""
    rotary = Rotary(theta_names=(name,), types={"default": None, "axial": None})
    return float(rotary.read(config, 4)["theta"])
