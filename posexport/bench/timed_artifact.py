"""How a benchmark times an artifact of posexport, or a plan. Its spec says everything."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from posexport.artifact.loaded import LoadedArtifact
from posexport.bench import shapes
from posexport.bench.scenarios import Scenario
from posexport.bench.shapes import Sizes
from posexport.runtimes import TENSORRT, Runtime
from posexport.spec.contract import Values


@attrs.frozen
class TimedArtifact:
    """A posexport.bench.timed_file.TimedFile."""

    loaded: LoadedArtifact

    no_torch = ""

    @property
    def path(self) -> Path:
        """The .onnx or .plan."""
        return self.loaded.path

    @property
    def source(self) -> Path:
        """The ONNX file, from which torch rebuilds the block, also for a plan."""
        return self.loaded.source.path

    @property
    def spec(self) -> Mapping[str, Any]:
        """The spec as plain data."""
        return self.loaded.spec.to_dict()

    @property
    def inputs(self) -> Values:
        """The graph's inputs."""
        return self.loaded.inputs

    @property
    def outputs(self) -> Values:
        """The graph's outputs."""
        return self.loaded.outputs

    @property
    def required_runtime(self) -> str | None:
        """The runtime that built a plan. None for an ONNX file."""
        return self.loaded.required_runtime

    @property
    def warnings(self) -> tuple[str, ...]:
        """How an ONNX file contradicts its manifest, if it does."""
        return () if self.loaded.mismatch is None else (f"{self.path}: {self.loaded.mismatch}",)

    def facts(self) -> dict[str, Any]:
        """The facts of the result. All are known."""
        spec, source = self.loaded.spec, self.loaded.source
        return {
            "file": self.path.name,
            "sha256": self.loaded.sha256,
            "encoding": spec.encoding.name,
            "form": source.form,
            "opset": source.opset,
            "dtype": spec.dtype,
            "spec": json.loads(spec.to_json()),
        }

    def default_sizes(self) -> list[Sizes]:
        """A prefill and a step if there is a cache, otherwise two lengths."""
        return shapes.sizes_of(self.loaded, ())

    def read_sizes(self, text: str) -> Sizes:
        """Sizes by the dimensions of the contract."""
        return shapes.sizes_of(self.loaded, [text])[0]

    def scenario_sizes(self, scenario: Scenario) -> Sizes:
        """The sizes of a scenario."""
        return shapes.scenario_sizes(self.loaded, scenario)

    def sizes_like(self, sizes: Sizes) -> Sizes:
        """The sizes of another file for the dimensions that this one has too. The others are defaults."""
        known, names = sizes.to_dict(), shapes.dimensions(self.loaded)
        shared = [f"{dim}={known[dim]}" for dim in names if dim in known]
        return self.read_sizes(",".join(shared)) if shared else self.default_sizes()[0]

    def request(self, sizes: Sizes) -> dict[str, Any]:
        """The spec, and sizes by its dimensions."""
        return {"spec": self.spec, **sizes.to_dict()}

    def work_request(self, sizes: Sequence[Sizes]) -> dict[str, Any] | None:
        """None, because the spec says it."""
        return None

    def engine_options(self, runtime: Runtime, sizes: Sequence[Sizes]) -> dict[str, Any]:
        """The sizes that a plan spans if it is built on the fly. An existing plan is opened only if it was checked."""
        if runtime.module != TENSORRT:
            return {}
        if self.required_runtime is not None:
            return {"sha256": self.loaded.sha256}
        return {"profile": self.loaded.profile_requests([one.to_dict() for one in sizes])}
