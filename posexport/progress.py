"""How long-running work reports its steps.

The command line shows them on a terminal, or as a line a minute elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], object]
"""Called with what is done next, such as "loading torch"."""

Warn = Callable[[str], object]
"""Called with a sentence for people about what may be wrong."""


def silent(step: str) -> None:
    """A `Progress` that shows nothing."""
