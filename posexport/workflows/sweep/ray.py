"""Jobs on a Ray cluster: one task each, placed by what it needs. Sweeps use Ray only in this file.

Files go through Ray's object store, in chunks and once for each content, so no file system is shared. Ray copies a
chunk once to each machine that reads it, and spills chunks to disk if they don't fit. A job that takes a whole machine
is given to an idle one, with all its CPUs. Ray retries nothing. Attempts are counted in one place (`sweep`), whatever
ended them.

Source: https://docs.ray.io/en/latest/ray-core/scheduling/index.html
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from posexport import __version__, temporary
from posexport.errors import PosexportError, RequestError, RuntimeMissingError, plain, system_error
from posexport.runtimes.installation import install_command
from posexport.workflows.sweep.job_files import chunks, write_chunks
from posexport.workflows.sweep.jobs import FAILED, LOST, File, Job, JobResources, Outcome
from posexport.workflows.sweep.local_jobs import JobCommand, JobRunner

CONNECT_SECONDS = 5.0
"""Seconds in which the head of a cluster must accept a connection."""

_ADDRESS = re.compile(r"(?P<host>[^\s:/\[\]]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")

MAX_QUEUED = 2
"""The most tasks that wait in Ray for each that can run. No machine is then idle, and the tasks cost little."""

_SIGTERM_SECONDS = 0.02  # between two checks of who handles SIGTERM while Ray starts
_LOOK_SECONDS = 1.0  # between two checks of which machines there are
_TYPE = "accelerator_type:"
_TINY = 0.001  # of a resource that only names a property of a machine

_ENABLE_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's variable for clusters of several machines. With 0, a cluster listens on the loopback interface only."""

_LONGEST_FOLDER, _SHORT_PARENT = 40, Path("/tmp")
"""The most bytes of the path of a folder for Ray's files, and the parent folder if the usual path is longer.

A socket in the folder may have 107 bytes, and Ray adds up to 67.
"""

Resources = Mapping[str, float]
SentFile = tuple[str, str, Sequence[Any]]
"""A file in Ray's object store: its name, its sha256, and the references to its chunks."""


def task(version: str, command: JobCommand, files: Sequence[SentFile]) -> Outcome:
    """Run one job. Ray executes this function on a machine of the cluster."""
    if version != __version__:
        return Outcome(state=LOST, reason=f"the machine has posexport {__version__}, the sweep is of {version}")

    def stage(folder: Path) -> None:
        import ray

        for name, sha256, references in files:
            write_chunks(folder / name, sha256, map(ray.get, references))  # one in memory at a time

    return JobRunner().run(command, stage)


def check_address(address: str, source: str = "--ray") -> None:
    """RequestError for text that is not an address of a cluster. `source` names where it was given. Imports no Ray."""
    match = _ADDRESS.fullmatch(address)
    if address not in ("auto", "local") and not (match and 0 < int(match["port"]) < 2**16):
        raise RequestError(
            f"{source} is {address!r}: give the host and port of the cluster's head, such as head:6379, or auto or "
            "local."
        )


