"""The machine of a measurement: what a time depends on besides the artifact. Unknown values are None."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import psutil

from posexport import __version__

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_WAIT_POLICY",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "GOMP_CPU_AFFINITY",
)
"""Environment variables that change how many threads an engine has, where they run, and how they wait."""

ENGINES = ("torch", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx")

_GPU_FIELDS = {"name": str, "driver_version": str, "power.limit": float, "clocks.max.sm": float, "memory.total": float}
_GPU_NAMES = ("name", "driver", "power_limit_watts", "largest_clock_mhz", "memory_mb")


def machine() -> dict[str, Any]:
    """Facts about this machine as plain data: memory in bytes, frequencies in MHz, no temperatures.

    It takes a few milliseconds, or with an NVIDIA driver, as long as nvidia-smi takes.
    """
    frequency = None
    with contextlib.suppress(OSError, NotImplementedError, AttributeError):
        frequency = psutil.cpu_freq()
    return {
        "cpu": cpu_model(),
        "vendor": _cpuinfo("vendor_id", "CPU implementer"),
        "instruction_sets": instruction_sets(),
        "architecture": platform.machine(),
        "cores": psutil.cpu_count(logical=False),
        "logical_cpus": psutil.cpu_count(),
        "affinity": _affinity(),
        "largest_mhz": (frequency.max or None) if frequency else None,
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "turbo": _turbo(),
        "virtual": _virtual(),
        "power": _power(),
        "memory": psutil.virtual_memory().total,
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "posexport": __version__,
        "engines": versions(ENGINES),
        "thread_variables": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        "gpu": _gpu(),
    }


SAME = (
    "cpu",
    "instruction_sets",
    "architecture",
    "logical_cpus",
    "affinity",
    "governor",
    "memory",
    "thread_variables",
    "engines",
    "gpu",
)
"""The facts that must agree if two measurements are of "the same machine"."""


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The facts in which two records differ, among those in SAME, on which times depend most."""
    return [name for name in SAME if one.get(name) != other.get(name)]


def cpu_model() -> str | None:
    """The processor's name as its maker writes it."""
    return _cpuinfo("model name", "Model", "cpu model") or platform.processor() or None


INSTRUCTION_SETS = {
    "avx": "AVX", "avx2": "AVX2", "fma": "FMA", "avx512f": "AVX-512", "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16", "avx512_fp16": "AVX-512 FP16", "avx_vnni": "AVX VNNI", "amx_bf16": "AMX BF16",
    "amx_int8": "AMX INT8", "asimd": "NEON", "neon": "NEON", "sve": "SVE", "sve2": "SVE2", "bf16": "BF16",
    "i8mm": "I8MM",
}  # fmt: skip
"""Instruction sets that matrix products use, by Linux's flag for each."""


def instruction_sets() -> list[str] | None:
    """Those of INSTRUCTION_SETS that the CPU has. None if the system doesn't list them."""
    listed = _cpuinfo("flags", "Features")
    if listed is None:
        return None
    flags = listed.split()
    return list(dict.fromkeys(name for flag, name in INSTRUCTION_SETS.items() if flag in flags))


def describe_cpu(record: Mapping[str, Any]) -> str:
    """The CPU of a machine's record in one line: its model, cores, and widest instruction sets."""
    widest = ("AVX2", "AVX-512", "AMX BF16", "NEON", "SVE", "SVE2")
    sets = [name for name in record.get("instruction_sets") or () if name in widest]
    cores = record.get("cores") or record.get("logical_cpus")
    counted = f"{cores} core{'s' * (cores != 1)}" if cores else None
    parts = [record.get("cpu") or "unknown CPU", counted, *sets]
    return ", ".join(part for part in parts if part)


def _cpuinfo(*names: str) -> str | None:
    """The first value that Linux gives under one of these names. None on other systems."""
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names and value.strip():
            return value.strip()
    return None


def _affinity() -> list[int] | None:
    """The CPUs that this process may run on."""
    with contextlib.suppress(AttributeError, OSError, psutil.Error):
        return list(psutil.Process().cpu_affinity() or []) or None
    return None


def _turbo() -> bool | None:
    boost = _read("/sys/devices/system/cpu/cpufreq/boost")
    off = _read("/sys/devices/system/cpu/intel_pstate/no_turbo")
    if boost is not None:
        return boost == "1"
    return None if off is None else off == "0"


def _virtual() -> bool | None:
    """Whether it is a virtual machine. Its neighbours can't be seen."""
    flags = _cpuinfo("flags")
    return None if flags is None else "hypervisor" in flags.split()


def _power() -> str | None:
    """The source of power, "mains" or "battery". None if there is no battery."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        battery = psutil.sensors_battery()
        if battery is not None and battery.power_plugged is not None:
            return "mains" if battery.power_plugged else "battery"
    return None


def versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those of the packages that are installed, by name."""
    installed = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def _gpu() -> dict[str, Any] | None:
    """The first GPU by nvidia-smi: name, driver, power limit in W, largest clock in MHz, memory in MB."""
    ask = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    values = [value.strip() for value in output.split(",")]
    if len(values) != len(_GPU_FIELDS):
        return None
    gpu: dict[str, str | float | None] = dict.fromkeys(_GPU_NAMES)
    for name, kind, value in zip(_GPU_NAMES, _GPU_FIELDS.values(), values, strict=True):
        with contextlib.suppress(ValueError):  # "[N/A]"
            gpu[name] = kind(value)
    return gpu


def _read(path: str) -> str | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return Path(path).read_text().strip()
    return None


