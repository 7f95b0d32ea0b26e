"""A stand-in for the command of a job, `python -P -m sweep_fake KIND key=value ...`, that takes milliseconds.

exit=N        ends with exit code N; if it is not 0, the error is "told so."
signal=N      kills itself with signal N
once=FILE     the first time, writes into FILE where it runs, and hangs; if FILE exists, it continues
log=FILE      adds a line when it starts and one when it ends, `sleep` seconds later
write=NAME    writes a file
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posexport.processes import end_with_parent

if TYPE_CHECKING:
    from posexport.workflows.sweep.jobs import Job, JobResources


def job(name: str, kind: str = "verify", needs: JobResources | None = None, **told: Any) -> Job:
    """A job of the stand-in."""
    from posexport.workflows.sweep.jobs import Job, JobResources

    words = tuple(f"{key}={value}" for key, value in {"name": name, **told}.items())
    return Job(kind=kind, arguments=words, needs=needs or JobResources(), label=name)


def _parent_of(process: int) -> int:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def main() -> None:
    end_with_parent()  # as the command of a job does
    told = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    place = {"parent": os.getppid(), "pid": os.getpid(), "node": _parent_of(os.getppid())}
    if "once" in told and not Path(told["once"]).exists():
        beside = Path(told["once"] + ".part")
        beside.write_text(json.dumps(place))
        beside.replace(told["once"])
        time.sleep(600)
    if "signal" in told:
        os.kill(os.getpid(), int(told["signal"]))
    if "log" in told:
        with Path(told["log"]).open("a") as log:
            log.write(f"{place['node']} {told.get('name')} start {time.time()}\n")
            log.flush()
            time.sleep(float(told.get("sleep", 0)))
            log.write(f"{place['node']} {told.get('name')} end {time.time()}\n")
    if "write" in told:
        Path(told["write"]).write_text("written")
    code = int(told.get("exit", 0))
    if code:
        Path(os.environ["POSEXPORT_ERROR_FILE"]).write_text(json.dumps({"error": "told so."}))
    if code in (0, 1):
        files = {path.name: path.stat().st_size for path in Path().iterdir()}
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
        threads = os.environ.get("OMP_NUM_THREADS")
        cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        told = {"files": files, "gpus": gpus, "threads": threads, "cpus": cpus}
        print(json.dumps({**place, **told}))  # noqa: T201
    sys.exit(code)


if __name__ == "__main__":
    main()
