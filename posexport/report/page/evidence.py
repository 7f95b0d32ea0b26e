"""What all results say of each artifact: who verified and timed it, and what is missing or stale.

A result belongs to the artifact with its sha256 where both have one, else to the one with its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import attrs

from posexport.bench.result import TIMED, Benchmark
from posexport.bench.tune.result import Result as Tuning
from posexport.report.page import machine_load
from posexport.report.page.blocks import Cell, Section, Table, listed, plural, seconds
from posexport.report.page.latency_rows import Row, rows_of, title_of
from posexport.report.page.results import Result
from posexport.report.page.summary import MARKS, TONES, Finding, Highlights
from posexport.verify.result import FAILED, NOT_RUN, PASSED, PROJECT, Report

_WORST_FIRST = (FAILED, PASSED, NOT_RUN)
_MOST_OPEN = 24  # artifacts in a table that starts open


@attrs.frozen(kw_only=True)
class Mention:
    """What one result, `source`, says of the artifact `file`: its state on a runtime; for a timing, also its time.

    `sha256` is empty where the result has none; `separate` marks the runs of tune.
    """

    file: str
    sha256: str
    source: str
    runtime: str
    state: str
    text: str
    timing: bool = False
    separate: bool = False


def same(file: str, sha256: str, other: str, other_sha256: str) -> bool:
    """Whether two names with hashes, as far as these are known, mean one artifact."""
    if sha256 and other_sha256:
        return sha256 == other_sha256
    return PurePath(file).name == PurePath(other).name


@attrs.frozen(kw_only=True)
class ArtifactSummary:
    """One artifact: a file on the page, or one that results mention. `stale` mentions are of its name but of other
    bytes."""

    name: str
    mentions: tuple[Mention, ...]
    stale: tuple[Mention, ...]

    def about(self, timing: bool) -> tuple[list[Mention], list[str]]:
        """Its verdicts, or its timings, and the results that have such of other bytes."""
        others = dict.fromkeys(mention.source for mention in self.stale if mention.timing == timing)
        return [mention for mention in self.mentions if mention.timing == timing], list(others)

    @property
    def verified(self) -> Cell:
        """On which runtimes a verdict found it right or wrong."""
        verdicts, stale = self.about(timing=False)
        if not verdicts:
            return _none(stale)
        worst = {each.text: each.state for state in reversed(_WORST_FIRST) for each in verdicts if each.state == state}
        names = {state: [name for name in worst if worst[name] == state] for state in _WORST_FIRST}
        idle = names[NOT_RUN]
        texts = {
            FAILED: f"failed on {listed(names[FAILED], 5)}",
            PASSED: listed(names[PASSED], 5),
            NOT_RUN: f"not run on {plural(len(idle), 'runtime') if len(idle) > 1 else listed(idle)}",
        }
        first = next(state for state in _WORST_FIRST if names[state])
        text = "; ".join(f"{MARKS[state]} {texts[state]}" for state in _WORST_FIRST if names[state])
        return Cell(text=text, more=f"not run on {', '.join(idle)}" if idle else "", tone=TONES.get(first, "good"))

    @property
    def timed(self) -> Cell:
        """Its times, where it was timed."""
        timings, stale = self.about(timing=True)
        if not timings:
            return _none(stale)
        times = [mention.text for mention in timings if mention.state == TIMED]
        if times:
            return Cell(text=listed(times, 3), more="; ".join(times))
        state = FAILED if any(mention.state == FAILED for mention in timings) else NOT_RUN
        return Cell(text=f"{MARKS[state]} {state} on {listed([each.text for each in timings])}", tone=TONES[state])

    @property
    def sentence(self) -> str:
        """Both in a sentence."""
        return f"Verified: {self.verified.text}. Timed: {self.timed.text}."

    def findings(self) -> Iterator[Finding]:
        """A missing verdict, a missing timing, and those that are stale."""
        missing = []
        for kind, again, timing in (("verdict", "verify", False), ("timing", "time", True)):
            mentions, stale = self.about(timing)
            if stale and not mentions:
                reason = f"its {kind} in {listed(stale)} is of other bytes (stale): {again} it again"
                yield Finding(state=NOT_RUN, who=self.name, reason=reason)
            elif all(mention.state == NOT_RUN for mention in mentions):
                missing.append(kind)
        if missing:
            yield Finding(state=NOT_RUN, who=self.name, reason=f"no {' and no '.join(missing)} on this page")


def _none(stale: Sequence[str]) -> Cell:
    text = f"⚠ stale: {listed(stale)} is of other bytes" if stale else "· no result on this page"
    return Cell(text=text, tone="away")


@attrs.frozen
class Evidence:
    """Every mention of an artifact, and the page's own files (`shown`: names to sha256)."""

    mentions: tuple[Mention, ...]
    shown: Mapping[str, str]

    @classmethod
    def of(cls, results: Sequence[Result[Any]], shown: Mapping[str, str]) -> Evidence:
        """All that verdicts, benchmarks and tunings say."""
        return cls(tuple(mention for result in results for mention in _mentions(result)), shown)

    def is_stale(self, file: str, sha256: str | None) -> bool:
        """Whether the file of that name on the page has other bytes."""
        named = any(PurePath(name).name == PurePath(file).name for name in self.shown)
        return bool(sha256) and named and sha256 not in self.shown.values()

    def verdict(self, row: Row) -> str:
        """The state of a timed artifact on its runtime, failed before passed; empty without a verdict."""
        made = row.benchmark
        states = {
            mention.state
            for mention in self.mentions
            if not mention.timing
            and mention.runtime == row.runtime
            and same(made.file, made.sha256, mention.file, mention.sha256)
        }
        return next((state for state in (FAILED, PASSED) if state in states), "")

    def artifacts(self) -> list[ArtifactSummary]:
        """The artifacts of the page, its own files first."""
        mentions = sorted(self.mentions, key=lambda mention: not mention.sha256)  # a hash tells more than a name
        artifacts = list(self.shown.items())
        for mention in mentions:
            about = mention.file, mention.sha256
            if not self.is_stale(*about) and not any(same(*artifact, *about) for artifact in artifacts):
                artifacts.append((PurePath(mention.file).name, mention.sha256))
        names = [PurePath(name).name for name, _ in artifacts]
        summaries = []
        for (name, sha256), bare in zip(artifacts, names, strict=True):
            its = tuple(each for each in mentions if same(name, sha256, each.file, each.sha256))
            stale = tuple(each for each in mentions if each not in its and PurePath(each.file).name == bare)
            apart = name not in self.shown and names.count(bare) > 1
            title = f"{name} ({sha256[:8]})" if apart else name
            summaries.append(ArtifactSummary(name=title, mentions=its, stale=stale))
        return summaries


