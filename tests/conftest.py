"""Shared set-up: one thread per engine (tests run in parallel processes), hypothesis without deadlines, interrupts that
arrive whatever the parent of this process ignores, and what is the same in every export made once per process."""

import gc
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # some tests import onnxruntime before posexport

import draws
import forks
import hypothesis
import numpy as np
import pytest
import quick_torch
import traces

from posexport import processes
from posexport.spec.spec import Spec
from posexport.verify import cases
from posexport.verify.draft import Draft
from posexport.verify.reach import Reach

hypothesis.settings.register_profile("posexport", deadline=None, derandomize=True, max_examples=25, print_blob=True)
hypothesis.settings.load_profile("posexport")

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored

quick_torch.install()
forks.install()
traces.install()
draws.install()


LONGEST = ("test_docs", "test_trt_import", "test_verify_mutants", "test_cache_mutants", "test_verify_faults")
"""Files that take longest. They run first: one that begins last would keep one process busy while the other is idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONGEST)


def pytest_collection_finish() -> None:
    """Keep the collector of garbage away from modules and tests, which live on, and let it look at all else more
    rarely: it was a tenth of the time of exports."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 50)


@pytest.fixture
def traced_anew() -> Iterator[None]:
    """Every export runs torch's exporter, for tests that change how it works; a test's own undo leaves it so."""
    with traces.anew():
        yield


@pytest.fixture
def real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start as the product starts them, for tests of just that."""
    monkeypatch.setattr(processes, "subprocess", subprocess)


@pytest.fixture
def deep_folder(tmp_path: Path) -> Iterator[Path]:
    """1,500 folders in each other, more than Python nests calls: pytest can't remove them itself."""
    here = Path.cwd()
    os.chdir(tmp_path)
    for _ in range(1501):
        Path("d").mkdir()
        os.chdir("d")
    os.chdir(here)
    yield tmp_path / "d"
    subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)


@pytest.fixture(scope="module", autouse=True)
def _inputs_of_verify(request: pytest.FixtureRequest) -> Iterator[None]:
    """Modules that are marked `few_inputs` ask what verify does with what it finds, not what its inputs show: the
    inputs with many tokens, which take most of the time, and all but two of one name are left out there."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("few_inputs"):
            patch.setattr(cases, "corners", _few(cases.corners))
        yield
        draws.CASES.clear()


def _few(corners: Callable[[Spec, np.random.Generator, Reach], Iterator[Draft]]) -> Any:
    def few(spec: Spec, rng: np.random.Generator, reach: Reach) -> Iterator[Draft]:
        names: Counter[str] = Counter()
        for draft in corners(spec, rng, reach):
            if draft.batch * max(draft.seq, draft.past) <= 150 and names[draft.name] < 2:
                names[draft.name] += 1
                yield draft

    return few
