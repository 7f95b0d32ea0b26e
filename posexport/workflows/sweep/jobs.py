"""A sweep: jobs that need nothing of each other, as plain data, for one machine or a fleet. Imports no engine.

A job is one command of posexport with the files that it reads. Its id is a hash of both: the same job has the same id
on every machine and every day, so what is done is known by its name, and a result that comes twice is one result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from posexport import __version__

PASSED, FAILED, NOT_RUN, LOST = "passed", "failed", "not run", "lost"
"""What becomes of a job. `lost` is said of one attempt: the process or the machine ended under it."""


@attrs.frozen(kw_only=True)
class JobResources:
    """What a job takes of a machine: CPUs, or None for all of them and nobody beside it, and GPUs of a type."""

    cpus: int | None = 1
    gpu: str | None = None
    gpus: int = 0

    @property
    def alone(self) -> bool:
        """Whether it takes a whole machine, as a timing does: neighbours would distort it."""
        return self.cpus is None

    def __str__(self) -> str:
        cpus = "a whole machine" if self.cpus is None else f"{self.cpus} CPU{'s' * (self.cpus > 1)}"
        return cpus if self.gpu is None else f"{cpus} and {self.gpus} {self.gpu}"


@attrs.frozen(kw_only=True)
class File:
    """A file that a job reads: its name in the job's folder, what is in it, where it lies here and when it changed."""

    name: str
    sha256: str
    size: int
    path: Path = attrs.field(eq=False)
    changed: int = attrs.field(default=0, eq=False)


@attrs.define(kw_only=True, slots=False, eq=False)
class Job:
    """One unit of work: `posexport <kind> <arguments>` in a folder that holds `files`.

    `label` is what people read; it is no part of the id.
    """

    kind: str
    arguments: tuple[str, ...]
    needs: JobResources
    label: str
    files: tuple[File, ...] = ()

    @cached_property
    def id(self) -> str:
        """16 hexadecimal digits of the sha256 of all that may change the result, posexport's version too."""
        said = {
            "version": __version__,
            "kind": self.kind,
            "arguments": self.arguments,
            "needs": attrs.asdict(self.needs),
            "files": {file.name: file.sha256 for file in self.files},
        }
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def requires(self) -> bool:
        """Whether it was told that a runtime must be there."""
        return "--require" in self.arguments

    def to_dict(self) -> dict[str, Any]:
        """Plain data without a path: what a machine must know to do it, files by their hashes."""
        return {
            "id": self.id,
            "kind": self.kind,
            "label": self.label,
            "arguments": list(self.arguments),
            "needs": attrs.asdict(self.needs),
            "files": [{"name": file.name, "sha256": file.sha256, "size": file.size} for file in self.files],
        }


@attrs.frozen(kw_only=True)
class Outcome:
    """What came of one attempt. `result` is the JSON that the command printed, `outputs` the files that it wrote.

    `where` names the machine; `seconds` is the time the command took there.
    """

    state: str
    reason: str | None = None
    where: str = ""
    seconds: float = 0.0
    result: Mapping[str, Any] | None = None
    outputs: Mapping[str, bytes] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Record:
    """What is kept of a job that has ended, after `attempts` attempts. `result` is the name of its result's file."""

    id: str
    label: str
    state: str
    reason: str | None = None
    attempts: int = 1
    where: str = ""
    seconds: float = 0.0
    result: str | None = None

    @property
    def final(self) -> bool:
        """Whether going on leaves it as it is: it was judged. What crashed or could not run is tried again."""
        return self.state == PASSED or (self.state == FAILED and self.result is not None)
