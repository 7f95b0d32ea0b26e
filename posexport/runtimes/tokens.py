"""Text and token ids: the tokenizer beside a model, by tokenizers or transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeGuard

import attrs

from posexport.errors import RequestError
from posexport.jsondata import read_json

FAST = "tokenizer.json"

FILES = (
    *(FAST, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("normalizer.json", "source.spm", "target.spm", "chat_template.json"),
)
"""The files that a tokenizer may have in the folder of a checkpoint."""


@attrs.frozen(kw_only=True)
class Tokenizer:
    """Turns text into token ids and back."""

    _tokenizer: Any
    _fast: bool

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with the special tokens that the tokenizer puts around it."""
        return list(self._tokenizer.encode(text).ids if self._fast else self._tokenizer.encode(text))

    def decode(self, ids: list[int]) -> str:
        """The text of ids, without special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in a folder; RequestError where there is none that can be read."""
    advice = "give --prompt-ids, or put the tokenizer's files there"
    if not any((folder / name).is_file() for name in FILES):
        raise RequestError(f"{str(folder)!r} holds no tokenizer ({FAST}): {advice}.")
    try:
        if (folder / FAST).is_file():
            from tokenizers import Tokenizer as Fast

            return Tokenizer(tokenizer=Fast.from_file(str(folder / FAST)), fast=True)
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        return Tokenizer(tokenizer=slow, fast=False)
    except ImportError:
        raise RequestError(
            f"text needs a package for tokenizers: pip install 'posexport[transformers]', or {advice}."
        ) from None
    except Exception as error:  # both raise plain Exceptions
        first = next(iter(str(error).splitlines()), "")
        raise RequestError(f"the tokenizer in {str(folder)!r} can't be read ({first}): {advice}.") from None


def stop_tokens(folder: Path) -> tuple[int, ...]:
    """The ids that end a text, of generation_config.json or config.json in a folder; none where neither says one."""
    for name in ("generation_config.json", "config.json"):
        found = (read_config(folder / name) or {}).get("eos_token_id")
        ids = found if isinstance(found, list) else [found]
        if all(map(is_whole, ids)):
            return tuple(ids)
    return ()


def trained_length(folder: Path) -> int | None:
    """How many positions the model was trained for, by the config.json in a folder; None where that is not said."""
    config = read_config(folder / "config.json") or {}
    part = config.get("text_config")
    for data in (config, part if isinstance(part, dict) else {}):
        for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
            if is_whole(data.get(name)) and data[name] > 0:
                return int(data[name])
    return None


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value of JSON is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def read_config(path: Path) -> dict[str, Any] | None:
    """What a file of JSON holds; None where it can't be read, or holds no object."""
    try:
        data = read_json(path)
    except (OSError, ValueError, RequestError):
        data = None
    return data if isinstance(data, dict) else None
