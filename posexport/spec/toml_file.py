"""TOML files that people write by hand: projects, sweeps and configs."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posexport.errors import RequestError, shown
from posexport.files import read_bytes

_LIMIT = 2**20  # maximum bytes of a file

_DEEPEST_KEY = 64  # maximum parts of a key

_PART = r"""(?:[\w-]+|"(?:[^"\\\n]|\\.)*"?|'[^'\n]*'?)"""
_LONG_TEXT = r'''"""(?s:[^\\]|\\.)*?(?:"{3,5}|\\?\Z)''' + "|" + r"""'''(?s:.)*?(?:'{3,5}|\Z)"""
_PARTS = re.compile(rf"{_LONG_TEXT}|#.*|(?P<key>{_PART}(?:[ \t]*\.[ \t]*{_PART})*)")
"""Texts of several lines, comments, and possible keys: parts with dots between them.

A match that has begun never fails later, so that one pass over a text is enough.
"""


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Read the table in a TOML file. `what` names the file in words. RequestError if it cannot be read."""
    try:
        text = read_bytes(path, _LIMIT).decode("utf-8-sig")  # some editors write a byte order mark
        if any(len(re.findall(_PART, key)) > _DEEPEST_KEY for key in _keys(text)):
            raise ValueError(f"a key has more than {_DEEPEST_KEY} parts")  # tomllib takes minutes for it
        table = tomllib.loads(text)
    except OSError as error:
        raise RequestError(f"{what} {str(path)!r} can't be read ({error.strerror}): give a TOML file.") from None
    except UnicodeDecodeError:
        raise RequestError(f"{what} {str(path)!r} is not TOML, whose text is UTF-8: save it as UTF-8.") from None
    except (ValueError, RecursionError) as error:  # for a very long number, it has advice to programmers after ";"
        raise RequestError(f"{what} {str(path)!r} is not TOML ({str(error).partition(';')[0]}): fix it.") from None
    if (wrong := _wrong_value(table)) is not None:
        raise RequestError(f"{what} {str(path)!r} holds {wrong}, which nothing takes: fix it.")
    return table


def _keys(text: str) -> Iterator[str]:
    """Yield possible keys in the text of a file. Keys without enough dots are left out."""
    return (match["key"] for match in _PARTS.finditer(text) if match["key"] and match["key"].count(".") >= _DEEPEST_KEY)


def _wrong_value(data: Any) -> str | None:
    """Return in words the first value that is not allowed in tables and lists, including keys.

    Not allowed are a text with a NUL, which no file name can have, and a whole number of more than the 64 bits of TOML.
    """
    waiting = [data]
    while waiting:
        match waiting.pop():
            case str() as text if "\0" in text:
                return f"the text {shown(text)} with a NUL"
            case int() as number if not -(2**63) <= number < 2**63:
                return f"a whole number of {number.bit_length():,} bits"
            case dict() as table:
                waiting += [*table.values(), *table]
            case list() as items:
                waiting += items
    return None
