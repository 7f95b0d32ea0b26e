"""The result of a benchmark as data: every candidate at every shape, to JSON and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from posexport.bench import statistics
from posexport.bench.shapes import Sizes
from posexport.errors import PosexportError, RequestError
from posexport.files import check_writable, read_bytes

KIND, VERSION = "bench", 1
TIMED, FAILED, NOT_RUN = "timed", "failed", "not run"

BOUND = "bound"
"""Under which the engine of a floor says how it was run."""


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
    seconds: statistics.Summary | None = None
    ratios: Mapping[str, statistics.Ratio] = attrs.field(factory=dict)
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
    """One shape: the scenario it came from, if any, its sizes, and the rounds that there was time for.

    `also` has further scenarios of the same sizes.
    """

    scenario: str | None
    also: tuple[str, ...] = ()
    sizes: Sizes
    rounds: int
    results: tuple[Timing, ...]

    @property
    def scenarios(self) -> tuple[str, ...]:
        """All scenarios that have these sizes."""
        return () if self.scenario is None else (self.scenario, *self.also)

    def timing(self, runtime: str) -> Timing | None:
        """The result of one candidate."""
        return next((each for each in self.results if each.runtime == runtime), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, sizes beside the rest."""
        results = [attrs.asdict(each) for each in self.results]
        names = {"scenario": self.scenario, **({"also": list(self.also)} if self.also else {})}
        return {**names, **self.sizes.to_dict(), "rounds": self.rounds, "results": results}


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
    """Timed runs of a turn at least."""
    processes: int
    """How many processes each candidate had, one after another."""
    seed: int
    machine_load: float
    """The share of the CPU that other work took during the rounds: above `HIGH_MACHINE_LOAD`, times mean little."""
    machine: Mapping[str, Any]
    threads: int | None
    cuda_graph: bool = False
    """Whether runs were captured as CUDA graphs, where a runtime can."""
    left_out: tuple[Mapping[str, str], ...] = ()
    """Points of whole sweeps that the artifact can't take: {scenario, reason}."""
    manifest_warnings: tuple[str, ...] = ()
    """Why a manifest is not of the file that was timed, where it isn't."""
    shapes: tuple[Shape, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data; times in seconds, memory in bytes."""
        head = {f.name: getattr(self, f.name) for f in attrs.fields(Benchmark) if f.name in _HEAD}
        head |= {"manifest_warnings": list(self.manifest_warnings)} if self.manifest_warnings else {}
        shapes = [shape.to_dict() for shape in self.shapes]
        return {"kind": KIND, "version": VERSION, **head, "left_out": list(self.left_out), "shapes": shapes}

    def floor_ways(self) -> dict[tuple[str, str], str]:
        """How each floor was run, by its name and the sizes as text."""
        return {
            (each.runtime, str(shape.sizes)): each.engine[BOUND]
            for shape in self.shapes
            for each in shape.results
            if BOUND in each.engine
        }

    def states(self, name: str) -> set[str]:
        """The states of one candidate over all shapes."""
        return {result.state for shape in self.shapes for result in shape.results if result.runtime == name}


_HEAD: dict[str, Any] = {
    **dict.fromkeys(("file", "sha256", "encoding", "form", "dtype"), str),
    **dict.fromkeys(("opset", "rounds", "burst", "processes", "seed"), int),
    **{"machine_load": float | int, "spec": dict, "machine": dict, "threads": int | None, "cuda_graph": bool},
}
_TIMING: dict[str, Any] = {
    **dict.fromkeys(("runtime", "state", "reason", "note"), str),
    **dict.fromkeys(("ratios", "processes", "engine"), dict),
    "seconds": dict | None,
}

HIGH_MACHINE_LOAD = 0.2
_ARTIFACT = (".onnx", ".plan", ".data")


def check_place(path: Path, baseline: Path | None = None) -> None:
    """RequestError where a result can't be saved at `path`, or would replace an artifact or the `baseline`.

    Minutes of timing are not to end so.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise RequestError(f"--save is {str(path)!r}: give the name of a file in a folder that is there.")
    real = path.resolve()
    of = real.with_suffix("") if real.suffix == ".json" else real  # whose manifest it would be
    if real.suffix in _ARTIFACT or (of.suffix in _ARTIFACT and of.is_file()):
        raise RequestError(f"--save is {str(path)!r}, a file of an artifact: give the result a name of its own.")
    if baseline is not None and real == baseline.resolve():
        raise RequestError(f"--save and --baseline are both {str(path)!r}: save the new result under another name.")
    check_writable(path)


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The names of the fields in which two specs, as plain data, are not the same."""
    return sorted(name for name in {**one, **other} if one.get(name) != other.get(name))


def read_benchmark(path: Path) -> Benchmark:
    """The result saved at `path`; RequestError where it is none, or of another version."""
    try:
        data = json.loads(read_bytes(path))
    except (OSError, ValueError, RecursionError) as error:
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
    head = {name: _typed(name, data[name], kind) for name, kind in _HEAD.items()}
    shapes = tuple(_shape(each) for each in data["shapes"])
    left_out = tuple({str(name): str(text) for name, text in each.items()} for each in data["left_out"])
    manifest_warnings = tuple(str(each) for each in data.get("manifest_warnings", ()))
    return Benchmark(**head, left_out=left_out, manifest_warnings=manifest_warnings, shapes=shapes)


def _shape(data: Mapping[str, Any]) -> Shape:
    sizes = Sizes(**{f.name: data[f.name] for f in attrs.fields(Sizes) if f.name in data})
    return Shape(
        scenario=_typed("scenario", data["scenario"], str | None),
        also=tuple(_typed("also", each, str) for each in data.get("also", ())),
        sizes=sizes,
        rounds=_typed("rounds", data["rounds"], int),
        results=tuple(_timing(each) for each in data["results"]),
    )


def _timing(data: Mapping[str, Any]) -> Timing:
    if data["state"] not in (TIMED, FAILED, NOT_RUN):
        raise ValueError(f"state {data['state']!r}")
    plain = {
        f.name: _typed(f.name, data[f.name], _TIMING.get(f.name, float | int | None)) for f in attrs.fields(Timing)
    }
    plain |= {
        "seconds": None if data["seconds"] is None else statistics.Summary(**_numbers(data["seconds"])),
        "ratios": _each(data["ratios"], lambda value: statistics.Ratio(**_numbers(value))),
        "processes": _each(data["processes"], lambda values: tuple(_positive(value) for value in values)),
    }
    return Timing(**plain)


def _typed(name: str, value: Any, kind: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{name} is {value!r}")
    return value


def _numbers(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _typed(name, value, float | int) for name, value in data.items()}


def _each(data: Mapping[str, Any], read: Callable[[Any], Any]) -> dict[str, Any]:
    return {str(name): read(value) for name, value in data.items()}


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 < number < float("inf"):
        raise ValueError(f"the ratio {value!r}")
    return number
