"""What folders hold, at any depth and by any links, within limits."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import attrs

from posexport.errors import RequestError, system_error

MOST_ENTRIES = 1_000_000
"""The most files and folders in a folder that is searched."""


@attrs.frozen
class Entries:
    """What a folder holds: names of folders, and of all that is none. A link to a folder is one of `folders`."""

    place: Path
    folders: list[str]
    files: list[str]


def walk(folder: Path, enters: Callable[[Path], bool] = lambda folder: True) -> Iterator[Entries]:
    """A folder and those below it, however deep, that `enters` takes; what links lead to is not entered. RequestError
    where they hold more than MOST_ENTRIES, and for one that can't be read: what it holds would be passed over."""
    waiting, left = [folder], MOST_ENTRIES
    while waiting:
        place = waiting.pop()
        entries, inside = Entries(place, [], []), []
        with (
            system_error(f"the folder {str(place)!r} can't be read", "make it readable, or move it elsewhere"),
            suppress(FileNotFoundError, NotADirectoryError),  # removed meanwhile, or a file: it holds nothing
            os.scandir(place) as found,
        ):
            for entry in itertools.islice(found, left + 1):
                left -= 1
                below = place / entry.name
                (entries.folders if _is_folder(entry) else entries.files).append(entry.name)
                if _is_folder(entry, links=False) and enters(below):
                    inside.append(below)
        if left < 0:
            raise RequestError(
                f"{str(folder)!r} holds more than {MOST_ENTRIES:,} files and folders: name one nearer to the files."
            )
        waiting += reversed(inside)
        yield entries


def _is_folder(entry: os.DirEntry[str], links: bool = True) -> bool:
    """Whether an entry is a folder, or with `links` leads to one; not where the system can't tell, as of a link to a
    place that may not be read: it must not hide those after it."""
    try:
        return entry.is_dir(follow_symlinks=links)
    except OSError:
        return False


def files_below(folder: Path) -> list[Path]:
    """All in a folder and below that is no folder, sorted; as in `walk`."""
    return sorted(entries.place / name for entries in walk(folder) for name in entries.files)


def make_folders(path: Path) -> None:
    """Make a folder and those above it, as `Path.mkdir(parents=True)` does, which calls itself for each of them."""
    missing: list[Path] = []
    for folder in (path, *path.parents):
        try:
            folder.mkdir(exist_ok=True)
            break
        except FileNotFoundError:
            missing.append(folder)
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
