"""The gate on synthetic series: the effect of noise, what it catches, what it refuses. No test depends on a clock."""

import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from helpers import small_spec

from posexport.bench import regression, statistics
from posexport.bench.benchmark import PROCESSES
from posexport.bench.result import Benchmark, Shape, Timing, read_benchmark
from posexport.bench.shapes import Sizes
from posexport.errors import RequestError
from posexport.machine import machine

HERE = machine()
RUNS = 200


def ratio(parts: Sequence[float]) -> statistics.Ratio:
    return statistics.Ratio(median=parts[0], low=min(parts), high=max(parts), confidence=0.95)


def result(lower_bound: Sequence[float], torch: Sequence[float] | None = None, **over: Any) -> Benchmark:
    """A run of one runtime at one shape, from its ratios in every process."""
    processes = {"lower_bound": tuple(lower_bound)} | ({} if torch is None else {"torch": tuple(torch)})
    timed = Timing(
        runtime="ort-cpu",
        state="timed",
        seconds=statistics.summarize([1.0]),
        ratios={name: ratio(parts) for name, parts in processes.items()},
        processes=processes,
    )
    peer = Timing(runtime="torch", state="timed", seconds=statistics.summarize([1.0]), processes={"torch": (1.0,) * 5})
    shape = Shape(scenario="prefill:128", **Sizes().to_dict(), rounds=30, results=(peer, timed))
    spec = small_spec("rope")
    head: dict[str, Any] = {
        "file": "block.onnx",
        "sha256": "0" * 64,
        "encoding": "rope",
        "form": "decomposed",
        "opset": 18,
        "dtype": "fp32",
        "spec": spec.to_dict(),
        "rounds": 30,
        "burst": 3,
        "processes": len(lower_bound),
        "seed": 0,
        "machine_load": 0.0,
        "machine": HERE,
        "threads": None,
        "shapes": (shape,),
    }
    return Benchmark(**head | over)


def only(gate: regression.Gate) -> regression.Change:
    (change,) = gate.changes
    return change


class Noise:
    """Runs on a noisy machine.

    Each process has a random factor (`luck`), one in ten is disturbed, and each run has a random factor (`drift`).
    """

    def __init__(self, seed: int, luck: float, drift: float) -> None:
        self._draw, self._luck, self._drift = random.Random(seed), luck, drift

    def run(self, middle: float) -> Iterator[float]:
        """The ratios of one process after another."""
        offset = self._draw.gauss(0, self._drift)
        while True:
            disturbed = abs(self._draw.gauss(0, 0.15)) if self._draw.random() < 0.1 else 0.0
            yield middle * math.exp(offset + self._draw.gauss(0, self._luck) + disturbed)


def judged(noise: Noise, slowdown: float, allowed: float = 0.05) -> tuple[str, int]:
    """One gate as `bench_to_keep` and `bench_gated` run it, with as many processes as it needs.

    Returns its state and the number of processes.
    """
    saved: list[float] = []
    for part in noise.run(1.3):
        saved.append(part)
        if len(saved) >= PROCESSES and (len(saved) == regression.MOST_PROCESSES or regression.is_steady(result(saved))):
            break
    base = result(saved)
    parts: list[float] = []
    for part in noise.run(1.3 * (1 + slowdown)):
        parts.append(part)
        if len(parts) >= PROCESSES:
            gate = regression.compare(result(parts), base, allowed)
            if gate.settled or len(parts) >= regression.MOST_PROCESSES:
                return only(gate).state, len(parts)
    raise AssertionError("runs never end")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("luck", [0.01, 0.03, 0.08])
def test_equal_builds_raise_no_alarm(luck: float) -> None:
    states = [judged(Noise(seed, luck, regression.DRIFT), 0.0)[0] for seed in range(RUNS)]
    assert states.count("slower") <= RUNS // 200


def test_a_planted_slowdown_is_caught() -> None:
    states = [judged(Noise(seed, 0.02, regression.DRIFT), 0.20)[0] for seed in range(RUNS)]
    assert states.count("slower") >= 0.8 * len(states)
    assert states.count("fine") == 0


