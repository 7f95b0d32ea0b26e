"""What a benchmark needs to know about any file: what it is, the sizes that it takes, and inputs for a worker."""

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
    """A file that is timed: an artifact of posexport, or a graph of another tool."""

    @property
    def path(self) -> Path:
        """The file that runtimes open."""

    @property
    def source(self) -> Path:
        """The ONNX file. For a plan, it is the file that the plan was built from."""

    @property
    def spec(self) -> Mapping[str, Any]:
        """The spec as plain data. Empty for a graph."""

    @property
    def inputs(self) -> Values:
        """The graph's inputs."""

    @property
    def outputs(self) -> Values:
        """The graph's outputs."""

    @property
    def required_runtime(self) -> str | None:
        """The one runtime that can open it. None for an ONNX file."""

    @property
    def no_torch(self) -> str:
        """Why it can't be timed beside torch. Empty if it can."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Why its manifest does not belong to the file, if it doesn't."""

    def facts(self) -> dict[str, Any]:
        """The fields of posexport.bench.result.Benchmark that describe it."""

    def default_sizes(self) -> list[Sizes]:
        """The sizes if none are given."""

    def read_sizes(self, text: str) -> Sizes:
        """The sizes of a `--shape`. RequestError for what it can't take."""

    def scenario_sizes(self, scenario: Scenario) -> Sizes:
        """The sizes of a scenario. RequestError for what it can't take."""

    def sizes_like(self, sizes: Sizes) -> Sizes:
        """The sizes at which it is timed beside another file of `sizes`. RequestError for what it can't take."""

    def request(self, sizes: Sizes) -> dict[str, Any]:
        """Fields of the request `shape` (posexport.bench.worker), from which a worker draws inputs of these sizes."""

    def work_request(self, sizes: Sequence[Sizes]) -> dict[str, Any] | None:
        """Fields of the request `make` (posexport.bench.worker), from which a worker counts the work of these sizes.

        None if the spec says it.
        """

    def engine_options(self, runtime: Runtime, sizes: Sequence[Sizes]) -> dict[str, Any]:
        """Options of the engine for runs of these sizes."""
