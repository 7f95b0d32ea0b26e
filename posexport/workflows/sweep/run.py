"""Doing the jobs of a sweep: who does them is an Executor, and what has ended is kept at once.

Jobs that share a machine come first and those that take a whole one after them, so that none is timed beside another.
An attempt that is lost, because a process crashed or a machine went away, goes back to the end of the line; after
`tries` attempts the job has failed, and the rest goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import attrs

from posexport.workflows.sweep.jobs import FAILED, LOST, NOT_RUN, Job, JobResources, Outcome

TRIES = 3
"""Attempts that a job gets."""

_STEP = 0.25  # seconds between two looks at what has ended, and for Ctrl-C

Finish = Callable[[Job, Outcome, int], object]
"""Is told what came of a job, and how many attempts it took; once for each job."""


class Executor(Protocol):
    """Who does jobs: processes of this machine, or a cluster."""

    def refusal(self, needs: JobResources) -> str | None:
        """Why nobody can do a job with these needs, or None."""

    def room(self, needs: JobResources) -> bool:
        """Whether one more job with these needs may be submitted now."""

    def submit(self, job: Job) -> None:
        """Begin a job, here or elsewhere."""

    def finished(self, seconds: float) -> list[tuple[Job, Outcome]]:
        """What has ended since it was asked last; waits at most that long for the first of them."""

    def close(self) -> None:
        """Stop what is under way."""


def drive(jobs: Sequence[Job], executor: Executor, finish: Finish, *, tries: int = TRIES) -> None:
    """Do all jobs, each until it has ended or was lost `tries` times."""
    for alone in (False, True):
        _Group([job for job in jobs if job.needs.alone == alone], executor, finish, tries).drive()


@attrs.define
class _Group:
    """Jobs that may run beside each other."""

    jobs: Sequence[Job]
    executor: Executor
    finish: Finish
    tries: int
    waiting: dict[JobResources, deque[Job]] = attrs.field(factory=dict)
    attempts: dict[str, int] = attrs.field(factory=dict)
    running: set[str] = attrs.field(factory=set)

    def drive(self) -> None:
        for job in self.jobs:
            self.waiting.setdefault(job.needs, deque()).append(job)
        while any(self.waiting.values()) or self.running:
            for needs, line in self.waiting.items():
                self._submit(needs, line)
            for job, outcome in self.executor.finished(_STEP):
                if job.id in self.running:  # else its answer came before
                    self.running.discard(job.id)
                    self._ended(job, outcome)

    def _submit(self, needs: JobResources, line: deque[Job]) -> None:
        if not line:
            return
        why = self.executor.refusal(needs)
        if why is not None:
            while line:
                self.finish(line[0], Outcome(state=NOT_RUN, reason=why), self.attempts.get(line[0].id, 0))
                line.popleft()
        while line and self.executor.room(needs):
            job = line.popleft()
            self.attempts[job.id] = self.attempts.get(job.id, 0) + 1
            self.running.add(job.id)
            self.executor.submit(job)

    def _ended(self, job: Job, outcome: Outcome) -> None:
        attempts = self.attempts[job.id]
        if outcome.state != LOST:
            self.finish(job, outcome, attempts)
        elif attempts < self.tries:
            self.waiting[job.needs].append(job)
        else:
            times = "at its only attempt" if attempts == 1 else f"{attempts} times"
            reason = f"lost {times}: {outcome.reason}"
            self.finish(job, attrs.evolve(outcome, state=FAILED, reason=reason, result=None, outputs={}), attempts)


def left(jobs: Iterable[Job], done: Iterable[str]) -> list[Job]:
    """Jobs whose ids are not among those that are done."""
    known = set(done)
    return [job for job in jobs if job.id not in known]
