"""The state of a sweep: a folder in which every file is complete, so that the sweep can be stopped at any moment.

    sweep.json                  the jobs with their states, and the combinations that a form refuses
    results/<kind>-<id>.json    the result that the command of a job printed
    artifacts/<id>/             the files that a job wrote, for kinds whose files are results
    matrix.json                 the cells of all matrix jobs together, as `posexport matrix` writes them
    .state/jobs/<id>.json       one job that has ended: a Record
    .state/parts/               results that are combined in a file above

The record of a job is written last. If it exists, its other files exist too.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import methodcaller
from pathlib import Path
from typing import IO

import attrs

from posexport import __version__
from posexport.artifact.folders import make_folders
from posexport.errors import RequestError, system_error
from posexport.files import json_bytes, renewed, staged, write_json
from posexport.jsondata import DataError, read_json, structure, unstructure
from posexport.verify.matrix.table import REFUSED, Cell, Entry, Matrix, read
from posexport.workflows.sweep.job_plan import Plan, Refused
from posexport.workflows.sweep.jobs import FAILED, NOT_RUN, Job, Outcome, Record
from posexport.workflows.sweep.kinds import KINDS

VERSION = 1
_JOBS, _PARTS = ".state/jobs", ".state/parts"


@attrs.frozen
class Folder:
    """The folder of one sweep. One process holds it at a time (see `hold`)."""

    path: Path

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Make the folder if needed, and keep other sweeps out of it until the block or this process ends in any way.

        RequestError if another sweep uses it.
        """
        if os.name != "posix":
            raise RequestError("sweep needs Linux or macOS: run it there.")
        import fcntl

        with system_error(f"output {str(self.path)!r} can't be made or written", "give another folder"):
            make_folders(self.path / _JOBS)
            lock = self._lock()
        with lock:
            with system_error(f"{str(self.path)!r} can't be locked", "give another folder"):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    text = f"another sweep is at work in {str(self.path)!r}: wait for it, or give another -o."
                    raise RequestError(text) from None
            yield

    def _lock(self) -> IO[bytes]:
        """The lock's file, created if needed. Nothing else with its name is opened, such as a pipe or a link."""
        path = self.path / ".state" / "lock"
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            lock = os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):  # a link, a folder, a socket
                raise
        else:
            if stat.S_ISREG(os.fstat(lock.fileno()).st_mode):
                return lock
            lock.close()
        raise RequestError(f"{str(path)!r} is not a regular file, so no lock: remove it, or give another -o.")

    def write_state(self, plan: Plan, records: Mapping[str, Record], notes: Sequence[str] = ()) -> None:
        """Write sweep.json: every job with its state and the file that has its result."""
        write_json(
            self.path / "sweep.json",
            {
                "kind": "sweep",
                "version": VERSION,
                "posexport": __version__,
                "jobs": [{**job.to_dict(), **_state(job, records.get(job.id))} for job in plan.jobs],
                "refused": plan.refusals(),
                "notes": list(notes),
            },
        )

    def collect(self, plan: Plan, records: Mapping[str, Record]) -> list[str]:
        """Combine the cells of matrix jobs and write sweep.json. Return notes for people about that."""
        results = [
            self.path / record.result
            for job in plan.jobs
            if KINDS[job.kind].parts and (record := records.get(job.id)) is not None and record.result is not None
        ]
        with renewed():
            matrices, left_out = merged(results, plan.refused)
        with staged() as files:
            for target, matrix in matrices.items():
                files.write(self.path / file_name(target), methodcaller("write", matrix.to_bytes()))
        notes = [f"{left_out} matrix jobs ran with other versions and are not in matrix.json"] if left_out else []
        self.write_state(plan, records, notes)
        return notes

    def records(self) -> dict[str, Record]:
        """The jobs that have ended, by id. A job whose record or result is not complete runs again."""
        with renewed():
            records = [record for file in sorted((self.path / _JOBS).glob("*.json")) if (record := _read(file))]
        return {
            record.id: record for record in records if record.result is None or (self.path / record.result).is_file()
        }

    def final(self) -> dict[str, Record]:
        """The records that the next run of the sweep keeps."""
        return {id: record for id, record in self.records().items() if record.final}

    def keep(self, job: Job, outcome: Outcome, attempts: int) -> Record:
        """Write the outcome of a job: its files, its result, and finally its record."""
        if outcome.state == "lost":
            raise ValueError("a lost attempt is no outcome of a job")
        result = None if outcome.result is None else _result_name(job.kind, job.id)
        record = Record(
            id=job.id,
            label=job.label,
            state=outcome.state,
            reason=outcome.reason,
            attempts=attempts,
            where=outcome.where,
            seconds=outcome.seconds,
            result=result,
        )
        contents = {f"artifacts/{job.id}/{name}": content for name, content in outcome.outputs.items()}
        if result is not None and outcome.result is not None:
            contents[result] = json_bytes(outcome.result)
        data = {"kind": "job", "version": VERSION, **unstructure(record), "job": job.to_dict()}
        contents[f"{_JOBS}/{job.id}.json"] = json_bytes(data)
        with staged() as files:
            for name, content in contents.items():
                path = self.path / name
                make_folders(path.parent)
                files.write(path, methodcaller("write", content))
        return record


