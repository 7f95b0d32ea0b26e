"""One architecture of the suite: a configuration of transformers and facts about its attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

HIDDEN, HEADS, KEY_HEADS, LAYERS, VOCABULARY = 64, 4, 2, 2, 128
HEAD_SIZE = HIDDEN // HEADS


@attrs.frozen(kw_only=True)
class Architecture:
    """A model to export.

    `kind` names its wrapper in `wrappers.WRAPPERS`, for example decoder, tokens, image or audio. `config` and `model`
    are names of classes in transformers; `options` are passed to the configuration. `sites` is the number of attentions
    in the exported graph. `encoding` is what gives them positions. `rope` is the layout of a rotation (half,
    interleaved, 2d), followed by "partial" if some features are not rotated. `attention` is the implementation in
    transformers.
    """

    name: str
    kind: str
    config: str
    model: str
    options: Mapping[str, Any]
    encoding: str
    rope: str = ""
    sites: int = LAYERS
    attention: str = "sdpa"
    positions: bool = True
    """Whether a decoder takes position_ids."""
    gain: float = 1.6
    """A factor for the weights of queries and keys. It gives scores a spread of a few units."""
    part: str = ""
    """The submodule to export, if not the whole model is exported."""
    dtype: str = "float32"
    notes: str = ""


def architecture(
    usual_kind: str, ending: str, name: str, prefix: str, encoding: str, options: Mapping[str, Any], **more: Any
) -> Architecture:
    """An architecture with classes named `<prefix>Config` and `<prefix><ending>`, unless `more` names others."""
    usual = {"kind": usual_kind, "config": f"{prefix}Config", "model": f"{prefix}{ending}"}
    return Architecture(name=name, encoding=encoding, options=options, **{**usual, **more})
