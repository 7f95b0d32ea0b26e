"""Bytes of a file that are read in pieces: weights that are copied to another file, and the parts around them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, overload

import attrs

from posexport.errors import RequestError, system_error
from posexport.files import HashingFile, open_file

_PIECE = 2**22  # bytes that are read at a time
_WINDOW = 2**12  # bytes for access to single bytes in order


class FileBytes:
    """The bytes of an open file of this `size`, read on request. ValueError if a byte no longer exists.

    A file that is mapped into memory and cut short meanwhile would end the process (SIGBUS).
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self._start, self._window = 0, b""

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> bytes: ...

    def __getitem__(self, at: int | slice) -> int | bytes:
        if isinstance(at, slice):
            start, stop, _ = at.indices(self._size)
            return self._read(start, stop)
        if not self._start <= at < self._start + len(self._window):
            self._start, self._window = at, self._read(at, min(at + _WINDOW, self._size))
        return self._window[at - self._start]

    def _read(self, start: int, stop: int) -> bytes:
        self._file.seek(start)
        data = self._file.read(stop - start)
        if len(data) < stop - start:
            raise ValueError("cut short")
        return data


@attrs.frozen(kw_only=True)
class ByteRange:
    """`length` bytes of a file from `offset` on. RequestError if they no longer exist."""

    path: Path
    offset: int
    length: int

    def write(self, file: HashingFile) -> None:
        """Copy them to a file."""
        for piece in self._pieces():
            file.write(piece)

    def read(self) -> bytes:
        """Return all bytes."""
        return b"".join(self._pieces())

    def _pieces(self) -> Iterator[bytes]:
        what = f"can't read the weights in {str(self.path)!r}"
        with system_error(what, "restore the file"), open_file(self.path) as source:
            source.seek(self.offset)
            left = self.length
            while left:
                piece = source.read(min(_PIECE, left))
                if not piece:
                    raise RequestError(f"{what}, it was cut short meanwhile: restore it.")
                left -= len(piece)
                yield piece
