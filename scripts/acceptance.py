"""`scripts/gpu_acceptance`: what needs a GPU to be shown.

Every cell of encoding x form x dtype x mode is exported, compiled to a plan where TensorRT is there, verified, and
timed; one that fails is a row of the table, and the rest go on. Exits 0 where everything that ran passed, 1 where
something failed, 3 where nothing passed or a runtime that was named is missing.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import click

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))
from results import RESULTS, record
from timing import COMMON, block_spec, write_block

from posexport import temporary
from posexport.bench import bench
from posexport.bench.candidates import CANDIDATES
from posexport.bench.options import BenchOptions
from posexport.cli import console
from posexport.errors import RequestError, unknown
from posexport.export.support import unsupported_reason
from posexport.files import write_json
from posexport.models import ENCODINGS
from posexport.runtimes import RUNTIMES, TENSORRT, cuda, gpu_missing
from posexport.spec.forms import FORMS
from posexport.spec.spec import DTYPES, Spec
from posexport.verify import verify
from posexport.verify.matrix.table import MODES, REFUSED, STATES

COMPILE_LIMIT = 900  # seconds for one plan
AXES: dict[str, Iterable[str]] = {
    "encoding": (*COMMON, "rope:layout=half"),
    "form": FORMS,
    "dtype": DTYPES,
    "mode": MODES,
}
"""What cells are made of: every combination, unless less is asked for."""

COLUMNS = ("cell", "runtime", "verify", "error / limit", "tokens: median ms (to torch eager)", "kernels", "reason")


@attrs.define(kw_only=True)
class Result:
    """One cell on one runtime. `state` is that of verify, or refused where the form can't carry the block."""

    cell: str
    runtime: str
    state: str = "not run"
    reason: str = ""
    error: float | None = None
    limit: float | None = None
    kernels: int | None = None
    fused_attention: bool | None = None
    times: list[dict[str, Any]] = attrs.field(factory=list)

    def fail(self, what: str, error: BaseException | str) -> None:
        """Note a failure of one step; the state can't be passed any more."""
        self.state = "failed"
        first = next(iter(str(error).strip().splitlines()), "")
        self.reason = f"{self.reason}; {what}: {first}".lstrip("; ")


@click.command()
@click.option("--runtimes", help="comma-separated  [default: torch-cuda, ort-cuda, tensorrt and tensorrt-rtx]")
@click.option("--encoding", multiple=True, help="this one only, repeatable")
@click.option("--form", multiple=True, type=click.Choice(list(FORMS)), help="this one only, repeatable")
@click.option("--dtype", multiple=True, type=click.Choice(DTYPES), help="this one only, repeatable")
@click.option("--mode", multiple=True, type=click.Choice(list(MODES)), help="this one only, repeatable")
@click.option("--cuda-graph", is_flag=True, help="time captured CUDA graphs where a runtime can")
@click.option("--quick", is_flag=True, help="a tiny block, short sequences, two rounds")
@click.option("--output", type=click.Path(path_type=Path), help="[default: docs/results/<device>.json]")
def main(runtimes: str | None, cuda_graph: bool, quick: bool, output: Path | None, **only: tuple[str, ...]) -> None:
    """Verify and time every encoding, form, dtype and mode on every runtime of a GPU machine."""
    names = runtimes.split(",") if runtimes else [name for name, row in RUNTIMES.items() if row.needs_gpu]
    wrong = [unknown("runtime", name, RUNTIMES) for name in names if name not in RUNTIMES]
    wrong += [unknown("encoding", name, ENCODINGS) for name in only["encoding"] if name.split(":")[0] not in ENCODINGS]
    if wrong:
        raise click.UsageError(str(wrong[0]))
    missing = {name: reason.text for name in names if (reason := RUNTIMES[name].missing()) is not None}
    if len(missing) == len(names):
        gpu = gpu_missing()
        why = gpu if gpu and all(RUNTIMES[name].needs_gpu for name in names) else "; ".join(missing.values())
        click.echo(f"not run: {why}", err=True)
        raise SystemExit(3)
    device = _device(names)
    target = output or RESULTS / f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"
    asked = itertools.product(*(only[axis] or names for axis, names in AXES.items()))
    cells = [Cell(*parts, quick=quick) for parts in asked]
    try:
        for cell in cells:
            cell.spec()
    except RequestError as error:
        raise click.UsageError(str(error)) from None
    if not target.parent.is_dir():
        raise click.UsageError(f"the folder {str(target.parent)!r} is not there: make it first, or give another.")
    options = BenchOptions(rounds=2 if quick else 15, cuda_graph=cuda_graph)
    results: list[Result] = []
    with temporary.folder() as folder, console.steps("acceptance", len(cells)) as progress:
        for cell in cells:
            progress.update(str(cell))
            results += _measure(cell, names, missing, folder, options)
            progress.update(advance=1)
            data = {"device": device, "quick": quick, "cuda_graph": cuda_graph, **record()}
            write_json(target, {**data, "results": [attrs.asdict(result) for result in results]})
    console.show_table(f"Acceptance on {device}", COLUMNS, map(_row, results))
    states = [result.state for result in results]
    click.echo(", ".join(f"{states.count(state)} {state}" for state in STATES) + f": {target}")
    raise SystemExit(_exit_code(states, bool(runtimes and missing)))


def _exit_code(states: list[str], lacking: bool) -> int:
    """1 where something failed; 3 where nothing passed, or where a runtime that was named is lacking."""
    if "failed" in states:
        return 1
    return 3 if lacking or "passed" not in states else 0