def check_answers(address: str) -> None:
    """RuntimeMissingError if nothing answers at an address, or `auto` finds no cluster.

    Ray itself waits for minutes for a head that is gone, so a connection to its port is tried first.
    """
    address, origin = _auto() if address == "auto" else (address, "the address given")
    match = _ADDRESS.fullmatch(address)
    if match is None:  # Ray starts this cluster, or finds it by itself
        return
    try:
        socket.create_connection((match["host"].strip("[]"), int(match["port"])), timeout=CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:  # UnicodeError for text that can't be the name of a host
        raise no_cluster(f"{address!r}, {origin}", getattr(error, "strerror", None) or str(error)) from None


def _auto() -> tuple[str, str]:
    """The address that Ray takes for `auto`, and where it comes from. `auto` again if Ray doesn't tell."""
    if given := os.environ.get("RAY_ADDRESS"):
        check_address(given, "RAY_ADDRESS")
        return given, "the address in RAY_ADDRESS"
    try:
        from ray._private.services import get_ray_address_from_environment as find
    except ImportError:  # Ray has no public function for it
        return "auto", ""
    try:
        return str(find("auto", None)), "the last one that was started on this machine"
    except ConnectionError:
        raise no_cluster("'auto'", "none runs on this machine") from None


def no_cluster(where: str, why: str) -> RuntimeMissingError:
    """The error for a cluster that does not answer."""
    return RuntimeMissingError(
        f"no Ray cluster answers at {where} ({why}): start one with 'ray start --head', give --ray the host and port "
        "of one that runs, or leave --ray out to run here."
    )


def connect(address: str) -> tuple[Any, temporary.Running]:
    """The module ray, connected to a cluster, and what ends the connection if the command is interrupted.

    RuntimeMissingError if there is no Ray or no cluster. For `local`, Ray starts a cluster that only this user's
    processes can reach. It listens only on the loopback interface, and requests need its token. Ray reads the settings
    for this when it is imported, so RequestError if it was imported before.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # each job sets its GPUs; Ray warns otherwise
    own: dict[str, Any] = {}
    if address == "local":
        if "ray" in sys.modules and os.environ.get(_ENABLE_CLUSTERS) != "0":
            raise RequestError(
                f"this process imported Ray before it could keep a cluster to this machine: set {_ENABLE_CLUSTERS}=0 "
                "before that import, or start a sweep with --ray local in a process of its own."
            )
        os.environ[_ENABLE_CLUSTERS] = "0"  # read when Ray is imported; otherwise it replaces the loopback address
        if "RAY_AUTH_MODE" not in os.environ:
            os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        own = {"_node_ip_address": "127.0.0.1", "include_dashboard": False}
        own["_temp_dir"] = str(_folder())
    try:
        import ray
    except ImportError:
        raise RuntimeMissingError(
            f"--ray needs Ray, which is not installed: {install_command('posexport[ray]')}, or leave --ray out to run "
            "here."
        ) from None
    logging.getLogger("ray").setLevel(logging.ERROR)
    check_answers(address)
    threads = ThreadPoolExecutor(max_workers=1)

    def end() -> None:
        ray.shutdown()
        threads.shutdown()

    connection = temporary.Running(end)
    try:
        with _files_in(own.get("_temp_dir")):
            _initialize(ray, threads, {"address": address, "log_to_driver": False, "configure_logging": False, **own})
    except (ConnectionError, ValueError, RuntimeError, OSError, TimeoutError) as error:
        connection.remove()
        raise no_cluster(repr(address), " ".join(str(error).split())[:200].rstrip(".")) from None
    return ray, connection


@contextmanager
def _files_in(folder: str | None) -> Iterator[None]:
    """Processes that start in the block have their temporary files in a folder. Those that Ray kills leave some."""
    before = os.environ.get("TMPDIR")
    if folder is not None:
        os.environ["TMPDIR"] = folder
    try:
        yield
    finally:
        if before is not None:
            os.environ["TMPDIR"] = before
        else:
            os.environ.pop("TMPDIR", None)


def _initialize(ray: Any, threads: ThreadPoolExecutor, options: Mapping[str, Any]) -> None:
    """Start or find the cluster in a thread of its own. Signals that end this process wait meanwhile.

    A start that is interrupted leaves processes behind or crashes at exit. In the main thread, Ray would give SIGTERM a
    handler that ends the process without its clean-up. Its C++ code sets one in any thread, which is replaced at once.
    The thread must live as long as the cluster, because Linux ends Ray's processes with it.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    with temporary.uninterrupted():
        on_sigterm = signal.getsignal(signal.SIGTERM)
        future = threads.submit(ray.init, namespace="posexport", **options)
        ended = False
        while not ended:
            ended = bool(wait((future,), timeout=_SIGTERM_SECONDS).done)
            if in_main_thread:
                signal.signal(signal.SIGTERM, on_sigterm)
        future.result()


def _folder() -> Path:
    """A folder for the files of Ray and its processes. It is removed when the command ends, after Ray."""
    parent = temporary.usual_parent()
    if len(os.fsencode(parent)) + 1 + temporary.FOLDER_NAME_LENGTH > _LONGEST_FOLDER:
        parent = _SHORT_PARENT
    with system_error(f"Ray's files can't be written to {str(parent)!r}", "set TMPDIR to a folder with a short path"):
        return temporary.folder(parent).path


class Cluster:
    """All machines of the cluster at an address, including those that join later."""

    def __init__(self, address: str, jobs: Sequence[Job], time_limit: float = 3600.0) -> None:
        self._ray, self._connection = connect(address)
        self._time_limit = time_limit
        self._task = self._ray.remote(task)
        self._running: dict[Any, tuple[Job, str | None]] = {}
        self._nodes: dict[str, Resources] = {}
        self._tried: dict[str, set[str]] = {}
        self._readers = Counter(file.sha256 for job in jobs for file in job.files)
        self._chunks: dict[str, list[Any]] = {}
        self._unsent: list[tuple[Job, Outcome]] = []
        self._looked = 0.0
        with self._asking():
            self._look()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """RuntimeMissingError if the cluster itself no longer answers."""
        try:
            yield
        except (self._ray.exceptions.RayError, ConnectionError, RuntimeError, TimeoutError) as error:
            message = " ".join(str(error).split())[:200].rstrip(".")
            raise RuntimeMissingError(
                f"the Ray cluster no longer answers ({type(error).__name__}: {message}): repair it and run the sweep "
                "again, which continues it."
            ) from None

    def _look(self) -> None:
        """Read which machines there are now."""
        self._looked = time.monotonic()
        self._nodes = {node["NodeID"]: node["Resources"] for node in self._ray.nodes() if node["Alive"]}

    def refusal(self, needs: JobResources) -> str | None:
        if any(_takes(node, needs) is not None for node in self._nodes.values()):
            return None
        return f"it needs {needs}, and no machine of the cluster has that: {described(self._nodes.values())}"

    def room(self, needs: JobResources) -> bool:
        """Whether few enough jobs wait. For a job that takes a whole machine, whether one is idle."""
        if needs.alone:
            return bool(self._idle(needs))
        places = sum(_places(node, needs) for node in self._nodes.values())
        taken = sum(job.needs == needs for job, _ in self._running.values())
        return taken < MAX_QUEUED * places

    def _idle(self, needs: JobResources) -> list[str]:
        busy = {node for _, node in self._running.values()}
        return [name for name, node in self._nodes.items() if name not in busy and _takes(node, needs) is not None]

    def submit(self, job: Job) -> None:
        """Give a job to Ray, for any machine that it fits, or for an idle one if it takes a whole machine."""
        with self._asking():
            try:
                files = [(file.name, file.sha256, self._put(file)) for file in job.files]
            except PosexportError as error:
                self._unsent.append((job, Outcome(state=FAILED, reason=str(error).rstrip("."))))
                return
            name: str | None = None
            options: dict[str, Any] = {"max_retries": 0, "name": plain(f"posexport {job.label}")}
            if job.needs.alone:
                from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

                tried = self._tried.setdefault(job.id, set())
                name = min(self._idle(job.needs), key=lambda node: node in tried)  # prefer one that did not lose it
                tried.add(name)
                options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(name, soft=False)
            nodes = [self._nodes[name]] if name else self._nodes.values()
            taken = next(resources for node in nodes if (resources := _takes(node, job.needs)))
            options.update(num_cpus=taken.pop("CPU"), num_gpus=taken.pop("GPU", 0), resources=taken)
            command = JobCommand.of(job, self._time_limit)
            if job.needs.gpu is None:  # the GPUs of its machine belong to other jobs
                command = attrs.evolve(command, environment={**command.environment, "CUDA_VISIBLE_DEVICES": ""})
            reference = self._task.options(**options).remote(__version__, command, files)
            self._running[reference] = (job, name)

    def _put(self, file: File) -> Sequence[Any]:
        if file.sha256 not in self._chunks:
            self._chunks[file.sha256] = [self._ray.put(chunk) for chunk in chunks(file)]
        return self._chunks[file.sha256]

    def finished(self, seconds: float) -> list[tuple[Job, Outcome]]:
        """The jobs that have ended, or were lost with their process or their machine."""
        ended, self._unsent = self._unsent, []
        with self._asking():
            for reference in self._done(0 if ended else seconds):
                job, _ = self._running.pop(reference)
                ended.append((job, self._outcome(reference)))
            for job, outcome in ended:
                if outcome.state != LOST:
                    self._forget(job)
            lost = any(outcome.state == LOST for _, outcome in ended)
            if lost or time.monotonic() - self._looked > _LOOK_SECONDS:
                self._look()
                ended += self._stranded()
        return ended

    def _stranded(self) -> list[tuple[Job, Outcome]]:
        """Running jobs that fit no machine any more. Ray would wait for one without end."""
        gone = {ref: job for ref, (job, _) in self._running.items() if self.refusal(job.needs) is not None}
        for reference in gone:
            self._ray.cancel(reference, force=True)
            del self._running[reference]
        return [(job, Outcome(state=LOST, reason="the last machine that it fits is gone")) for job in gone.values()]

    def _done(self, seconds: float) -> list[Any]:
        """References to the tasks that have ended by now, otherwise to the first that ends within `seconds`."""
        if not self._running:
            return []
        waiting = list(self._running)
        done, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=0, fetch_local=False)
        return list(done or self._ray.wait(waiting, num_returns=1, timeout=seconds)[0])

    def _outcome(self, reference: Any) -> Outcome:
        try:
            outcome: Outcome = self._ray.get(reference)
            return outcome
        except self._ray.exceptions.RayError as error:
            message = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
            return Outcome(state=LOST, reason=f"{type(error).__name__}: {message[:300].rstrip('.')}")

    def _forget(self, job: Job) -> None:
        """Let the cluster drop files that no other job reads."""
        for file in job.files:
            self._readers[file.sha256] -= 1
            if self._readers[file.sha256] <= 0:
                self._chunks.pop(file.sha256, None)

    def close(self) -> None:
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        self._connection.remove()


