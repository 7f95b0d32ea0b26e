"""Where a sweep's state lives: a folder, of which every file is whole, so that it can be stopped at any moment.

    sweep.json                  the jobs with what became of them, and the combinations that a form refuses
    results/<kind>-<id>.json    what the command of a job printed
    artifacts/<id>/             the files that it wrote, where that is what it is for
    matrix.json                 the cells of all matrix jobs together, as `posexport matrix` writes them
    .state/jobs/<id>.json       one job that has ended: a Record
    .state/parts/               results that are put together in a file above

A job's record is written last: where there is one, the rest is there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from operator import methodcaller
from pathlib import Path
from typing import IO

import attrs

from posexport import __version__
from posexport.errors import RequestError
from posexport.files import json_bytes, staged, write_json
from posexport.workflows.sweep.jobs import FAILED, NOT_RUN, PASSED, Job, Outcome, Record
from posexport.workflows.sweep.kinds import KINDS
from posexport.workflows.sweep.matrix import file_name

VERSION = 1
_JOBS, _PARTS = ".state/jobs", ".state/parts"


class Folder:
    """The folder of one sweep, held by one process at a time (see `hold`)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Make the folder if need be, and keep other sweeps out of it; RequestError where one is in it."""
        try:
            (self.path / _JOBS).mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".state" / "lock").open("ab")
        except OSError as error:
            raise RequestError(
                f"output {str(self.path)!r} can't be made or written ({error.strerror}): give another folder."
            ) from None
        with lock:
            if not _lock(lock):
                raise RequestError(f"another sweep is at work in {str(self.path)!r}: wait for it, or give another -o.")
            yield

    def tell(
        self,
        jobs: Sequence[Job],
        records: Mapping[str, Record],
        refused: Sequence[tuple[Mapping[str, str], str]],
        notes: Sequence[str] = (),
    ) -> None:
        """Write down the jobs of this sweep, in sweep.json: what became of each, and which file has its result."""
        write_json(
            self.path / "sweep.json",
            {
                "kind": "sweep",
                "version": VERSION,
                "posexport": __version__,
                "jobs": [{**job.to_dict(), **_told(job, records.get(job.id))} for job in jobs],
                "refused": [{**said, "reason": why} for said, why in refused],
                "notes": list(notes),
            },
        )

    def records(self) -> dict[str, Record]:
        """What has ended, by id. A file that isn't whole counts as none: its job is done again."""
        found = {}
        for path in sorted((self.path / _JOBS).glob("*.json")):
            record = _read(path)
            if record is not None and (record.result is None or (self.path / record.result).is_file()):
                found[record.id] = record
        return found

    def judged(self) -> dict[str, Record]:
        """Those records that going on leaves as they are."""
        return {id: record for id, record in self.records().items() if record.final}

    def keep(self, job: Job, outcome: Outcome, attempts: int) -> Record:
        """Write what came of a job: its files, its result, and at last its record."""
        place = _PARTS if KINDS[job.kind].parts else "results"
        result = None if outcome.result is None else f"{place}/{job.kind}-{job.id}.json"
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
        with staged() as files:
            for name, content in outcome.outputs.items():
                files.write(_made(self.path / "artifacts" / job.id / name), methodcaller("write", content))
            if result is not None and outcome.result is not None:
                files.write(_made(self.path / result), methodcaller("write", json_bytes(outcome.result)))
            head = {"kind": "job", "version": VERSION, **attrs.asdict(record), "job": job.to_dict()}
            files.write(self.path / _JOBS / f"{job.id}.json", methodcaller("write", json_bytes(head)))
        return record


def _told(job: Job, record: Record | None) -> dict[str, str | None]:
    """State, reason and visible result of a job: of one of the matrix, the file that its cells are put together in."""
    if record is None:
        return {"state": NOT_RUN, "reason": "it is not done yet: run the sweep again", "result": None}
    result = record.result
    if result is not None and KINDS[job.kind].parts:
        result = file_name(next((v for word, v in pairwise(job.arguments) if word == "--target"), "portable"))
    return {"state": record.state, "reason": record.reason, "result": result}


def _made(path: Path) -> Path:
    """The path, once its folder is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _read(path: Path) -> Record | None:
    try:
        data = json.loads(path.read_bytes())
        record = Record(**{field.name: data[field.name] for field in attrs.fields(Record)})
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    sound = data.get("version") == VERSION and record.id == path.stem and record.state in (PASSED, FAILED, NOT_RUN)
    return record if sound else None


def _lock(file: IO[bytes]) -> bool:
    """Whether the file is ours alone from now on, until it is closed or the process ends, however it does."""
    if os.name != "posix":
        raise RequestError("sweep needs Linux or macOS: run it there.")
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
