"""Shows the recognised attention of a graph to people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from posexport.cli import console
from posexport.graphs.attention.support import OPERATOR
from posexport.report.attentions import Data, alike, cache_text, encoding_text, heads_text, mask_text, more_text


def show_attentions(file: str, attentions: Sequence[Data]) -> None:
    """Show every attention. Consecutive ones that differ only in their names are shown once."""
    if not attentions:
        console.write()
        console.write(f"no attention found in {file}")
    for group in alike(attentions):
        console.write()
        console.show_facts(_title(group), list(_facts(group)))


def _title(group: Sequence[Data]) -> str:
    first, last = group[0], group[-1]
    if first is last:
        return f"attention {first['layer']}: {first['name']}"
    return f"attention {first['layer']} to {last['layer']}: {first['name']} ... {last['name']}"


def _facts(group: Sequence[Data]) -> Iterator[tuple[str, str]]:
    first, last = group[0], group[-1]
    if first["head_dim"] is None:
        yield "not recognised", first["reason"]["text"]
        if first["operator"] is not None:
            yield "operator", first["operator"]
        return
    yield "heads", heads_text(first)
    yield "mask", mask_text(first["mask"])
    yield "encoding", encoding_text(first["encoding"])
    if first["cache"] is not None:
        text, others = cache_text(first["cache"]), cache_text(last["cache"])
        yield "cache", text if text == others else f"{text} ... {others.removeprefix(first['cache']['kind'] + ': ')}"
    if more := more_text(first):
        yield "more", more
    yield "operator", f"{first['operator']}, {first['dtype']}"
    for runtime, fate in first["runtimes"].items():
        reason = "" if fate["reason"] is None else f", {fate['reason']['text']}"
        refused = fate["reason"] is not None and fate["reason"]["code"] == OPERATOR
        yield runtime, f"{'refused' if refused else _FATES[fate['one_kernel']]}{reason}"


_FATES = {True: "one kernel", False: "not one kernel", None: "not known"}
