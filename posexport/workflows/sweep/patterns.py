"""Files by patterns such as `models/**/*.onnx`. `**` is any number of folders. Hidden names must be given."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from fnmatch import filter as matching_names
from glob import has_magic
from pathlib import Path

from posexport.artifact.folders import walk


def matching(folder: Path, pattern: str) -> list[Path]:
    """The files that match a pattern, relative to the folder: sorted, each once.

    `**` enters no folder through a link, because links may form circles. RequestError if there are too many files
    (posexport.artifact.folders.walk).
    """
    parts, places = Path(pattern).parts, {folder}
    for part in (*parts, *(["*"] if parts[-1:] == ("**",) else [])):
        places = _each_once(_next(places, part))
    return sorted(place for place in places if place.is_file())


def _each_once(places: Iterable[Path]) -> set[Path]:
    """The existing places, each folder under one name. With links in circles, a folder may have any number of names."""
    found: dict[object, Path] = {}
    for place in sorted(set(places)):
        with suppress(OSError, ValueError):  # a link that leads to itself; a name with a NUL
            status = place.stat()
            found.setdefault((status.st_dev, status.st_ino) if stat.S_ISDIR(status.st_mode) else place, place)
    return set(found.values())


def _next(places: set[Path], part: str) -> Iterator[Path]:
    """What one part of a pattern matches in some folders."""
    if part == "**":
        yield from _folders(places)
    elif has_magic(part):
        for place in places:
            entries = next(walk(place))
            names = matching_names(entries.folders + entries.files, part)
            yield from (place / name for name in names if part[0] == "." or name[0] != ".")
    else:
        yield from (place / part for place in places)


def _folders(places: set[Path]) -> Iterator[Path]:
    """The folders and all folders in them, each once."""
    entered: set[Path] = set()
    for place in sorted(places):
        if place in entered:  # found from a folder above it
            continue
        for entries in walk(place, lambda folder: folder.name[:1] != "." and folder not in entered):
            entered.add(entries.place)
            yield entries.place
