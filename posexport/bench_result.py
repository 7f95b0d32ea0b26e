"""The result of a benchmark as data: every candidate at every shape, to JSON and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from posexport import timing
from posexport.bench_shapes import Sizes
from posexport.errors import PosexportError, RequestError

KIND, VERSION = "bench", 1
TIMED, FAILED, NOT_RUN = "timed", "failed", "not run"


@attrs.frozen(kw_only=True)
class Timing:
    """One candidate at one shape: `state` is timed, failed or not run, with the reason for the last two.

    `ratios` holds, by peer (`floor`, `torch`, `torch-compile`, `torch-onnx`, `ort-optimizer`, `against`), this
    candidate's time over the peer's on the same device; `processes` the median of that ratio in each process.
    `note` says which options had no effect on it. Seconds and bytes throughout.
    """

    runtime: str
    state: str
    reason: str = ""
    note: str = ""
    seconds: timing.Summary | None = None
    ratios: Mapping[str, timing.Ratio] = attrs.field(factory=dict)
    processes: Mapping[str, tuple[float, ...]] = attrs.field(factory=dict)
    tokens_per_second: float | None = None
    memory: int | None = None
    gpu_memory: int | None = None
    load_seconds: float | None = None
    build_seconds: float | None = None
    warmup_seconds: float | None = None
    engine: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Shape:
    """One shape: the scenario it came from, if any, its sizes, and the rounds that there was time for."""

    scenario: str | None
    sizes: Sizes
    rounds: int
    results: tuple[Timing, ...]

    def timing(self, runtime: str) -> Timing | None:
        """The result of one candidate."""
        return next((each for each in self.results if each.runtime == runtime), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, sizes beside the rest."""
        results = [attrs.asdict(each) for each in self.results]
        return {"scenario": self.scenario, **self.sizes.to_dict(), "rounds": self.rounds, "results": results}


@attrs.frozen(kw_only=True)
class Benchmark:
    """The result: every candidate at every shape, and what it was measured with."""

    file: str
    sha256: str
    encoding: str
    form: str
    opset: int
    dtype: str
    spec: Mapping[str, Any]
    rounds: int
    burst: int
    processes: int
    """How many processes each candidate had, one after another."""
    seed: int
    busy: float
    """The share of the CPU that other work took during the rounds: above `BUSY`, times mean little."""
    machine: Mapping[str, Any]
    threads: int | None
    left_out: tuple[Mapping[str, str], ...] = ()
    """Points of whole sweeps that the artifact can't take: {scenario, reason}."""
    shapes: tuple[Shape, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data; times in seconds, memory in bytes."""
        head = {f.name: getattr(self, f.name) for f in attrs.fields(Benchmark) if f.name not in ("left_out", "shapes")}
        shapes = [shape.to_dict() for shape in self.shapes]
        return {"kind": KIND, "version": VERSION, **head, "left_out": list(self.left_out), "shapes": shapes}

    def states(self, name: str) -> set[str]:
        """The states of one candidate over all shapes."""
        return {result.state for shape in self.shapes for result in shape.results if result.runtime == name}


BUSY = 0.2
_SAVED = "a file that `posexport bench --save` wrote"


def read_benchmark(path: Path) -> Benchmark:
    """The result saved at `path`; RequestError where it is none, or of another version."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise RequestError(
            f"can't read {str(path)!r} ({why}): give a file that `posexport bench --save` wrote."
        ) from None
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise RequestError(
            f"{str(path)!r} is no result of a benchmark: give a file that `posexport bench --save` wrote."
        )
    if data.get("version") != VERSION:
        raise RequestError(
            f"{str(path)!r} has version {data.get('version')!r}, this posexport reads {VERSION}: save it anew."
        )
    try:
        return benchmark_from(data)
    except (KeyError, TypeError, ValueError, AttributeError, PosexportError) as error:
        said = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise RequestError(f"{str(path)!r} is a damaged result of a benchmark ({said}): save it anew.") from None


def benchmark_from(data: Mapping[str, Any]) -> Benchmark:
    """The result that `to_dict` made plain data of; raises whatever damaged data leads to."""
    names = [f.name for f in attrs.fields(Benchmark) if f.name not in ("left_out", "shapes")]
    shapes = tuple(_shape(each) for each in data["shapes"])
    return Benchmark(**{name: data[name] for name in names}, left_out=tuple(data["left_out"]), shapes=shapes)


def _shape(data: Mapping[str, Any]) -> Shape:
    sizes = Sizes(**{f.name: data[f.name] for f in attrs.fields(Sizes) if f.name in data})
    results = tuple(_timing(each) for each in data["results"])
    return Shape(scenario=data["scenario"], sizes=sizes, rounds=int(data["rounds"]), results=results)


def _timing(data: Mapping[str, Any]) -> Timing:
    if data["state"] not in (TIMED, FAILED, NOT_RUN):
        raise ValueError(f"state {data['state']!r}")
    plain = {f.name: data[f.name] for f in attrs.fields(Timing)} | {
        "seconds": None if data["seconds"] is None else timing.Summary(**data["seconds"]),
        "ratios": _each(data["ratios"], lambda value: timing.Ratio(**value)),
        "processes": _each(data["processes"], lambda values: tuple(_positive(value) for value in values)),
    }
    return Timing(**plain)


def _each(data: Mapping[str, Any], read: Callable[[Any], Any]) -> dict[str, Any]:
    return {str(name): read(value) for name, value in data.items()}


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 < number < float("inf"):
        raise ValueError(f"the ratio {value!r}")
    return number
