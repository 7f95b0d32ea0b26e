"""Properties of one artifact under way on each runtime, and the verdicts that come of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import attrs

from posexport.processes import MISSING
from posexport.runtimes.base import Arrays
from posexport.runtimes.pool import Answer, result
from posexport.verify.properties import PROPERTIES, TOLERANCES, Probe, probe, promised
from posexport.verify.result import FAILED, NOT_RUN, PASSED, Comparison, State, Verdict

if TYPE_CHECKING:
    from posexport.artifact.loaded import LoadedArtifact

Submit = Callable[[Sequence[Arrays]], Future[Answer]]
SLOW = "it is slow, and the runs of properties are many"


def _tokens(inputs: Arrays) -> int:
    """Tokens in a row of a run."""
    return len(next(iter(inputs.values()))[0])


@attrs.define
class Trials:
    """The properties that an artifact's encoding has: `runs` of those that can be tried, `untried` with the reason."""

    probe: Probe | None
    runs: dict[str, list[Arrays]]
    untried: dict[str, str]
    asked: dict[str, Future[Answer] | None] = attrs.field(factory=dict)

    @classmethod
    def of(cls, subject: LoadedArtifact, seed: int) -> Trials:
        """Those of a subject."""
        names, found = promised(subject.spec), probe(subject.spec, subject.bounds, seed)
        if isinstance(found, str):
            return cls(None, {}, dict.fromkeys(names, found))
        reasons = {name: PROPERTIES[name].untried(found) for name in names}
        low = subject.bounds["seq"][0]
        runs: dict[str, list[Arrays]] = {}
        untried = {name: why for name, why in reasons.items() if why is not None}
        for name in names:
            if name in untried:
                continue
            made = PROPERTIES[name].runs(found)
            tokens = [_tokens(each) for each in made]
            if min(tokens) < low or (subject.bounds["seq"][1] or max(tokens)) < max(tokens):
                untried[name] = f"its runs are of {min(tokens)} to {max(tokens)} tokens, which the file does not take"
            else:
                runs[name] = made
        return cls(found, runs, untried)

    def tokens(self) -> int:
        """All tokens of all runs."""
        return sum(_tokens(each) for made in self.runs.values() for each in made)

    def sizes(self) -> list[dict[str, int]]:
        """Sizes by dimension that runs have."""
        if self.probe is None:
            return []
        rest = {"batch": self.probe.batch, "past_seq": 0, "max_seq": self.probe.room or 1}
        counts = {_tokens(each) for made in self.runs.values() for each in made}
        return [{**rest, "seq": count} for count in sorted(counts)]

    def submit(self, runtime: str, run: Submit | None) -> None:
        """Ask a runtime for all runs; None where it would take too long."""
        everything = [each for made in self.runs.values() for each in made]
        self.asked[runtime] = run(everything) if run is not None and everything else None

    def verdicts(self, artifact: str) -> list[Verdict]:
        """One for each property and runtime."""
        return [
            self._verdict(artifact, runtime, name, future)
            for runtime, future in self.asked.items()
            for name in PROPERTIES
            if name in self.runs or name in self.untried
        ]

    def _verdict(self, artifact: str, runtime: str, name: str, future: Future[Answer] | None) -> Verdict:
        def verdict(state: State, reason: str | None, worst: Comparison | None = None, cases: int = 0) -> Verdict:
            return Verdict(
                artifact=artifact, runtime=runtime, state=state, reason=reason, worst=worst, cases=cases, check=name
            )

        if name in self.untried:
            return verdict(NOT_RUN, self.untried[name])
        if future is None or self.probe is None:
            return verdict(NOT_RUN, SLOW)
        answer = result(future)
        if answer.failure is not None:
            return verdict(NOT_RUN if answer.failure.code == MISSING else FAILED, answer.failure.text)
        first = 0
        for each, made in self.runs.items():
            if each == name:
                break
            first += len(made)
        outs = answer.outputs[first : first + len(self.runs[name])]
        error, allowed = PROPERTIES[name].rule(self.probe, outs), TOLERANCES[self.probe.spec.dtype]
        passed = error <= allowed
        summary = PROPERTIES[name].summary
        reason = None if passed else f"{name} does not hold ({summary}): outputs are {error:.3g} of the largest apart"
        worst = Comparison(
            case=summary,
            output="output",
            state=PASSED if passed else FAILED,
            reason=reason,
            max_error=error,
            limit=allowed,
        )
        return verdict(worst.state, reason, worst, len(outs))
