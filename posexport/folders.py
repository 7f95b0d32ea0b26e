"""Writing folders whole or not at all: filled under a temporary name beside their place, then renamed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from posexport.errors import RequestError
from posexport.files import uninterrupted


def write_folder(target: Path, fill: Callable[[Path], None], beside: Mapping[Path, bytes] | None = None) -> None:
    """Make the folder `target` of what `fill` writes into the empty folder that it is given.

    What stands there gives way, and the small files `beside` (path to bytes) change with it. Raises RequestError where
    the place can't be written; whatever is raised, everything is then as it was.
    """
    temporary: Path | None = None
    try:
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
        made = temporary / "new"
        made.mkdir()
        fill(made)
        moves = [(made, target)]
        for number, (path, data) in enumerate((beside or {}).items()):
            file = temporary / f"new-{number}"
            file.write_bytes(data)
            moves.append((file, path))
        with uninterrupted():
            _move(moves, temporary)
    except OSError as error:
        raise RequestError(
            f"can't write the folder {str(target)!r} ({error.strerror}): give another place, or free some space."
        ) from None
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _move(moves: list[tuple[Path, Path]], aside: Path) -> None:
    """Rename each to its place, what is there out of the way; all back where one can't be."""
    done: list[tuple[Path, Path]] = []

    def rename(source: Path, place: Path) -> None:
        source.rename(place)
        done.append((source, place))

    try:
        for number, (source, place) in enumerate(moves):
            if place.exists():
                rename(place, aside / f"old-{number}")
            rename(source, place)
    except OSError:
        for source, place in reversed(done):
            place.rename(source)
        raise
