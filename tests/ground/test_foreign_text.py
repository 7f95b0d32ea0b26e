"""JSON and names that somebody else wrote: read within limits, printed without their power over a terminal."""

from __future__ import annotations

import pytest

from posexport.errors import PosexportError, Reason, RequestError, plain, shown
from posexport.jsondata import DataError, parse_json


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "not JSON"),
        ('{"a":' * 70 + "1" + "}" * 70, "nested deeper"),
        ("[" * 70 + "]" * 70, "nested deeper"),
        ('{"a": 1, "a": 2}', "a key stands in it twice"),
        ('{"b": {"a": 1, "a": 1}}', "a key stands in it twice"),
        ("1" * 5000, "not JSON"),
        ("", "not JSON"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_json_is_read_within_limits(text: str | bytes, said: str) -> None:
    with pytest.raises(DataError, match=said):
        parse_json(text)
    assert parse_json("[" * 60 + "]" * 60) is not None


NASTY = "\x1b]0;title\x07\x1b[2J\x9b31m\u202eabc\r\b\ud800"


def test_text_of_files_can_not_control_a_terminal() -> None:
    for made in (plain(NASTY), shown(NASTY), str(RequestError(NASTY)), Reason("code", NASTY).text):
        assert made.isprintable(), made
        made.encode()
    assert plain("größe 中文 ⚠ µs\tx\n") == "größe 中文 ⚠ µs\tx\n"
    assert str(RequestError("one\n  two")) == "one two"


def test_long_texts_are_shortened() -> None:
    assert len(str(RequestError(f"the name {'x' * 6000!r} is long"))) < 300
    assert len(str(RequestError("a b " * 10_000))) < 7000
    assert len(shown("x" * 6000)) < 130
    assert len(shown([1] * 6000)) < 130
    assert "6,000 characters" in shown("x" * 6000)


def test_posexport_errors_are_sentences() -> None:
    class Odd(PosexportError):
        pass

    assert str(Odd("a\x00b")) == "a\\x00b"
