"""What a benchmark needs of a file, whoever wrote it: what it is, the sizes that it takes, and inputs for a worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from posexport.bench.scenarios import Scenario
    from posexport.bench.shapes import Sizes
    from posexport.runtimes import Runtime
    from posexport.spec.contract import Values


class TimedFile(Protocol):
    """A file that is timed: an artifact of posexport, or a graph that anyone wrote."""

    @property
    def path(self) -> Path:
        """The file that runtimes open."""

    @property
    def source(self) -> Path:
        """The ONNX file: the same, or that of a plan."""

    @property
    def spec(self) -> Mapping[str, Any]:
        """The spec as plain data; empty for a graph."""

    @property
    def inputs(self) -> Values:
        """The graph's inputs."""

    @property
    def outputs(self) -> Values:
        """The graph's outputs."""

    @property
    def required_runtime(self) -> str | None:
        """The one runtime that can open it, None for an ONNX file."""

    @property
    def no_torch(self) -> str:
        """Why it can't be timed beside torch; empty where it can."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Why its manifest is not of the file, where it isn't."""

    def facts(self) -> dict[str, Any]:
        """The fields of posexport.bench.result.Benchmark that say what it is."""

    def default_sizes(self) -> list[Sizes]:
        """The sizes where none are asked for."""

    def read_sizes(self, text: str) -> Sizes:
        """The sizes of a `--shape`; RequestError for what it can't take."""

    def scenario_sizes(self, scenario: Scenario) -> Sizes:
        """The sizes of a scenario; RequestError for what it can't take."""

    def sizes_like(self, sizes: Sizes) -> Sizes:
        """The sizes at which it is timed beside another file of `sizes`; RequestError for what it can't take."""

    def request(self, sizes: Sizes) -> dict[str, Any]:
        """What a worker draws inputs of these sizes from: fields of the request `shape` (posexport.bench.worker)."""

    def work_request(self, sizes: Sequence[Sizes]) -> dict[str, Any] | None:
        """What a worker needs to find out the work of runs of these sizes: fields of the request `make`
        (posexport.bench.worker); None where the spec says it."""

    def engine_options(self, runtime: Runtime, sizes: Sequence[Sizes]) -> dict[str, Any]:
        """Options of the engine for runs of these sizes."""
