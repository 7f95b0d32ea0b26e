"""The torch side of posexport: encodings, and the blocks that use them.

Importing this package loads no torch: the table below is data, and `posexport.models.block` is imported by those who
build a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from posexport.errors import RequestError, unknown
from posexport.models.absolute import Learned, Sinusoidal
from posexport.models.axes import Mrope, Rope2d, Rope3d, RopeDinov3, RopeMixed, RopeVjepa2
from posexport.models.biases import T5, Alibi, Alibi2d, Fire, Kerple, Sandwich
from posexport.models.content import Cope, Deberta, Shaw
from posexport.models.none import NoEncoding
from posexport.models.relative import Relative
from posexport.models.rotary import Rope, XPos
from posexport.models.temperature import Temperature
from posexport.models.windows import Swin, SwinV2
from posexport.spec.encoding import Encoding
from posexport.spec.spec import LAYER_FIELDS, Layer, Spec

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
    """An encoding from `{"name": ..., parameter: value}`; raises RequestError for what isn't known or allowed."""
    rest = dict(data)
    name = rest.pop("name", None)
    if not isinstance(name, str) or name not in ENCODINGS:
        raise unknown("encoding", str(name), ENCODINGS)
    cls = ENCODINGS[name]
    known = [field.name for field in attrs.fields(cls)]
    for key in rest:
        if key not in known:
            raise unknown(f"parameter of {name}", key, known)
    return cls(**rest)


def read_spec(data: Mapping[str, Any]) -> Spec:
    """A spec from plain data as `Spec.to_dict` writes it; missing fields take their defaults."""
    rest = dict(data)
    encoding = rest.pop("encoding", None)
    if not isinstance(encoding, Mapping):
        raise RequestError(f"encoding is {encoding!r}: it must be a table with a name, such as {{'name': 'rope'}}.")
    known = [field.name for field in attrs.fields(Spec)]
    for key in rest:
        if key not in known:
            raise unknown("field of a spec", key, known)
    if rest.get("layer_pattern"):
        if not isinstance(rest["layer_pattern"], list | tuple):
            raise RequestError(f"layer_pattern is {rest['layer_pattern']!r}: it must be a list of layers.")
        rest["layer_pattern"] = [read_layer(layer) for layer in rest["layer_pattern"]]
    return Spec(encoding=read_encoding(encoding), **rest)


def read_layer(data: Any) -> Layer:
    """One kind of layer of a pattern from `{"encoding": {...}, field: value}`."""
    if not isinstance(data, Mapping) or not isinstance(data.get("encoding"), Mapping):
        raise RequestError(f"layer_pattern has {data!r}: each layer must be a table with an encoding.")
    rest = {key: value for key, value in data.items() if key != "encoding"}
    for key in rest:
        if key not in LAYER_FIELDS:
            raise unknown("field of a layer", key, LAYER_FIELDS)
    return Layer(encoding=read_encoding(data["encoding"]), **rest)
