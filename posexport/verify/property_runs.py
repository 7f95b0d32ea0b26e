"""The properties of one artifact under verification: their runs on each runtime, and the verdicts on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import attrs

from posexport.errors import Reason
from posexport.processes import NOTHING_SHOWN
from posexport.runtimes.base import Arrays
from posexport.runtimes.pool import Answer, result
from posexport.verify.eligibility import SLOW
from posexport.verify.properties import PROPERTIES, TOLERANCES, Probe, make_probe, promised
from posexport.verify.result import FAILED, NOT_RUN, PROPERTY, Comparison, Verdict

if TYPE_CHECKING:
    from posexport.artifact.loaded import LoadedArtifact

Submit = Callable[[Sequence[Arrays]], Future[Answer]]

UNTRIED = "untried"
"""The code of a property that can't be tried on this artifact."""


def _tokens(inputs: Arrays) -> int:
    return len(next(iter(inputs.values()))[0])


@attrs.define
class PropertyRuns:
    """The properties of an artifact's encoding: `runs` has the inputs of each, or why it can't be tried.

    `answers` has, by runtime, the future outputs of all runs; None if they would take too long.
    """

    probe: Probe | None
    runs: dict[str, list[Arrays] | Reason]
    answers: dict[str, Future[Answer] | None] = attrs.field(factory=dict)

    @classmethod
    def of(cls, artifact: LoadedArtifact, seed: int) -> PropertyRuns:
        """The properties of an artifact."""
        names, probe = promised(artifact.spec), make_probe(artifact.spec, artifact.bounds, seed)
        if isinstance(probe, str):
            return cls(None, dict.fromkeys(names, Reason(UNTRIED, probe)))
        return cls(probe, {name: _runs(name, probe, *artifact.bounds["seq"]) for name in names})

    def inputs(self) -> list[Arrays]:
        """The inputs of all runs, in order."""
        return [arrays for runs in self.runs.values() if isinstance(runs, list) for arrays in runs]

    def tokens(self) -> int:
        """The tokens of all runs together."""
        return sum(map(_tokens, self.inputs()))

    def sizes(self) -> list[dict[str, int]]:
        """The sizes of the runs, by dimension."""
        if self.probe is None:
            return []
        fixed = {"batch": self.probe.batch, "past_seq": 0, "max_seq": self.probe.room or 1}
        return [{**fixed, "seq": length} for length in sorted(set(map(_tokens, self.inputs())))]

    def submit(self, runtime: str, run: Submit | None) -> None:
        """Submit all runs to a runtime, unless `run` is None because they would take too long."""
        inputs = self.inputs()
        self.answers[runtime] = run(inputs) if run is not None and inputs else None

    def verdicts(self, artifact: str) -> Iterator[Verdict]:
        """One verdict for each property and runtime."""
        for runtime, future in self.answers.items():
            answer = None if future is None else result(future)
            outputs = iter(() if answer is None else answer.outputs)
            for name, runs in self.runs.items():
                verdict = partial(Verdict.of, artifact, runtime, check=name)
                if isinstance(runs, Reason):
                    yield verdict(NOT_RUN, runs)
                elif answer is None or self.probe is None:
                    yield verdict(NOT_RUN, Reason(SLOW, "it is slow, and properties take many runs"))
                elif answer.failure is not None:
                    yield verdict(NOT_RUN if answer.failure.code in NOTHING_SHOWN else FAILED, answer.failure)
                else:
                    broken, comparison = _judged(name, self.probe, list(islice(outputs, len(runs))))
                    yield verdict(comparison.state, broken, worst=comparison, cases=len(runs))


def _runs(name: str, probe: Probe, lower: int, upper: int | None) -> list[Arrays] | Reason:
    """The inputs of a property's runs, of `lower` to `upper` tokens; or why it can't be tried."""
    if (text := PROPERTIES[name].why_untried(probe)) is not None:
        return Reason(UNTRIED, text)
    runs = PROPERTIES[name].runs(probe)
    least, most = min(map(_tokens, runs)), max(map(_tokens, runs))
    if least < lower or most > (upper or most):
        return Reason(UNTRIED, f"its runs have {least} to {most} tokens, which the file does not take")
    return runs


def _judged(name: str, probe: Probe, outputs: list[Arrays]) -> tuple[Reason | None, Comparison]:
    """Why a property does not hold for the outputs of its runs, None if it does; and the error with its limit."""
    summary, limit = PROPERTIES[name].summary, TOLERANCES[probe.spec.dtype]
    error = PROPERTIES[name].rule(probe, outputs)
    text = f"{name} does not hold ({summary}): outputs differ by {error:.3g} of the largest"
    broken = None if error <= limit else Reason(PROPERTY, text)
    return broken, Comparison.of(summary, "output", broken, max_error=error, limit=limit)
