"""What every process of a run has: one thread per engine (tests run in parallel processes), and interrupts that arrive
whatever the parent of this process ignores. Processes that run tests have what `shared_setup` makes quick too; the one
that only hands tests out need not import the engines first, while the others wait."""

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # some tests import onnxruntime before posexport

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("dist", "no") == "no":
        import shared_setup

        config.pluginmanager.register(shared_setup)


LONGEST = (
    *("test_docs", "test_compile", "test_verify_artifacts", "test_trt_import", "test_attention_by_head"),
    *("test_verify_translator", "test_verify_checkpoint", "test_cache_mutants", "test_generation", "test_verify_graph"),
    *("test_whole_model_command", "test_compile_command"),
)
"""Files that take longest. They run first: one that begins last would keep one process busy while the other is idle."""


@pytest.hookimpl(tryfirst=True)  # before pytest looks for the slow ones
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `sampled(n)`, the cases but every n-th belong to the slow sweep."""
    counts = Counter[str]()
    for item in items:
        mark, test = item.get_closest_marker("sampled"), item.nodeid.partition("[")[0]
        if mark is not None and item.get_closest_marker("slow") is None:
            if counts[test] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            counts[test] += 1
    items.sort(key=lambda item: item.path.stem not in LONGEST)


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
