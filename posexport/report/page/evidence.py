"""Which artifact a result is about: the one of its sha256 where both have one, else the one of its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

import attrs

from posexport.report.page import machine_load
from posexport.report.page.blocks import seconds
from posexport.report.page.latency_rows import rows_of, where_of
from posexport.report.page.results import Result

PASSED, FAILED = "passed", "failed"
_PROJECT = "project"  # what stands for a runtime in verdicts on a project's own terms


@attrs.frozen(kw_only=True)
class Mention:
    """What the result `by` says of the artifact `file`: its state on a runtime, or, for a timing, what was timed.

    `sha256` is empty where the result doesn't say it; `kind` is the result's.
    """

    file: str
    sha256: str
    by: str
    runtime: str
    state: str
    text: str
    timing: bool = False
    kind: str = ""


def same(file: str, sha256: str, other: str, other_sha256: str) -> bool:
    """Whether two names with hashes, as far as these are known, mean one artifact."""
    if sha256 and other_sha256:
        return sha256 == other_sha256
    return PurePath(file).name == PurePath(other).name


def mentions(results: Sequence[Result]) -> Iterator[Mention]:
    """Everything that verdicts, benchmarks and tunings say of artifacts."""
    for result in results:
        yield from _OF.get(result.kind, lambda _: ())(result)


def _verdicts(result: Result) -> Iterator[Mention]:
    for each in result.data["verdicts"]:
        if each["runtime"] != _PROJECT:
            yield Mention(
                file=each["artifact"], sha256=each.get("sha256") or "", by=result.name, runtime=each["runtime"],
                state=each["state"], text=each["runtime"],
            )  # fmt: skip


def _timings(result: Result) -> Iterator[Mention]:
    for row in rows_of([result]):
        if not row.role:
            place = f"{row.runtime}, {where_of(row.shape)}"
            text = f"{machine_load.sign(row.head)}{seconds(row.median)} ({place})" if row.timed else row.runtime
            yield Mention(
                file=row.head["file"], sha256=row.head.get("sha256") or "", by=result.name, runtime=row.runtime,
                state=row.result["state"], text=text, timing=True, kind=result.kind,
            )  # fmt: skip


def _winner(result: Result) -> Iterator[Mention]:
    """What tune says of the file that it wrote: it verified it, and mostly raced it."""
    won = result.data.get("winner") or {}
    if not won.get("file"):
        return
    head = {"file": won["file"], "sha256": won.get("sha256") or "", "by": result.name}
    if won.get("verified"):
        yield Mention(**head, runtime=won["verified"], state=PASSED, text=f"{won['verified']} (by tune)")
    if won.get("seconds"):
        place = ", ".join(text for text in (result.data["target"], result.data.get("scenario")) if text)
        text = f"{machine_load.sign(result.data)}{seconds(won['seconds']['median'])} ({place}, by tune)"
        yield Mention(**head, runtime=result.data["target"], state="timed", text=text, timing=True, kind=result.kind)


_OF = {"verify": _verdicts, "bench": _timings, "tune": _winner}


def stale(file: str, sha256: str | None, shown: Mapping[str, str]) -> bool:
    """Whether the file of that name on the page (`shown`: names to sha256) has other bytes."""
    named = any(PurePath(name).name == PurePath(file).name for name in shown)
    return bool(sha256) and named and sha256 not in shown.values()


def marked(results: Sequence[Result], shown: Mapping[str, str]) -> list[Result]:
    """The results, verdicts and benchmarks of other bytes than the files on the page being marked as stale, and
    benchmarks with what verdicts found."""
    told = [each for each in mentions(results) if not each.timing]
    found = []
    for result in results:
        if result.kind == "verify":
            for each in result.data["verdicts"]:
                each["stale"] = stale(each["artifact"], each.get("sha256"), shown)
        elif result.kind == "bench":
            file, sha256 = result.data["file"], result.data.get("sha256") or ""
            own = [each for each in told if same(file, sha256, each.file, each.sha256)]
            states = {each.runtime: each.state for state in (PASSED, FAILED) for each in own if each.state == state}
            result = attrs.evolve(result, verdicts=states, stale=stale(file, sha256, shown))
        found.append(result)
    return found
