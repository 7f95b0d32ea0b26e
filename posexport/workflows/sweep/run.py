"""Running the jobs of a sweep on an Executor, and keeping each result as soon as it is there.

Jobs that share a machine run first and those that take a whole one after them, so that no other job disturbs a timing.
An attempt that is lost, because a process crashed or a machine went away, goes back to the end of the queue; after
`tries` attempts the job has failed, and the other jobs go on.
"""

from __future__ import annotations

from collections import Counter, deque
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
        _drive([job for job in jobs if job.needs.alone == alone], executor, finish, tries)


def _drive(jobs: Iterable[Job], executor: Executor, finish: Finish, tries: int) -> None:
    """Run jobs that may run beside each other."""
    waiting: dict[JobResources, deque[Job]] = {}
    for job in jobs:
        waiting.setdefault(job.needs, deque()).append(job)
    attempts: Counter[str] = Counter()
    running: set[str] = set()
    while any(waiting.values()) or running:
        for needs, queue in waiting.items():
            reason = executor.refusal(needs) if queue else None
            while queue and reason is not None:
                job = queue.popleft()
                finish(job, Outcome(state=NOT_RUN, reason=reason), attempts[job.id])
            while queue and executor.room(needs):
                job = queue.popleft()
                attempts[job.id] += 1
                running.add(job.id)
                executor.submit(job)
        for job, outcome in executor.finished(_POLL_SECONDS):
            if job.id not in running:  # its outcome is known already
                continue
            running.discard(job.id)
            if outcome.state == LOST and attempts[job.id] < tries:
                waiting[job.needs].append(job)
            else:
                finish(job, _final(outcome, attempts[job.id]), attempts[job.id])


def _final(outcome: Outcome, attempts: int) -> Outcome:
    """The outcome of a job after its last attempt: one that is lost has failed."""
    if outcome.state != LOST:
        return outcome
    times = "at its only attempt" if attempts == 1 else f"{attempts} times"
    return attrs.evolve(outcome, state=FAILED, reason=f"lost {times}: {outcome.reason}", result=None, outputs={})


def left(jobs: Iterable[Job], done: Iterable[str]) -> list[Job]:
    """The jobs whose ids are not `done`."""
    known = set(done)
    return [job for job in jobs if job.id not in known]
