"""The request of `posexport tune FILE`: any ONNX file, its scenario, and what is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from posexport.artifact.paths import check_artifact
from posexport.bench.scenarios import Scenario
from posexport.bench.tune.request import USUAL_TOKENS, check_files, limits_of, one_scenario
from posexport.bench.tune.space import CONSECUTIVE, Limits, Request
from posexport.errors import RequestError, located
from posexport.progress import Progress, silent
from posexport.spec.fields import stated

if TYPE_CHECKING:
    from posexport.artifact.signing import SigningKey
    from posexport.bench.timed_graph import TimedGraph
    from posexport.bench.tune.result import Result

OPTIONS = ("runtime", "scenario", "objective", "form", "target", "opset", "allow", "output")
"""The options that a tuning of a file takes. The others describe a block, but a file is already a graph."""


@attrs.frozen(kw_only=True)
class FileTuneRequest:
    """A tuning of a file that can start. The file has not been read yet."""

    file: Path
    roles: Mapping[str, str]
    runtime: str
    scenario: Scenario | None
    objective: str
    limits: Limits
    output: Path
    save: Path | None

    def run(
        self, cache: Path | None, resume: bool, progress: Progress = silent, key: SigningKey | None = None
    ) -> Result:
        """Tune. With `resume`, facts in the folder `cache` are reused (default: the folder of the output).

        What is written is signed with a `key`. RequestError for a file that can't be tuned, or that contradicts its
        manifest.
        """
        from posexport.artifact.graph_file import read_graph
        from posexport.artifact.loaded import check_source
        from posexport.bench.timed_graph import timed_graph
        from posexport.bench.tune.fact_cache import Store
        from posexport.bench.tune.file_programs import TunedFile
        from posexport.bench.tune.search import check_there, tune
        from posexport.graphs.roles import check_given

        check_there(self.runtime)
        progress(f"reading {self.file.name}")
        file = read_graph(self.file)
        check_source(file)
        graph = timed_graph(file, self.roles)
        with located(repr(str(self.file))):
            check_given(self.roles, graph.inputs)
        scenario = usual_scenario(graph) if self.scenario is None else self.scenario
        graph.scenario_sizes(scenario)
        request = Request(scenario=scenario, runtime=self.runtime, objective=self.objective, limits=self.limits)
        tuned = TunedFile(graph=graph, roles=self.roles, key=key)
        return tune(tuned, request, self.output, Store(cache or self.output.parent, resume), progress)


def read_file_request(
    file: str, given: Mapping[str, Any], roles: Mapping[str, str], save: Path | None
) -> FileTuneRequest:
    """The request for these options, which are None or () if not given.

    RequestError for invalid options, before anything is read.
    """
    path = Path(file)
    check_artifact(path)
    options = stated(given)
    others = [name for name in options if name not in OPTIONS]
    if others:
        raise RequestError(
            f"--{others[0].replace('_', '-')} was given with the file {file!r}, which is a graph already: drop it, or "
            "leave the file out."
        )
    runtime = options.get("runtime", "ort-cpu")
    if path.suffix != ".onnx" or runtime.startswith("tensorrt"):
        raise RequestError(
            f"{file!r} can't be tuned for {runtime}: of a file, sessions of ONNX Runtime are tuned (--for ort-cpu or "
            "ort-cuda), so give an .onnx and one of these; 'posexport compile' makes plans."
        )
    limits = limits_of(options)
    if CONSECUTIVE in limits.allow:
        raise RequestError(
            f"--allow consecutive was given with the file {file!r}, whose positions are as they were written: drop it."
        )
    scenario = one_scenario(options["scenario"]) if "scenario" in options else None
    usual = Scenario("prefill", USUAL_TOKENS)
    checked = Request(
        scenario=scenario or usual, runtime=runtime, objective=options.get("objective", "latency"), limits=limits
    )
    output = Path(options.get("output", f"{path.stem}-tuned.onnx"))
    check_files(output, ".onnx", runtime, save)
    return FileTuneRequest(
        file=path,
        roles=roles,
        runtime=checked.runtime,
        scenario=scenario,
        objective=checked.objective,
        limits=limits,
        output=output,
        save=save,
    )


def usual_scenario(graph: TimedGraph) -> Scenario:
    """A step if there is a cache, a batch if there are no tokens, else a prompt, of a usual size that fits."""
    usual = graph.default_sizes()[-1]
    if usual.past_seq is not None:
        return Scenario("decode", usual.past_seq or 1)
    return Scenario("batch", usual.batch) if usual.seq is None else Scenario("prefill", usual.seq)
