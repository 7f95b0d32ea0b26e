"""The interface between stages and engines: an opened artifact that can be run and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from posexport.errors import RequestError, check_known

if TYPE_CHECKING:
    import numpy as np

Arrays = dict[str, "np.ndarray[Any, Any]"]
"""Tensors by the graph's names, in the graph's own dtypes (bf16 as ml_dtypes.bfloat16)."""


class Runner(Protocol):
    """One artifact opened in one engine."""

    def run(self, inputs: Arrays) -> Arrays:
        """Every output of the graph by name; raises what the engine raises."""

    def prepare(self, inputs: Arrays) -> Callable[[], float]:
        """Bind inputs on the device once. Each call of the result runs once and returns its seconds, without copies."""

    def describe(self) -> dict[str, str]:
        """Versions and device, for reports."""


@runtime_checkable
class MethodRunner(Runner, Protocol):
    """A runner that has several methods and chooses the fastest."""

    method: str | None
    """The method to use if it is possible; None to choose one."""

    sizes: Mapping[str, int]
    """The sizes of the inputs that are prepared next."""


@runtime_checkable
class GroupRunner(Runner, Protocol):
    """A runner that reads its weights once for several sets of inputs."""

    def run_all(self, inputs: Sequence[Arrays]) -> Iterator[tuple[int, Arrays]]:
        """The number and the outputs of each set of inputs, as they are ready; raises what the first error raises."""


def check_options(engine: str, options: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """RequestError for an option that the engine doesn't know: it would have no effect."""
    for name in options:
        check_known(f"option of {engine}", name, allowed)


def check_onnx_file(engine: str, path: Path, options: Mapping[str, Any], allowed: Sequence[str] = ()) -> None:
    """RequestError for a file that is not `.onnx`, for engines that take nothing else, and for unknown options."""
    check_options(engine, options, allowed)
    if path.suffix != ".onnx":
        raise RequestError(f"{engine} runs .onnx files, not {path.name!r}: give the .onnx it came from.")


def timed(call: Callable[[], object]) -> Callable[[], float]:
    """A call that returns the wall-clock seconds it took."""

    def run() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return run
