"""numpy gets one thread in the judging process and in the process of onnx's evaluator. Its idle threads spin and would
take cores from other engines."""

import os
import subprocess
import sys

import pytest

from posexport.machine import usable
from posexport.runtimes import RUNTIMES
from posexport.runtimes.numpy_threads import ONE_THREAD, one_thread
from posexport.runtimes.pool import Pool

pytestmark = [
    pytest.mark.usefixtures("real_processes"),
    pytest.mark.skipif(sys.platform != "linux" or usable() == 1, reason="counts threads below /proc, of several CPUs"),
]

NAME = next(iter(ONE_THREAD))
COUNT = "import os; print(len(os.listdir('/proc/self/task')), os.environ.get('OPENBLAS_NUM_THREADS'))"

PLAINLY = "import numpy"
INSIDE = "from posexport.runtimes.numpy_threads import one_thread\nwith one_thread():\n    import numpy"
VERIFIED = """
import os, time
from pathlib import Path
from posexport.errors import RequestError
from posexport.verify.verifier import verify
try:
    verify([Path("none.onnx")], runtimes={})
except RequestError:
    pass
until = time.monotonic() + 5
while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < until:  # a thread that read from a worker ends
    time.sleep(0.05)
"""


def threads(code: str, **more: str) -> list[str]:
    """The number of threads of a new process after `code`, and the value in its environment."""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")} | more
    command = [sys.executable, "-c", f"{code}\n{COUNT}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("code", [INSIDE, VERIFIED], ids=["inside", "verify"])
def test_numpy_gets_one_thread_and_the_environment_is_as_before(code: str) -> None:
    assert threads(code) == ["1", "None"]


def test_numpy_has_more_threads_elsewhere() -> None:
    """Otherwise the other tests of this file would show nothing."""
    count, _ = threads(PLAINLY)
    assert int(count) > 1


def test_the_number_that_the_user_sets_stands() -> None:
    assert threads(INSIDE, **{NAME: "2"}) == ["2", "2"]


def test_an_error_in_the_block_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    with pytest.raises(ImportError), one_thread():
        raise ImportError
    assert NAME not in os.environ


@pytest.mark.parametrize(("name", "wanted"), [("onnx-reference", "1"), ("torch", None)])
def test_the_process_of_onnxs_evaluator_gets_one_thread(
    name: str, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On some machines torch's BLAS reads the variable too."""
    monkeypatch.delenv(NAME, raising=False)
    with Pool(time_limit=20) as pool:
        worker, _ = pool._get(RUNTIMES[name])
        assert worker._environment.get(NAME) == wanted