def test_a_quiet_machine_settles_at_once() -> None:
    states = [judged(Noise(seed, 0.002, 0.0), 0.0)[0] for seed in range(RUNS)]
    assert states.count("fine") >= 0.5 * len(states)


def test_noise_that_hides_everything_is_neither_fine_nor_slower() -> None:
    change = only(regression.compare(result([1.0, 2.0, 0.5, 1.5]), result([1.0, 0.6, 1.4, 2.1]), 0.05))
    assert change.state == "inconclusive"
    assert change.low is not None and change.high is not None and change.low < 1.05 < change.high


STEADY = (1.30, 1.31, 1.29, 1.30, 1.30)


@pytest.mark.parametrize(
    ("factor", "allowed", "state"),
    [(1.0, 0.05, "fine"), (0.5, 0.0, "fine"), (1.05, 0.05, "inconclusive"), (1.2, 0.05, "slower"), (1.2, 0.3, "fine")],
)
def test_only_what_lies_wholly_above_what_is_allowed_is_slower(factor: float, allowed: float, state: str) -> None:
    gate = regression.compare(result([factor * part for part in STEADY]), result(STEADY), allowed)
    change = only(gate)
    assert change.state == state
    assert change.change == pytest.approx(factor)
    assert (gate.exit_code(strict=False), gate.exit_code(strict=True)) == (state == "slower", state != "fine")


def test_a_slower_machine_is_no_regression() -> None:
    """Only the ratio to the reference of the same run counts, not the seconds."""
    slow = result(STEADY)
    (shape,) = slow.shapes
    seconds = statistics.summarize([9.0])
    slow = attrs.evolve(
        slow, shapes=(attrs.evolve(shape, results=tuple(attrs.evolve(r, seconds=seconds) for r in shape.results)),)
    )
    assert only(regression.compare(slow, result(STEADY), 0.05)).state == "fine"


def test_the_steadier_reference_is_taken() -> None:
    wild = (1.0, 2.0, 0.5, 1.0, 3.0)
    assert only(regression.compare(result(STEADY, wild), result(STEADY, wild), 0.05)).reference == "lower_bound"
    assert only(regression.compare(result(wild, STEADY), result(wild, STEADY), 0.05)).reference == "torch"
    assert (
        only(regression.compare(result(wild, STEADY), result(STEADY), 0.05)).reference == "lower_bound"
    )  # Both results have this reference.


@pytest.mark.parametrize(
    ("bound", "torch", "steady"),
    [(0.005, 0.005, True), (0.005, None, True), (0.005, 0.3, False), (0.3, 0.005, False), (0.3, None, False)],
)
def test_a_result_is_steady_by_both_references(bound: float, torch: float | None, steady: bool) -> None:
    luck = (-2, -1, 0, 1, 2, 1, -1)
    parts = [None if by is None else [1 + by * each for each in luck] for by in (bound, torch)]
    assert regression.is_steady(result(parts[0] or [], parts[1])) is steady


def test_peers_are_not_gated() -> None:
    assert only(regression.compare(result(STEADY), result(STEADY), 0.05)).runtime == "ort-cpu"


def test_what_was_not_timed_now_is_not_run_and_says_why() -> None:
    found = result(STEADY)
    (shape,) = found.shapes
    for results, why in (
        ((), "it is not among the runtimes of this run"),
        ((Timing(runtime="ort-cpu", state="failed", reason="crashed"),), "failed: crashed"),
    ):
        gate = regression.compare(
            attrs.evolve(found, shapes=(attrs.evolve(shape, results=results),)), result(STEADY), 0.05
        )
        assert (only(gate).state, only(gate).reason) == ("not run", why)
        assert (gate.exit_code(strict=False), gate.exit_code(strict=True)) == (0, 1)


@pytest.mark.parametrize(("old", "new", "settled"), [(2, 5, True), (5, 2, False)])
def test_few_processes_tell_nothing(old: int, new: int, settled: bool) -> None:
    gate = regression.compare(result(STEADY[:new]), result(STEADY[:old]), 0.05)
    assert (only(gate).state, gate.settled) == ("inconclusive", settled)
    assert "it needs 3 processes" in only(gate).reason


