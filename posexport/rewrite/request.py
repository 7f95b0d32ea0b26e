"""The request of `posexport rewrite`, as data; imports no engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from posexport.spec.fields import choice, flag, integer, parsed
from posexport.spec.forms import FORMS, TARGETS

LOWEST_OPSET = 11
"""The lowest opset of a file that can be rewritten."""


def _one_of(*names: str) -> Callable[[Any], str]:
    def read(given: Any) -> str:
        if given not in names:
            raise ValueError
        return str(given)

    return read


def _texts(given: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(given, list | tuple) or not all(isinstance(item, str) and item for item in given):
        raise TypeError
    return tuple(dict.fromkeys(given))


@attrs.frozen(kw_only=True)
class RewriteOptions:
    """How attention is rewritten. RequestError for a value that can't be read.

    `only` names the chosen attentions, by default all. `roles` says what inputs are for, by name, if that can't be
    guessed (posexport.graphs.roles). With `require_all`, nothing is written if one attention is left as it was.
    """

    form: str = choice("decomposed", tuple(FORMS), "how attention is written")
    target: str = choice("portable", tuple(TARGETS), "what it is written for")
    opset: int | None = integer(None, "the opset of the new file", at_least=1)
    kv_cache: str | None = parsed("what becomes of caches", "shared, or not given", _one_of("shared"))
    angles: str | None = parsed("how angles are computed", "exact, or not given", _one_of("exact"))
    only: tuple[str, ...] = parsed("the attentions to rewrite", "a list of names", _texts, ())
    roles: Mapping[str, str] = attrs.field(factory=dict)
    seed: int = integer(0, "seed of the inputs that are drawn", at_least=0)
    require_all: bool = flag(False, "write nothing where an attention is left")
