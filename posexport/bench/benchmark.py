"""The bench stage: latency and memory of an artifact on every available runtime, beside torch and the lower bound.

Each runtime has its own process, so that its memory can be measured and a crash ends only that process. The runtimes
take turns (`rounds`). A turn is some untimed runs, which wake sleeping threads, and then a few timed runs. Quantiles
are over all timed runs. Ratios to the references are over rounds, of the median run of each turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from posexport.artifact.paths import check_artifact
from posexport.bench.candidates import COMPILED, LOWER_BOUND, OF_TORCH, Candidate, choose, previous, torch_of
from posexport.bench.loading import load_timed
from posexport.bench.options import DEFAULTS, ROUNDS, ROUNDS_OF_SEVERAL, BenchOptions
from posexport.bench.result import Benchmark, LeftOut, Shape, differing
from posexport.bench.scenarios import Scenario, read_scenario
from posexport.bench.session import BURST, BenchSession
from posexport.bench.shapes import Sizes, pairs_of
from posexport.errors import RequestError
from posexport.machine import machine
from posexport.progress import Progress, silent

if TYPE_CHECKING:
    from posexport.bench.timed_file import TimedFile

PROCESSES = 7
"""Processes of each candidate if runs are compared with each other."""


def bench(path: Path, options: BenchOptions = DEFAULTS, *, progress: Progress = silent) -> Benchmark:
    """Time an artifact beside torch eager, torch.compile and the lower bound.

    RequestError for names, sizes and files that can't be used.
    """
    with BenchRun(path, options, progress=progress) as run:
        run.open_processes(run.planned)
        return run.result()


class BenchRun(BenchSession):
    """A benchmark in progress. Creating it times nothing. Then processes are opened and timed one after the other.

    `previous_artifact` is an earlier artifact of the same block, timed in the same rounds. `methods` gives the method
    of each lower bound (`bound_methods` of an earlier result). The `planned` processes share the rounds. Raises the
    same errors as `bench`.
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
        if previous_artifact is not None and all(one.role for one in candidates):
            raise RequestError(
                f"--runtime is {', '.join(options.runtimes)}, which doesn't run the artifact, so nothing can be "
                "compared with --against: name one that does, such as ort-cpu, or none."
            )
        paths = [path, *([] if previous_artifact is None else [previous_artifact])]
        for file in paths:
            check_artifact(file)
        for text in options.shapes:  # before an engine is loaded to read the artifact
            pairs_of(text)
        for text in options.scenarios:
            read_scenario(text)
        self.planned = options.processes or 1
        rounds = options.rounds or (ROUNDS if self.planned == 1 else ROUNDS_OF_SEVERAL * self.planned)
        if self.planned > 1 and not options.torch_compile:
            named = (*options.runtimes, *options.required)
            candidates = [one for one in candidates if one.role != COMPILED or one.name in named]
        artifact, *others = load_timed(paths, options.trusted, options.roles)
        candidates = _possible(candidates, artifact, options)
        sizes, self._names, self._left_out = points(artifact, options.shapes, options.scenarios)
        self._warnings = artifact.warnings
        self.notes: tuple[str, ...] = ()
        other, its_sizes = None, None
        for other in others:
            its_sizes = _sizes_of_previous(artifact, other, sizes)
            self.notes = _unlike(artifact, other)
            self._warnings += other.warnings
            candidates += [previous(one) for one in candidates if not one.role]
        self._share, self._machine = math.ceil(rounds / self.planned), machine()
        options = attrs.evolve(options, rounds=self._share, seconds=options.seconds / self.planned)
        super().__init__(artifact, candidates, sizes, options, other, progress, methods, its_sizes)

    def result(self) -> Benchmark:
        """The result so far. It has no timings before the first process."""
        return Benchmark(
            **self._artifact.facts(),
            rounds=self._share * self.processes,
            burst=BURST,
            processes=self.processes,
            seed=self._options.seed,
            machine_load=self.machine_load,
            machine=self._machine,
            threads=self._options.threads,
            cuda_graph=self._options.cuda_graph,
            manifest_warnings=self._warnings,
            left_out=self._left_out,
            shapes=tuple(
                Shape(
                    scenario=names[0] if names else None,
                    also=names[1:],
                    **attrs.asdict(sizes) | {"others": dict(sizes.others)},
                    rounds=self.rounds[index],
                    results=self.timings(index),
                )
                for index, (sizes, names) in enumerate(zip(self._sizes, self._names, strict=True))
            ),
        )


