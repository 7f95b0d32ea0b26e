"""Encodings, and the torch blocks that use them.

Importing this package does not load torch, because the table below is data. Import `posexport.models.block` to build a
block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from posexport.errors import RequestError, check_known, shown, unknown
from posexport.models.absolute import Learned, NoEncoding, Sinusoidal, Temperature
from posexport.models.axes import Mrope, Rope2d, Rope3d, RopeDinov3, RopeMixed, RopeVjepa2
from posexport.models.biases import T5, Alibi, Alibi2d, Fire, Kerple, Sandwich, Swin, SwinV2
from posexport.models.content import Cope, Deberta, Relative, Shaw
from posexport.models.rotary import Rope, XPos
from posexport.spec.encoding import Encoding
from posexport.spec.spec import LAYER_FIELDS, MOST_LAYERS, Layer, Spec

ENCODINGS: dict[str, type[Encoding]] = {
    cls.name: cls
    for cls in (
        *(NoEncoding, Learned, Sinusoidal, Relative, T5, Rope, Rope2d, Alibi),
        *(XPos, Mrope, Rope3d, RopeMixed, RopeDinov3, RopeVjepa2),
        *(Alibi2d, Kerple, Sandwich, Fire, Shaw, Deberta, Cope, Swin, SwinV2, Temperature),
    )
}
"""Every encoding by name, in the order that `posexport list` shows."""


def read_encoding(data: Mapping[str, Any]) -> Encoding:
    """Read an encoding from `{"name": ..., parameter: value}`. RequestError for unknown names and invalid values."""
    parameters = dict(data)
    name = parameters.pop("name", None)
    if not isinstance(name, str) or name not in ENCODINGS:
        raise unknown("encoding", str(name), ENCODINGS)
    cls = ENCODINGS[name]
    _check_names(f"parameter of {name}", parameters, [field.name for field in attrs.fields(cls)])
    return cls(**parameters)


def read_spec(data: Mapping[str, Any]) -> Spec:
    """Read a spec from plain data as `Spec.to_dict` writes it. Missing fields get their defaults."""
    fields = dict(data)
    encoding = fields.pop("encoding", None)
    if not isinstance(encoding, Mapping):
        raise RequestError(f"encoding is {encoding!r}: it must be a table with a name, such as {{'name': 'rope'}}.")
    _check_names("field of a spec", fields, [field.name for field in attrs.fields(Spec)])
    if fields.get("layer_pattern"):
        if not isinstance(fields["layer_pattern"], list | tuple):
            raise RequestError(f"layer_pattern is {fields['layer_pattern']!r}: it must be a list of layers.")
        if len(fields["layer_pattern"]) > MOST_LAYERS:  # before any layer is read
            raise RequestError(f"layer_pattern has {len(fields['layer_pattern'])} layers: at most {MOST_LAYERS}.")
        fields["layer_pattern"] = [_read_layer(layer) for layer in fields["layer_pattern"]]
    return Spec(encoding=read_encoding(encoding), **fields)


def _read_layer(data: object) -> Layer:
    """Read one kind of layer of a pattern from `{"encoding": {...}, field: value}`."""
    if not isinstance(data, Mapping) or not isinstance(data.get("encoding"), Mapping):
        raise RequestError(f"layer_pattern has {shown(data)}: each layer must be a table with an encoding.")
    fields = {key: value for key, value in data.items() if key != "encoding"}
    _check_names("field of a layer", fields, LAYER_FIELDS)
    return Layer(encoding=read_encoding(data["encoding"]), **fields)


def _check_names(kind: str, names: Iterable[str], allowed: Sequence[str]) -> None:
    for name in names:
        check_known(kind, name, allowed)
