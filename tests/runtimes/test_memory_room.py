"""Available memory: the minimum of the machine's free memory and what the limits of control groups leave."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import small_spec

from posexport import machine
from posexport.errors import RequestError
from posexport.models.weights import seeded
from posexport.verify.eligibility import memory_shortfall


@pytest.mark.parametrize(
    ("own", "folder", "names"),
    [
        ("0::/outer/inner\n", "outer", ("memory.max", "memory.current", "inactive_file")),
        (
            "3:cpu:/\n2:memory:/outer/inner\n",
            "memory/outer",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_the_limit_of_a_container_counts(
    own: str, folder: str, names: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "_OWN_CGROUPS", tmp_path / "own")
    assert machine.available() == 1000  # without cgroup files, as on other systems
    (tmp_path / "own").write_text(own)
    (tmp_path / folder / "inner").mkdir(parents=True)
    (tmp_path / folder / "inner" / names[0]).write_text("max\n")
    (tmp_path / folder / names[0]).write_text("500\n")
    (tmp_path / folder / names[1]).write_text("400\n")
    (tmp_path / folder / "memory.stat").write_text(f"anon 370\n{names[2]} 30\n")
    assert machine.available() == 130
    with pytest.raises(RequestError, match=r"0\.00 MB of memory are free"):  # making weights uses the same number
        seeded(small_spec("rope"), 0)


def test_sizes_have_a_unit_that_shows_them() -> None:
    sizes = (3_456_789, 999_000_000, 2_000_000_000)
    assert [machine.size_text(size) for size in sizes] == ["3.46 MB", "999.00 MB", "2.0 GB"]


def test_what_other_runs_were_promised_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available", lambda: 5_000_000_000)
    assert memory_shortfall(3_000_000_000) is None
    assert "2.0 GB are free" in str(memory_shortfall(3_000_000_000, 3_000_000_000))
    assert memory_shortfall(0, 9_000_000_000) is None