def test_more_processes_stop_where_the_baseline_itself_is_too_noisy() -> None:
    gate = regression.compare(result([1.3] * 5), result([1.0, 1.7, 1.3, 1.1, 1.5]), 0.05)
    assert (only(gate).state, gate.settled) == ("inconclusive", True)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "file": ({"file": "other.onnx"}, "the baseline is of file 'other.onnx', this run of 'block.onnx'"),
    "dtype": ({"dtype": "fp16"}, "the baseline is of dtype 'fp16', this run of 'fp32'"),
    "encoding": ({"encoding": "alibi"}, "the baseline is of encoding 'alibi'"),
    "spec": (
        {"spec": small_spec("rope", hidden_size=64).to_dict()},
        "another block (head_dim, hidden_size, scale differ)",
    ),
    "threads": ({"threads": 1}, "the threads of the baseline are 1"),
    "graphs": ({"cuda_graph": True}, "the baseline has --cuda-graph, the run has not"),
    "nothing": (
        {"shapes": (Shape(scenario="prefill:128", **Sizes().to_dict(), rounds=1, results=()),)},
        "the baseline timed nothing that runs the artifact",
    ),
    "shapes": (
        {"shapes": (Shape(scenario=None, **Sizes(seq=7).to_dict(), rounds=1, results=()),)},
        "batch=1,seq=128 is in this run only",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_baseline_of_something_else_is_refused(name: str) -> None:
    over, message = WRONG[name]
    with pytest.raises(RequestError) as caught:
        regression.compare(result(STEADY), result(STEADY, **over), 0.05)
    assert message in str(caught.value)


def test_another_machine_or_form_is_noted() -> None:
    base = result(STEADY, form="native", machine={**HERE, "cpu": "another"})
    notes = " ".join(regression.compare(result(STEADY), base, 0.05).notes)
    assert "form is native, this one's decomposed" in notes and "(cpu differ)" in notes
    assert regression.compare(result(STEADY), result(STEADY), 0.05).notes == ()


@pytest.mark.parametrize("parts", [(1e-300, 1e99, 1e-300), (5e-324,) * 3, (1e99,) * 3, (1e-308, 1.0, 1e99)])
def test_ratios_that_no_times_have_overflow_nothing(parts: Sequence[float]) -> None:
    for new, old in ((result(STEADY), result(parts)), (result(parts), result(STEADY)), (result(parts), result(parts))):
        change = only(regression.compare(new, old, 0.05))
        assert change.state in ("fine", "slower", "inconclusive")
        assert change.low is None or 0 < change.low <= change.high < 1e100


@pytest.mark.parametrize(("factor", "state"), [(1.0, "fine"), (1.3, "slower")])
def test_an_earlier_artifact_in_the_same_rounds(factor: float, state: str) -> None:
    found = result(STEADY)
    (shape,) = found.shapes
    old = Timing(runtime="against:ort-cpu", state="timed", seconds=statistics.summarize([1.0]))
    parts = tuple(factor * part / 1.3 for part in STEADY)
    new = attrs.evolve(shape.results[1], processes={"against": parts})
    found = attrs.evolve(found, shapes=(attrs.evolve(shape, results=(shape.results[0], new, old)),))
    change = only(regression.compare_previous(found, 0.05))
    assert (change.state, change.reference) == (state, "the earlier artifact")
    none = attrs.evolve(found, shapes=(attrs.evolve(shape, results=(attrs.evolve(new, processes={}),)),))
    assert only(regression.compare_previous(none, 0.05)).state == "not run"


def test_what_ran_neither_artifact_is_left_out_beside_what_did() -> None:
    found = result(STEADY)
    (shape,) = found.shapes
    new = attrs.evolve(shape.results[1], processes={"against": STEADY})
    gone = [Timing(runtime=f"{kind}ort-cuda", state="not run", reason="no GPU") for kind in ("", "against:")]
    both = attrs.evolve(found, shapes=(attrs.evolve(shape, results=(new, *gone)),))
    assert only(regression.compare_previous(both, 0.05)).runtime == "ort-cpu"
    assert len(regression.compare_previous(both, 0.05, named=["ort-cuda"]).changes) == 2
    alone = attrs.evolve(found, shapes=(attrs.evolve(shape, results=tuple(gone)),))
    assert only(regression.compare_previous(alone, 0.05)).state == "not run"
    lost = attrs.evolve(gone[1], state="timed", seconds=statistics.summarize([1.0]))
    assert only(
        regression.compare_previous(attrs.evolve(both, shapes=(attrs.evolve(shape, results=(gone[0], lost)),)), 0.05)
    )


@pytest.mark.parametrize(
    ("text", "share"), [("5%", 0.05), ("0.05", 0.05), (" 120 %", 1.2), ("0", 0.0), ("7.5%", 0.075)]
)
def test_what_is_allowed_is_a_share_or_percent(text: str, share: float) -> None:
    assert regression.read_limit(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "x", "-1%", "5", "1", "nan", "inf", "2000%", "5%%"])
