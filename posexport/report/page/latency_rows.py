"""Timings as the page compares them: every candidate of one block in one scenario, whichever file it stands in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from posexport.report.page.bench_keys import key, labels
from posexport.report.page.blocks import plural
from posexport.report.page.results import Result

PEERS = {
    "lower_bound": "lower bound: bare matrix products",
    "torch": "torch eager",
    "torch-compile": "torch.compile",
    "torch-onnx": "torch.onnx.export",
    "ort-optimizer": "ORT's optimizer",
}
"""What others' candidates are called, by the role that `ratios` names too."""

_SIZES = ("batch", "seq", "past_seq", "max_seq", "encoder_seq")


@attrs.frozen(kw_only=True)
class Row:
    """One candidate at one shape, with the file that it was timed for.

    `verdict` is the state in which a verdict found the artifact on this runtime, empty where there is none; `stale`
    says that other bytes were timed than those of the file on the page.
    """

    file: str
    head: dict[str, Any]
    shape: dict[str, Any]
    result: dict[str, Any]
    verdict: str = ""
    stale: bool = False

    @property
    def runtime(self) -> str:
        return str(self.result["runtime"])

    @property
    def role(self) -> str:
        """The peer that it is, or nothing for a runtime that runs the artifact."""
        name = self.runtime.removesuffix("-cuda")
        return name if name in PEERS else "against" if name.startswith("against:") else ""

    @property
    def gpu(self) -> bool:
        """Whether it ran on a GPU; ratios are to the peers of the same device."""
        return self.runtime.endswith("-cuda") or self.runtime.startswith(("tensorrt", "trt"))

    @property
    def timed(self) -> bool:
        return bool(self.result["state"] == "timed")

    @property
    def median(self) -> float:
        return float(self.result["seconds"]["median"])

    def ratio(self, peer: str) -> dict[str, Any] | None:
        return (self.result.get("ratios") or {}).get(peer)


@attrs.frozen(kw_only=True)
class Comparison:
    """All candidates of one block on one machine in one scenario; `where` is the scenario, `words` what it means.

    `key` is the same for what may be compared, `block` names it. `heads` are all artifacts of the block, each once, so
    that a candidate is called the same in every scenario.
    """

    key: str
    block: str
    heads: Mapping[tuple[str, str], dict[str, Any]]
    where: str
    words: str
    rows: tuple[Row, ...]

    @property
    def ranked(self) -> list[Row]:
        """The candidates that may win, the fastest first: whatever was timed but the lower bound.

        Runs of their own, one per file, differ by more than their candidates do: where each timed torch on the same
        device, candidates stand by their ratio to it, times its time in the fastest of the runs.
        """
        timed = [row for row in self.rows if row.timed and row.role != "lower_bound"]
        scales: dict[bool, float] = {}
        for gpu in (False, True):
            runs = {id(row.head) for row in timed if row.gpu == gpu}
            torch = {id(row.head): row.median for row in timed if row.gpu == gpu and row.role == "torch"}
            if len(runs) > 1 and len(torch) == len(runs):
                scales[gpu] = min(torch.values())

        def place(row: Row) -> float:
            ratio = row.ratio("torch") if row.gpu in scales else None
            return row.median if ratio is None else float(ratio["median"]) * scales[row.gpu]

        return sorted(timed, key=place)

    def name(self, row: Row, with_file: bool = True) -> str:
        """What a candidate is called: its runtime, and what sets its file apart from the others of the block."""
        heads = list(self.heads.values())
        dtypes = len({head["dtype"] for head in heads}) > 1
        own = [row.head["form"], *([row.head["dtype"]] if dtypes else [])]
        if len({head["opset"] for head in heads if _same(head, row.head)}) > 1:
            own.append(f"opset {row.head['opset']}")
        if row.role in PEERS:
            device = " on CUDA" if row.runtime.endswith("-cuda") else ""
            return f"{PEERS[row.role]}{device}" + (f" · {row.head['dtype']}" if dtypes else "")
        alike = (head for head in heads if _same(head, row.head))
        twins = [head for head in alike if head["opset"] == row.head["opset"]]
        file = row.head["file"] if len({head["file"] for head in twins}) == len(twins) else row.file
        return " · ".join([row.runtime, *own, *([file] if with_file and len(twins) > 1 else [])])


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[key] == other[key] for key in ("form", "dtype"))


def rows_of(results: Sequence[Result]) -> Iterator[Row]:
    """Every candidate at every shape of every file."""
    for result in results:
        for shape in result.data["shapes"]:
            for each in shape["results"]:
                verdict = result.verdicts.get(each["runtime"], "")
                yield Row(
                    file=result.name, head=result.data, shape=shape, result=each, verdict=verdict, stale=result.stale
                )  # fmt: skip


def comparisons(results: Sequence[Result]) -> list[Comparison]:
    """The rows by block and scenario, in the order in which they come."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows_of(results):
        for where in (where_of(row.shape), *(row.shape.get("also") or ())):  # scenarios of the same sizes
            groups.setdefault((key(row.head), where), []).append(row)
    heads: dict[str, dict[tuple[str, str], dict[str, Any]]] = {}
    for (block, _), rows in groups.items():
        heads.setdefault(block, {}).update({_artifact(row.head): row.head for row in rows})
    names = labels([result.data for result in results])
    return [
        Comparison(
            key=block,
            block=names[block],
            heads=heads[block],
            where=where,
            words=_words(rows[0].shape),
            rows=tuple(rows),
        )
        for (block, where), rows in groups.items()
    ]


def _artifact(head: dict[str, Any]) -> tuple[str, str]:
    """What an artifact is known by: its content and its name, whichever result file tells of it."""
    return head.get("sha256") or "", head["file"]


def where_of(shape: dict[str, Any]) -> str:
    """The scenario, or the sizes."""
    given = shape.get("scenario")
    return str(given or ", ".join(f"{key} {shape[key]}" for key in _SIZES if shape.get(key) is not None))


def _words(shape: dict[str, Any]) -> str:
    """A shape for somebody who doesn't know the scenarios' names."""
    past, tokens = (
        shape.get("past_seq") or 0,
        plural(shape["seq"], "token" if not shape.get("past_seq") else "new token"),
    )
    said = f"{tokens} behind {past:,} in the cache" if past else f"{tokens} at once"
    return said if shape["batch"] == 1 else f"{shape['batch']:,} × {said}"
