"""Jobs on this machine: several at a time, each in processes of its own. Needs no Ray.

A job that shares the machine is bound to the CPUs that it takes, where the system can do that: engines start a thread
for each CPU that they see, and jobs side by side would slow each other down.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from posexport.machine import numbers
from posexport.runtimes import cuda
from posexport.workflows.sweep.job_files import stage_files
from posexport.workflows.sweep.jobs import Job, JobResources, Outcome
from posexport.workflows.sweep.subprocess_job import JobCommand, JobRunner


class Local:
    """Runs at most `workers` jobs side by side, on no more CPUs than there are, or than workers where these are more; a
    job that takes the whole machine runs alone."""

    def __init__(self, workers: int, time_limit: float = 3600.0) -> None:
        self._workers, self._time_limit = workers, time_limit
        self._cpus = numbers()
        self._runners = [JobRunner() for _ in range(workers)]
        self._idle = list(self._runners)  # as many as threads, so that none finds it empty
        self._threads = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="sweep")
        self._running: dict[Future[Outcome], tuple[Job, Sequence[int]]] = {}

    def refusal(self, needs: JobResources) -> str | None:
        """Why this machine can't run such jobs, or None."""
        cpus = len(self._cpus)
        if needs.cpus is not None and needs.cpus > cpus:
            return f"it needs {needs.cpus} CPUs, and this machine has {cpus}"
        if needs.gpu is None:
            return None
        try:
            gpu = cuda.device()[0]
        except OSError:
            return f"it needs a GPU {needs.gpu}, and this machine has none"
        return None if needs.gpu.lower() in gpu.lower() else f"it needs a GPU {needs.gpu}, and this machine has {gpu}"

    def room(self, needs: JobResources) -> bool:
        """Whether a worker and enough CPUs are free; for a job that takes the whole machine, whether nothing runs."""
        taken = [job.needs for job, _ in self._running.values()]
        if needs.alone:
            return not taken
        if needs.gpu is not None and any(other.gpu for other in taken):
            return False  # runtimes here use the first of several GPUs
        cpus = sum(other.cpus or 0 for other in taken)
        return len(taken) < self._workers and cpus + (needs.cpus or 0) <= max(self._workers, len(self._cpus))

    def submit(self, job: Job) -> None:
        """Give a job to a free worker, with the CPUs that the fewest other jobs have."""
        used = Counter(cpu for _, cpus in self._running.values() for cpu in cpus)
        cpus = sorted(self._cpus, key=lambda cpu: used[cpu])[: job.needs.cpus]
        self._running[self._threads.submit(self._run, job, cpus)] = (job, cpus)

    def _run(self, job: Job, cpus: Sequence[int]) -> Outcome:
        runner = self._idle.pop()
        if hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):  # where this is not permitted, the job runs on all CPUs
                os.sched_setaffinity(0, cpus)  # of this thread, and so of the process that it starts
        try:
            return runner.run(JobCommand.of(job, self._time_limit), lambda folder: stage_files(job.files, folder))
        finally:
            self._idle.append(runner)

    def finished(self, seconds: float) -> list[tuple[Job, Outcome]]:
        """The jobs that have ended; waits at most `seconds` for the first."""
        done = wait(self._running, timeout=seconds, return_when=FIRST_COMPLETED).done
        return [(self._running.pop(future)[0], future.result()) for future in done]

    def close(self) -> None:
        """Kill the jobs that run."""
        for runner in self._runners:
            runner.stop()
        self._threads.shutdown(wait=True, cancel_futures=True)
