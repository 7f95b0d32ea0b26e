"""The facts that tunings have measured, in a folder: an interrupted tuning goes on from there, a repeated one is quick.

A fact is kept under the hash of everything that it depends on (bytes of files, options, sizes, versions, the machine),
in `<hash>.json`; whatever changes makes another hash. The programs themselves lie in a folder of each tuning's own,
while it runs. All of it is in `.posexport-tune`, inside the folder that was given: what else is there stays as it is.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from posexport.errors import RequestError
from posexport.files import write_json

FOLDER = ".posexport-tune"
_VERSION = 2
"""Of what is kept: facts of another one are not read."""


class Store:
    """Facts by what they depend on. `resume` False: nothing is read, everything is measured anew."""

    def __init__(self, folder: Path, resume: bool = True) -> None:
        self._folder, self._resume = folder if folder.name == FOLDER else folder / FOLDER, resume
        self.reused = 0
        """How many facts came from an earlier tuning."""
        self._seen: set[Path] = set()
        self._temporary: dict[Path, dict[str, Any]] = {}  # what isn't kept, for as long as this tuning runs
        self._files: Path | None = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            ignore = self._folder / ".gitignore"
            if not ignore.exists():
                ignore.write_text("*\n")
        except OSError as error:
            raise _unwritable(self._folder, error) from None

    @property
    def files(self) -> Path:
        """Where the programs of this tuning lie, and of no other one."""
        if self._files is None:
            try:
                self._files = Path(tempfile.mkdtemp(prefix="programs-", dir=self._folder))
            except OSError as error:
                raise _unwritable(self._folder, error) from None
        return self._files

    def get(
        self,
        key: Mapping[str, Any],
        find: Callable[[], dict[str, Any]],
        keep: Callable[[dict[str, Any]], bool] = lambda fact: True,
    ) -> dict[str, Any]:
        """The fact of `key` (plain data); `find` is called where it isn't known, and what it gives is kept where `keep`
        says that it will be so next time too."""
        text = json.dumps({"version": _VERSION, **key}, sort_keys=True, separators=(",", ":"))
        path = self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
        known = self._read(path, json.loads(text)) if self._resume or path in self._seen else None
        if known is not None:
            self.reused += path not in self._seen
            self._seen.add(path)
            return known
        if path in self._temporary:
            return self._temporary[path]
        fact = find()
        if not keep(fact):
            self._temporary[path] = fact
        else:
            self._seen.add(path)
            write_json(path, {"key": json.loads(text), "fact": fact})
        return fact

    def clear_files(self) -> None:
        """Remove the programs; the facts about them stay."""
        if self._files is not None:
            shutil.rmtree(self._files, ignore_errors=True)
            self._files = None

    @staticmethod
    def _read(path: Path, key: Mapping[str, Any]) -> dict[str, Any] | None:
        try:
            data = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):  # not there, or damaged: then it is measured anew
            return None
        whole = isinstance(data, dict) and data.get("key") == key and isinstance(data.get("fact"), dict)
        return dict(data["fact"]) if whole else None


def _unwritable(folder: Path, error: OSError) -> RequestError:
    return RequestError(
        f"can't write to the cache {str(folder)!r} ({error.strerror}): give another folder with --cache."
    )