def test_other_shares_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="--max-regression is"):
        regression.read_limit(text)


def test_a_result_is_read_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    found = result(STEADY, STEADY)
    path.write_text(json.dumps(found.to_dict()))
    assert read_benchmark(path) == found


def spoilt(data: dict[str, Any], how: str) -> Any:
    timed = data["shapes"][0]["results"][1]
    changes: dict[str, Any] = {
        "kind": lambda: data.update(kind="tune"),
        "version": lambda: data.update(version=99),
        "head": lambda: data.pop("machine"),
        "shapes": lambda: data.update(shapes=3),
        "sizes": lambda: data["shapes"][0].update(seq="many"),
        "state": lambda: timed.update(state="fine"),
        "negative": lambda: timed["processes"].update(lower_bound=[-1.0]),
        "nan": lambda: timed["processes"].update(lower_bound=[math.nan]),
        "processes": lambda: data.update(processes="7"),
        "machine": lambda: data.update(machine=None),
        "spec": lambda: data.update(spec=None),
        "threads": lambda: data.update(threads="x"),
        "median": lambda: timed["ratios"]["lower_bound"].update(median="1"),
        "reason": lambda: timed.update(reason=None),
        "ratio": lambda: timed["ratios"].update(lower_bound={"median": 1.0}),
    }
    changes[how]()
    return data


@pytest.mark.parametrize(
    "how",
    [
        *("kind", "version", "head", "processes", "machine", "spec", "threads", "shapes", "sizes", "state", "reason"),
        *("negative", "nan", "ratio", "median", "list", "text", "none"),
    ],
)
def test_files_that_are_no_result_are_refused(tmp_path: Path, how: str) -> None:
    path = tmp_path / "base.json"
    if how == "text":
        path.write_text("{")
    elif how == "list":
        path.write_text("[]")
    elif how != "none":
        path.write_text(json.dumps(spoilt(result(STEADY).to_dict(), how)))
    with pytest.raises(RequestError) as caught:
        read_benchmark(path)
    assert str(path) in str(caught.value)


def test_lower_bounds_of_other_methods_are_no_reference() -> None:
    def bounded(method: str, **series: Any) -> Benchmark:
        found = result(**series)
        (shape,) = found.shapes
        bound = Timing(
            runtime="lower_bound", state="timed", seconds=statistics.summarize([1.0]), engine={"method": method}
        )
        return attrs.evolve(found, shapes=(attrs.evolve(shape, results=(bound, *shape.results)),))

    series = {"lower_bound": [2.0, 2.01, 2.02] * 3, "torch": [0.5, 0.6, 0.4] * 3}
    base = bounded("products by torch", **series)
    assert base.bound_methods() == {("lower_bound", str(Sizes())): "products by torch"}
    assert only(regression.compare(bounded("products by torch", **series), base, 0.05)).reference == "lower_bound"
    assert only(regression.compare(bounded("products by onnxruntime", **series), base, 0.05)).reference == "torch"
    alone = {"lower_bound": series["lower_bound"]}
    found = only(regression.compare(bounded("another", **alone), bounded("one", **alone), 0.05))
    assert (found.state, found.reason) == (
        "not run",
        "neither torch nor the same lower bound was timed beside it in both runs",
    )