def points(
    artifact: TimedFile, shapes: Sequence[str], scenarios: Sequence[str]
) -> tuple[list[Sizes], list[tuple[str, ...]], tuple[LeftOut, ...]]:
    """The sizes to time, the scenarios of each, and the parts of sweeps that the artifact can't take."""
    asked: dict[Scenario, Scenario] = {}
    for scenario in (scenario for text in scenarios for scenario in read_scenario(text)):
        if not scenario.swept:
            asked[scenario] = scenario  # a scenario that is named is required, even if a sweep has it too
        asked.setdefault(scenario, scenario)
    names: dict[Sizes, tuple[str, ...]] = {}
    left_out = []
    for scenario in asked.values():
        try:
            sizes = artifact.scenario_sizes(scenario)
            names[sizes] = (*names.get(sizes, ()), str(scenario))
        except RequestError as error:
            if not scenario.swept:
                raise
            left_out.append(LeftOut(scenario=str(scenario), reason=str(error).rstrip(".")))
    if asked and not names:
        raise RequestError(f"nothing of the sweep can be timed: {left_out[0].reason}.")
    if shapes or not asked:
        given = [artifact.read_sizes(text) for text in shapes] or artifact.default_sizes()
        names |= {sizes: () for sizes in given if sizes not in names}
    return list(names), list(names.values()), tuple(left_out)


def _possible(candidates: Sequence[Candidate], artifact: TimedFile, options: BenchOptions) -> list[Candidate]:
    """Leave out references that can't be made from the file, unless they are named. Add the user's module."""
    if not artifact.no_torch:
        if options.module is not None:
            raise RequestError(
                f"--module was given with {str(artifact.path)!r}, which is posexport's own: its torch block is made of "
                "its spec, so drop it."
            )
        return list(candidates)
    if options.alternatives:
        raise RequestError(
            f"--peers was given with {str(artifact.path)!r}, and {artifact.no_torch}: drop it, or give the other "
            "way to run it with --against."
        )
    named = {*options.runtimes, *options.required}
    possible = [candidate for candidate in candidates if candidate.role not in OF_TORCH or candidate.name in named]
    if options.module is None:
        return possible
    torch = torch_of(options.module)
    others = [candidate for candidate in possible if candidate.name != torch.name]
    bounds = [candidate for candidate in others if candidate.role == LOWER_BOUND]
    return [*bounds, torch, *(candidate for candidate in others if candidate not in bounds)]


def _sizes_of_previous(artifact: TimedFile, other: TimedFile, sizes: Sequence[Sizes]) -> list[Sizes]:
    """The sizes at which the earlier artifact is timed. RequestError if it is another block or can't take them."""
    if artifact.spec and other.spec and artifact.spec != other.spec:
        names = ", ".join(differing(other.spec, artifact.spec))
        raise RequestError(
            f"{str(other.path)!r} is another block than {str(artifact.path)!r} ({names} differ): give an earlier "
            "artifact of the same one."
        )
    return [other.sizes_like(one) for one in sizes]


def _unlike(artifact: TimedFile, other: TimedFile) -> tuple[str, ...]:
    """A sentence if two graphs differ in inputs or outputs. Nothing else shows whether they are the same function."""
    if artifact.spec and other.spec:
        return ()
    pairs = (("inputs", artifact.inputs, other.inputs), ("outputs", artifact.outputs, other.outputs))
    lists = {kind: sorted({*mine} ^ {*theirs}) for kind, mine, theirs in pairs}
    parts = [f"{kind} ({', '.join(names)})" for kind, names in lists.items() if names]
    return (f"The two files differ in {' and '.join(parts)}.",) if parts else ()
