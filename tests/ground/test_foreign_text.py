"""JSON and names from untrusted sources: read within limits, and printed so that they cannot control a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posexport.cli.console import show_json
from posexport.errors import PosexportError, Reason, RequestError, plain, shown, unknown
from posexport.jsondata import DataError, parse_json
from posexport.models import read_spec
from posexport.spec.toml_file import read_toml


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "not JSON"),
        ('{"a":' * 70 + "1" + "}" * 70, "nested deeper"),
        ("[" * 70 + "]" * 70, "nested deeper"),
        ('{"a": 1, "a": 2}', "a key stands in it twice"),
        ('{"b": {"a": 1, "a": 1}}', "a key stands in it twice"),
        ("1" * 5000, "a whole number of 5000 digits"),
        ("-1" + "0" * 4000, "a whole number of 4002 digits"),
        (f'{{"a": [{2**64}]}}', "a whole number of 20 digits"),
        ("", "not JSON"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_json_is_read_within_limits(text: str | bytes, said: str) -> None:
    with pytest.raises(DataError, match=said):
        parse_json(text)
    assert parse_json("[" * 60 + "]" * 60) is not None
    assert parse_json(f"[{2**64 - 1}, {-(2**63)}]") == [2**64 - 1, -(2**63)]


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


def test_numbers_that_python_does_not_write_are_described() -> None:
    assert shown(16**9000) == "a number of thousands of digits"
    assert shown({"size": [16**9000]}) == "data with such a number"
    assert str(unknown("form", shown(16**9000), ["a"])).startswith("unknown form")


HUGE = {"hexadecimal": f"0x{'f' * 9000}", "octal": f"0o{'7' * 90}", "decimal": "1" * 5000, "65 bits": str(2**64)}


@pytest.mark.parametrize("text", HUGE.values(), ids=HUGE)
@pytest.mark.parametrize("place", ["size = {}", "sizes = [1, {}]", "[table]\nsize = {}", "a = {{b = [{{c = {}}}]}}"])
def test_toml_holds_no_number_that_it_can_not_have(text: str, place: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(place.format(text))
    with pytest.raises(RequestError, match=r"whole number of|is not TOML"):
        read_toml(path, "config")
    path.write_text(f"size = 0x{'f' * 15}\nleast = {-(2**63)}")
    assert read_toml(path, "config") == {"size": 16**15 - 1, "least": -(2**63)}


def test_a_mark_of_utf8_before_json_and_toml_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text("size = 1", encoding="utf-8-sig")
    assert read_toml(path, "config") == {"size": 1}
    assert parse_json('{"size": 1}'.encode("utf-8-sig")) == {"size": 1}


def test_a_field_that_gets_such_a_number_says_so() -> None:
    for fields in ({"hidden_size": 16**9000}, {"layers": 16**9000}, {"dtype": 16**9000}, {"causal": 16**9000}):
        data = {"encoding": {"name": "rope"}, "hidden_size": 64, "num_heads": 4, **fields}
        with pytest.raises(RequestError, match="a number of thousands of digits"):
            read_spec(data)


@pytest.mark.parametrize("mark", ["\u200b", "\u200d", "\u2060", "\u202e", "\x9b", "\x7f", "\ufeff", "\U000e0041"])
def test_json_shows_characters_that_can_not_be_seen(mark: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_json({"name": f"a{mark}b"})
    text = capsys.readouterr().out
    assert text.isascii()
    assert json.loads(text) == {"name": f"a{mark}b"}
