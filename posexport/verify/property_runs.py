"""The properties of one artifact under verification: their runs on each runtime, and the verdicts on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import attrs

from posexport.errors import Reason
from posexport.processes import MISSING
from posexport.runtimes.base import Arrays
from posexport.runtimes.pool import Answer, result
from posexport.verify.eligibility import SLOW
from posexport.verify.properties import PROPERTIES, TOLERANCES, Probe, make_probe, promised
from posexport.verify.result import FAILED, NOT_RUN, PROPERTY, Comparison, Verdict

if TYPE_CHECKING:
    from posexport.artifact.loaded import LoadedArtifact

Submit = Callable[[Sequence[Arrays]], Future[Answer]]

UNTRIED = "untried"
"""The code of a property that this artifact can't be tried for."""


def _tokens(inputs: Arrays) -> int:
    return len(next(iter(inputs.values()))[0])


@attrs.define
class PropertyRuns:
    """The properties of an artifact's encoding: `runs` of those that can be tried, `untried` the others, each with why.

    `answers` has, by runtime, the outputs of all runs to come; None where they would take too long.
    """

    probe: Probe | None
    runs: dict[str, list[Arrays]]
    untried: dict[str, Reason]
    answers: dict[str, Future[Answer] | None] = attrs.field(factory=dict)

    @classmethod
    def of(cls, artifact: LoadedArtifact, seed: int) -> PropertyRuns:
        """Those of an artifact."""
        names, tokens = promised(artifact.spec), make_probe(artifact.spec, artifact.bounds, seed)
        if isinstance(tokens, str):
            return cls(None, {}, dict.fromkeys(names, Reason(UNTRIED, tokens)))
        lower, upper = artifact.bounds["seq"]
        runs: dict[str, list[Arrays]] = {}
        untried: dict[str, Reason] = {}
        for name in names:
            text = PROPERTIES[name].untried(tokens)
            inputs = [] if text is not None else PROPERTIES[name].runs(tokens)
            lengths = [_tokens(run) for run in inputs]
            if lengths and (min(lengths) < lower or max(lengths) > (upper or max(lengths))):
                text = f"its runs have {min(lengths)} to {max(lengths)} tokens, which the file does not take"
            if text is None:
                runs[name] = inputs
            else:
                untried[name] = Reason(UNTRIED, text)
        return cls(tokens, runs, untried)

    def tokens(self) -> int:
        """The tokens of all runs together."""
        return sum(_tokens(run) for inputs in self.runs.values() for run in inputs)

    def sizes(self) -> list[dict[str, int]]:
        """The sizes by dimension that runs have."""
        if self.probe is None:
            return []
        fixed = {"batch": self.probe.batch, "past_seq": 0, "max_seq": self.probe.room or 1}
        lengths = {_tokens(run) for inputs in self.runs.values() for run in inputs}
        return [{**fixed, "seq": length} for length in sorted(lengths)]

    def submit(self, runtime: str, run: Submit | None) -> None:
        """Submit all runs to a runtime; None where they would take too long."""
        inputs = [arrays for runs in self.runs.values() for arrays in runs]
        self.answers[runtime] = run(inputs) if run is not None and inputs else None

    def verdicts(self, artifact: str) -> list[Verdict]:
        """One for each property and runtime."""
        return [
            self._verdict(artifact, runtime, name, future)
            for runtime, future in self.answers.items()
            for name in PROPERTIES
            if name in self.runs or name in self.untried
        ]

    def _verdict(self, artifact: str, runtime: str, name: str, future: Future[Answer] | None) -> Verdict:
        if name in self.untried:
            return Verdict.of(artifact, runtime, NOT_RUN, self.untried[name], check=name)
        if future is None or self.probe is None:
            reason = Reason(SLOW, "it is slow, and properties take many runs")
            return Verdict.of(artifact, runtime, NOT_RUN, reason, check=name)
        answer = result(future)
        if answer.failure is not None:
            missing = answer.failure.code == MISSING
            return Verdict.of(artifact, runtime, NOT_RUN if missing else FAILED, answer.failure, check=name)
        names = list(self.runs)
        first = sum(len(self.runs[before]) for before in names[: names.index(name)])
        outputs = answer.outputs[first : first + len(self.runs[name])]
        error, limit = PROPERTIES[name].rule(self.probe, outputs), TOLERANCES[self.probe.spec.dtype]
        summary = PROPERTIES[name].summary
        text = f"{name} does not hold ({summary}): outputs differ by {error:.3g} of the largest"
        broken = None if error <= limit else Reason(PROPERTY, text)
        comparison = Comparison.of(summary, "output", broken, max_error=error, limit=limit)
        return Verdict.of(artifact, runtime, comparison.state, broken, worst=comparison, cases=len(outputs), check=name)
