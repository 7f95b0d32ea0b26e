"""The record of the machine: known values are stated, unknown ones are None, and differences are named."""

import json
import subprocess
from typing import Any

import pytest

from posexport import machine


def test_it_is_plain_data_with_what_times_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = machine.machine()
    assert json.loads(json.dumps(found)) == found
    assert found["logical_cpus"] >= 1 and found["memory"] > 0
    assert found["thread_variables"]["OMP_NUM_THREADS"] == "3"
    assert set(machine.SAME) <= set(found)


SMI = "NVIDIA X, 550.1, 350.00, [N/A], 81920\n"


@pytest.mark.parametrize(
    ("said", "wanted"),
    [(SMI, ["NVIDIA X", "550.1", 350.0, None, 81920.0]), ("No devices were found", None)],
    ids=["told", "no device"],
)
def test_the_gpu_is_as_its_tool_says(monkeypatch: pytest.MonkeyPatch, said: str, wanted: list[Any] | None) -> None:
    done = subprocess.CompletedProcess([], 0, stdout=said)
    monkeypatch.setattr(machine.subprocess, "run", lambda *args, **more: done)
    gpu = machine.machine()["gpu"]
    assert (None if gpu is None else list(gpu.values())) == wanted


def test_a_tool_that_fails_leaves_the_gpu_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any, **more: Any) -> None:
        raise subprocess.CalledProcessError(9, "nvidia-smi")

    monkeypatch.setattr(machine.subprocess, "run", failing)
    assert machine.machine()["gpu"] is None


def test_files_that_are_not_there_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_read", lambda path: None)
    found = machine.machine()
    assert (found["governor"], found["turbo"], found["virtual"]) == (None, None, None)


def test_differences_are_named() -> None:
    one = machine.machine()
    assert machine.differences(one, one) == []
    assert machine.differences(one, {**one, "cpu": "another", "power": "battery"}) == ["cpu"]


X86 = "vendor_id\t: GenuineIntel\nmodel name\t: Xeon X\nflags\t: avx avx2 fma avx512f amx_bf16 hypervisor\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd sve bf16\nCPU implementer\t: 0x41\n\nModel\t\t: Board\n"


@pytest.mark.parametrize(
    ("text", "vendor", "sets", "shown"),
    [
        (
            X86,
            "GenuineIntel",
            ["AVX", "AVX2", "FMA", "AVX-512", "AMX BF16"],
            "Xeon X, 2 cores, AVX2, AVX-512, AMX BF16",
        ),
        (ARM, "0x41", ["NEON", "SVE", "BF16"], "Board, 2 cores, NEON, SVE"),
        (None, None, None, "name, 2 cores"),
    ],
    ids=["x86", "arm", "no /proc"],
)
def test_the_cpu_is_named_with_its_instruction_sets(
    monkeypatch: pytest.MonkeyPatch, text: str | None, vendor: str | None, sets: list[str] | None, shown: str
) -> None:
    monkeypatch.setattr(machine, "_read", lambda path: text if path == "/proc/cpuinfo" else None)
    monkeypatch.setattr(machine.platform, "processor", lambda: "name")
    record = {**machine.machine(), "cores": 2}
    assert (record["vendor"], record["instruction_sets"]) == (vendor, sets)
    assert machine.describe_cpu(record) == shown