def _state(job: Job, record: Record | None) -> dict[str, str | None]:
    """State, reason and result of a job in sweep.json. The result of a matrix job is the file with all cells."""
    if record is None:
        return {"state": NOT_RUN, "reason": "it has not run yet: run the sweep again", "result": None}
    result = record.result
    if result is not None and KINDS[job.kind].parts:
        result = file_name(next(job.values_of("--target"), "portable"))
    return {"state": record.state, "reason": record.reason, "result": result}


def _read(path: Path) -> Record | None:
    """The record in a file. None if the file is damaged or of another version."""
    try:
        data = read_json(path)
        record = structure(data, Record)
    except (OSError, DataError):
        return None
    names = (None, *(_result_name(kind, path.stem) for kind in KINDS))  # no other file is a result of it
    sound = data.get("version") == VERSION and record.id == path.stem and record.result in names
    return record if sound else None


def _result_name(kind: str, id: str) -> str:
    """The name of a job's result in the folder of a sweep."""
    return f"{_PARTS if KINDS[kind].parts else 'results'}/{kind}-{id}.json"


def merged(results: Iterable[Path], refused: Iterable[Refused]) -> tuple[dict[str, Matrix], int]:
    """Matrices by target, combined from files of results, and how many files were left out.

    A file is left out if other versions of the exporters made it than made the first. There may be two cells for the
    same entry and runtime, such as from machines with a GPU and without. Then one that failed wins, otherwise one that
    ran.
    """
    matrices: dict[str, Matrix] = {}
    left_out = 0
    for path in results:
        part = read(path, "remove it, so that its job runs again")
        whole = matrices.setdefault(part.target, Matrix(target=part.target, made_by=part.made_by))
        if not whole.same_makers(part):
            left_out += 1
            continue
        whole.put_cpus(part.cpus)
        whole.put(
            cell for key, cell in part.cells.items() if key not in whole.cells or _rank(cell) > _rank(whole.cells[key])
        )
    for values, reason in refused:
        if (matrix := matrices.get(values.get("target", "portable"))) is not None:
            entry = Entry(**{key: values[key] for key in ("encoding", "form", "dtype", "mode")})
            columns = dict.fromkeys(column for _, column in matrix.cells)
            matrix.put(Cell(entry=entry, column=column, state=REFUSED, reason=reason) for column in columns)
    return matrices, left_out


def _rank(cell: Cell) -> int:
    return {NOT_RUN: 0, FAILED: 2}.get(cell.state, 1)


def file_name(target: str) -> str:
    """The name of a target's matrix in the folder of a sweep."""
    return "matrix.json" if target == "portable" else f"matrix-{target}.json"
