"""The tokenizer's child process: any failure of its library becomes one sentence in the parent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from posexport.errors import RequestError
from posexport.runtimes import tokens
from posexport.runtimes.tokens import read_tokenizer, stop_tokens

LIBRARY = """
import os, sys, time

class Panic(BaseException):
    pass

class Tokenizer:
    @classmethod
    def from_file(cls, path):
        return cls()

    no_padding = no_truncation = lambda self: None

    def encode(self, text):
        print("thread main panicked", file=sys.stderr, flush=True)
        if text == "hang":
            time.sleep(3600)
        if text == "abort":
            os.abort()
        if text == "exit":
            os._exit(3)
        if text == "panic":
            raise Panic("thread main panicked")
        if text == "no memory":
            raise MemoryError
        if text == "many":
            return range(2**24 + 1)
        return [len(text)]

    def decode(self, ids, skip_special_tokens):
        if ids == [666]:
            raise Panic("thread main panicked")
        return "x" * (2**24 + 1) if ids == [0] else f"{ids} {os.getpid()}"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real_processes: None) -> Path:
    """A folder with a tokenizer and a stand-in for the library `tokenizers`. Processes are new, because forked ones may
    have imported the real library."""
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "tokenizers.py").write_text(LIBRARY)
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path / "library"), os.environ.get("PYTHONPATH", ""))))
    return tmp_path


def test_one_process_lives_as_long_as_the_tokenizer(folder: Path) -> None:
    with read_tokenizer(folder) as tokenizer:
        assert tokenizer.encode(["a", "bcd"]) == [[1], [3]]
        first, second = tokenizer.decode([[1, 2], [3]])
        assert first.startswith("[1, 2] ")
        assert second.startswith("[3] ")
        (again,) = tokenizer.decode([[3]])
        assert again == second
        pid = int(again.split()[-1])
        assert pid != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


FAILURES = {
    "hang": "it takes longer than 60 s",
    "abort": "its library crashes, or needs more memory than it may take",
    "exit": "its library crashes, or needs more memory than it may take",
    "panic": "its library fails at it",
    "no memory": "it needs more memory than it may take",
    "many": "it makes more than 16,777,216 tokens of the text",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", FAILURES)
def test_what_a_library_does_is_one_sentence(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with read_tokenizer(folder) as tokenizer:
        if text == "hang":
            monkeypatch.setattr(tokens, "LONGEST", 0.5)
        with pytest.raises(RequestError) as raised:
            tokenizer.encode(["fine", text])
    assert str(raised.value) == (
        f"the tokenizer in {str(folder)!r} can't encode the prompt ({FAILURES[text]}): give --prompt-ids, or put the "
        "tokenizer's files there."
    )


@pytest.mark.parametrize(
    ("ids", "said"),
    [([666], "its library fails at it"), ([0], "it makes more than 16,777,216 characters of the tokens")],
)
def test_a_decoder_that_fails_is_one_sentence(ids: list[int], said: str, folder: Path) -> None:
    with read_tokenizer(folder) as tokenizer, pytest.raises(RequestError) as raised:
        tokenizer.decode([ids])
    assert f"can't decode the tokens ({said}): give --prompt-ids" in str(raised.value)


def test_no_library(folder: Path) -> None:
    (folder / "library" / "tokenizers.py").write_text("raise ImportError")
    with pytest.raises(RequestError, match=r"text needs a package for tokenizers: pip install 'posexport\[transf"):
        read_tokenizer(folder)


STOPS: dict[str, tuple[str | None, str | None, tuple[int, ...] | str]] = {
    "one": ('{"eos_token_id": 7}', '{"eos_token_id": 3}', (7,)),
    "several": ('{"eos_token_id": [7, 9]}', None, (7, 9)),
    "none in the first": ('{"eos_token_id": null}', '{"eos_token_id": 3}', ()),
    "a negative number is none": ('{"eos_token_id": -1}', '{"eos_token_id": 3}', ()),
    "in the second alone": (None, '{"eos_token_id": 3}', (3,)),
    "no files": (None, None, ()),
    "cut short": ('{"eos_token_id": [128001, 12', '{"eos_token_id": 3}', "can't be read as a JSON object"),
    "a list": ("[]", '{"eos_token_id": 3}', "can't be read as a JSON object"),
    "text": ('{"eos_token_id": "a"}', None, "has the eos_token_id 'a'"),
    "a truth value": ('{"eos_token_id": [2, true]}', None, "has the eos_token_id True"),
    "no whole number": (None, '{"eos_token_id": 2.0}', "has the eos_token_id 2.0"),
    "beyond any vocabulary": (None, '{"eos_token_id": 1000000000000}', "has the eos_token_id 1000000000000"),
}


@pytest.mark.parametrize("name", STOPS)
def test_what_ends_a_text_is_not_guessed(name: str, tmp_path: Path) -> None:
    generation, config, want = STOPS[name]
    for file, text in (("generation_config.json", generation), ("config.json", config)):
        if text is not None:
            (tmp_path / file).write_text(text)
    if isinstance(want, tuple):
        assert stop_tokens(tmp_path) == want
    else:
        with pytest.raises(RequestError, match=want):
            stop_tokens(tmp_path)