def _takes(node: Resources, needs: JobResources) -> dict[str, float] | None:
    """The resources that a job takes of a machine, by Ray's names. None if the machine lacks them.

    A type of GPU is one that Ray detects (`accelerator_type:H100`), or a resource of that name.
    """
    cpus = node.get("CPU", 0)
    taken: dict[str, float] = {"CPU": cpus if needs.cpus is None else needs.cpus}
    if cpus < max(1, taken["CPU"]):
        return None
    if needs.gpu is None:
        return taken
    if f"{_TYPE}{needs.gpu}" in node and node.get("GPU", 0) >= needs.gpus:
        return {**taken, "GPU": needs.gpus, f"{_TYPE}{needs.gpu}": _TINY}
    if node.get(needs.gpu, 0) >= needs.gpus:
        return {**taken, needs.gpu: needs.gpus, **({"GPU": needs.gpus} if node.get("GPU", 0) >= needs.gpus else {})}
    return None


def _places(node: Resources, needs: JobResources) -> int:
    """How many jobs with these needs a machine can run side by side."""
    taken = _takes(node, needs)
    return 0 if taken is None else int(min(node[name] // amount for name, amount in taken.items()))


def described(nodes: Iterable[Resources]) -> str:
    """The machines of a cluster in words."""
    kinds = Counter(_words(node) for node in nodes if node.get("CPU", 0))
    return ", ".join(f"{number} with {kind}" for kind, number in sorted(kinds.items())) or "it has none with CPUs"


def _words(node: Resources) -> str:
    types = [f"{node.get('GPU', 0):g} {name.removeprefix(_TYPE)}" for name in sorted(node) if name.startswith(_TYPE)]
    return " and ".join([f"{node['CPU']:g} CPU{'s' * (node['CPU'] > 1)}", *types])
