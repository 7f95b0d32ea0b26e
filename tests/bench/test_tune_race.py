"""Successive halving with fake timings: the winner, the cost, and the effects of noise, ties and failures."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from posexport.bench.tune.halving import EQUAL, GROUP, LAST, MAX_ROUNDS, NEAR, Halving, Round, successive_halving


class Track:
    """Simulates rounds with known times: each round has a drift, each run has noise, and each process has a factor."""

    def __init__(
        self,
        times: Mapping[str, float],
        noise: float,
        seed: int = 0,
        failing: Mapping[str, str] | None = None,
        luck: float = 0.005,
    ) -> None:
        self.times, self.noise, self.failing, self.luck = times, noise, failing or {}, luck
        self.runs, self.groups = 0, []  # type: int, list[list[str]]
        self._random = random.Random(seed)

    def __call__(self, names: Sequence[str], rounds: int, seed: int) -> tuple[list[Round], Mapping[str, str]]:
        self.groups.append(list(names))
        self.runs += rounds * len(names)
        there = [name for name in names if name not in self.failing]
        luck = {name: 1 + self._random.gauss(0, self.luck) for name in there}
        made: list[Round] = []
        for _ in range(rounds):
            drift = 1 + abs(self._random.gauss(0, 5 * self.noise))
            one = {name: self.times[name] * luck[name] * drift for name in there}
            made.append({name: time * (1 + abs(self._random.gauss(0, self.noise))) for name, time in one.items()})
        return made, {name: self.failing[name] for name in names if name in self.failing}


SPREAD = {f"c{number}": 1 + 0.1 * number for number in range(12)}


@pytest.mark.parametrize("best", range(0, 12, 3))
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
def test_finds_a_planted_best_wherever_it_stands(best: int, noise: float) -> None:
    times = {name: 2.0 + 0.1 * number for number, name in enumerate(SPREAD)} | {f"c{best}": 1.0}
    found = successive_halving(list(times), Track(times, noise, best))
    assert found.remaining == [f"c{best}"]
    assert set(found.dropped) | set(found.halved) == set(times) - {f"c{best}"}


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2])
def test_costs_a_fraction_of_timing_everything(noise: float) -> None:
    shares, regrets = [], []
    for seed in range(40):
        track = Track(SPREAD, noise, seed)
        found = successive_halving(list(SPREAD), track, seed=seed)
        pick = found.equals()[0]
        shares.append(track.runs / (MAX_ROUNDS * len(SPREAD)))
        regrets.append(SPREAD[pick] / min(SPREAD.values()) - 1)
    assert sum(shares) / len(shares) < 0.4
    assert sum(regrets) / len(regrets) < EQUAL


def test_ties_stay_equal_and_the_preferred_one_comes_first() -> None:
    times = dict.fromkeys(("plain", "fancy"), 1.0) | {"slow": 1.5}
    found = successive_halving(list(times), Track(times, 0.002, luck=0.0))
    assert found.remaining == ["plain", "fancy"]
    assert found.equals() == ["plain", "fancy"]
    assert set(found.dropped) == {"slow"}


def test_equal_ones_end_the_race_before_all_rounds() -> None:
    track = Track(dict.fromkeys("ab", 1.0), 0.001, luck=0.0)
    found = successive_halving(["a", "b"], track)
    assert len(found.rounds) < MAX_ROUNDS


def test_many_equal_ones_are_halved_and_the_preferred_stay() -> None:
    names = [f"c{number}" for number in range(9)]

    def time_rounds(group: Sequence[str], rounds: int, seed: int) -> tuple[list[Round], Mapping[str, str]]:
        wild = random.Random(seed)  # All intervals are wide, and all medians are close.
        return [{name: wild.choice([0.9, 1.0, 1.1]) for name in group} for _ in range(rounds)], {}

    found = successive_halving(names, time_rounds)
    assert 1 <= len(found.remaining) <= LAST + 1
    assert found.halved
    assert not set(found.halved) & set(found.remaining)


def test_a_simpler_one_that_is_behind_is_no_equal() -> None:
    times = {"plain": 1.0 + 2 * NEAR, "fancy": 1.0}
    rounds = [{"plain": times["plain"] * (0.9 if number % 3 == 0 else 1), "fancy": 1.0} for number in range(20)]
    found = Halving(rounds=list(rounds), remaining=["plain", "fancy"])
    assert found.equals() == ["fancy"]


def test_failures_are_told_and_never_win() -> None:
    track = Track({"a": 1.0, "b": 2.0, "c": 3.0}, 0.01, failing={"a": "no kernel"})
    found = successive_halving(["a", "b", "c"], track)
    assert found.failed == {"a": "no kernel"}
    assert found.remaining == ["b"]
    everything = Track({"a": 1.0, "b": 1.0}, 0.01, failing={"a": "x", "b": "y"})
    assert successive_halving(["a", "b"], everything).remaining == []
    assert successive_halving(["a"], Track({"a": 1.0}, 0.0)).remaining == ["a"]


def test_the_one_that_is_left_where_a_whole_group_failed_is_timed() -> None:
    names = [f"c{number}" for number in range(GROUP + 1)]
    for left in names:
        found = successive_halving(
            names, Track(dict.fromkeys(names, 1.0), 0.0, failing={name: "x" for name in names if name != left})
        )
        assert found.remaining == [left] and found.seconds(left)


def test_few_rounds_drop_only_what_is_clearly_behind() -> None:
    def time_rounds(group: Sequence[str], rounds: int, seed: int) -> tuple[list[Round], Mapping[str, str]]:
        luck = [1.01, 1.02, 1.04, 1.05] if seed == 0 else [0.9] * rounds  # the first process and the next
        return [{name: {"best": best, "slow": 2.0}.get(name, 1.0) for name in group} for best in luck], {}

    found = successive_halving(["other", "slow", "best"], time_rounds)
    assert found.remaining == ["best"]
    assert list(found.dropped) == ["slow", "other"]


def test_groups_are_compared_through_the_leader_that_they_share() -> None:
    quiet, loud = {"leader": 1.0, "a": 1.1}, {"leader": 2.0, "b": 2.02}  # the same machine some minutes later
    found = Halving(rounds=[quiet] * 4 + [loud] * 4, remaining=["a", "b"])
    assert found.fastest(["a", "b"]) == "b"
    assert found.speeds("b")["a"] == pytest.approx(1.1 / 1.01)


def test_groups_are_small_and_share_the_fastest() -> None:
    times = {f"c{number}": 1.0 + number for number in range(20)}
    track = Track(times, 0.0)
    assert successive_halving(list(times), track, seed=5).remaining == ["c0"]
    assert max(map(len, track.groups)) <= GROUP
    for before, after in zip(track.groups[:3], track.groups[1:4], strict=True):
        assert after[0] == min(before, key=times.__getitem__)


def test_rounds_of_earlier_races_count_as_evidence() -> None:
    known: list[Round] = [{"a": 1.0, "b": 1.2, "x": 9.0}] * 10
    track = Track({"a": 1.0, "b": 1.2}, 0.0)
    found = successive_halving(["a", "b"], track, known=known)
    assert found.known == 10
    assert found.dropped["b"][1].confidence > 0.95
    assert track.runs == 8  # only one step of the two


def test_the_same_seed_gives_the_same_race() -> None:
    def once() -> Any:
        return successive_halving(list(SPREAD), Track(SPREAD, 0.05, 7), seed=7)

    assert once() == once()
