"""Reads the user's arrays from a .npz file, without pickles, and without archives that unpack to too much."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import BinaryIO

import numpy as np

from posexport.errors import RequestError
from posexport.files import open_file
from posexport.machine import available, size_text
from posexport.runtimes.base import Arrays

_MOST_PACKED = 20  # times that an archive may grow when it is unpacked
_SMALL = 64 * 2**20  # bytes that any archive may unpack to


def read_arrays(path: Path, what: str = "inputs") -> Arrays:
    """Every array of the .npz file at `path` by name; RequestError for any other file, and for pickles.

    `what` is the name of the arrays in messages.
    """
    try:
        with open_file(path) as raw, np.load(raw, allow_pickle=False) as file:  # numpy would leave its own file open
            if not isinstance(file, np.lib.npyio.NpzFile) or file.zip is None:
                raise ValueError
            if len(set(file.files)) < len(file.files):  # readers differ in which of two they take
                raise ValueError
            _check_unpacked(f"{what} {str(path)!r}", raw, file.zip)
            arrays = {name: file[name] for name in file.files}
            if not all(isinstance(array, np.ndarray) for array in arrays.values()):  # numpy gives others as bytes
                raise ValueError
            return arrays
    except RequestError:
        raise
    except OSError as error:
        why = error.strerror or "not readable"
        raise RequestError(f"{what} {str(path)!r} can't be read ({why}): give a .npz file.") from None
    except Exception:  # damaged archives make zip, zlib and numpy's header parser raise any error
        raise RequestError(
            f"{what} {str(path)!r} are not a .npz file of plain arrays: write it with numpy.savez."
        ) from None


def _check_unpacked(what: str, raw: BinaryIO, archive: zipfile.ZipFile) -> None:
    """RequestError if an archive unpacks to more than fits in memory, or than is plausible for its size."""
    unpacked = sum(entry.file_size for entry in archive.infolist())
    packed = os.fstat(raw.fileno()).st_size
    if unpacked > (free := available() // 4):
        raise RequestError(
            f"{what} unpack to {size_text(unpacked)}, at most {size_text(free)} (a quarter of the memory "
            "that is free) are read: give smaller ones."
        )
    if unpacked > max(_MOST_PACKED * packed, _SMALL):
        raise RequestError(
            f"{what} unpack from {size_text(packed)} to {size_text(unpacked)}, at most {_MOST_PACKED} "
            "times their size are read: write them with numpy.savez, which doesn't compress."
        )
