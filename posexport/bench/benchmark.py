"""The bench stage: latency and memory of an artifact on every runtime that is there, beside torch and the lower bound.

Each runtime has its own process, so that its memory can be measured and a crash ends only itself. They are called in
alternation (`rounds`); a turn is untimed runs, which wake threads that slept, and then a few timed ones. Quantiles are
over all timed runs; ratios to the references are over rounds, of the median run of each turn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from posexport.artifact.paths import check_artifact
from posexport.bench.candidates import choose, previous
from posexport.bench.options import DEFAULTS, ROUNDS, ROUNDS_OF_SEVERAL, BenchOptions
from posexport.bench.result import Benchmark, LeftOut, Shape, differing
from posexport.bench.scenarios import Scenario, read_scenario
from posexport.bench.session import BURST, BenchSession
from posexport.bench.shapes import Sizes, load_for_bench, read_sizes, scenario_sizes, sizes_of
from posexport.errors import RequestError
from posexport.machine import machine
from posexport.progress import Progress, silent

if TYPE_CHECKING:
    from posexport.artifact.loaded import LoadedArtifact
    from posexport.artifact.signing import TrustedKey

PROCESSES = 7
"""Processes of each candidate where runs are compared with one another."""


def bench(path: Path, options: BenchOptions = DEFAULTS, *, progress: Progress = silent) -> Benchmark:
    """Time an artifact beside torch eager, torch.compile and the lower bound.

    RequestError for names, sizes and files that can't be used.
    """
    with BenchRun(path, options, progress=progress) as run:
        run.open_processes(run.planned)
        return run.result()


class BenchRun(BenchSession):
    """One benchmark under way: made without timing anything, then process after process is opened and timed.

    `previous_artifact` is an earlier artifact of the same block, timed in the same rounds. `methods` says how a lower
    bound is run (`bound_methods` of an earlier result). `planned` processes share the rounds. Raises as `bench` does.
    """

    def __init__(
        self,
        path: Path,
        options: BenchOptions,
        *,
        previous_artifact: Path | None = None,
        methods: Mapping[tuple[str, str], str] | None = None,
        progress: Progress = silent,
    ) -> None:
        candidates = choose(options.runtimes, options.alternatives, options.required)
        for file in (path, *([] if previous_artifact is None else [previous_artifact])):
            check_artifact(file)
        for text in options.shapes:  # before an engine loads to read the artifact
            read_sizes(text, Sizes(), [field.name for field in attrs.fields(Sizes)])
        for text in options.scenarios:
            read_scenario(text)
        self.planned = options.processes or 1
        rounds = options.rounds or (ROUNDS if self.planned == 1 else ROUNDS_OF_SEVERAL * self.planned)
        if self.planned > 1 and not options.torch_compile:
            named = (*options.runtimes, *options.required)
            candidates = [one for one in candidates if one.role != "torch-compile" or one.name in named]
        artifact = load_for_bench(path, options.trusted)
        sizes, self._names, self._left_out = points(artifact, options.shapes, options.scenarios)
        self._warnings = _warnings(artifact)
        other = None
        if previous_artifact is not None:
            other = _load_previous(artifact, previous_artifact, sizes, options.trusted)
            self._warnings += _warnings(other)
            candidates += [previous(one) for one in candidates if not one.role]
        self._share, self._machine = math.ceil(rounds / self.planned), machine()
        options = attrs.evolve(options, rounds=self._share, seconds=options.seconds / self.planned)
        super().__init__(artifact, candidates, sizes, options, other, progress, methods)

    def result(self) -> Benchmark:
        """What is known so far; without timings before the first process."""
        artifact = self._artifact
        return Benchmark(
            file=artifact.path.name,
            sha256=artifact.sha256,
            encoding=artifact.spec.encoding.name,
            form=artifact.source.form,
            opset=artifact.source.opset,
            dtype=artifact.spec.dtype,
            spec=json.loads(artifact.spec.to_json()),
            rounds=self._share * self.processes,
            burst=BURST,
            processes=self.processes,
            seed=self._options.seed,
            machine_load=self.machine_load,
            machine=self._machine,
            threads=self._options.threads,
            cuda_graph=self._options.cuda_graph,
            manifest_warnings=tuple(self._warnings),
            left_out=self._left_out,
            shapes=tuple(
                Shape(
                    scenario=names[0] if names else None,
                    also=names[1:],
                    **sizes.to_dict(),
                    rounds=self.rounds[index],
                    results=self.timings(index),
                )
                for index, (sizes, names) in enumerate(zip(self._sizes, self._names, strict=True))
            ),
        )


def _warnings(artifact: LoadedArtifact) -> list[str]:
    return [] if artifact.mismatch is None else [f"{artifact.path}: {artifact.mismatch}"]


def points(
    artifact: LoadedArtifact, shapes: Sequence[str], scenarios: Sequence[str]
) -> tuple[list[Sizes], list[tuple[str, ...]], tuple[LeftOut, ...]]:
    """The sizes to time with the scenarios of each, and what of whole sweeps the artifact can't take."""
    asked: dict[Scenario, Scenario] = {}
    for scenario in (scenario for text in scenarios for scenario in read_scenario(text)):
        if not scenario.swept:
            asked[scenario] = scenario  # named once is named, whatever sweep has it too
        asked.setdefault(scenario, scenario)
    names: dict[Sizes, tuple[str, ...]] = {}
    left_out = []
    for scenario in asked.values():
        try:
            sizes = scenario_sizes(artifact, scenario)
            names[sizes] = (*names.get(sizes, ()), str(scenario))
        except RequestError as error:
            if not scenario.swept:
                raise
            left_out.append(LeftOut(scenario=str(scenario), reason=str(error).rstrip(".")))
    if asked and not names:
        raise RequestError(f"nothing of the sweep can be timed: {left_out[0].reason}.")
    if shapes or not asked:
        names |= {sizes: () for sizes in sizes_of(artifact, shapes) if sizes not in names}
    return list(names), list(names.values()), tuple(left_out)


def _load_previous(
    artifact: LoadedArtifact, path: Path, sizes: Sequence[Sizes], trusted: Sequence[TrustedKey]
) -> LoadedArtifact:
    """The earlier artifact; RequestError where it is another block, or can't take the sizes."""
    other = load_for_bench(path, trusted)
    if other.spec != artifact.spec:
        names = ", ".join(differing(other.spec.to_dict(), artifact.spec.to_dict()))
        raise RequestError(
            f"{str(path)!r} is another block than {str(artifact.path)!r} ({names} differ): give an earlier artifact of "
            "the same one."
        )
    sizes_of(other, [str(one) for one in sizes])
    return other
