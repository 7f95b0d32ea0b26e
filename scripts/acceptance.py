"""`scripts/gpu_acceptance`: what needs a GPU to be shown.

`posexport matrix` exports and verifies every encoding, form, dtype and mode on each GPU runtime, into a folder that is
named after the GPU; then files of the usual encodings are timed there, one after the other (`timings.json`). What fails
is a row of the tables, and the rest goes on; what a limit of time leaves out is "not run", and running it again goes
on. Exits 0 where everything that ran passed, 1 where something failed, 3 where nothing passed or a runtime that was
named is missing.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
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
from posexport.errors import unknown
from posexport.export.support import unsupported_reason
from posexport.files import write_json
from posexport.runtimes import RUNTIMES, cuda, gpu_missing
from posexport.spec.forms import FORMS
from posexport.spec.spec import DTYPES, Spec
from posexport.verify.matrix.run import OUT_OF_TIME
from posexport.verify.matrix.table import MODES, REFUSED, STATES
from posexport.verify.result import FAILED, NOT_RUN, PASSED

TIMED = {"mode": ("prefill", "decode"), "dtype": ("fp16", "bf16", "fp32"), "encoding": COMMON, "form": tuple(FORMS)}
"""What is timed: every combination, the last axis first, so that all forms of a block are timed side by side."""

COLUMNS = ("block", "form", "runtime", "state", "tokens: median ms (to torch eager)", "reason")


@attrs.define(kw_only=True)
class Timing:
    """One file on one runtime; `state` is passed where it was timed, and `reason` says why it was not."""

    block: str
    form: str
    runtime: str
    state: str = NOT_RUN
    reason: str = ""
    times: list[dict[str, Any]] = attrs.field(factory=list)


@click.command()
@click.option("--runtime", multiple=True, help="this one only, repeatable  [default: all that need a GPU]")
@click.option("--encoding", multiple=True, help="this one only, repeatable")
@click.option("--form", multiple=True, type=click.Choice(list(FORMS)), help="this one only, repeatable")
@click.option("--dtype", multiple=True, type=click.Choice(DTYPES), help="this one only, repeatable")
@click.option("--mode", multiple=True, type=click.Choice(list(MODES)), help="this one only, repeatable")
@click.option("--jobs", help="files that are verified side by side")
@click.option("--minutes", help="begin to verify nothing more after these minutes")
@click.option(
    "--bench-minutes", type=click.FloatRange(0), help="begin to time nothing more after these further minutes"
)
@click.option("--cuda-graph", is_flag=True, help="time captured CUDA graphs where a runtime can")
@click.option("--quick", is_flag=True, help="time a tiny block, short sequences, two rounds")
@click.option("--output", type=click.Path(path_type=Path), help="a folder  [default: docs/results/<device>]")
def main(
    runtime: tuple[str, ...],
    jobs: str | None,
    minutes: str | None,
    bench_minutes: float | None,
    cuda_graph: bool,
    quick: bool,
    output: Path | None,
    **only: tuple[str, ...],
) -> None:
    """Verify and time every encoding, form, dtype and mode on every runtime of a GPU machine."""
    names = runtime or tuple(name for name, row in RUNTIMES.items() if row.needs_gpu)
    if (wrong := next((name for name in names if name not in RUNTIMES), None)) is not None:
        raise click.UsageError(str(unknown("runtime", wrong, RUNTIMES)))
    missing = {name: reason.text for name in names if (reason := RUNTIMES[name].missing()) is not None}
    if len(missing) == len(names):
        click.echo(f"not run: {'; '.join(dict.fromkeys(missing.values()))}", err=True)
        raise SystemExit(3)
    device = _device(names)
    folder = output or RESULTS / re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    code = _verify(names, folder, jobs=jobs, minutes=minutes, **only)
    if code not in (0, 1, 3):
        raise SystemExit(code)
    options = BenchOptions(rounds=2 if quick else 15, cuda_graph=cuda_graph)
    chosen = {axis: [name for name in TIMED[axis] if not only[axis] or name in only[axis]] for axis in TIMED}
    end = float("inf") if bench_minutes is None else time.monotonic() + 60 * bench_minutes
    header = {"device": device, "quick": quick, "cuda_graph": cuda_graph, **record()}
    target = folder / "timings.json"
    timings = _timed_before(target, header)
    with temporary.folder() as files, console.steps("timing") as progress:
        for mode, dtype, encoding, form in itertools.product(*chosen.values()):
            file = File(encoding=encoding, form=form, dtype=dtype, mode=mode, quick=quick)
            progress.update(f"timing {file}")
            left = [name for name in names if (file.block, form, name) not in timings]
            for timing in file.time(left, missing, files, options, in_time=time.monotonic() < end):
                timings[timing.block, timing.form, timing.runtime] = timing
            write_json(target, {**header, "results": list(map(attrs.asdict, timings.values()))})
    console.show_table(f"Timings on {device}", COLUMNS, map(_row, timings.values()))
    states = [timing.state for timing in timings.values()]
    click.echo(", ".join(f"{states.count(state)} {state}" for state in STATES) + f": {target}")
    raise SystemExit(_exit_code(states, code, bool(runtime and missing)))


def _exit_code(states: Sequence[str], verified: int, lacking: bool) -> int:
    """1 where something failed, here or by the exit code of what was `verified`; 3 where nothing passed there, or where
    a runtime that was named is lacking."""
    if FAILED in states or verified == 1:
        return 1
    return 3 if lacking else verified


def _verify(names: Sequence[str], folder: Path, **options: Any) -> int:
    """`posexport matrix`; its exit code."""
    command = [sys.executable, "-m", "posexport", "matrix", "--output", str(folder)]
    command += [f"--runtime={name}" for name in names]
    for name, value in options.items():
        command += [f"--{name}={one}" for one in ((value,) if isinstance(value, str) else value or ())]
    return subprocess.run(command, check=False).returncode


def _timed_before(path: Path, header: Mapping[str, Any]) -> dict[tuple[str, str, str], Timing]:
    """What an earlier run with the same `header` timed, by block, form and runtime."""
    data = json.loads(path.read_bytes()) if path.exists() else {}
    if {**data, "results": None} != {**header, "results": None}:
        return {}
    timings = [Timing(**row) for row in data["results"] if row["state"] == PASSED]
    return {(timing.block, timing.form, timing.runtime): timing for timing in timings}


@attrs.frozen(kw_only=True)
class File:
    """What is timed: twelve heads of 64 features, or with `quick` four of 16."""

    encoding: str
    form: str
    dtype: str
    mode: str
    quick: bool

    def __str__(self) -> str:
        return f"{self.block} {self.form}"

    @property
    def block(self) -> str:
        """The name of what it holds, in whatever form."""
        return f"{self.encoding} {self.dtype} {self.mode}"

    def spec(self) -> Spec:
        hidden, heads = (64, 4) if self.quick else (768, 12)
        return block_spec(self.encoding, hidden, heads, dtype=self.dtype, **MODES[self.mode].fields_for(self.encoding))

    def shapes(self) -> tuple[str, ...]:
        """What it is timed on."""
        prefill, step = ("seq=16", "seq=1,past_seq=16") if self.quick else ("seq=1024", "seq=1,past_seq=1000")
        return (prefill if self.mode == "prefill" else step,)

    def time(
        self, names: Sequence[str], missing: Mapping[str, str], folder: Path, options: BenchOptions, in_time: bool
    ) -> list[Timing]:
        """Export it and time it on each runtime."""
        spec = self.spec()
        timings = [
            Timing(block=self.block, form=self.form, runtime=name, reason=missing.get(name, OUT_OF_TIME))
            for name in names
        ]
        if (why := unsupported_reason(spec, self.form)) is not None:
            return [attrs.evolve(timing, state=REFUSED, reason=why.text) for timing in timings]
        here = [timing for timing in timings if timing.runtime not in missing]
        if here and in_time:
            try:
                path = folder / f"{str(self).replace(' ', '-')}.onnx"
                write_block(spec, path, form=self.form)
                self._bench(path, here, options)
            except Exception as error:  # whatever an engine raises is a row of the table
                for timing in here:
                    timing.state, timing.reason = FAILED, str(error).strip().partition("\n")[0]
        return timings

    def _bench(self, path: Path, timings: Sequence[Timing], options: BenchOptions) -> None:
        runtimes = tuple(timing.runtime for timing in timings if timing.runtime in CANDIDATES)
        benchmark = bench(path, attrs.evolve(options, runtimes=runtimes, shapes=self.shapes()))
        for timing in timings:
            timing.reason = "" if timing.runtime in runtimes else "it can't be timed"
            for shape in benchmark.shapes:
                found = next((result for result in shape.results if result.runtime == timing.runtime), None)
                if found is None or found.seconds is None:
                    timing.state = timing.state if found is None else found.state
                    timing.reason = timing.reason if found is None else found.reason
                    continue
                timing.state = PASSED
                ratios = {role: attrs.asdict(ratio) for role, ratio in found.ratios.items()}
                figures = {"seconds": attrs.asdict(found.seconds), "ratios": ratios}
                memory = {"memory": found.memory, "gpu_memory": found.gpu_memory}
                timing.times.append({**shape.sizes.to_dict(), **figures, **memory})


def _row(timing: Timing) -> tuple[str, ...]:
    times = []
    for timed in timing.times:
        tokens = f"{timed['seq']} over {timed['past_seq']}" if "past_seq" in timed else str(timed["seq"])
        ratio = f" ({timed['ratios']['torch']['median']:.2f}x)" if "torch" in timed["ratios"] else ""
        times.append(f"{tokens}: {timed['seconds']['median'] * 1e3:.3f}{ratio}")
    return (timing.block, timing.form, timing.runtime, timing.state, "\n".join(times) or "-", timing.reason)


def _device(names: Sequence[str]) -> str:
    if gpu_missing() is not None or not any(RUNTIMES[name].needs_gpu for name in names):
        return "cpu-acceptance"
    name, capability = cuda.device()
    return f"{name} sm{capability.replace('.', '')}"


if __name__ == "__main__":
    main()
