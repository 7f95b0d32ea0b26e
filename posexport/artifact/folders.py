"""The contents of folders, at any depth and through any links, within limits."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import attrs

from posexport.errors import RequestError, system_error

MOST_ENTRIES = 1_000_000
"""The maximum number of files and folders in a folder that is searched."""


@attrs.frozen
class Entries:
    """The contents of a folder: names of folders, and names of everything else. A link to a folder is in `folders`."""

    place: Path
    folders: list[str]
    files: list[str]


def walk(folder: Path, enters: Callable[[Path], bool] = lambda folder: True) -> Iterator[Entries]:
    """Yield a folder and the folders below it, at any depth, that `enters` accepts. Targets of links are not entered.

    RequestError if they contain more than MOST_ENTRIES. RequestError also for a folder that cannot be read, because its
    contents would be missing.
    """
    waiting, left = [folder], MOST_ENTRIES
    while waiting:
        place = waiting.pop()
        entries, inside = Entries(place, [], []), []
        with (
            system_error(f"the folder {str(place)!r} can't be read", "make it readable, or move it elsewhere"),
            suppress(FileNotFoundError, NotADirectoryError),  # removed meanwhile, or a file: it contains nothing
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
    """Whether an entry is a folder, or with `links` points to a folder.

    False if the system cannot tell, as for a link to a place that is not readable. Such a link must not hide the
    entries after it.
    """
    try:
        return entry.is_dir(follow_symlinks=links)
    except OSError:
        return False


def files_below(folder: Path) -> list[Path]:
    """Return everything in a folder and below that is not a folder, sorted. It raises the errors of `walk`."""
    return sorted(entries.place / name for entries in walk(folder) for name in entries.files)


def make_folders(path: Path) -> None:
    """Make a folder and its parents without recursion. `Path.mkdir(parents=True)` calls itself for each of them."""
    missing: list[Path] = []
    for folder in (path, *path.parents):
        try:
            folder.mkdir(exist_ok=True)
            break
        except FileNotFoundError:
            missing.append(folder)
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
