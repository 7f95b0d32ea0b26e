"""Every artifact that the page is about, with who verified and timed it, and what of it is missing or stale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

import attrs

from posexport.report.page.blocks import Cell, Section, Table, listed, plural
from posexport.report.page.evidence import Mention, mentions, same, stale
from posexport.report.page.results import Result
from posexport.report.page.summary import NOT_RUN, Finding, Found
from posexport.report.page.verdicts import MARKS, TONES

_STATES = ("failed", "passed", "not run")
_OPEN = 24
"""Artifacts up to which their table stands open."""


@attrs.frozen(kw_only=True)
class ArtifactSummary:
    """One artifact: a file on the page, or one that results tell of. `others` are of its name but of other bytes."""

    name: str
    said: tuple[Mention, ...]
    others: tuple[Mention, ...]

    def about(self, timing: bool) -> tuple[list[Mention], list[str]]:
        """What is said of it, verdicts or timings, and which results say it of other bytes."""
        others = dict.fromkeys(each.by for each in self.others if each.timing == timing)
        return [each for each in self.said if each.timing == timing], list(others)

    @property
    def verified(self) -> Cell:
        """On which runtimes a verdict found it right or wrong."""
        verdicts, stale = self.about(timing=False)
        if not verdicts:
            return _none(stale)
        worst = {each.text: each.state for state in reversed(_STATES) for each in verdicts if each.state == state}
        names = {state: [name for name, own in worst.items() if own == state] for state in _STATES}
        first = next(state for state in _STATES if names[state])
        told = {"failed": "failed on ", "passed": "", "not run": "not run on "}
        said = [f"{MARKS[state]} {told[state]}{_runtimes(own, state)}" for state, own in names.items() if own]
        more = f"not run on {', '.join(names['not run'])}" if names["not run"] else ""
        return Cell(text="; ".join(said), more=more, tone=TONES.get(first, "good"))

    @property
    def timed(self) -> Cell:
        """How long it takes, where that was measured."""
        timings, stale = self.about(timing=True)
        if not timings:
            return _none(stale)
        known = [each.text for each in timings if each.state == "timed"]
        if known:
            return Cell(text=listed(known, 3), more="; ".join(known))
        states = {each.state for each in timings}
        state = "failed" if "failed" in states else "not run"
        return Cell(text=f"{MARKS[state]} {state} on {listed([each.text for each in timings])}", tone=TONES[state])

    @property
    def words(self) -> str:
        """Both in a sentence."""
        return f"Verified: {self.verified.text}. Timed: {self.timed.text}."


def _runtimes(names: Sequence[str], state: str) -> str:
    return plural(len(names), "runtime") if state == "not run" and len(names) > 1 else listed(names, 5)


def _none(stale: Sequence[str]) -> Cell:
    told = f"⚠ stale: {listed(stale)} is of other bytes" if stale else "· no result on this page"
    return Cell(text=told, tone="away")


def subjects(results: Sequence[Result], shown: Mapping[str, str]) -> list[ArtifactSummary]:
    """The artifacts of the page, `shown` being its own files (names to sha256), which come first."""
    told = sorted(mentions(results), key=lambda each: not each.sha256)  # those that say their bytes know better
    known = list(shown.items())
    for each in told:
        if not stale(each.file, each.sha256, shown) and not any(same(*one, each.file, each.sha256) for one in known):
            known.append((PurePath(each.file).name, each.sha256))
    names = [PurePath(name).name for name, _ in known]
    found = []
    for (name, sha256), bare in zip(known, names, strict=True):
        said = tuple(each for each in told if same(name, sha256, each.file, each.sha256))
        others = tuple(each for each in told if each not in said and PurePath(each.file).name == bare)
        apart = name not in shown and names.count(bare) > 1
        found.append(ArtifactSummary(name=f"{name} ({sha256[:8]})" if apart else name, said=said, others=others))
    return found


def section(found: Sequence[ArtifactSummary]) -> tuple[Section | None, Found]:
    """The section, and what the boxes learn from it: what nobody verified or timed."""
    if not found:
        return None, Found()
    table = Table(
        caption="What is known of each artifact", columns=("artifact", "verified", "timed"),
        rows=tuple((Cell(text=each.name), each.verified, each.timed) for each in found),
        folded=f"Every artifact: {plural(len(found), 'row')}" if len(found) > _OPEN else "",
    )  # fmt: skip
    lead = "Results belong to files by their sha256, or by name where either has none."
    by = {each.kind for one in found for each in one.said if each.timing and each.state == "timed"}
    lead += " Times by tune and by bench are of different runs: don't compare them." if len(by) > 1 else ""
    section = Section(id="artifacts", title="Artifacts", lead=lead, blocks=(table,))
    return section, Found(findings=tuple(_findings(found)))


_AGAIN = {"verdict": "verify", "timing": "time"}


def _findings(found: Sequence[ArtifactSummary]) -> Iterator[Finding]:
    for each in found:
        lacks = []
        for what, timing in (("verdict", False), ("timing", True)):
            said, stale = each.about(timing)
            ran = any(one.state != "not run" for one in said)
            if stale and not said:
                reason = f"its {what} in {listed(stale)} is of other bytes (stale): {_AGAIN[what]} it again"
                yield Finding(state=NOT_RUN, who=each.name, reason=reason, where="")
            elif not ran:
                lacks.append(what)
        if lacks:
            yield Finding(state=NOT_RUN, who=each.name, reason=f"no {' and no '.join(lacks)} on this page", where="")
