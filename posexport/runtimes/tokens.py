"""Converts text to token ids and back with the tokenizer beside a model, by tokenizers or transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posexport.errors import RequestError, shown
from posexport.files import is_there, not_a_file
from posexport.jsondata import is_whole, read_json
from posexport.processes import (
    CRASHED,
    EXITED,
    KILLED,
    LIMITED,
    MEMORY,
    MISSING,
    STOPPED,
    TIMED_OUT,
    Worker,
    failure_of,
)

FAST, _SETTINGS = "tokenizer.json", "tokenizer_config.json"

_CLASS = "AutoTokenizer"
"""The key in `auto_map` of _SETTINGS that names a class in a Python file beside it."""

FILES = (
    *(FAST, _SETTINGS, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("tokenizer.model", "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("normalizer.json", "source.spm", "target.spm", "spm.model", "tekken.json", "chat_template.json"),
)
"""The files that a tokenizer may have in the folder of a checkpoint."""


LONGEST = 60.0
"""The seconds that a tokenizer may take to be opened, and for each call."""

MOST_MEMORY = 4 * 2**30
"""The bytes that a tokenizer may take: the largest known ones take a tenth of it."""

MOST_IDS = MOST_CHARACTERS = 2**24
"""The most ids that a tokenizer may make of one text, and the most characters of one row of ids."""

MOST_TOKENS = 2**31
"""More than any vocabulary has."""

_PARTS = ("decoder", "generator", "text_config")
"""The keys in config.json of the part for the generated text, in the order of transformers."""

_ADVICE = "give --prompt-ids, or put the tokenizer's files there"

_CRASHED = "its library crashes, or needs more memory than it may take"
_FAILURES: Mapping[str, str] = {
    TIMED_OUT: f"it takes longer than {LONGEST:g} s",
    MEMORY: "it needs more memory than it may take",
    LIMITED: "it crashes or needs more memory than the limit of this shell (ulimit) allows",
    **dict.fromkeys((KILLED, CRASHED, EXITED), _CRASHED),
    STOPPED: "its process was stopped",
}
"""Why a tokenizer gave no answer, by the codes of posexport.processes. What its library printed is not shown."""


class Tokenizer:
    """Converts text to token ids and back, in a child process that lives until it is closed: its files may be hostile.

    RequestError if it can't, if it takes too long or too much memory, and if its library crashes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._worker = Worker("posexport.runtimes.tokens_process")
        try:
            self._ask("be read", open=str(folder.absolute()))
        except BaseException:
            self._worker.close()
            raise

    def __enter__(self) -> Tokenizer:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, with the special tokens that the tokenizer adds."""
        ids: list[list[int]] = self._ask("encode the prompt", encode=list(texts))["ids"]
        return ids

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The text of each row of ids, without special tokens."""
        texts: list[str] = self._ask("decode the tokens", decode=[list(row) for row in rows])["texts"]
        return texts

    def _ask(self, purpose: str, **request: Any) -> dict[str, Any]:
        reply = self._worker.ask(request, LONGEST)
        failure = failure_of(reply)
        if failure is not None and failure.code == MISSING:
            raise RequestError(
                f"text needs a package for tokenizers: pip install 'posexport[transformers]', or {_ADVICE}."
            )
        fault = reply["fault"] if failure is None else _FAILURES.get(failure.code, failure.text)
        if fault is not None:
            raise RequestError(f"the tokenizer in {str(self._folder)!r} can't {purpose} ({fault}): {_ADVICE}.")
        return reply


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in a folder, to be closed by the caller.

    RequestError if no tokenizer can be read, and for one that needs code beside it, which is not run.
    """
    if not any((folder / name).is_file() for name in FILES):
        raise RequestError(f"{str(folder)!r} holds no tokenizer ({FAST}): {_ADVICE}.")
    for name in (*FILES, "config.json"):
        problem = not_a_file(folder / name)
        if problem is not None and is_there(folder / name):
            raise RequestError(f"the tokenizer in {str(folder)!r} can't be read ({name} is {problem}): {_ADVICE}.")
    code = (read_config(folder / _SETTINGS) or {}).get("auto_map")
    if not (folder / FAST).is_file() and (isinstance(code, list) or (isinstance(code, dict) and _CLASS in code)):
        raise RequestError(
            f"the tokenizer in {str(folder)!r} needs the Python code that {_SETTINGS} names in auto_map, and code that "
            f"a model brings with it is not run: give --prompt-ids, or put a {FAST} there."
        )
    return Tokenizer(folder)


def stop_tokens(folder: Path) -> tuple[int, ...]:
    """The ids that end a text, as transformers reads them in a folder; empty if none is given.

    Negative ids don't count. RequestError for a file that can't be read, and for what is not a token.
    """
    name, settings = generation_part(folder)
    return _ends(folder / name, settings)


def some_stop_tokens(folder: Path) -> tuple[int, ...]:
    """Like `stop_tokens`, but if generation_config.json has none, those of config.json."""
    config = folder / "config.json"
    return stop_tokens(folder) or _ends(config, _with_text_part(settings_in(config) or {}))


def _ends(path: Path, settings: Mapping[str, Any]) -> tuple[int, ...]:
    found = settings.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if wrong := [one for one in ids if not is_whole(one) or one >= MOST_TOKENS]:
        raise RequestError(f"{str(path)!r} has the eos_token_id {shown(wrong[0])}: give the id of a token, or several.")
    return tuple(one for one in ids if one >= 0)


def generation_part(folder: Path) -> tuple[str, dict[str, Any]]:
    """The file that tells transformers how to choose tokens, and its settings.

    It is generation_config.json in a folder, or config.json if that doesn't exist; "" if neither exists. RequestError
    for a file that can't be read.
    """
    settings = settings_in(folder / "generation_config.json")
    if settings is not None:
        return "generation_config.json", settings
    config = settings_in(folder / "config.json")
    return ("", {}) if config is None else ("config.json", _with_text_part(config))


def _with_text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a config.json, completed by those of its part for text."""
    return {**text_part(config), **{key: value for key, value in config.items() if value is not None}}


