"""Bytes of a file that are read in pieces: weights on their way to another file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import attrs

from posexport.errors import RequestError, system_error
from posexport.files import HashingFile, open_file

_PIECE = 2**22  # bytes that are read at a time


@attrs.frozen(kw_only=True)
class ByteRange:
    """So many bytes of a file from `offset` on; RequestError where they are not there any more."""

    path: Path
    offset: int
    length: int

    def write(self, file: HashingFile) -> None:
        """Copy them to a file."""
        for piece in self._pieces():
            file.write(piece)

    def read(self) -> bytes:
        """All of them."""
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