def _mentions(result: Result[Any]) -> Iterator[Mention]:
    data, source = result.data, result.name
    if isinstance(data, Report):
        for verdict in data.verdicts:
            if verdict.runtime != PROJECT:
                yield Mention(
                    file=verdict.artifact, sha256=verdict.sha256 or "", source=source, runtime=verdict.runtime,
                    state=verdict.state, text=verdict.runtime,
                )  # fmt: skip
    elif isinstance(data, Benchmark):
        for row in rows_of([result]):
            if not row.role:
                time = f"{machine_load.sign(data)}{seconds(row.median)} ({row.runtime}, {title_of(row.shape)})"
                yield Mention(
                    file=data.file, sha256=data.sha256, source=source, runtime=row.runtime, state=row.timing.state,
                    text=time if row.timed else row.runtime, timing=True,
                )  # fmt: skip
    elif isinstance(data, Tuning) and data.winner is not None and data.winner.file:
        yield from _of_tuning(data, data.winner.file, source)


def _of_tuning(tuning: Tuning, file: str, source: str) -> Iterator[Mention]:
    """What tune says of the file that it wrote: it verified it, and mostly timed it."""
    winner = tuning.winner
    if winner is None:
        return
    sha256 = winner.sha256 or ""
    if winner.verified:
        text = f"{winner.verified} (by tune)"
        yield Mention(file=file, sha256=sha256, source=source, runtime=winner.verified, state=PASSED, text=text)
    if winner.seconds:
        place = ", ".join(filter(None, (tuning.target, tuning.scenario)))
        text = f"{machine_load.sign(tuning)}{seconds(winner.seconds.median)} ({place}, by tune)"
        yield Mention(
            file=file, sha256=sha256, source=source, runtime=tuning.target, state=TIMED, text=text, timing=True,
            separate=True,
        )  # fmt: skip


def section(artifacts: Sequence[ArtifactSummary]) -> tuple[Section, Highlights]:
    """The table of artifacts, and what was not verified or not timed."""
    table = Table(
        caption="Evidence for each artifact", columns=("artifact", "verified", "timed"),
        rows=tuple((Cell(text=each.name), each.verified, each.timed) for each in artifacts),
        folded=f"Every artifact: {plural(len(artifacts), 'row')}" if len(artifacts) > _MOST_OPEN else "",
    )  # fmt: skip
    lead = "Results belong to files by their sha256, or by name where either has none."
    timings = [mention for artifact in artifacts for mention in artifact.about(timing=True)[0]]
    if len({mention.separate for mention in timings if mention.state == TIMED}) > 1:
        lead += " Times by tune and by bench are of different runs: don't compare them."
    findings = tuple(finding for artifact in artifacts for finding in artifact.findings())
    return Section(id="artifacts", title="Artifacts", lead=lead, blocks=(table,)), Highlights(findings=findings)