def settings_in(path: Path) -> dict[str, Any] | None:
    """The content of a generation_config.json or config.json; None if it doesn't exist.

    RequestError if it can't be read.
    """
    config = read_config(path)
    if config is None and is_there(path):
        raise RequestError(
            f"{str(path)!r} can't be read as a JSON object, and may say which tokens end a text or are never chosen: "
            "restore it, or remove it."
        )
    return config


def start_tokens(folder: Path) -> tuple[int, ...]:
    """The ids with which the decoder of an encoder-decoder begins, as transformers reads them.

    They are in generation_config.json or config.json in a folder; empty if neither has them.
    """
    for file in ("generation_config.json", "config.json"):
        config = read_config(folder / file) or {}
        start, forced, usual = (_token(config, f"{name}_token_id") for name in ("decoder_start", "forced_bos", "bos"))
        if start or usual:
            return (start or usual) + forced
    return ()


def _token(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """The id of a token; empty if it is not given."""
    value = config.get(key)
    return (value,) if is_whole(value) and 0 <= value < MOST_TOKENS else ()


_LENGTHS = (
    *("max_target_positions", "max_text_positions", "max_decoder_position_embeddings", "max_text_len"),
    *("max_position_embeddings", "n_positions", "max_seq_len"),
)
"""Settings with the number of positions. Those of decoders of encoder-decoders come first."""


def trained_length(folder: Path) -> int | None:
    """The number of positions that the model (or the decoder of an encoder-decoder) was trained for, by config.json.

    None if it is not given.
    """
    config = read_config(folder / "config.json") or {}
    for data in (config, text_part(config)):
        for name in _LENGTHS:
            if is_whole(data.get(name)) and data[name] > 0:
                return int(data[name])
    return None


_SHORT_AND_LONG = ("longrope", "su")
"""Names of the one kind of angles that change at a length. The first checkpoints of Phi-3 have the second name."""


def length_of_short_frequencies(folder: Path) -> int | None:
    """The number of tokens up to which a model uses its short frequencies (longrope), by the config.json in a folder.

    None if the model has only one set of frequencies.
    """
    found, key = list[int](), "original_max_position_embeddings"
    for kind, table, data in _rope_tables(read_config(folder / "config.json") or {}):
        if kind in _SHORT_AND_LONG:
            lengths = (table.get(key), data.get(key))
            found += [length for length in lengths if is_whole(length) and length > 0][:1]
    return min(found, default=None)


def has_dynamic_frequencies(folder: Path) -> bool:
    """Whether frequencies change from the trained length on (the scaling `dynamic`), by the config.json in a folder."""
    return any("dynamic" in kind for kind, *_ in _rope_tables(read_config(folder / "config.json") or {}))


def _rope_tables(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """The kind of a model's angles, their settings, and the part of the configuration that has them; of several types
    of layers, those of each."""
    for data in (dict(config), text_part(config)):
        tables = [data.get(name) for name in ("rope_parameters", "rope_scaling")]
        tables += [table for one in tables if isinstance(one, dict) for table in one.values()]  # by type of layers
        for table in tables:
            if isinstance(table, dict):
                kinds = (table.get(name) for name in ("rope_type", "type"))
                yield from ((kind, table, data) for kind in kinds if isinstance(kind, str))


def vocabulary_of(folder: Path) -> int | None:
    """The number of tokens that the model has, by the config.json in a folder; None if it is not given."""
    config = read_config(folder / "config.json") or {}
    sizes = [data.get("vocab_size") for data in (text_part(config), config)]
    return next((size for size in sizes if is_whole(size) and size > 0), None)


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config.json for the generated text, for models that read something else."""
    parts = (config.get(name) for name in _PARTS)
    return next((part for part in parts if part and isinstance(part, dict)), {})


def read_config(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if it can't be read, or has no object."""
    try:
        data = read_json(path)
    except (OSError, ValueError, RequestError):
        data = None
    return data if isinstance(data, dict) else None
