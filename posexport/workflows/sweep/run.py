"""Running the jobs of a sweep on an Executor, and keeping each result as soon as it is there.

Jobs that share a machine run first and those that take a whole one after them, so that no other job disturbs a timing.
An attempt that is lost, because a process crashed or a machine went away, goes back to the end of the queue; after
`tries` attempts the job has failed, and the other jobs go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import attrs

from posexport.workflows.sweep.jobs import FAILED, LOST, NOT_RUN, Job, JobResources, Outcome

TRIES = 3
"""Attempts that a job gets."""

_POLL_SECONDS = 0.25  # after which the loop looks for jobs that have ended, and for Ctrl-C

Finish = Callable[[Job, Outcome, int], object]
"""Called once for each job with its outcome and the number of attempts."""


class Executor(Protocol):
    """What runs jobs: processes of this machine, or a cluster."""

    def refusal(self, needs: JobResources) -> str | None:
        """Why a job with these needs can't run anywhere, or None."""

    def room(self, needs: JobResources) -> bool:
        """Whether one more job with these needs may be submitted now."""

    def submit(self, job: Job) -> None:
        """Start a job."""

    def finished(self, seconds: float) -> list[tuple[Job, Outcome]]:
        """The jobs that have ended since the last call; waits at most `seconds` for the first of them."""

    def close(self) -> None:
        """Stop the jobs that run."""


def drive(jobs: Sequence[Job], executor: Executor, finish: Finish, *, tries: int = TRIES) -> None:
    """Run all jobs, each until it has ended or was lost `tries` times."""
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
            for needs, queue in self.waiting.items():
                self._submit(needs, queue)
            for job, outcome in self.executor.finished(_POLL_SECONDS):
                if job.id in self.running:  # otherwise its outcome is known already
                    self.running.discard(job.id)
                    self._ended(job, outcome)

    def _submit(self, needs: JobResources, queue: deque[Job]) -> None:
        if not queue:
            return
        reason = self.executor.refusal(needs)
        if reason is not None:
            while queue:
                self.finish(queue[0], Outcome(state=NOT_RUN, reason=reason), self.attempts.get(queue[0].id, 0))
                queue.popleft()
        while queue and self.executor.room(needs):
            job = queue.popleft()
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
    """The jobs whose ids are not `done`."""
    known = set(done)
    return [job for job in jobs if job.id not in known]
