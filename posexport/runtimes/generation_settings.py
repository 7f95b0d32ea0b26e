"""What a model's generation_config.json says about the choice of tokens, except those that begin and end a text.

Suppressed tokens are never chosen, and the last token that may be made can be a forced one, as in transformers. Other
settings that transformers applies when it takes the likeliest token, such as a penalty for repetition, are not applied.
They are named.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from posexport.errors import RequestError, shown
from posexport.jsondata import is_whole
from posexport.runtimes.tokens import MOST_TOKENS, generation_part, stop_tokens

_WITHOUT_EFFECT: Mapping[str, object] = {
    "guidance_scale": 1,
    "sequence_bias": None,
    "encoder_repetition_penalty": 1,
    "repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "exponential_decay_length_penalty": None,
    "watermarking_config": None,
    "num_beams": 1,
    "penalty_alpha": 0,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
    "stop_strings": None,
}
"""Settings that are not applied, with the values that change nothing."""


@attrs.frozen(kw_only=True)
class GenerationSettings:
    """The ids that are never chosen, those that are not chosen first, and those that may be forced as the last token.

    `ignored` are the settings of `file` that are not applied, with their values.
    """

    file: str = ""
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    forced_last: tuple[int, ...] = ()
    ignored: tuple[str, ...] = ()


def generation_settings(folder: Path) -> GenerationSettings:
    """The settings of generation_config.json in a folder, or of config.json if that doesn't exist.

    transformers reads them in the same way. RequestError for a file that can't be read, and for a list of tokens that
    is not valid.
    """
    name, settings = generation_part(folder)
    return _settings(folder, name, settings) if name else GenerationSettings()


def _settings(folder: Path, name: str, config: Mapping[str, Any]) -> GenerationSettings:
    path = folder / name
    words = config.get("bad_words_ids") or []
    if not isinstance(words, list) or not all(isinstance(word, list) for word in words):
        raise RequestError(f"{str(path)!r} has the bad_words_ids {shown(words)}: give a list of lists of ids, or none.")
    ends = stop_tokens(folder) if words else ()  # transformers leaves them out
    single = [word[0] for word in words if len(word) == 1 and word[0] not in ends]
    ignored = [
        f"{key} {shown(config[key])}"
        for key, neutral in _WITHOUT_EFFECT.items()
        if config.get(key) not in (None, neutral) and (config[key] or neutral is not None)
    ]
    if any(len(word) > 1 for word in words):
        ignored.append("bad_words_ids of several tokens")
    last = config.get("forced_eos_token_id")
    return GenerationSettings(
        file=name,
        suppressed=_ids(path, "suppress_tokens", config.get("suppress_tokens")) + _ids(path, "bad_words_ids", single),
        suppressed_first=_ids(path, "begin_suppress_tokens", config.get("begin_suppress_tokens")),
        forced_last=_ids(path, "forced_eos_token_id", [last] if is_whole(last) else last),
        ignored=tuple(ignored),
    )


def _ids(path: Path, key: str, found: object) -> tuple[int, ...]:
    """Ids of tokens, without those below 0, which stand for none; RequestError for anything else."""
    ids = [] if found is None else found
    if not isinstance(ids, list) or not all(is_whole(one) and one < MOST_TOKENS for one in ids):
        raise RequestError(f"{str(path)!r} has the {key} {shown(found)}: give a list of ids of tokens, or none.")
    return tuple(one for one in ids if one >= 0)
