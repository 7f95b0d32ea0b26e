"""The facts that tunings have measured, in a folder. Interrupted and repeated tunings reuse them.

A fact is kept under the hash of everything that it depends on (bytes of files, options, sizes, versions, the machine),
in `<hash>.json` with its own hash. If anything changes, the hash is another one. While a tuning runs, its programs are
in a folder of their own. Everything is in `.posexport-tune` inside the given folder. Other files there are not changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from posexport import __version__, temporary
from posexport.artifact.folders import make_folders
from posexport.bench.tune.facts import fits
from posexport.errors import system_error
from posexport.files import renewed, write_json
from posexport.jsondata import DataError, json_sha256, read_json

FOLDER = ".posexport-tune"
_VERSION = 3
"""The version of the kept facts. Facts of other versions are not read."""


class Store:
    """Facts by what they depend on. With `resume` False, nothing is read and everything is measured anew."""

    def __init__(self, folder: Path, resume: bool = True) -> None:
        self._folder, self._resume = folder if folder.name == FOLDER else folder / FOLDER, resume
        self.reused = 0
        """The number of facts that came from an earlier tuning."""
        self._facts: dict[Path, dict[str, Any]] = {}  # of this tuning
        self._files: temporary.Temporary | None = None
        with self._writing():
            make_folders(self._folder)
            with suppress(FileExistsError), (self._folder / ".gitignore").open("x") as ignore:  # follows no link
                ignore.write("*\n")

    def _writing(self) -> AbstractContextManager[None]:
        return system_error(f"can't write to the cache {str(self._folder)!r}", "give another folder with --cache")

    @property
    def files(self) -> Path:
        """The folder with the programs of this tuning only."""
        if self._files is None:
            with self._writing():
                self._files = temporary.folder(self._folder, "programs-")
        return self._files.path

    def get(
        self,
        key: Mapping[str, Any],
        find: Callable[[], dict[str, Any]],
        keep: Callable[[dict[str, Any]], bool] = lambda fact: True,
    ) -> dict[str, Any]:
        """The fact of `key` (plain data) and posexport's version.

        If it is not known, `find` is called. Its result is kept if `keep` says that it will be the same next time.
        """
        whole = json.loads(json.dumps({"version": _VERSION, "posexport": __version__, **key}))  # as it is read again
        path = self._folder / f"{json_sha256(whole)[:32]}.json"
        if path not in self._facts:
            fact = _read(path, whole) if self._resume else None
            self.reused += fact is not None
            if fact is None:
                fact = find()
                if keep(fact):
                    write_json(path, {"key": whole, "fact": fact, "sha256": json_sha256(fact)})
            self._facts[path] = fact
        return self._facts[path]

    def clear_files(self) -> None:
        """Remove the programs. The facts about them stay."""
        if self._files is not None:
            self._files.remove()
            self._files = None


def _read(path: Path, key: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fact in a file. None if it is missing or damaged, so that it is measured anew."""
    try:
        with renewed():
            data = read_json(path)
    except (OSError, DataError):
        return None
    if not isinstance(data, dict) or data.get("key") != key:
        return None
    fact = data.get("fact")
    return fact if data.get("sha256") == json_sha256(fact) and fits(key, fact) else None
