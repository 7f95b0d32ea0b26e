"""The score: mutants of each artifact are made, judged by the oracle, and verified together with their original.

Verify runs on onnxruntime's CPU provider. Some changes save most of its time and change no verdict. Inputs are drawn
once, and the float64 block and torch eager run once, for all mutants of an artifact, because the mutants share spec and
weights. Only mutants that pass on the smallest sets of inputs run on all of them. Verify does not locate where a graph
departs.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import multiprocessing
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import numpy as np
import onnx

from mutation.artifacts import ARTIFACTS, Artifact, write_artifact
from mutation.corners import FAMILIES, corner_mutant
from mutation.inputs import REACH, broad_aims
from mutation.oracle import BROKEN, FAULT, Oracle
from mutation.random_faults import KINDS, random_mutant
from posexport.artifact.loaded import LoadedArtifact
from posexport.runtimes import RUNTIMES
from posexport.runtimes.pool import Pool
from posexport.spec.spec import Spec
from posexport.verify import submission, verify
from posexport.verify.judge import ArtifactJob
from posexport.verify.result import FAILED
from posexport.verify.submission import Drawn

RUNTIME = "ort-cpu"


@attrs.define(kw_only=True)
class Mutant:
    """One mutant and its results. `caught` is None if verify did not run on it."""

    artifact: str
    group: str
    kind: str
    numbers: str
    state: str
    ratio: float
    sizes: str
    caught: bool | None = None
    reason: str = ""
    model: onnx.ModelProto | None = None


@attrs.define
class Score:
    """All mutants, the originals that failed, and the seconds of the oracle and of verify."""

    mutants: list[Mutant] = attrs.field(factory=list)
    alarms: list[str] = attrs.field(factory=list)
    oracle_seconds: float = 0.0
    verify_seconds: float = 0.0


def _random(*parts: object) -> np.random.Generator:
    """A generator seeded by `parts`, so that the numbers of an artifact and kind do not depend on other draws."""
    return np.random.default_rng(zlib.crc32(json.dumps([str(part) for part in parts]).encode()))


def random_mutants(artifact: Artifact, oracle: Oracle, count: int, seed: int) -> Iterator[Mutant]:
    """Up to `count` random mutants that run. The kinds take turns."""
    random = _random("random", artifact.name, seed)
    kinds, made, tried = list(KINDS), 0, 0
    offset = int(random.integers(len(kinds)))
    while made < count and tried < 6 * count:
        kind = kinds[(offset + tried) % len(kinds)]
        tried += 1
        mutated = random_mutant(artifact, kind, random)
        if mutated is None:
            continue
        model, numbers = mutated
        shown = oracle.judge_apart(model, broad_aims(artifact.spec), 1, (seed, tried))
        if shown.state == BROKEN:
            continue
        made += 1
        yield Mutant(
            artifact=artifact.name,
            group="random",
            kind=kind,
            numbers=numbers,
            state=shown.state,
            ratio=shown.ratio,
            sizes=shown.sizes,
            model=model,
        )


@contextmanager
def cheap_verify(only_small: bool) -> Iterator[None]:
    """Within this context, verify on files of one spec draws inputs once, torch runs once for the same inputs and
    options, and departures are not located. `only_small` leaves verify the smallest quarter of its sets of inputs."""
    submit: Callable[..., Future[Any]] = Pool.submit
    draw: Callable[..., Drawn] = submission.draw_cases
    answers: dict[str, Future[Any]] = {}
    drawn: dict[str, Drawn] = {}

    def once(self: Pool, row: Any, path: Path, inputs: Any, *others: Any, **named: Any) -> Future[Any]:
        if row.name != "torch":
            return submit(self, row, path, inputs, *others, **named)
        digest = hashlib.sha256(repr((others, named)).encode())
        for arrays in inputs:
            for name, array in arrays.items():
                digest.update(f"{name}{array.dtype}{array.shape}".encode())
                digest.update(np.ascontiguousarray(array).tobytes())
        key = digest.hexdigest()
        if key not in answers:
            answers[key] = submit(self, row, path, inputs, *others, **named)
        return answers[key]

    def drawn_once(artifact: LoadedArtifact, *others: Any) -> Drawn:
        key = repr((artifact.spec, artifact.bounds, artifact.source.form, artifact.contract_violation, others))
        if key not in drawn:
            drawn[key] = draw(artifact, *others)
            if only_small:
                cases = sorted(drawn[key].cases, key=lambda case: sum(array.nbytes for array in case.arrays.values()))
                drawn[key] = attrs.evolve(drawn[key], cases=cases[: -(-len(cases) // 4)])
        return drawn[key]

    def unlocated(self: ArtifactJob, verdict: Any, *arguments: Any) -> Any:
        return verdict

    with (
        mock.patch.object(Pool, "submit", once),
        mock.patch.object(submission, "draw_cases", drawn_once),
        mock.patch.object(ArtifactJob, "_located", unlocated),
    ):
        yield


def ask_verify(original: Path, mutants: Sequence[Mutant], folder: Path, options: dict[str, Any]) -> list[str]:
    """Set `caught` of each mutant. Return the reason of the original if it fails.

    A mutant that fails on the smallest sets of inputs fails on all of them: only the others are run on all.
    """
    alarms: list[str] = []
    for only_small in (True, False):
        asked = [mutant for mutant in mutants if not mutant.caught]
        alarms = _verify(original, asked, folder, options, only_small)
    return alarms


def _verify(
    original: Path, mutants: Sequence[Mutant], folder: Path, options: dict[str, Any], only_small: bool
) -> list[str]:
    """Verify the original and these mutants together, as `ask_verify` does."""
    names: dict[str, Mutant] = {}
    for number, mutant in enumerate(mutants):
        assert mutant.model is not None
        path = folder / f"{'small' if only_small else 'all'}-{number}.onnx"
        onnx.save(mutant.model, path)
        names[path.name] = mutant
    with cheap_verify(only_small):
        try:
            files = [original, *(folder / name for name in names)]
            report = verify(files, runtimes={RUNTIME: RUNTIMES[RUNTIME]}, **options)
        except Exception as error:  # if verify breaks on one artifact, the others must still be scored
            return [f"{original.name}: verify raised {type(error).__name__}: {error}"]
    alarms = []
    for verdict in report.verdicts:
        name = Path(verdict.artifact).name
        if name in names:
            names[name].caught, names[name].reason = verdict.state == FAILED, str(verdict.reason or "")
        elif verdict.state == FAILED:
            alarms.append(f"{name}: {verdict.reason}")
    for unreadable in report.unreadable:
        name = Path(unreadable.artifact).name
        if name in names:  # refused, exit code 2
            names[name].caught, names[name].reason = True, unreadable.error
        else:
            alarms.append(f"{name}: {unreadable.error}")
    return alarms


def verify_options(spec: Spec, seed: int) -> dict[str, Any]:
    """Arguments of verify: the seed, and the reach of the oracle's inputs if verify has that parameter."""
    options: dict[str, Any] = {"seed": seed}
    if "reach" in inspect.signature(verify).parameters:
        keys = REACH.keys if spec.kv_cache or spec.cross else REACH.row
        options["reach"] = {"seq": keys, "batch": REACH.batch}
    return options


