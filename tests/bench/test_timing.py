"""Statistics of timing: quantiles, ratios and their intervals, the order in rounds. No test depends on a clock."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posexport.bench import gate, statistics
from posexport.bench import rounds as rounds_module
from posexport.bench.rounds import MachineLoad, interleave
from posexport.errors import RequestError
from posexport.runtimes.base import timed

SECONDS = st.floats(1e-7, 1e3)


def noisy(seed: int, count: int, factor: float = 1.0) -> list[float]:
    """Times around `factor` with a long upper tail, as in real measurements."""
    noise = random.Random(seed)
    return [factor * (1 + noise.expovariate(1 / 0.05)) for _ in range(count)]


@given(st.lists(SECONDS, min_size=1, max_size=60))
def test_a_series_is_as_fast_as_itself(series: list[float]) -> None:
    found = statistics.ratio(series, series)
    assert (found.median, found.low, found.high) == (1, 1, 1)


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=60))
def test_an_interval_holds_the_median_and_turns_over_with_the_ratio(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = map(list, zip(*pairs, strict=True))
    found, other = statistics.ratio(ours, theirs), statistics.ratio(theirs, ours)
    assert found.low <= found.median <= found.high
    assert found.low == pytest.approx(1 / other.high)
    assert found.high == pytest.approx(1 / other.low)


@given(st.lists(SECONDS, min_size=1, max_size=60))
def test_quantiles_are_ordered_and_within_the_series(series: list[float]) -> None:
    found = statistics.summarize(series)
    assert min(series) <= found.p10 <= found.median <= found.p90 <= found.p99 <= max(series)
    assert found.count == len(series)


def test_quantiles_are_those_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    series = noisy(0, 37)
    for fraction in (0, 0.1, 0.5, 0.9, 0.99, 1):
        assert statistics.quantile(series, fraction) == pytest.approx(numpy.quantile(series, fraction))


@pytest.mark.parametrize("rounds", [9, 20, 101])
def test_a_planted_slowdown_is_seen(rounds: int) -> None:
    found = statistics.ratio(noisy(1, rounds, 2.0), noisy(2, rounds))
    assert 1.8 < found.low <= found.high < 2.2


def test_drift_of_the_machine_cancels() -> None:
    drift = [1 + index / 10 for index in range(31)]  # four times slower at the end
    ours = [1.5 * time * factor for time, factor in zip(noisy(3, 31), drift, strict=True)]
    theirs = [time * factor for time, factor in zip(noisy(4, 31), drift, strict=True)]
    found = statistics.ratio(ours, theirs)
    assert 1.35 < found.low <= 1.5 <= found.high < 1.65


@pytest.mark.parametrize(("count", "low", "high"), [(6, 0, 5), (9, 1, 7), (20, 5, 14), (101, 40, 60)])
def test_intervals_are_the_textbook_order_statistics(count: int, low: int, high: int) -> None:
    # Conover, Practical Nonparametric Statistics, table A3: ranks (from 1) 1..6, 2..8, 6..15; 41..61 for n = 101
    found = statistics.ratio([float(index + 1) for index in range(count)], [1.0] * count)
    assert (found.low, found.high) == (low + 1, high + 1)
    assert 0.95 <= found.confidence < 1


def test_intervals_hold_the_true_median_as_often_as_they_say() -> None:
    held = total = 0
    draw = random.Random(5)
    for _ in range(1000):
        found = statistics.ratio([draw.lognormvariate(0, 1) for _ in range(12)], [1.0] * 12)
        held, total = held + (found.low <= 1 <= found.high), total + 1
    assert found.confidence - 0.03 < held / total  # Three standard errors are 0.02.


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_rounds_claim_little(count: int) -> None:
    found = statistics.ratio([1.0] * count, [1.0] * count)
    assert found.confidence == 1 - 2.0 ** (1 - count) < 0.95


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [([1.0], [1.0, 1.0]), ([], []), ([1.0], [0.0]), ([1.0], [-1.0]), ([float("nan")], [1.0]), ([float("inf")], [1.0])],
)
def test_what_is_no_series_of_times_has_no_ratio(ours: list[float], theirs: list[float]) -> None:
    with pytest.raises(ValueError, match=r"ratio|finite|rounds"):
        statistics.ratio(ours, theirs)


def test_each_round_calls_everybody_once_in_an_order_of_its_own() -> None:
    calls: list[str] = []

    def call(name: str):  # type: ignore[no-untyped-def]
        return lambda: calls.append(name) or float(len(calls))

    series = interleave({name: call(name) for name in "abc"}, 40, seed=7, pause=0.0)
    rounds = (
        list(itertools.batched(calls, 3))
        if hasattr(itertools, "batched")
        else list(zip(*[iter(calls)] * 3, strict=True))
    )
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert len(set(rounds)) == 6
    before = list(calls)
    calls.clear()
    interleave({name: call(name) for name in "abc"}, 40, seed=7, pause=0.0)
    assert calls == before
    assert sorted(itertools.chain(*series.values())) == [float(index + 1) for index in range(120)]


def test_no_rounds_are_refused() -> None:
    with pytest.raises(RequestError, match="rounds is 0"):
        interleave({}, 0)


def test_the_share_of_others_leaves_out_what_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, own, clock = iter([10.0, 18.0]), iter([1.0, 3.0]), iter([0.0, 4.0])
    monkeypatch.setattr(rounds_module, "_busy_seconds", lambda: next(busy))
    monkeypatch.setattr(rounds_module.os, "times", lambda: (next(own), 0.0, 0.0, 0.0))
    monkeypatch.setattr(rounds_module.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(rounds_module.psutil, "cpu_count", lambda: 2)
    others = MachineLoad([2**22 + 1])  # A process that does not exist does not count.
    assert others.share() == pytest.approx((8 - 2) / (4 * 2))


def test_timed_returns_seconds_of_the_call_alone() -> None:
    done: list[int] = []
    assert timed(lambda: done.append(1))() >= 0
    assert done == [1]


def test_students_t_is_that_of_the_tables() -> None:
    table = {(0.95, 1): 12.7062, (0.95, 4): 2.77645, (0.99, 2): 9.92484, (0.99, 10): 3.16927, (0.95, 120): 1.97993}
    for (confidence, freedom), wanted in table.items():
        assert statistics.student(confidence, freedom) == pytest.approx(wanted, abs=2e-5)
    assert statistics.student(0.95, 1e9) == pytest.approx(1.95996, abs=1e-4)
    assert statistics.student(0.95, 2) > statistics.student(0.95, 2.5) > statistics.student(0.95, 3)


def test_a_trimmed_mean_shrugs_at_one_that_was_disturbed() -> None:
    quiet = statistics.trimmed([1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 1.0])
    assert (quiet.middle, quiet.freedom) == (pytest.approx(1.0), 4)
    assert statistics.trimmed([1.0, 1.1, 0.9, 9.0, 0.95, 1.0, 1.0]).middle < 1.02
    whole = statistics.trimmed([1.0, 2.0, 6.0])  # There are too few to trim any.
    assert (whole.middle, whole.variance, whole.freedom) == (3.0, pytest.approx(7 / 3), 2)


def test_another_process_narrows_the_interval() -> None:
    draw = random.Random(1)
    width = {}
    for count in range(3, 11):
        found = [statistics.trimmed([draw.gauss(0, 1) for _ in range(count)]) for _ in range(400)]
        width[count] = sum(statistics.student(0.99, each.freedom) * each.variance**0.5 for each in found) / len(found)
    assert width[3] > width[4] > width[5] > width[6]
    assert width[5] > width[7] > width[9]


def test_the_luck_of_a_process_is_in_the_interval() -> None:
    """Rounds agree within each process, but processes differ: only an interval over processes shows this."""
    draw = random.Random(3)
    held = {"rounds": 0, "processes": 0}
    for _ in range(200):
        luck = [1 + draw.gauss(0, 0.05) for _ in range(7)]
        ours = [[one * (1 + draw.gauss(0, 0.001)) for _ in range(6)] for one in luck]
        theirs = [[1.0] * 6] * 7
        naive = statistics.ratio([each for part in ours for each in part], [1.0] * 42)
        whole, parts = statistics.ratio_of_processes(ours, theirs)
        assert len(parts) == 7 and whole.low <= whole.median <= whole.high
        held["rounds"] += naive.low <= 1 <= naive.high
        held["processes"] += whole.low <= 1 <= whole.high
    assert held["processes"] >= 0.9 * 200 > 0.75 * 200 > held["rounds"]


def test_two_processes_claim_what_their_rounds_do() -> None:
    ours, theirs = [[1.0, 2.0], [3.0, 4.0]], [[1.0, 1.0], [1.0, 1.0]]
    found, parts = statistics.ratio_of_processes(ours, theirs)
    assert found == statistics.ratio([1.0, 2.0, 3.0, 4.0], [1.0] * 4)
    assert parts == (1.5, 3.5)


def test_an_undecided_gate_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Run:
        planned, processes = 3, 0

        def open_processes(self, count: int = 1) -> None:
            self.processes += count

        def result(self) -> int:
            return self.processes

    clock = iter([0.0, 1.0, gate.GATE_TIMEOUT + 1.0])
    monkeypatch.setattr(gate.time, "monotonic", lambda: next(clock))
    assert gate._settled(Run(), 20, lambda result: False) == 4  # type: ignore[arg-type, comparison-overlap]
    clock = iter([0.0, 1.0, 2.0, 3.0])
    assert gate._settled(Run(), 5, lambda result: False) == 5  # type: ignore[arg-type, comparison-overlap]
    assert gate._settled(Run(), 20, lambda result: True) == 3  # type: ignore[arg-type, comparison-overlap]
