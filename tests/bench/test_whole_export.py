"""What the benchmark of whole exports computes from its times, and that figures of a busy machine are marked."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("transformers")

SCRIPTS = Path(__file__).parents[2] / "scripts"
ROWS = {
    "export of 2 layers, a shape, seconds": (10.0, "measured"),
    "export of 2 layers, a shape, CPU seconds": (5.0, "measured"),
    "export of 24 layers, a shape, seconds": (32.0, "passed"),
    "export of 24 layers, a shape, CPU seconds": (27.0, "measured"),
    "a layer more, 2 to 24 layers, a shape, seconds beyond its bytes": (0.5, "failed"),
    "a layer more, 2 to 24 layers, a shape, CPU seconds with its bytes": (1.0, "measured"),
    "a layer more, 2 to 24 layers, a shape, its bytes alone, seconds": (0.5, "measured"),
}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for folder in ("benchmarks", "suite"):
        monkeypatch.syspath_prepend(str(SCRIPTS / folder))
    return importlib.import_module("whole_export")


def test_a_layer_more_is_the_slope_beyond_its_bytes(load: ModuleType) -> None:
    """The medians count, so one slow round does not change the result."""
    wall: Any = {("ours", 2): [10.0, 9.0, 99.0], ("ours", 24): [32.0, 31.0, 99.0]}
    wall |= {("bytes", 2): [1.0, 1.0, 9.0], ("bytes", 24): [12.0, 12.0, 99.0]}
    busy = {key: [value - 5 for value in values] for key, values in wall.items()}
    made = [*load._wholes("a shape", (2, 24), wall, busy, False), *load._a_layer_more("a shape", (2, 24), wall, busy)]
    assert {row.what: (row.value, row.state) for row in made} == ROWS


def test_a_wheel_that_is_not_to_be_had_is_a_row_that_was_not_run(load: ModuleType) -> None:
    def missing() -> None:
        raise RuntimeError("looking\nno matching distribution")

    assert load._refusal(missing) == "no matching distribution"
    assert load._refusal(lambda: None) is None


def test_figures_of_a_busy_machine_say_so(load: ModuleType) -> None:
    spec = importlib.util.spec_from_file_location("benchmark_command", SCRIPTS / "benchmarks" / "__main__.py")
    assert spec is not None and spec.loader is not None
    command = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(command)
    facts = sys.modules["results"].record()["machine"]
    part = {"title": "A part", "machine": facts, "rows": []}
    busy, calm = (command._section({**part, "machine_load": share})[3] for share in (0.4, 0.02))
    assert busy.endswith("other work took 40% of the CPU. **To be measured again at rest.**")
    assert calm.endswith("other work took 2% of the CPU.")
