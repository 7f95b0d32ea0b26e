"""A real Ray cluster of several machines (all are processes on this machine), with a stand-in for the commands of jobs:
where jobs run, and their outcomes if a process is killed or a machine disappears."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import attrs
import psutil
import pytest
from helpers import CHILD_PATH
from sweep_fake import job

from posexport.errors import RuntimeMissingError
from posexport.workflows.sweep import local_jobs
from posexport.workflows.sweep.job_files import Hashes
from posexport.workflows.sweep.jobs import FAILED, NOT_RUN, PASSED, Job, JobResources, Outcome
from posexport.workflows.sweep.ray import Cluster, task
from posexport.workflows.sweep.sweep import drive

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*unclosed (file|socket).*:ResourceWarning",  # Ray leaves its logs and sockets to the garbage collector
    "ignore:subprocess \\d+ is still running:ResourceWarning",  # its daemons outlive the objects that started them
)
STORE = {"object_store_memory": 80 * 2**20}


@attrs.define
class Machines:
    """A cluster, and its machines by name. A stand-in knows its machine by the process that started its parent."""

    cluster: Any
    nodes: dict[str, Any]

    def add(self, name: str, cpus: int, gpus: int = 0, **resources: float) -> None:
        """Add a machine, which also has `resources`."""
        self.nodes[name] = self.cluster.add_node(num_cpus=cpus, num_gpus=gpus, resources=resources, **STORE)
        self.cluster.wait_for_nodes()

    def name(self, place: Any) -> str:
        """The machine on which a stand-in ran."""
        (name,) = (name for name, node in self.nodes.items() if raylet(node) == place["node"])
        return name

    def lose(self, place: Any) -> None:
        """End the machine of a stand-in, with all its processes at once."""
        self.cluster.remove_node(self.nodes.pop(self.name(place)), allow_graceful=False)


def raylet(node: Any) -> int:
    """The process that represents a machine in Ray."""
    return int(node.all_processes["raylet"][0].process.pid)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster as RayCluster

    root = logging.getLogger()
    before = root.level, list(root.handlers)
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", f"{CHILD_PATH}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setattr(local_jobs, "CHILD", "sweep_fake")
    cluster = RayCluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **STORE})
    found = Machines(cluster, {"plain": cluster.head_node})
    found.add("gpus", 2, gpus=1, **{"accelerator_type:H100": 1, "T4": 1})
    yield found
    ray.shutdown()
    cluster.shutdown()
    patch.undo()
    root.level, root.handlers[:] = before  # after it starts, Ray shows debug messages of every library


def done(machines: Machines, jobs: Sequence[Job], tries: int = 3) -> dict[str, tuple[Outcome, int]]:
    """The outcomes of jobs, and the number of attempts, by label."""
    found: dict[str, tuple[Outcome, int]] = {}

    def finish(each: Job, outcome: Outcome, attempts: int) -> None:
        assert each.label not in found
        found[each.label] = (outcome, attempts)

    with closing(Cluster(machines.cluster.address, jobs)) as executor:
        drive(jobs, executor, finish, tries=tries)
    return found


@pytest.mark.slow
def test_everything_at_once(machines: Machines, tmp_path: Path) -> None:
    """Placement by needs, transferred files, a Ray process that is killed, and a job that always crashes."""
    (tmp_path / "big").write_bytes(os.urandom(3_000_000))
    big = Hashes().file(tmp_path / "big")
    log, killed = tmp_path / "log", tmp_path / "killed"
    whole = JobResources(cpus=None)
    jobs = [
        *(job(f"parity {n}", log=log, sleep=0.2) for n in range(4)),
        *(job(f"timing {n}", needs=whole, log=log, sleep=0.2) for n in range(4)),
        job("h100", needs=JobResources(cpus=1, gpu="H100", gpus=1)),
        job("whole h100", needs=JobResources(cpus=None, gpu="H100", gpus=1)),
        job("t4", needs=JobResources(cpus=1, gpu="T4", gpus=1)),
        job("none", needs=JobResources(cpus=1, gpu="A100", gpus=1)),
        job("large", needs=JobResources(cpus=64)),
        job("killed", once=killed),
        job("poison", signal=int(signal.SIGSEGV)),
        *(
            Job(kind="verify", arguments=(f"n={n}",), needs=JobResources(), label=f"file {n}", files=(big,))
            for n in range(2)
        ),
    ]
    threading.Thread(target=_when, args=(killed, lambda place: os.kill(place["parent"], signal.SIGKILL))).start()
    found = done(machines, jobs)
    states = {name: outcome.state for name, (outcome, _) in found.items()}
    bad = {"none": NOT_RUN, "large": NOT_RUN, "poison": FAILED}
    assert states == {each.label: bad.get(each.label, PASSED) for each in jobs}
    assert {machines.name(found[name][0].result) for name in ("h100", "whole h100", "t4")} == {"gpus"}
    assert (found["h100"][0].result or {})["gpus"] == "0"
    assert {(found[f"parity {n}"][0].result or {})["gpus"] for n in range(4)} == {""}
    assert found["none"][0].reason == (
        "it needs 1 CPU and 1 A100, and no machine of the cluster has that: 1 with 2 CPUs, 1 with 2 CPUs and 1 H100"
    )
    assert found["killed"][1] == 2
    assert found["poison"][1] == 3
    assert found["poison"][0].reason == "lost 3 times: the process was killed by SIGSEGV"
    assert [(found[f"file {n}"][0].result or {})["files"] for n in range(2)] == [{"big": 3_000_000}] * 2
    _alone(log.read_text().splitlines())


def _alone(lines: Sequence[str]) -> None:
    """Nothing ran on a machine beside a timing, and timings ran on several machines at the same time."""
    spans: dict[tuple[str, str], list[float]] = {}
    for line in sorted(lines, key=lambda line: float(line.split()[-1])):
        node, *name, _, moment = line.split()
        spans.setdefault((node, " ".join(name)), []).append(float(moment))
    timings = [(node, span) for (node, name), span in spans.items() if name.startswith("timing")]
    assert len(timings) == 4
    for node, (start, end) in timings:
        others = [span for (at, _), span in spans.items() if at == node and span != [start, end]]
        assert all(until <= start or since >= end for since, until in others)
    assert len({node for node, _ in timings}) > 1


def _when(path: Path, act: Callable[[dict[str, Any]], object]) -> None:
    """Do something as soon as a job has written where it runs."""
    until = time.monotonic() + 60
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.02)
    act(json.loads(path.read_text()))


@pytest.mark.slow
def test_a_machine_goes_away(machines: Machines, tmp_path: Path) -> None:
    """If the machine of a job ends, the job runs elsewhere. This includes jobs that take a whole machine."""
    machines.add("spare 0", 2, spare=1)
    for index, cpus in enumerate((1, None)):
        machines.add(f"spare {index + 1}", 2, spare=1)
        place = tmp_path / f"place {index}"
        jobs = [job("once", needs=JobResources(cpus=cpus, gpu="spare", gpus=1), once=place), job("beside")]
        thread = threading.Thread(target=_when, args=(place, machines.lose))
        thread.start()
        found = done(machines, jobs)
        thread.join()
        assert {name: outcome.state for name, (outcome, _) in found.items()} == {"once": PASSED, "beside": PASSED}
        assert found["once"][1] == 2
        assert machines.name(found["once"][0].result).startswith("spare")


@pytest.mark.slow
def test_the_last_machine_that_fits_goes_away(machines: Machines, tmp_path: Path) -> None:
    """The jobs that ran or waited there are not run, and the sweep ends."""
    machines.add("only", 1, only=1)
    place = tmp_path / "place"
    jobs = [
        job(name, needs=JobResources(cpus=1, gpu="only", gpus=1), once=place) for name in ("first", "second", "third")
    ]
    thread = threading.Thread(target=_when, args=(place, machines.lose))
    thread.start()
    found = done(machines, jobs)
    thread.join()
    assert {outcome.state for outcome, _ in found.values()} == {NOT_RUN}
    assert all((outcome.reason or "").startswith("it needs 1 CPU and 1 only") for outcome, _ in found.values())


def test_what_has_no_machine_any_more_is_lost_and_a_silent_cluster_is_one_sentence() -> None:
    """Uses stand-ins, so no cluster is needed."""
    ray, cancelled = MagicMock(), []
    ray.exceptions.RayError = KeyError
    ray.cancel.side_effect = lambda reference, force: cancelled.append(reference)
    cluster = Cluster.__new__(Cluster)
    cluster._ray, cluster._nodes = ray, {"a": {"CPU": 2.0}}
    fits, stranded = job("fits"), job("stranded", needs=JobResources(cpus=4))
    cluster._running = {"r1": (fits, None), "r2": (stranded, None)}
    assert [(each.label, outcome.state) for each, outcome in cluster._stranded()] == [("stranded", "lost")]
    assert (cancelled, list(cluster._running)) == (["r2"], ["r1"])
    cluster._unsent = []
    ray.wait.side_effect = KeyError("gone")
    with pytest.raises(RuntimeMissingError, match=r"the Ray cluster no longer answers \(KeyError: 'gone'\)"):
        cluster.finished(0)


@pytest.mark.slow
def test_interrupted_and_gone_on(machines: Machines, tmp_path: Path) -> None:
    """Ctrl-C ends the command itself. The second run does only the remaining jobs, on the cluster or on this
    machine."""
    code = (
        "import sys; from posexport.workflows.sweep import local_jobs; local_jobs.CHILD = 'sweep_fake';"
        "from posexport.cli import main; main(sys.argv[1:])"
    )
    place, jobs = tmp_path / "place", tmp_path / "s" / ".state" / "jobs"
    (tmp_path / "a.onnx").write_bytes(b"")
    text = f"bench artifact={tmp_path / 'a.onnx'} cpus=1"
    texts = ("--job", text, "--job", f"{text} max-regression=once={place}")
    arguments = [sys.executable, "-c", code, "sweep", *texts, "-o", str(tmp_path / "s"), "--ray"]
    arguments.append(machines.cluster.address)
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (place.exists() and list(jobs.glob("*.json"))):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (
        130,
        "Error: interrupted: 1 of 2 jobs are left, so run it again to continue.\n",
    )
    (first,) = jobs.glob("*.json")
    before = first.stat().st_mtime_ns
    hung = json.loads(place.read_text())["pid"]
    until = time.monotonic() + 90  # Ray may be slow on a busy machine
    while psutil.pid_exists(hung):
        assert time.monotonic() < until, "what was under way goes on"
        time.sleep(0.1)
    again = subprocess.run([*arguments, "--json"], capture_output=True, text=True, check=True)
    found = json.loads(again.stdout)
    assert (found["done_before"], found["counts"]["passed"]) == (1, 2)
    assert first.stat().st_mtime_ns == before


def test_another_version_does_nothing() -> None:
    command = local_jobs.JobCommand.of(job("x"), 60)
    outcome = task("0.0.1", command, [])
    assert (outcome.state, outcome.result) == ("lost", None)
    assert "the sweep is of 0.0.1" in (outcome.reason or "")
