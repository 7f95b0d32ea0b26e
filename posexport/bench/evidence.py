"""What all results say about each artifact: which runtimes verified and timed it, and what is missing or stale.

A result belongs to the artifact with its sha256 if both have one, otherwise to the artifact with its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import PurePath
from typing import Any

import attrs

from posexport.bench.comparisons import Row, rows_of, title_of
from posexport.bench.result import TIMED, Benchmark
from posexport.bench.results import Result
from posexport.bench.tune.result import Result as Tuning
from posexport.verify.result import FAILED, PASSED, PROJECT, Report


@attrs.frozen(kw_only=True)
class Mention:
    """What one result, `source`, says about the artifact `file`: its state on a runtime.

    A `timing` has its `scenario` and, if it was timed, its median in `seconds`. `busy` marks a timing from a busy
    machine. `sha256` is empty if the result has none. `by_tune` marks the runs of tune.
    """

    file: str
    sha256: str
    source: str
    runtime: str
    state: str
    timing: bool = False
    scenario: str = ""
    seconds: float | None = None
    busy: bool = False
    by_tune: bool = False


def same(file: str, sha256: str, other: str, other_sha256: str) -> bool:
    """Whether both names mean the same artifact: by their hashes if both are known, otherwise by name."""
    if sha256 and other_sha256:
        return sha256 == other_sha256
    return PurePath(file).name == PurePath(other).name


@attrs.frozen(kw_only=True)
class ArtifactSummary:
    """One artifact: a file on the page, or one in results. `stale` mentions have its name but other bytes."""

    name: str
    mentions: tuple[Mention, ...]
    stale: tuple[Mention, ...]

    def about(self, timing: bool) -> tuple[list[Mention], list[str]]:
        """Its verdicts, or its timings.

        Also returns the names of results that have some for a file of the same name but other bytes.
        """
        others = dict.fromkeys(mention.source for mention in self.stale if mention.timing == timing)
        return [mention for mention in self.mentions if mention.timing == timing], list(others)


@attrs.frozen
class Evidence:
    """Every mention of an artifact, and the page's own files (`shown`: sha256 by name)."""

    mentions: tuple[Mention, ...]
    shown: Mapping[str, str]

    @classmethod
    def of(cls, results: Iterable[Result[Any]], shown: Mapping[str, str]) -> Evidence:
        """Collect what verdicts, benchmarks and tunings say."""
        return cls(tuple(mention for result in results for mention in _mentions(result.name, result.data)), shown)

    def is_stale(self, file: str, sha256: str | None) -> bool:
        """Whether the page has a file of that name with other bytes."""
        named = any(PurePath(name).name == PurePath(file).name for name in self.shown)
        return bool(sha256) and named and sha256 not in self.shown.values()

    def verdict(self, row: Row) -> str:
        """The verdict on a timed artifact on its runtime: failed if any failed. Empty without a verdict."""
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
        mentions = sorted(self.mentions, key=lambda mention: not mention.sha256)  # a hash says more than a name
        known = _Artifacts(self.shown)
        for mention in mentions:
            if not self.is_stale(mention.file, mention.sha256) and not known.of(mention.file, mention.sha256):
                known.add(PurePath(mention.file).name, mention.sha256)
        about: dict[int, list[Mention]] = {}
        others: dict[str, dict[tuple[str, bool], dict[str, Mention]]] = {}
        for mention in mentions:
            for number in known.of(mention.file, mention.sha256):
                about.setdefault(number, []).append(mention)
            if mention.sha256:
                by_source = others.setdefault(PurePath(mention.file).name, {})
                by_source.setdefault((mention.source, mention.timing), {}).setdefault(mention.sha256, mention)
        names = [PurePath(name).name for name, _ in known.artifacts]
        counted = Counter(names)
        summaries = []
        for number, ((name, sha256), bare) in enumerate(zip(known.artifacts, names, strict=True)):
            # one mention for each result, even if it has several such artifacts
            found = (
                next((m for other, m in each.items() if other != sha256), None)
                for each in others.get(bare, {}).values()
            )
            stale = tuple(mention for mention in found if mention is not None) if sha256 else ()
            title = f"{name} ({sha256[:8]})" if name not in self.shown and counted[bare] > 1 else name
            summaries.append(ArtifactSummary(name=title, mentions=tuple(about.get(number, ())), stale=stale))
        return summaries


class _Artifacts:
    """Artifacts by number, indexed by sha256 and name. A search would be slow, because there may be thousands."""

    def __init__(self, shown: Mapping[str, str]) -> None:
        self.artifacts: list[tuple[str, str]] = []
        self._by_hash: dict[str, list[int]] = {}
        self._by_name: dict[str, list[int]] = {}
        self._without_hash: dict[str, list[int]] = {}
        for name, sha256 in shown.items():
            self.add(name, sha256)

    def add(self, name: str, sha256: str) -> None:
        bare, number = PurePath(name).name, len(self.artifacts)
        self.artifacts.append((name, sha256))
        self._by_name.setdefault(bare, []).append(number)
        if sha256:
            self._by_hash.setdefault(sha256, []).append(number)
        else:
            self._without_hash.setdefault(bare, []).append(number)

    def of(self, file: str, sha256: str) -> list[int]:
        """The numbers of the artifacts that are the `same`."""
        bare = PurePath(file).name
        if not sha256:
            return self._by_name.get(bare, [])
        return [*self._by_hash.get(sha256, ()), *self._without_hash.get(bare, ())]


def _mentions(source: str, data: object) -> Iterator[Mention]:
    match data:
        case Report():
            for verdict in data.verdicts:
                if verdict.runtime != PROJECT:
                    about = partial(Mention, file=verdict.artifact, sha256=verdict.sha256 or "", source=source)
                    yield about(runtime=verdict.runtime, state=verdict.state)
        case Benchmark():
            about = partial(Mention, file=data.file, sha256=data.sha256, source=source, timing=True, busy=data.busy)
            for row in rows_of(source, data):
                if not row.role:
                    scenario, seconds = title_of(row.shape), row.median if row.timed else None
                    yield about(runtime=row.runtime, state=row.timing.state, scenario=scenario, seconds=seconds)
        case Tuning(winner=winner) if winner is not None and winner.file:  # tune verified it, and usually timed it
            about = partial(Mention, file=winner.file, sha256=winner.sha256 or "", source=source, by_tune=True)
            if winner.verified:
                yield about(runtime=winner.verified, state=PASSED)
            if winner.seconds:
                timed = partial(about, runtime=data.target, state=TIMED, timing=True)
                yield timed(scenario=data.scenario, seconds=winner.seconds.median, busy=data.busy)
