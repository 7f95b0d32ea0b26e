"""Runs a tokenizer in a child process, `python -P -m posexport.runtimes.tokens_process`: its files may be hostile.

A request is {open: folder}, {encode: texts} or {decode: rows of ids}; the last two need the first. The answer is
{fault, ids, texts}: `fault` is a clause that says why it failed, or null. Only classes of tokenizers and transformers
are used: code beside a model is never run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posexport import machine
from posexport.errors import RequestError, RuntimeMissingError
from posexport.processes import serve
from posexport.runtimes.tokens import FAST, MOST_CHARACTERS, MOST_IDS, MOST_MEMORY

_EMPTY: dict[str, Any] = {"fault": None, "ids": [], "texts": []}


class Session:
    """The tokenizer that was opened last."""

    def __init__(self) -> None:
        self._tokenizer: Any = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Open, encode or decode."""
        ((work, given),) = request.items()
        try:
            with _errors_are_refusals():
                return {**_EMPTY, **getattr(self, f"_{work}")(given)}
        except RequestError as error:
            return {**_EMPTY, "fault": str(error)}

    def _open(self, folder: str) -> dict[str, Any]:
        machine.limit_to_what_is_free(max(0, machine.available() - MOST_MEMORY))
        self._tokenizer = _opened(Path(folder))
        return {}

    def _encode(self, texts: list[str]) -> dict[str, Any]:
        encoded = [self._tokenizer.encode(text) for text in texts]
        rows = [list(getattr(one, "ids", one)) for one in encoded]
        if max(map(len, rows)) > MOST_IDS:
            raise RequestError(f"it makes more than {MOST_IDS:,} tokens of the text")
        return {"ids": rows}

    def _decode(self, rows: list[list[int]]) -> dict[str, Any]:
        texts = [str(self._tokenizer.decode(ids, skip_special_tokens=True)) for ids in rows]
        if max(map(len, texts)) > MOST_CHARACTERS:
            raise RequestError(f"it makes more than {MOST_CHARACTERS:,} characters of the tokens")
        return {"texts": texts}


def _opened(folder: Path) -> Any:
    """A tokenizer that neither pads nor truncates, whatever its file says: a prompt is encoded as it is."""
    try:
        if (folder / FAST).is_file():
            from tokenizers import Tokenizer

            fast = Tokenizer.from_file(str(folder / FAST))
            fast.no_padding()
            fast.no_truncation()
            return fast
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except ImportError:
        raise RuntimeMissingError("no package for tokenizers is installed") from None


@contextlib.contextmanager
def _errors_are_refusals() -> Iterator[None]:
    """RequestError with a clause for whatever a tokenizer raises, except for a lack of memory."""
    try:
        yield
    except (RequestError, RuntimeMissingError):
        raise
    except BaseException as error:  # Rust's panics are not Exceptions
        if machine.is_short(error):
            raise MemoryError("memory ran out") from None
        if not isinstance(error, Exception):
            raise RequestError("its library fails at it") from None
        first = next(iter(str(error).splitlines()), "")[:300].rstrip(".")
        raise RequestError(first or type(error).__name__) from None


if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    serve(Session().answer)