@attrs.frozen(kw_only=True)
class Plan:
    """Which mutants are made of each artifact. `groups` keeps only some classes ("random" is one)."""

    random_count: int = 17
    corner_share: float = 1.0
    corner_draws: int = 1
    groups: tuple[str, ...] = ()
    seed: int = 0


def corner_mutants(artifact: Artifact, oracle: Oracle, plan: Plan) -> Iterator[Mutant]:
    """Mutants of a share of the families, each as often as the plan says."""
    for name, (group, _) in FAMILIES.items():
        random = _random("corner", artifact.name, name, plan.seed)
        if (plan.groups and group not in plan.groups) or random.random() >= plan.corner_share:
            continue
        for draw in range(plan.corner_draws):
            mutated = corner_mutant(artifact, name, random)
            if mutated is None:
                continue
            model, fault = mutated
            shown = oracle.judge(model, fault.aims, 3, (plan.seed, draw))
            yield Mutant(
                artifact=artifact.name,
                group=group,
                kind=name,
                numbers=fault.numbers,
                state=shown.state,
                ratio=shown.ratio,
                sizes=shown.sizes,
                model=model,
            )


def score_artifact(name: str, plan: Plan) -> Score:
    """The score of one artifact."""
    with tempfile.TemporaryDirectory(prefix="posexport-mutation-") as place:
        folder, mutants_folder = Path(place), Path(place) / "mutants"
        mutants_folder.mkdir()
        artifact = write_artifact(name, folder)
        oracle = Oracle(artifact)
        mutants: list[Mutant] = []
        if not plan.groups or "random" in plan.groups:
            mutants += random_mutants(artifact, oracle, plan.random_count, plan.seed)
        mutants += corner_mutants(artifact, oracle, plan)
        asked = [mutant for mutant in mutants if mutant.state == FAULT]
        started = time.perf_counter()
        alarms = ask_verify(
            folder / f"sound-{name}.onnx", asked, mutants_folder, verify_options(artifact.spec, plan.seed)
        )
        seconds = time.perf_counter() - started
    for mutant in mutants:
        mutant.model = None
    return Score(mutants, alarms, oracle.seconds, seconds)


def score(
    names: Sequence[str] = tuple(ARTIFACTS),
    plan: Plan | None = None,
    jobs: int = 1,
    progress: Callable[[str], None] = lambda text: None,
) -> Score:
    """Score these artifacts in `jobs` processes at a time."""
    made, plan = Score(), plan or Plan()
    with ExitStack() as stack:
        if jobs > 1:
            pool = stack.enter_context(ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")))
            scores: Iterable[Score] = pool.map(score_artifact, names, [plan] * len(names))
        else:
            scores = (score_artifact(name, plan) for name in names)
        for name, part in zip(names, scores, strict=True):
            faults = [mutant for mutant in part.mutants if mutant.state == FAULT]
            missed = [mutant for mutant in faults if not mutant.caught]
            progress(
                f"{name}: {len(part.mutants)} mutants, {len(faults)} faults, {len(faults) - len(missed)} caught; "
                f"oracle {part.oracle_seconds:.1f} s, verify {part.verify_seconds:.1f} s"
            )
            for mutant in missed:
                progress(f"  missed: {mutant.group} / {mutant.kind} / {mutant.numbers} / {mutant.sizes}")
            made.mutants += part.mutants
            made.alarms += part.alarms
            made.oracle_seconds += part.oracle_seconds
            made.verify_seconds += part.verify_seconds
    return made
