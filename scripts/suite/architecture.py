"""One architecture of the suite: a configuration of transformers, and what its attention holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

HIDDEN, HEADS, KEY_HEADS, LAYERS, VOCABULARY = 64, 4, 2, 2, 128
HEAD_SIZE = HIDDEN // HEADS


@attrs.frozen(kw_only=True)
class Architecture:
    """A model to export.

    `kind` names its wrapper: decoder, tokens, image, audio. `config` and `model` are names of classes in transformers;
    `options` go to the configuration. `sites` counts the attentions that the exported graph holds; `encoding` is what
    tells them positions, `rope` the layout of a rotation (half, interleaved, 2d; with "partial" where some features
    stay as they are). `attention` is the implementation in transformers.
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
    """Factor of the weights of queries and keys: scores get a spread of a few units."""
    part: str = ""
    """Module inside the model that is exported, where it is not all of it."""
    dtype: str = "float32"
    notes: str = ""


def architecture(
    usual_kind: str, ending: str, name: str, prefix: str, encoding: str, options: Mapping[str, Any], **more: Any
) -> Architecture:
    """A row of the usual kind with classes named `<prefix>Config` and `<prefix><ending>`, unless `more` has others."""
    usual = {"kind": usual_kind, "config": f"{prefix}Config", "model": f"{prefix}{ending}"}
    return Architecture(name=name, encoding=encoding, options=options, **{**usual, **more})
