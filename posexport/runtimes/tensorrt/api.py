"""The Python API that TensorRT and TensorRT for RTX share: which of them is installed, its log and its errors."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from posexport.errors import RequestError, RuntimeMissingError, check_known
from posexport.runtimes import NO_GPU, RUNTIMES, TENSORRT, Runtime
from posexport.runtimes.installation import install_command

BUILDERS: dict[str, Runtime] = {name: row for name, row in RUNTIMES.items() if row.module == TENSORRT}
"""The runtimes that build plans, by name; the preferred one is first."""


def can_build(name: str) -> str | None:
    """Why the runtime can't build plans here, in one sentence without a full stop; None if it can."""
    reason = BUILDERS[name].missing()
    # TensorRT times kernels on the GPU that the plan is for; TensorRT for RTX leaves that to the first run.
    return None if reason is None or (reason.code == NO_GPU and name != "tensorrt") else reason.text


def choose(name: str | None) -> str:
    """The runtime that builds: `name`, or by default the first one that can build on this machine.

    Raises RequestError for a runtime that builds no plans, RuntimeMissingError if none can build.
    """
    if name in RUNTIMES and name not in BUILDERS:
        raise RequestError(f"runtime {name!r} builds no plans: allowed: {', '.join(BUILDERS)}.")
    if name is not None:
        check_known("runtime", name, BUILDERS)
    reasons = {builder: can_build(builder) for builder in BUILDERS if name in (None, builder)}
    for builder, reason in reasons.items():
        if reason is None:
            return builder
    listed = "; ".join(f"{builder}: {reason}" for builder, reason in reasons.items())
    raise RuntimeMissingError(f"no plan can be built here ({listed}).")


def load(name: str) -> Any:
    """The engine's module; RuntimeMissingError if it can't be imported."""
    row = BUILDERS[name]
    try:
        return import_module(row.package)
    except Exception as error:  # a broken installation raises many kinds: libraries, drivers, versions
        raise RuntimeMissingError(
            f"{name} can't be imported ({error or type(error).__name__}): install it again, "
            f"{install_command(row.install)}."
        ) from error


def make_log(trt: Any) -> Any:
    """A logger that keeps every message in `.messages` as (severity, text), and prints nothing."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.messages: list[tuple[Any, str]] = []

        def log(self, severity: Any, message: str) -> None:
            self.messages.append((severity, message))

        def texts(self) -> list[str]:
            return [text for _, text in self.messages]

        def errors(self) -> list[str]:
            bad = (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR)
            return [text for severity, text in self.messages if severity in bad]

    return Log()


def create(maker: Callable[[Any], Any], log: Any) -> Any:
    """An instance of `maker`, TensorRT's class Builder or Runtime, with a logger.

    These classes log while they hold a lock that the destructor of another builder also takes. If Python collected such
    a builder while the logger runs, it would wait for itself. So garbage collection is off in the meantime.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return maker(log)
    finally:
        if collects:
            gc.enable()


def make_network(trt: Any, builder: Any) -> Any:
    """An empty network, strongly typed."""
    typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)  # without the flag, all networks are
    return builder.create_network(0 if typed is None else 1 << int(typed))


def capabilities(trt: Any) -> dict[str, Any]:
    """The engine's constants by compute capability, such as "8.9"; empty if it builds only for the installed GPU."""
    members = dict(getattr(getattr(trt, "ComputeCapability", None), "__members__", {}))
    return {f"{key[2:-1]}.{key[-1]}": value for key, value in members.items() if re.fullmatch(r"SM\d+", key)}


def read_capabilities(trt: Any, name: str, given: Sequence[str]) -> list[Any]:
    """The engine's constants for compute capabilities such as "8.9"; RequestError for one that it can't target."""
    if given and name == "tensorrt":
        raise RequestError(
            "tensorrt builds for the GPU at hand only, so it takes no compute capability: drop --compute-capability, "
            "or build with --runtime tensorrt-rtx."
        )
    known = capabilities(trt) if given else {}
    for capability in given:
        if capability not in known:
            raise RequestError(
                f"compute capability {capability!r} is not one that {name} {trt.__version__} builds for: allowed: "
                f"{', '.join(known)}."
            )
    return [known[capability] for capability in given]
