"""The bench stage: latency and memory of an artifact on every runtime that is there, beside torch and the lower bound.

Each runtime has its own process, so that its memory can be told and a crash ends only itself. They are called in
alternation (`rounds`); a turn is untimed runs, which wake threads that slept, and then a few timed ones.
Quantiles are over all timed runs; ratios to the peers are over rounds, of the median run of each turn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs

from posexport.artifact.paths import check_artifact
from posexport.bench.candidates import choose, earlier
from posexport.bench.result import HIGH_MACHINE_LOAD, Benchmark, LeftOut, Shape, differing
from posexport.bench.scenarios import Scenario, read_scenario
from posexport.bench.session import BURST, BenchSession, Settings
from posexport.bench.shapes import Sizes, Subject, read_sizes, read_subject
from posexport.errors import RequestError
from posexport.files import sha256_of
from posexport.machine import machine

__all__ = ["BUDGET", "HIGH_MACHINE_LOAD", "PROCESSES", "Benchmark", "bench"]

BUDGET = 60.0
"""Seconds for the rounds of one shape, however slow it is."""

ROUNDS, ROUNDS_EACH = 20, 10
"""Rounds of one process, and of each where there are several."""

PROCESSES = 7
"""Processes of each candidate where runs are compared with one another."""


def bench(
    path: Path,
    *,
    runtimes: Sequence[str] = (),
    also: Sequence[str] = (),
    shapes: Sequence[str] = (),
    scenarios: Sequence[str] = (),
    peers: bool = False,
    compiled: bool = False,
    rounds: int | None = None,
    warmup: int = 3,
    threads: int | None = None,
    cuda_graph: bool = False,
    seed: int = 0,
    budget: float = BUDGET,
    processes: int = 1,
    most_processes: int | None = None,
    check: Callable[[Benchmark], object] = lambda head: None,
    enough: Callable[[Benchmark], bool] = lambda found: True,
    against: Path | None = None,
    methods: Mapping[tuple[str, str], str] | None = None,
    progress: Callable[[str], object] = lambda step: None,
) -> Benchmark:
    """Time the artifact at `path`; torch eager, torch.compile and the lower bound are always among the candidates.

    `also` names candidates beside `runtimes`, or beside the default ones. `shapes` are texts like
    `batch=1,seq=128`, `scenarios` like `decode:2048`; `threads` counts the threads of each runtime (default: its own
    choice). `peers` adds torch's own export and ONNX Runtime's optimizer; `against` is an
    earlier artifact of the same block, timed in the same rounds. `budget` is in seconds, for the rounds of one shape.
    Each candidate gets `processes` processes one after another, which share the rounds; and more, up to
    `most_processes`, until `enough` says so of the result. With more than one, torch.compile is timed only where it is
    named or `compiled` is given: it takes seconds to start. `check` sees the result before anything is timed.
    `methods` says how a lower bound is run (`Benchmark.bound_methods` of an earlier result).
    `progress` is called with what comes next. RequestError for names, sizes and files that can't be used.
    """
    chosen = choose(runtimes, peers, also)
    _check_early(path, against, scenarios, shapes)
    if rounds is None:
        rounds = ROUNDS if processes == 1 else ROUNDS_EACH * processes
    if processes > 1 and not compiled:
        chosen = [each for each in chosen if each.role != "torch-compile" or each.name in (*runtimes, *also)]
    subject = read_subject(path)
    sizes, names, left_out = _points(subject, shapes, scenarios)
    if rounds < 1 or warmup < 1 or processes < 1 or not 0 < budget < math.inf:
        raise RequestError(
            f"rounds is {rounds}, warmup {warmup}, processes {processes} and budget {budget:g}: each must be above 0."
        )
    old = None if against is None else _earlier(subject, against, sizes)
    if old is not None:
        chosen += [earlier(each) for each in chosen if not each.role]
    share = math.ceil(rounds / processes)
    settings = Settings(
        rounds=share, warmup=warmup, threads=threads, cuda_graph=cuda_graph, seed=seed, budget=budget / processes
    )
    digest, here = sha256_of(path), machine()
    with BenchSession(subject, chosen, sizes, settings, old, progress, methods) as field:

        def result() -> Benchmark:
            return Benchmark(
                file=path.name,
                sha256=digest,
                encoding=subject.spec.encoding.name,
                form=subject.form,
                opset=subject.opset,
                dtype=subject.spec.dtype,
                spec=json.loads(subject.spec.to_json()),
                rounds=share * field.sessions,
                burst=BURST,
                processes=field.sessions,
                seed=seed,
                machine_load=field.machine_load,
                machine=here,
                threads=threads,
                cuda_graph=cuda_graph,
                left_out=left_out,
                manifest_warnings=(*subject.manifest_warnings, *(() if old is None else old.manifest_warnings)),
                shapes=tuple(
                    Shape(
                        scenario=names_of[0] if names_of else None,
                        also=names_of[1:],
                        **each.to_dict(),
                        rounds=field.rounds[index],
                        results=field.timings(index) if field.sessions else (),
                    )
                    for index, (each, names_of) in enumerate(zip(sizes, names, strict=True))
                ),
            )

        check(result())
        while field.sessions < processes:
            field.session()
        found = result()
        while field.sessions < (most_processes or processes) and not enough(found):
            field.session()
            found = result()
    return found


def _check_early(path: Path, against: Path | None, scenarios: Sequence[str], shapes: Sequence[str]) -> None:
    """RequestError for what is wrong with any artifact, before an engine loads to read this one."""
    for file in (path, *([] if against is None else [against])):
        check_artifact(file)
    for text in shapes:
        read_sizes(text, Sizes(), [field.name for field in attrs.fields(Sizes)])
    for text in scenarios:
        read_scenario(text)


def _points(
    subject: Subject, shapes: Sequence[str], scenarios: Sequence[str]
) -> tuple[list[Sizes], list[tuple[str, ...]], tuple[LeftOut, ...]]:
    """The sizes to time with the scenarios of each, and what of whole sweeps the artifact can't take."""
    asked: dict[Scenario, Scenario] = {}
    for scenario in (each for text in scenarios for each in read_scenario(text)):
        if not scenario.swept:
            asked[scenario] = scenario  # named once is named, whatever sweep has it too
        asked.setdefault(scenario, scenario)
    found: dict[Sizes, tuple[str, ...]] = {}
    left_out = []
    for scenario in asked.values():
        try:
            size = subject.scenario(scenario)
            found[size] = (*found.get(size, ()), str(scenario))
        except RequestError as error:
            if not scenario.swept:
                raise
            left_out.append(LeftOut(scenario=str(scenario), reason=str(error).rstrip(".")))
    if asked and not found:
        raise RequestError(f"nothing of the sweep can be timed: {left_out[0].reason}.")
    if shapes or not asked:
        found |= {each: () for each in subject.sizes(shapes) if each not in found}
    return list(found), list(found.values()), tuple(left_out)


def _earlier(subject: Subject, path: Path, sizes: Sequence[Sizes]) -> Subject:
    """The earlier artifact; RequestError where it is another block, or can't take the sizes."""
    old = read_subject(path)
    if old.spec != subject.spec:
        names = ", ".join(differing(old.spec.to_dict(), subject.spec.to_dict()))
        raise RequestError(
            f"{str(path)!r} is another block than {str(subject.path)!r} ({names} differ): give an earlier artifact of "
            "the same one."
        )
    old.sizes([str(each) for each in sizes])
    return old
