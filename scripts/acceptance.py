"""`scripts/gpu_acceptance`: the checks that need a GPU.

It works in two steps. The first prepares whole models and blocks: it exports them and makes inputs and float64
references. The second verifies them on every runtime of the GPU machine and times them there. `--prepare FOLDER` does
the first step only, on any machine. `--from-prepared FOLDER` does the second step, without an exporter.

Rows are written as soon as they are known, to a folder named after the GPU. The most important files come first. Rows
that the time limit leaves out are "not run"; another run continues with them. Exits 0 if everything that ran passed, 1
if something failed, and 3 if nothing passed or a runtime that was named is missing.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

import attrs
import click

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))
from acceptance_items import MODELS, Item, Prepared, PreparedList, items, prepare, read_list
from acceptance_rows import COLUMNS, TITLE, Results, Row, summary
from results import RESULTS, record

from posexport import temporary
from posexport.bench import bench
from posexport.bench.candidates import CANDIDATES
from posexport.bench.options import BenchOptions
from posexport.cli import console
from posexport.errors import PosexportError, Reason, check_known
from posexport.models import ENCODINGS
from posexport.runtimes import RUNTIMES, cuda, gpu_missing
from posexport.runtimes.pool import Pool, result
from posexport.spec.forms import FORMS
from posexport.spec.spec import DTYPES
from posexport.verify.matrix.run import OUT_OF_TIME
from posexport.verify.matrix.table import MODES, makers
from posexport.verify.prepared.check import check_file
from posexport.verify.result import FAILED, NOT_RUN, PARITY, PASSED

TIME_LIMIT = 240.0
"""Seconds that a runtime may take for one file. Building a plan is included."""

VERIFYING = 0.6
"""The share of the time after which no further block is verified."""

TIMING, GRAPH_TIMING = "time", "time with CUDA graphs"


@click.command()
@click.option(
    "--prepare", "target", type=click.Path(path_type=Path, file_okay=False), help="only prepare, into this folder"
)
@click.option(
    "--from-prepared", type=click.Path(path_type=Path, file_okay=False), help="verify and time this prepared folder"
)
@click.option(
    "--megabytes", type=click.FloatRange(1), default=120, show_default=True, help="prepare at most about this much"
)
@click.option("--runtime", multiple=True, help="only this one; repeatable  [default: all that need a GPU]")
@click.option("--model", multiple=True, type=click.Choice(list(MODELS)), help="only this one; repeatable")
@click.option("--encoding", multiple=True, help="only this one; repeatable")
@click.option("--form", multiple=True, type=click.Choice(list(FORMS)), help="only this one; repeatable")
@click.option("--dtype", multiple=True, type=click.Choice(DTYPES), help="only this one; repeatable")
@click.option("--mode", multiple=True, type=click.Choice(list(MODES)), help="only this one; repeatable")
@click.option(
    "--minutes", type=click.FloatRange(0), default=25, show_default=True, help="start nothing new after this time"
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=max(1, min(8, (os.cpu_count() or 1) // 2)),
    show_default="half of the CPUs, at most 8",
    help="files to verify at the same time",
)
@click.option("--time/--no-time", "timed", default=True, help="time files too  [default: yes]")
@click.option("--quick", is_flag=True, help="prepare tiny files, time few rounds")
@click.option("--output", type=click.Path(path_type=Path), help="a folder  [default: docs/results/<device>]")
def main(
    target: Path | None,
    from_prepared: Path | None,
    megabytes: float,
    runtime: tuple[str, ...],
    minutes: float,
    jobs: int,
    timed: bool,
    quick: bool,
    output: Path | None,
    **only: tuple[str, ...],
) -> None:
    """Verify and time whole models and blocks on every runtime of a GPU machine."""
    names = runtime or tuple(name for name, row in RUNTIMES.items() if row.needs_gpu)
    try:
        for kind, given, known in (("runtime", runtime, RUNTIMES), ("encoding", only["encoding"], ENCODINGS)):
            for name in given:
                check_known(kind, name, known)
        if target is not None and from_prepared is not None:
            raise click.UsageError("--prepare and --from-prepared are two steps: give one of them.")
        chosen = items(**only, quick=quick)
        if target is not None:
            _prepare_only(target, prepare(target, chosen, megabytes * 2**20, quick))
            return
        missing = {name: RUNTIMES[name].missing() for name in names}
        reasons = [reason.text for reason in missing.values() if reason is not None]
        if from_prepared is None and len(reasons) == len(names):
            click.echo(f"not run: {'; '.join(dict.fromkeys(reasons))}", err=True)
            raise SystemExit(3)
        listed = None if from_prepared is None else read_list(from_prepared)
        device, made_by = _device(names), makers() if listed is None else dict(listed.made_by)
        header = {"device": device, "made_by": made_by, "quick": quick if listed is None else listed.quick, **record()}
        folder = output or RESULTS / re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
        results = Results(folder=folder, header=header)
        with temporary.folder() as made:
            if from_prepared is None or listed is None:
                left = _left(chosen, missing, results)
                source, lists = made, prepare(made, left, float("inf"), quick)
            else:
                source, lists = from_prepared, _one_by_one(listed, {one.name for one in chosen})
            prepares = from_prepared is None
            run(source, lists, missing, results, minutes=minutes, timed=timed, prepares=prepares, jobs=jobs)
        if not results.rows:
            raise click.UsageError("nothing of what was chosen is there: choose other names.")
        results.write()
    except PosexportError as error:
        raise click.UsageError(str(error)) from None
    console.show_table(TITLE.format(device=results.header["device"]), COLUMNS, [row.shown() for row in results.rows])
    click.echo(f"{summary(results.rows)}: {results.folder / 'acceptance.json'}")
    raise SystemExit(results.exit_code(bool(runtime and reasons)))


def _prepare_only(folder: Path, lists: Iterator[PreparedList]) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise click.UsageError(f"{str(folder)!r} is not empty: give a new folder.")
    listed = None
    for listed in lists:
        one = listed.items[-1]
        click.echo(f"{one.place}{f': {one.error}' if one.error else ''}")
    if listed is None:
        raise click.UsageError("nothing of what was chosen can be exported: choose other forms, dtypes or modes.")
    wrong = sum(bool(one.error) for one in listed.items)
    click.echo(f"{len(listed.items) - wrong} prepared, {wrong} failed: {folder}")
    raise SystemExit(1 if wrong else 0)


def _left(chosen: Iterator[Item], missing: Mapping[str, Reason | None], results: Results) -> Iterator[Item]:
    """The items to prepare: all except those whose rows from the earlier run are still valid. Those rows are kept."""
    for one in chosen:
        every = [results.standing(one.name, name, reason) for name, reason in missing.items()]
        if all(every):
            for rows in every:
                results.keep(rows)
        else:
            yield one


def _one_by_one(listed: PreparedList, names: set[str]) -> Iterator[PreparedList]:
    """For each chosen item, the list with only this item."""
    for one in listed.items:
        if one.name in names:
            yield attrs.evolve(listed, items=(one,))


@attrs.frozen
class Checks:
    """Verifies files below `source` on `runtimes`, several at a time. `ends` maps `is_model` to the time of the
    monotonic clock, in seconds, after which no file of this kind is verified."""

    source: Path
    missing: Mapping[str, Reason | None]
    ends: Mapping[bool, float]
    pools: SimpleQueue[Pool]

    def in_time(self, prepared: Prepared) -> bool:
        """Whether a file may still be verified."""
        return time.monotonic() < self.ends[prepared.is_model]

    def rows(self, prepared: Prepared, runtimes: Sequence[str]) -> list[Row]:
        """The rows of a file on these runtimes."""
        if prepared.file is None:
            state, reason = FAILED, f"it could not be prepared: {prepared.error}"
        elif not (self.source / prepared.place).is_dir():
            state, reason = NOT_RUN, f"{prepared.place} is not here: copy its part"
        elif not self.in_time(prepared):
            state, reason = NOT_RUN, OUT_OF_TIME
        else:
            pool = self.pools.get()
            try:
                rows = {name: RUNTIMES[name] for name in runtimes}
                found = check_file(prepared.file, self.source / prepared.place, pool, rows, self.missing)
                return [Row.of(prepared.name, verdict) for verdict in found]
            finally:
                self.pools.put(pool)
        return [Row(file=prepared.name, runtime=name, check=PARITY, state=state, reason=reason) for name in runtimes]


def run(
    source: Path,
    lists: Iterator[PreparedList],
    missing: Mapping[str, Reason | None],
    results: Results,
    *,
    minutes: float,
    timed: bool,
    prepares: bool,
    jobs: int,
) -> None:
    """Verify and time the last item of each list. Its folder is below `source`, and some runtimes may be missing.

    `jobs` files are verified at a time. Nothing is verified while something is timed. Whole models that follow each
    other in the list are timed as soon as all of them are verified. Blocks take longer: they are timed after all are
    verified, or after the share VERIFYING of the time. If the list `prepares` each item on demand, no more items are
    prepared after the time for verifying is over.
    """
    start, quick, later = time.monotonic(), bool(results.header["quick"]), list[Prepared]()
    end, end_of_blocks = start + 60 * minutes, start + 60 * minutes * (VERIFYING if timed else 1)
    with ExitStack() as stack:
        executor = ThreadPoolExecutor(jobs)
        stack.callback(executor.shutdown, wait=True, cancel_futures=True)
        pools = SimpleQueue[Pool]()
        for _ in range(jobs):  # pools close before the executor: a waiting thread then gets its answer
            pools.put(stack.enter_context(Pool(TIME_LIMIT)))
        checks = Checks(source, missing, {True: end, False: end_of_blocks}, pools)
        progress = stack.enter_context(console.steps("preparing"))

        def time_all(every: list[Prepared]) -> None:
            for prepared in every:
                progress.update(f"timing {prepared.name}")
                _bench(source / prepared.place, prepared, results, quick, in_time=time.monotonic() < end)

        for is_model, group in itertools.groupby((listed.items[-1] for listed in lists), lambda one: one.is_model):
            checked = list[Prepared]()
            for prepared in _checked(group, checks, executor, results, prepares):
                progress.update(f"verified {prepared.name}")
                checked.append(prepared)
            timeable = [one for one in checked if timed and one.shapes is not None]
            if is_model:
                time_all(timeable)
            else:
                later += timeable
            if prepares and checked and not checks.in_time(checked[-1]):
                break
        time_all(later)


def _checked(
    group: Iterator[Prepared], checks: Checks, executor: ThreadPoolExecutor, results: Results, prepares: bool
) -> Iterator[Prepared]:
    """Verify all items of a group and add their rows in the order of the group. Rows of the earlier run are kept while
    they are valid. If the list prepares items on demand, stop when the time is over."""
    waiting = deque[tuple[Prepared, list[Row], Future[list[Row]]]]()

    def ready(every: bool) -> Iterator[Prepared]:
        while waiting and (every or waiting[0][-1].done()):
            prepared, kept, future = waiting.popleft()
            results.keep(kept)
            for row in result(future):
                late, reason = row.reason == OUT_OF_TIME, checks.missing[row.runtime]
                stand = late and results.standing(row.file, row.runtime, reason, row.sha256, in_time=False)
                if stand:
                    results.keep(stand)
                else:
                    results.add(row)
            yield prepared

    for prepared in group:
        earlier = {
            name: results.standing(prepared.name, name, why, prepared.sha256) for name, why in checks.missing.items()
        }
        names = [name for name, rows in earlier.items() if not rows]
        future = executor.submit(checks.rows, prepared, names)
        waiting.append((prepared, [row for rows in earlier.values() for row in rows], future))
        if prepares and not checks.in_time(prepared):
            break
        yield from ready(every=False)
    yield from ready(every=True)


def _bench(folder: Path, prepared: Prepared, results: Results, quick: bool, in_time: bool) -> None:
    """Time a file on the runtimes that passed. A whole model is also timed with captured CUDA graphs."""
    rows = [row for row in results.rows if row.file == prepared.name]
    done = {(row.runtime, row.check) for row in rows if row.check in (TIMING, GRAPH_TIMING)}
    passed = [row.runtime for row in rows if row.check == PARITY and row.state == PASSED]
    able = [name for name in dict.fromkeys(passed) if name in CANDIDATES and not CANDIDATES[name].role]
    for check in (TIMING, GRAPH_TIMING):
        graphs = check == GRAPH_TIMING
        names = [name for name in able if (name, check) not in done]
        names = [name for name in names if not graphs or CANDIDATES[name].takes("cuda_graph")]
        if names and not in_time:
            for name in names:
                results.add(Row(file=prepared.name, runtime=name, check=check, state=NOT_RUN, reason=OUT_OF_TIME))
        elif names and prepared.file is not None:
            for row in _times(folder / prepared.file.model, prepared, names, check, quick):
                results.add(row)


def _times(path: Path, prepared: Prepared, names: Sequence[str], check: str, quick: bool) -> list[Row]:
    """A row for each runtime. An error that an engine raises becomes a row too."""
    rows = [Row(file=prepared.name, runtime=name, check=check, state=FAILED, reason="no timing") for name in names]
    rounds, seconds = (2, 2.0) if quick else (15, 8.0)
    options = BenchOptions(
        runtimes=tuple(names),
        shapes=prepared.shapes or (),
        cuda_graph=check == GRAPH_TIMING,
        rounds=rounds,
        seconds=seconds,
    )
    try:
        shapes = bench(path, options).shapes
    except Exception as error:
        return [attrs.evolve(row, reason=str(error).strip().partition("\n")[0]) for row in rows]
    for row in rows:
        for shape in shapes:
            timing = next(result for result in shape.results if result.runtime == row.runtime)
            if timing.seconds is None:
                row.state, row.reason = timing.state, timing.reason
                continue
            row.state, row.reason = PASSED, ""
            ratio = timing.ratios.get("torch")
            row.times.append(
                {
                    "sizes": ", ".join(f"{name} {size}" for name, size in shape.sizes.to_dict().items()),
                    "seconds": timing.seconds.median,
                    "tokens_per_second": timing.tokens_per_second,
                    "to_torch": None if ratio is None else ratio.median,
                    "gpu_memory": timing.gpu_memory,
                }
            )
    return rows


def _device(names: Sequence[str]) -> str:
    if gpu_missing() is not None or not any(RUNTIMES[name].needs_gpu for name in names):
        return "cpu-acceptance"
    name, capability = cuda.device()
    return f"{name} sm{capability.replace('.', '')}"


if __name__ == "__main__":
    main()
