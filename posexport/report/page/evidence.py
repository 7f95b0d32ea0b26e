"""The table of artifacts on the page: who verified and timed each, and what is missing or stale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from posexport.bench.evidence import ArtifactSummary, Mention
from posexport.bench.result import TIMED
from posexport.report.page.blocks import Cell, Section, Table
from posexport.report.page.summary import TONES, Finding, Highlights
from posexport.report.text import MARKS, listed, plural, seconds
from posexport.verify.result import FAILED, NOT_RUN, PASSED

_WORST_FIRST = (FAILED, PASSED, NOT_RUN)
_MOST_OPEN = 24  # artifacts in a table that starts open


def section(artifacts: Sequence[ArtifactSummary]) -> tuple[Section, Highlights]:
    """The table of artifacts, and what was not verified or not timed."""
    table = Table(
        caption="Evidence for each artifact",
        columns=("artifact", "verified", "timed"),
        rows=[(artifact.name, _verified(artifact), _timed(artifact)) for artifact in artifacts],
    )
    lead = "Results belong to files by their sha256, or by name where either has none."
    timings = [mention for artifact in artifacts for mention in artifact.about(timing=True)[0]]
    if len({mention.by_tune for mention in timings if mention.state == TIMED}) > 1:
        lead += " Times by tune and by bench are of different runs: don't compare them."
    findings = tuple(finding for artifact in artifacts for finding in _findings(artifact))
    blocks = [table.fold("Every artifact", _MOST_OPEN)]
    return Section(id="artifacts", title="Artifacts", lead=lead, blocks=blocks), Highlights(findings=findings)


def sentence(artifact: ArtifactSummary) -> str:
    """Who verified and timed an artifact."""
    return f"Verified: {_verified(artifact).text}. Timed: {_timed(artifact).text}."


def _verified(artifact: ArtifactSummary) -> Cell:
    """On which runtimes a verdict found it right or wrong."""
    verdicts, stale = artifact.about(timing=False)
    if not verdicts:
        return _none(stale)
    worst = {_text(mention): state for state in _WORST_FIRST[::-1] for mention in verdicts if mention.state == state}
    names = {state: [name for name in worst if worst[name] == state] for state in _WORST_FIRST}
    idle = names[NOT_RUN]
    texts = {
        FAILED: f"failed on {listed(names[FAILED], 5)}",
        PASSED: listed(names[PASSED], 5),
        NOT_RUN: f"not run on {plural(len(idle), 'runtime') if len(idle) > 1 else listed(idle)}",
    }
    states = [state for state in _WORST_FIRST if names[state]]
    text = "; ".join(f"{MARKS[state]} {texts[state]}" for state in states)
    more = f"not run on {', '.join(idle)}" if idle else ""
    return Cell(text, more=more, tone=TONES.get(states[0], "good"))


def _timed(artifact: ArtifactSummary) -> Cell:
    """Its times, where it was timed."""
    timings, stale = artifact.about(timing=True)
    if not timings:
        return _none(stale)
    times = [_text(timing) for timing in timings if timing.state == TIMED]
    if times:
        return Cell(listed(times, 3), more="; ".join(times))
    state = FAILED if any(timing.state == FAILED for timing in timings) else NOT_RUN
    return Cell(f"{MARKS[state]} {state} on {listed([_text(timing) for timing in timings])}", tone=TONES[state])


def _text(mention: Mention) -> str:
    if mention.seconds is None:
        return f"{mention.runtime}{' (by tune)' * mention.by_tune}"
    place = ", ".join(filter(None, (mention.runtime, mention.scenario, "by tune" * mention.by_tune)))
    return f"{'⚠ ' * mention.busy}{seconds(mention.seconds)} ({place})"


def _none(stale: Sequence[str]) -> Cell:
    text = f"⚠ stale: {listed(stale)} is of other bytes" if stale else "· no result on this page"
    return Cell(text, tone="away")


def _findings(artifact: ArtifactSummary) -> Iterator[Finding]:
    """A missing verdict, a missing timing, and those that are stale."""
    missing = []
    for kind, again, timing in (("verdict", "verify", False), ("timing", "time", True)):
        mentions, stale = artifact.about(timing)
        if stale and not mentions:
            reason = f"its {kind} in {listed(stale)} is of other bytes (stale): {again} it again"
            yield Finding(state=NOT_RUN, who=artifact.name, reason=reason)
        elif all(mention.state == NOT_RUN for mention in mentions):
            missing.append(kind)
    if missing:
        yield Finding(state=NOT_RUN, who=artifact.name, reason=f"no {' and no '.join(missing)} on this page")
