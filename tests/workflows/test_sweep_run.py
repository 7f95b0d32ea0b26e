"""The loop that runs jobs, with an executor that loses them: each job ends once, and lost jobs end too."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep_fake import job

from posexport.workflows.sweep.jobs import FAILED, LOST, NOT_RUN, PASSED, Job, JobResources, Outcome
from posexport.workflows.sweep.sweep import drive

KINDS_OF_NEEDS = (
    JobResources(),
    JobResources(cpus=None),
    JobResources(cpus=2, gpu="H100", gpus=1),
    JobResources(cpus=1, gpu="T4", gpus=1),
)


@attrs.define
class Flaky:
    """Ends jobs in the order of `choose`, with the next outcome of each. It refuses jobs that need a T4."""

    outcomes: dict[str, deque[str]]
    choose: Iterator[int]
    places: int = 3
    running: list[Job] = attrs.field(factory=list)
    tries: Counter[str] = attrs.field(factory=Counter)
    late: list[Job] = attrs.field(factory=list)

    def refusal(self, needs: JobResources) -> str | None:
        return "no T4" if needs.gpu == "T4" else None

    def room(self, needs: JobResources) -> bool:
        return not self.running if needs.alone else len(self.running) < self.places

    def submit(self, job: Job) -> None:
        assert job.needs.gpu != "T4"
        assert not any(each.needs.alone for each in self.running) and not (job.needs.alone and self.running)
        assert all(each.id != job.id for each in self.running)
        self.running.append(job)
        self.tries[job.id] += 1

    def finished(self, seconds: float) -> list[tuple[Job, Outcome]]:
        if not self.running:
            return []
        ended = self.running.pop(next(self.choose) % len(self.running))
        waiting = self.outcomes[ended.label]
        state = waiting.popleft() if waiting else PASSED
        twice = [(each, Outcome(state=FAILED, reason="late")) for each in self.late]
        self.late = [ended] if state != LOST else []
        return [(ended, Outcome(state=state, reason=state, result={})), *twice]

    def close(self) -> None: ...


@settings(max_examples=60, deadline=None)
@given(
    needs=st.lists(st.sampled_from(KINDS_OF_NEEDS), min_size=1, max_size=12),
    outcomes=st.lists(st.lists(st.sampled_from((LOST, PASSED, FAILED)), max_size=4), min_size=12, max_size=12),
    order=st.lists(st.integers(0, 5), min_size=40, max_size=40),
    tries=st.integers(1, 4),
)
def test_each_job_ends_once_whatever_is_lost(
    needs: list[JobResources], outcomes: list[list[str]], order: list[int], tries: int
) -> None:
    jobs = [job(f"job {index}", needs=each) for index, each in enumerate(needs)]
    told = {each.label: deque(of) for each, of in zip(jobs, outcomes, strict=False)}
    want = {}
    for each in jobs:
        states = [*told[each.label], PASSED]
        lost = next(index for index, state in enumerate(states) if state != LOST)
        want[each.id] = NOT_RUN if each.needs.gpu == "T4" else FAILED if lost >= tries else states[lost]
    executor = Flaky(told, iter(order * 3))
    ended: list[tuple[str, str, int]] = []
    drive(jobs, executor, lambda each, outcome, n: ended.append((each.id, outcome.state, n)), tries=tries)
    assert {id: state for id, state, _ in ended} == want
    assert len(ended) == len(jobs), "one ended twice"
    assert all(count <= tries for count in executor.tries.values())
    assert {id: n for id, state, n in ended if state != NOT_RUN} == dict(executor.tries)


def test_a_job_that_is_always_lost_fails_and_the_rest_goes_on() -> None:
    poison, *rest = jobs = [job(f"job {index}") for index in range(5)]
    executor = Flaky({each.label: deque([LOST] * 9 if each is poison else []) for each in jobs}, iter([0] * 99))
    ended = {}
    drive(jobs, executor, lambda each, outcome, n: ended.update({each.id: (outcome, n)}), tries=3)
    outcome, attempts = ended.pop(poison.id)
    assert (outcome.state, outcome.reason, outcome.result, attempts) == (FAILED, "lost 3 times: lost", None, 3)
    assert {id: outcome.state for id, (outcome, _) in ended.items()} == {each.id: PASSED for each in rest}


def test_what_takes_a_whole_machine_comes_last() -> None:
    jobs = [job("timing", needs=JobResources(cpus=None)), job("parity"), job("lost once")]
    executor = Flaky({each.label: deque([LOST] if each.label == "lost once" else []) for each in jobs}, iter([0] * 9))
    order: list[str] = []
    drive(jobs, executor, lambda each, outcome, n: order.append(each.label))
    assert order == ["parity", "lost once", "timing"]


def test_an_interrupt_ends_it_at_once() -> None:
    jobs = [job(f"job {index}") for index in range(4)]
    ended: list[str] = []

    def finish(each: Job, outcome: Outcome, attempts: int) -> None:
        ended.append(each.id)
        if len(ended) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drive(jobs, Flaky({each.label: deque() for each in jobs}, iter([0] * 9)), finish)
    assert [each.id for each in jobs if each.id not in ended] == [jobs[2].id, jobs[3].id]
