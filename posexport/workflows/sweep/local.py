"""Jobs on this machine: some at a time, each in processes of its own. Needs no Ray.

A job that shares the machine is kept to the CPUs that it takes, where the system can do that: engines start a thread
for each CPU that they see, and jobs side by side would be in each other's way.
"""

from __future__ import annotations

import contextlib
import os
import queue
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from posexport.machine import numbers
from posexport.runtimes import cuda
from posexport.workflows.sweep.job_files import stage_files
from posexport.workflows.sweep.jobs import Job, JobResources, Outcome
from posexport.workflows.sweep.subprocess_job import TIME_LIMIT, JobCommand, JobRunner


class Local:
    """At most `workers` jobs side by side, and no more CPUs than there are, or workers where these are more; one that
    takes the whole machine has it for itself."""

    def __init__(self, workers: int, time_limit: float = TIME_LIMIT) -> None:
        self._workers, self._time_limit = workers, time_limit
        self._cpus = numbers()
        self._idle: queue.SimpleQueue[JobRunner] = queue.SimpleQueue()
        self._hands = [JobRunner() for _ in range(workers)]
        for hand in self._hands:
            self._idle.put(hand)
        self._threads = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="sweep")
        self._running: dict[Future[Outcome], tuple[Job, Sequence[int]]] = {}

    def refusal(self, needs: JobResources) -> str | None:
        """Why this machine is not for such jobs, or None."""
        cpus = len(self._cpus)
        if needs.cpus is not None and needs.cpus > cpus:
            return f"it needs {needs.cpus} CPUs, and this machine has {cpus}"
        if needs.gpu is None:
            return None
        try:
            here = cuda.device()[0]
        except OSError:
            return f"it needs a GPU {needs.gpu}, and this machine has none"
        return None if needs.gpu.lower() in here.lower() else f"it needs a GPU {needs.gpu}, and this machine has {here}"

    def room(self, needs: JobResources) -> bool:
        """Whether a worker and CPUs are free, or all are where the job takes the machine."""
        taken = [job.needs for job, _ in self._running.values()]
        if needs.alone:
            return not taken
        if needs.gpu is not None and any(each.gpu for each in taken):
            return False  # of several GPUs the first is what runtimes here take
        cpus = sum(each.cpus or 0 for each in taken)
        return len(taken) < self._workers and cpus + (needs.cpus or 0) <= max(self._workers, len(self._cpus))

    def submit(self, job: Job) -> None:
        """Give a job to a free worker, and CPUs that fewest others have."""
        used = Counter(cpu for _, cpus in self._running.values() for cpu in cpus)
        cpus = sorted(self._cpus, key=lambda cpu: used[cpu])[: job.needs.cpus]
        self._running[self._threads.submit(self._work, job, cpus)] = (job, cpus)

    def _work(self, job: Job, cpus: Sequence[int]) -> Outcome:
        order = JobCommand.of(job, self._time_limit)
        hand = self._idle.get()
        if hasattr(os, "sched_setaffinity"):
            with contextlib.suppress(OSError):  # where it may not, the job runs on all
                os.sched_setaffinity(0, cpus)  # of this thread, and so of the process that it starts
        try:
            return hand.work(order, lambda folder: stage_files(job.files, folder))
        finally:
            self._idle.put(hand)

    def finished(self, seconds: float) -> list[tuple[Job, Outcome]]:
        """What has ended."""
        done = wait(self._running, timeout=seconds, return_when=FIRST_COMPLETED).done
        return [(self._running.pop(future)[0], future.result()) for future in done]

    def close(self) -> None:
        """Kill what runs."""
        for hand in self._hands:
            hand.stop()
        self._threads.shutdown(wait=True, cancel_futures=True)
