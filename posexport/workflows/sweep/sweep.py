"""A whole sweep: its plan, the loop that runs the remaining jobs on an Executor, and the outcome of every job.

Jobs that share a machine run first. Jobs that take a whole machine run after them, so that no other job disturbs a
timing. If an attempt is lost, because a process crashed or a machine went away, its job goes back to the end of the
queue. After `tries` attempts the job has failed, and the other jobs continue.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Protocol

import attrs

from posexport import temporary
from posexport.errors import RequestError
from posexport.jsondata import unstructure
from posexport.spec.fields import integer, positive
from posexport.workflows.sweep.folder import VERSION, Folder
from posexport.workflows.sweep.job_plan import Plan, plan, read_tables, read_text
from posexport.workflows.sweep.jobs import FAILED, LOST, NOT_RUN, PASSED, Job, JobResources, Outcome, Record
from posexport.workflows.sweep.kinds import Options
from posexport.workflows.sweep.ray import Cluster, check_address

STATES = (PASSED, FAILED, NOT_RUN)
_POLL_SECONDS = 0.25  # after which the loop looks for jobs that have ended, and for Ctrl-C

Finish = Callable[[Job, Outcome, int], object]
"""Called once for each job with its outcome and the number of attempts."""


@attrs.frozen(kw_only=True)
class SweepOptions:
    """Where and how a sweep runs: on this machine with `workers`, or on the Ray cluster at the address `ray`."""

    ray: str | None = None
    workers: int | None = integer(None, "jobs side by side on this machine")
    tries: int = integer(3, "attempts that a job gets")
    time_limit: float = positive(3600.0, "seconds that one job may take")

    def __attrs_post_init__(self) -> None:
        if self.ray is None:
            return
        if self.workers is not None:
            raise RequestError(
                f"--workers {self.workers} is for this machine and --ray {self.ray} for a cluster: give one."
            )
        check_address(self.ray)


@attrs.frozen(kw_only=True)
class SweepResult:
    """The records of a sweep's jobs in the order of its plan.

    `done_before` of them existed when it began. `left` are missing because it was interrupted.
    """

    plan: Plan
    folder: Path
    records: Sequence[Record]
    done_before: int
    left: int = 0
    notes: Sequence[str] = ()

    def exit_code(self) -> int:
        """1 if a job failed, otherwise 3 if a required runtime, or every job, was not run, otherwise 0."""
        states = {record.state for record in self.records}
        if FAILED in states:
            return 1
        return 3 if self._required() is not None or states == {NOT_RUN} else 0

    def missing(self) -> str:
        """The sentence for exit code 3."""
        required = self._required()
        if required is None:
            return "no job was run: see their reasons."
        return f"{required.label} was not run: {required.reason}."

    def _required(self) -> Record | None:
        """The first record of a job that requires a runtime but was not run."""
        required = {job.id for job in self.plan.jobs if "--require" in job.arguments}
        return next((record for record in self.records if record.state == NOT_RUN and record.id in required), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        counts = Counter(record.state for record in self.records)
        kinds = {job.id: job.kind for job in self.plan.jobs}
        return {
            "kind": "sweep",
            "version": VERSION,
            "folder": str(self.folder),
            "counts": {state: counts[state] for state in STATES},
            "done_before": self.done_before,
            "jobs": [{"kind": kinds[record.id], **unstructure(record)} for record in self.records],
            "refused": self.plan.refusals(),
            "notes": list(self.notes),
        }


def read_plan(file: str | None, texts: Sequence[str], commands: Callable[[str], Options]) -> Plan:
    """The jobs of a file and of texts. `commands` gives the options of a command by its name."""
    if not file and not texts:
        raise RequestError("there are no jobs: give a TOML file, or --job 'matrix encoding=rope'.")
    tables = read_tables(Path(file)) if file else []
    return plan([*tables, *map(read_text, texts)], commands)


def run_sweep(
    planned: Plan, folder: Folder, options: SweepOptions, progress: Callable[[str, int], object]
) -> SweepResult:
    """Run the jobs that have no final record yet. `progress` is called with a step and how many jobs are done.

    Ctrl-C ends the jobs that run. The records so far are kept, and the result says how many jobs are left.
    """
    temporary.usual_parent()
    with closing(_executor(planned, folder, options)) as executor, folder.hold():
        final = folder.final()
        records = {job.id: final[job.id] for job in planned.jobs if job.id in final}
        done_before = len(records)
        progress("starting", done_before)

        def finish(job: Job, outcome: Outcome, attempts: int) -> None:
            records[job.id] = folder.keep(job, outcome, attempts)
            progress(f"{outcome.state}: {job.label}", len(records))

        with suppress(KeyboardInterrupt):
            folder.write_state(planned, records)
            drive([job for job in planned.jobs if job.id not in final], executor, finish, tries=options.tries)
        notes = folder.collect(planned, records)
    ended = [records[job.id] for job in planned.jobs if job.id in records]
    return SweepResult(
        plan=planned,
        folder=folder.path,
        records=ended,
        done_before=done_before,
        left=len(planned.jobs) - len(ended),
        notes=notes,
    )


def _executor(planned: Plan, folder: Folder, options: SweepOptions) -> Executor:
    """What runs the jobs. A cluster is connected only if a job is left, and before the folder is made."""
    if options.ray is not None:
        final = folder.final()
        if remaining := [job for job in planned.jobs if job.id not in final]:
            return Cluster(options.ray, remaining, options.time_limit)
    from posexport.verify.matrix.run import default_jobs
    from posexport.workflows.sweep.local_jobs import Local

    return Local(options.workers or default_jobs(), options.time_limit)


class Executor(Protocol):
    """What runs jobs: processes of this machine, or a cluster."""

    def refusal(self, needs: JobResources) -> str | None:
        """Why a job with these needs can't run anywhere, or None."""

    def room(self, needs: JobResources) -> bool:
        """Whether one more job with these needs may be submitted now."""

    def submit(self, job: Job) -> None:
        """Start a job."""

    def finished(self, seconds: float) -> list[tuple[Job, Outcome]]:
        """The jobs that have ended since the last call. Waits at most `seconds` for the first of them."""

    def close(self) -> None:
        """Stop the jobs that run."""


def drive(jobs: Sequence[Job], executor: Executor, finish: Finish, tries: int = 3) -> None:
    """Run all jobs, each until it has ended or was lost `tries` times."""
    for alone in (False, True):
        _drive([job for job in jobs if job.needs.alone == alone], executor, finish, tries)


def _drive(jobs: Iterable[Job], executor: Executor, finish: Finish, tries: int) -> None:
    """Run jobs that may run side by side."""
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
    """The outcome of a job after its last attempt. A lost attempt then counts as failed."""
    if outcome.state != LOST:
        return outcome
    times = "at its only attempt" if attempts == 1 else f"{attempts} times"
    return attrs.evolve(outcome, state=FAILED, reason=f"lost {times}: {outcome.reason}", result=None, outputs={})
