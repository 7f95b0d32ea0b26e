"""A pytest plugin that sets up the processes that run tests: hypothesis without deadlines, and exports that reuse equal
work within a process."""

import gc
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import draws
import forks
import hypothesis
import numpy as np
import pytest
import quick_torch
import shared_exports
import traces

from posexport import processes
from posexport.graphs import cases as graph_cases
from posexport.spec.spec import Spec
from posexport.verify import cases
from posexport.verify.draft import Draft
from posexport.verify.graph import submission as graph_submission
from posexport.verify.reach import Reach

hypothesis.settings.register_profile("posexport", deadline=None, derandomize=True, max_examples=25, print_blob=True)
hypothesis.settings.load_profile("posexport")

quick_torch.install()
forks.install()
traces.install()
draws.install()


def pytest_collection_finish() -> None:
    """Keep the garbage collector away from modules and tests, which stay in memory, and let it run less often. It took
    a tenth of the time of exports."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 50)


@pytest.fixture(scope="session", autouse=True)
def _folder_of_exports(tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.getbasetemp()  # each process of pytest-xdist has a subfolder of the run's folder
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "exports"
    folder.mkdir(exist_ok=True)
    shared_exports.FOLDER[:] = [folder]


@pytest.fixture
def traced_anew() -> Iterator[None]:
    """Every export runs torch's exporter, for tests that change how it works. Their own `monkeypatch.undo` does not end
    this."""
    with traces.anew():
        yield


@pytest.fixture
def real_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start as the product starts them, for tests of this start."""
    monkeypatch.setattr(processes, "subprocess", subprocess)


@pytest.fixture(scope="module", autouse=True)
def _inputs_of_verify(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give verify fewer inputs in some test modules.

    Modules marked `few_inputs` test what verify does with its findings, not what its inputs reveal. Inputs with many
    tokens, which take most of the time, are left out there, and at most two inputs of one name are kept. For foreign
    graphs, every second input is left out. Modules marked `few_bands` get the longest and every eighth of the lengths
    that faults in bands of positions need (test_bands.py). These lengths are three quarters of a file's inputs.

    In the test command, the folder `rewrite` is treated as if marked `few_inputs`, except for modules marked
    `all_inputs`. Its tests compare the written files with their own oracles, and the slow sweep uses all inputs.
    """
    with pytest.MonkeyPatch.context() as patch:
        marked, room = request.node.get_closest_marker, request.node.path.parent.name
        quick = room == "rewrite" and request.config.option.markexpr == "not slow" and not marked("all_inputs")
        few = quick or marked("few_inputs")
        if few or marked("few_bands"):
            patch.setattr(graph_submission, "band_corners", _few_bands(graph_submission.band_corners))
        if few:
            patch.setattr(cases, "corners", _few(cases.corners))
            patch.setattr(graph_cases, "_corners", _every_other(graph_cases._corners))
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


def _every_other(corners: Callable[..., Iterable[graph_cases.Corner]]) -> Any:
    return lambda roles: islice(corners(roles), None, None, 2)


def _few_bands(corners: Callable[..., Iterable[graph_cases.Corner]]) -> Any:
    def few(*sizes: Any) -> Iterator[graph_cases.Corner]:
        made = [*corners(*sizes)]
        seq, batch = (max((getattr(one, name) for one in made), default=0) for name in ("seq", "batch"))
        return (one for at, one in enumerate(made) if at % 8 == 0 or one.seq == seq or one.batch == batch)

    return few
