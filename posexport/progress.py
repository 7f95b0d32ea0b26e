"""How long work reports what it is doing: it calls a `Progress` with the step that begins.

The command line passes a callable that shows the step on a terminal, or as a line a minute elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], object]
"""Called with what is done next, such as "loading torch"."""


def silent(step: str) -> None:
    """A `Progress` that shows nothing."""
