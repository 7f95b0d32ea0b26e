"""Runs cells in separate processes. The workers that `posexport verify` starts in a cell are forks of the cell's
process before its work. This saves seconds of imports for each worker."""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

from limited import PRELOADED, record_of
from whole_cell import cell
from whole_data import Cell

from posexport.jsondata import structure

forks: Any = importlib.import_module("forks")  # a module of the tests, without types

PRELOADED += [
    *forks.PRELOADED,
    *("whole_run", "posexport.cli", "whole_warm", "posexport.export.whole_model", "posexport.verify.graph.job"),
    *("posexport.runtimes.checkpoint_module", "posexport.runtimes.generation_process"),
]
_PR_SET_CHILD_SUBREAPER = 36


def run(one: Cell, work: Path, fault: bool = False) -> Cell:
    """The cell with its result."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (one.architecture, one.form, one.dtype, one.caches, str(work), fault)
        record, _ = record_of(Path(folder) / "record.json", in_forks, *arguments)
    if "ended" in record:
        record = {"state": "ended", "reason": record["ended"]}
    place = {"architecture": one.architecture, "form": one.form, "dtype": one.dtype, "caches": one.caches}
    return structure(place | record, Cell)


def in_forks(*arguments: Any) -> dict[str, Any]:
    """Run a cell whose workers are forks of this process."""
    control = _server()
    vars(forks)["_start"] = lambda: control
    forks.install()
    return cell(*arguments)


def _server() -> socket.socket:
    """Start the process that forks workers. This process becomes the parent of the workers."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        forks.serve(theirs)
        os._exit(0)
    theirs.close()
    return ours
