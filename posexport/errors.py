"""The errors for a person's mistakes: one sentence, and the exit code that goes with it."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import attrs

ERROR_FILE = "POSEXPORT_ERROR_FILE"
"""The environment variable that names a file. The command line also writes its error there: `{"error": "..."}`."""


_LONG_WORD = re.compile(r"\S{400,}")
_LONGEST_TEXT = 6000


def plain(text: str, longest: int = _LONGEST_TEXT, kept: str = "\n\t") -> str:
    """Text for a terminal or a report, which text in other people's files can't control.

    Control characters, escape sequences, marks that change the direction of writing, and what UTF-8 can't hold are
    written as Python writes them (`\\x1b`), except those in `kept`. Words of 400 characters and more, and texts that
    are longer than `longest`, are shortened in their middle.
    """
    if not text.isprintable():
        text = "".join(
            character if character.isprintable() or character in kept else repr(character)[1:-1] for character in text
        )
    if len(text) >= 400:
        text = _shortened(_LONG_WORD.sub(lambda word: _shortened(word[0], 160), text), longest)
    return text


def _shortened(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    return f"{text[: longest * 3 // 4]}... ({len(text):,} characters) ...{text[-longest // 4 :]}"


def _sentence(text: str) -> str:
    """Plain text on one line."""
    return plain(" ".join(text.split()) if "\n" in text or "\t" in text else text)


def shown(value: object, longest: int = 80) -> str:
    """A name or value from a file, for a message: as Python writes it, shortened in its middle."""
    if isinstance(value, str) and len(value) > longest:
        value = _shortened(value, longest)
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return "a number of thousands of digits" if isinstance(value, int) else "data with such a number"
    return text if isinstance(value, str) else _shortened(text, longest)


@attrs.frozen
class Reason:
    """Why something failed or was not run: `code` is for code, `text` for people (a sentence without its full stop).

    Codes are short, in kebab-case, and constants beside whatever gives the reason. Texts are never compared or
    searched.
    """

    code: str
    text: str = attrs.field(converter=plain)

    def __str__(self) -> str:
        return self.text


class PosexportError(Exception):
    """The base of all errors that posexport raises on purpose. Its text is one sentence."""

    exit_code = 2

    def __str__(self) -> str:
        return _sentence(super().__str__())


class RequestError(PosexportError):
    """The request or the input is wrong (exit code 2)."""


class NotFiniteError(RequestError):
    """A model gives NaN or infinity in place of logits, so it makes no token."""


class FieldError(RequestError):
    """A value that a field doesn't accept. Call `named` to report it under the option that the user typed."""

    def __init__(self, field: str, complaint: str) -> None:
        super().__init__(field, complaint)
        self.field, self.complaint = field, complaint

    def __str__(self) -> str:
        return _sentence(f"{self.field} {self.complaint}")

    def named(self, name: str) -> RequestError:
        """The same error with the name that the field has where it was written, such as that of an option."""
        return RequestError(f"{name} {self.complaint}")


class MismatchError(RequestError):
    """The file at `path` is not what its manifest, a trusted signature or an original says. `reason` has the clause.

    `sha256` is that of the file if it is known, and `runtime` is the one runtime that could open it (a plan's builder).
    """

    def __init__(
        self,
        path: object,
        reason: Reason,
        advice: str = "restore it, or make it again",
        *,
        sha256: str | None = None,
        runtime: str | None = None,
    ) -> None:
        super().__init__(f"{str(path)!r} can't be used, {reason.text}: {advice}.")
        self.reason, self.sha256, self.runtime = reason, sha256, runtime


class RuntimeMissingError(PosexportError):
    """A required runtime is not available (exit code 3)."""

    exit_code = 3


@contextmanager
def located(where: str, spelled: Callable[[str], str] = str) -> Iterator[None]:
    """Begin the errors of the block with `where`. `spelled` gives the name that a field has there."""
    try:
        yield
    except PosexportError as error:
        kind = RuntimeMissingError if isinstance(error, RuntimeMissingError) else RequestError
        text = error.named(spelled(error.field)) if isinstance(error, FieldError) else error
        raise kind(f"{where}: {text}") from None


_ADVICE = {
    "ENOSPC": "free some space",
    "EDQUOT": "free some space of your quota",
    "ENAMETOOLONG": "give a shorter name",
    "EACCES": "change its permissions",
    "EPERM": "change its permissions",
    "ENOTDIR": "give a path whose parts are folders",
    "ELOOP": "its symbolic links form a circle: give the file itself",
    "EMFILE": "raise the limit on open files (ulimit -n)",
    "ENFILE": "close other programs, since the system has too many files open",
    "EIO": "check the disk",
    "ESTALE": "mount the network's file system again",
    "EBUSY": "close what uses it",
    "ETXTBSY": "end the program that runs from it",
}
"""What to do about an error of the system, by its name in `errno`, for any file."""

if os.name == "nt":
    _ADVICE["EACCES"] = "close what uses it or change its permissions"  # a file that is open has this error there

_ALONE = ("ENAMETOOLONG", "ELOOP")
"""Errors for which only this advice helps."""


def advice_for(error: OSError, otherwise: str) -> str:
    """What to do about an error of the system: the advice for its number, `otherwise`, or both."""
    name = errno.errorcode.get(error.errno or 0, "")
    known = _ADVICE.get(name)
    return otherwise if known is None else known if name in _ALONE else f"{known}, or {otherwise}"


@contextmanager
def system_error(problem: str, advice: str) -> Iterator[None]:
    """Raise an OSError of the block as a RequestError.

    It has `problem`, the system's reason in brackets, and what to do by the number of the error or by `advice`.
    """
    try:
        yield
    except OSError as error:
        raise RequestError(f"{problem} ({error.strerror or error}): {advice_for(error, advice)}.") from None


def unknown(kind: str, given: str, allowed: Iterable[str], similarity: float = 0.5) -> RequestError:
    """The error for a name outside a table. It names the nearest name with at least this similarity (0 to 1)."""
    import difflib

    names = list(allowed)
    near = difflib.get_close_matches(given.lower(), names, n=1, cutoff=similarity)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return RequestError(f"unknown {kind} {given!r}: {hint}allowed: {', '.join(names) or 'none'}.")


def check_known(kind: str, given: object, allowed: Collection[str]) -> None:
    """Raise `unknown` for a name outside a table."""
    if given not in allowed:
        raise unknown(kind, given if isinstance(given, str) else shown(given), allowed)


def said(error: BaseException) -> str:
    """`ValueError: no heads`: the type of an error and the first line of its text.

    If the first line ends in a colon, the second line follows.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]).rstrip(".")
    return type(error).__name__ + (f": {text}" if text else "")
