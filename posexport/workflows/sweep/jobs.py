"""A sweep: independent jobs as plain data, for one machine or a cluster. Imports no engine.

A job is one command of posexport with the files that it reads. Its id is a hash of both, so the same job has the same
id on every machine and every day. A finished job is recognised by its id, and a second result for it is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import attrs

from posexport import __version__
from posexport.jsondata import json_sha256

State = Literal["passed", "failed", "not run", "lost"]

PASSED: Literal["passed"] = "passed"
FAILED: Literal["failed"] = "failed"
NOT_RUN: Literal["not run"] = "not run"
LOST: Literal["lost"] = "lost"
"""The states of a job. An attempt can also be lost: its process or its machine ended before the command did."""


@attrs.frozen(kw_only=True)
class JobResources:
    """What a job takes of a machine: CPUs (None for the whole machine), and GPUs of a type."""

    cpus: int | None = 1
    gpu: str | None = None
    gpus: int = 0

    @property
    def alone(self) -> bool:
        """Whether it takes a whole machine, like a timing, which other jobs would distort."""
        return self.cpus is None

    def __str__(self) -> str:
        cpus = "a whole machine" if self.cpus is None else f"{self.cpus} CPU{'s' * (self.cpus > 1)}"
        return cpus if self.gpu is None else f"{cpus} and {self.gpus} {self.gpu}"


@attrs.frozen(kw_only=True)
class File:
    """A file that a job reads.

    `name` is its name in the job's folder. `sha256` and `size` are those of its content. `path` is its path on this
    machine, and `changed` is the time of its last change in ns.
    """

    name: str
    sha256: str
    size: int
    path: Path = attrs.field(eq=False)
    changed: int = attrs.field(default=0, eq=False)


@attrs.define(kw_only=True, slots=False, eq=False)
class Job:
    """One unit of work: `posexport <kind> <arguments>` in a folder with `files`. `label` is not part of the id."""

    kind: str
    arguments: tuple[str, ...]
    needs: JobResources
    label: str
    files: tuple[File, ...] = ()

    @cached_property
    def id(self) -> str:
        """16 hexadecimal digits of the sha256 of everything that may change the result, also posexport's version."""
        parts = {
            "version": __version__,
            "kind": self.kind,
            "arguments": self.arguments,
            "needs": attrs.asdict(self.needs),
            "files": {file.name: file.sha256 for file in self.files},
        }
        return json_sha256(parts)[:16]

    def values_of(self, option: str) -> Iterator[str]:
        """The values that its arguments give to an option such as `--runtime`."""
        return (value for word, value in pairwise(self.arguments) if word == option)

    def to_dict(self) -> dict[str, Any]:
        """Plain data without paths: files by their hashes."""
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
    """The outcome of one attempt.

    `result` is the JSON that the command printed, and `outputs` are the files that it wrote. `where` is the name of the
    machine, and `seconds` is how long the command took there.
    """

    state: State
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
    state: Literal["passed", "failed", "not run"]
    reason: str | None = None
    attempts: int = 1
    where: str = ""
    seconds: float = 0.0
    result: str | None = None

    @property
    def final(self) -> bool:
        """Whether the next run of the sweep keeps it: it passed, or failed with a result.

        Jobs that crashed or could not run are tried again.
        """
        return self.state == PASSED or (self.state == FAILED and self.result is not None)