@attrs.frozen
class Cell:
    """What one file is made of; `encoding` as timing.block_spec names it, `quick` for a tiny block."""

    encoding: str
    form: str
    dtype: str
    mode: str
    quick: bool = attrs.field(kw_only=True)

    def __str__(self) -> str:
        return f"{self.encoding} {self.form} {self.dtype} {self.mode}"

    def spec(self) -> Spec:
        hidden, heads = (64, 4) if self.quick else (768, 12)
        fields = MODES[self.mode].fields_for(self.encoding.partition(":")[0])
        return block_spec(self.encoding, hidden, heads, dtype=self.dtype, **fields)

    def shapes(self) -> tuple[str, ...]:
        """What it is timed on; trained positions end at 1024."""
        prefills = ("seq=16",) if self.quick else ("seq=128", "seq=1024")
        step, places = ("seq=1,past_seq=16", 32) if self.quick else ("seq=1,past_seq=1000", 1024)
        shapes = {"prefill": prefills, "padding": prefills[:1], "decode": (step,)}
        return shapes.get(self.mode, (f"{step},max_seq={places}",))


def _measure(
    cell: Cell, names: list[str], missing: dict[str, str], folder: Path, options: BenchOptions
) -> list[Result]:
    results = [Result(cell=str(cell), runtime=name, reason=missing.get(name, "")) for name in names]
    spec = cell.spec()
    if (why := unsupported_reason(spec, cell.form)) is not None:
        return [attrs.evolve(result, state=REFUSED, reason=why.text) for result in results]
    here = [result for result in results if result.runtime not in missing]
    path = folder / f"{str(cell).replace(' ', '-').replace(':', '-')}.onnx"
    if _step("export", here, lambda: write_block(spec, path, form=cell.form)):
        plain = [result for result in here if RUNTIMES[result.runtime].module != TENSORRT]
        groups = [(path, plain)] if plain else []
        for result in here:
            if result not in plain:
                plan = path.with_suffix(f".{result.runtime}.plan")
                if _step("compile", [result], partial(_compile, path, plan, result)):
                    groups.append((plan, [result]))
        for file, group in groups:
            _step("verify", group, partial(_verify, file, group))
            timed = [result for result in group if result.runtime in CANDIDATES]
            if timed:
                _step("bench", timed, partial(_bench, file, timed, attrs.evolve(options, shapes=cell.shapes())))
    return results


def _step(what: str, results: Sequence[Result], call: Callable[[], object]) -> bool:
    """Do one step for some runtimes; where it raises, all of them have failed, and the rest goes on."""
    try:
        call()
    except Exception as error:  # whatever an engine raises is a row of the table
        for result in results:
            result.fail(what, error)
        return False
    return bool(results)


def _compile(path: Path, plan: Path, result: Result) -> None:
    """Build in a process of its own: an engine that crashes must not take the other cells along."""
    command = [sys.executable, "-c", "from posexport.cli import main; main()", "compile", str(path)]
    command += ["--runtime", result.runtime, "--output", str(plan), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()[-1:] or [f"it ended with code {done.returncode}"]
        raise RequestError(lines[0].removeprefix("Error: "))
    kernels = json.loads(done.stdout)["kernels"]
    result.kernels, result.fused_attention = kernels["count"], kernels["fused_attention"]


def _verify(path: Path, results: list[Result]) -> None:
    report = verify([path], runtimes={result.runtime: RUNTIMES[result.runtime] for result in results})
    if report.unreadable:
        raise RequestError(report.unreadable[0].error)
    verdicts = {verdict.runtime: verdict for verdict in report.verdicts}
    for result in results:
        verdict = verdicts.get(result.runtime)
        if verdict is None:
            result.fail("verify", "no verdict")
            continue
        result.state, result.reason = verdict.state, verdict.reason or ""
        if verdict.worst is not None:
            result.error, result.limit = verdict.worst.max_error, verdict.worst.limit


def _bench(path: Path, results: list[Result], options: BenchOptions) -> None:
    benchmark = bench(path, attrs.evolve(options, runtimes=tuple(result.runtime for result in results)))
    for result in results:
        for shape in benchmark.shapes:
            mine = next(timing for timing in shape.results if timing.runtime == result.runtime)
            if mine.state == "failed":
                result.fail("bench", mine.reason)
            elif mine.seconds is not None:
                against = CANDIDATES[mine.runtime].references["torch"]
                ratio = attrs.asdict(mine.ratios["torch"]) if "torch" in mine.ratios else None
                size = {**shape.sizes.to_dict(), "ratio": ratio, "against": against if ratio else ""}
                memory = {"memory": mine.memory, "gpu_memory": mine.gpu_memory}
                result.times.append({**size, "seconds": attrs.asdict(mine.seconds), **memory})
            elif not result.reason:
                result.reason = f"not timed: {mine.reason}"


def _row(result: Result) -> tuple[str, ...]:
    error = "-" if result.error is None or result.limit is None else f"{result.error:.2g} / {result.limit:.2g}"
    times = []
    for timed in result.times:
        tokens = f"{timed['seq']} over {timed['past_seq']}" if "past_seq" in timed else str(timed["seq"])
        ratio = f" ({timed['ratio']['median']:.2f}x)" if timed["ratio"] else ""
        times.append(f"{tokens}: {timed['seconds']['median'] * 1e3:.3f}{ratio}")
    kernels = "-" if result.kernels is None else f"{result.kernels}{', fused' if result.fused_attention else ''}"
    return (result.cell, result.runtime, result.state, error, "\n".join(times) or "-", kernels, result.reason)


def _device(names: list[str]) -> str:
    if gpu_missing() is not None or not any(RUNTIMES[name].needs_gpu for name in names):
        return "cpu-acceptance"
    name, capability = cuda.device()
    return f"{name} sm{capability.replace('.', '')}"


if __name__ == "__main__":
    main()
