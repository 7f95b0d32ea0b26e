"""How long work reports what it does; the command line shows it on a terminal, or as a line a minute elsewhere."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], object]
"""Called with what is done next, such as "loading torch"."""

Warn = Callable[[str], object]
"""Called with a sentence for people about what may be wrong."""


def silent(step: str) -> None:
    """A `Progress` that shows nothing."""