def numbers() -> list[int]:
    """The numbers of the CPUs that this process may use: those of its affinity, if there is one."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def usable() -> int:
    """How many CPUs this process may use."""
    return len(numbers())


def kept_to() -> int:
    """The number of CPUs that this process is kept to, 0 if it has all.

    By default, ONNX Runtime has a thread for each core of the machine, pinned to it, whatever the process may use.
    """
    cpus = usable()
    return 0 if cpus == os.cpu_count() else cpus


HEADROOM = 512 * 2**20
"""Bytes that are left to other processes."""

SHORT = (
    *("bad_alloc", "bad allocation", "out of memory", "failed to allocate", "can't allocate", "cannot allocate"),
    *("unable to allocate", "memory allocation", "failed to map segment", "can't start new thread"),
)
"""How engines, the loader of libraries and Python say that memory is short, in small letters."""

PLENTY = 16 * 2**30
"""A limit of the user of this many bytes leaves room for all libraries, whatever the number of CPUs."""

_CGROUPS, _OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def size_text(size: int) -> str:
    """A number of bytes in GB, or in MB below 1 GB."""
    return f"{size / 1e6:.2f} MB" if abs(size) < 1e9 else f"{size / 1e9:.1f} GB"


def available() -> int:
    """Bytes that are available without swapping: those of the machine, or what a container's limit leaves if less."""
    return min(int(psutil.virtual_memory().available), *_below_limits())


def _below_limits() -> Iterator[int]:
    """What each memory limit of this process's control groups (Linux, v1 and v2) leaves. Cached files count as free."""
    yield sys.maxsize
    with contextlib.suppress(OSError):
        for line in _OWN_CGROUPS.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root = _CGROUPS / ("memory" if controllers else "")
            limit, used = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
            inner = root / group.lstrip("/")
            for folder in (inner, *inner.parents):
                if folder.is_relative_to(root):
                    with contextlib.suppress(OSError, ValueError):  # "max" means no limit
                        most = int((folder / f"memory.{limit}").read_text())
                        now = int((folder / f"memory.{used}").read_text())
                        yield max(most - now + _cached(folder), 0)


def _cached(folder: Path) -> int:
    rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return next((int(size) for name, size in rows if name in ("inactive_file", "total_inactive_file")), 0)


@attrs.frozen
class Limit:
    """A limit on the memory of a process, and the shell command that sets it."""

    bytes: int
    command: str

    def __str__(self) -> str:
        return f"the limit of {size_text(self.bytes)} that {self.command} sets"


def set_limit() -> Limit | None:
    """The lowest limit (`ulimit`) that the user set on this process's memory. None without one, or if it is plenty."""
    if sys.platform == "win32":
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = {
        "ulimit -d": hard if _limited else soft,  # `limit_to_what_is_free` doesn't change the hard one
        "ulimit -v": resource.getrlimit(resource.RLIMIT_AS)[0],
    }
    found = [Limit(size, command) for command, size in limits.items() if 0 <= size < PLENTY]
    return min(found, key=lambda limit: limit.bytes, default=None)


NEAR_LIMIT = 0.75
"""The part of a memory limit above which an error counts as a lack of memory.

What an engine asked for in vain was larger than the rest.
"""

_limited = False
"""Whether posexport has set a limit on this process."""


def is_short(error: BaseException) -> bool:
    """Whether an error says that there was not enough memory.

    If the user set a limit, errors of C and Rust code after a failed allocation say so too.
    """
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    if (isinstance(error, SystemError) or not isinstance(error, Exception)) and set_limit() is not None:
        return True
    return is_shortage(str(error)) or _is_at_limit()


def _is_at_limit() -> bool:
    """Whether this process has taken most of what posexport's limit allows.

    An engine may have another name for an allocation that failed, such as oneDNN's "could not create a primitive".
    """
    if not _limited:
        return False
    import resource

    limit, data = resource.getrlimit(resource.RLIMIT_DATA)[0], _status("VmData:")
    return data is not None and limit >= 0 and data > NEAR_LIMIT * limit


def is_shortage(text: str) -> bool:
    """Whether the text of an engine's error, which has no code for it, says that there was not enough memory."""
    text = text.lower()
    return any(words in text for words in SHORT)


def limit_to_what_is_free(keep_free: int = 0) -> None:
    """Limit this process to what is free now, less `keep_free` and `HEADROOM` bytes (Linux only)."""
    if sys.platform != "linux":
        return
    import resource

    global _limited
    limit = (_status("VmData:") or resident()) + max(available() - keep_free - HEADROOM, HEADROOM)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if not _limited and 0 <= before[0] < limit:  # a lower limit that the user set stays
        return
    _limited = True
    with contextlib.suppress(ValueError, OSError):  # and so does that of the system
        resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))


@contextlib.contextmanager
def limited_to_what_is_free() -> Iterator[None]:
    """Limit this process to the memory that is free while the block runs. Its children lift the limit."""
    if sys.platform != "linux":
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit_to_what_is_free()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


_ARENA_MAX = -8
"""The GNU C library's number of the setting."""


def share_one_heap() -> None:
    """Have threads that begin from now on take memory from one heap, where the C library is the GNU one: each would
    get a heap of its own, which keeps what was freed there, although only one of them works at a time."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


def give_freed_memory_back() -> None:
    """Return memory that was freed, but that the GNU C library keeps, to the system."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def forget_peak() -> int:
    """The resident bytes now. The peak counts anew from here (Linux; elsewhere the peak is what is resident)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return resident()


def resident() -> int:
    """Resident bytes now."""
    return int(psutil.Process().memory_info().rss)


def peak() -> int:
    """The most resident bytes since `forget_peak`."""
    return _status("VmHWM:") or resident()


def _status(name: str) -> int | None:
    lines = (_read("/proc/self/status") or "").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name)), None)
