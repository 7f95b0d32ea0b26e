"""What the manifest of a rewritten file says of its origin and of the evidence: its key `rewrite`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from posexport.errors import Reason
from posexport.jsondata import OMITTED


@attrs.frozen(kw_only=True)
class RewriteSource:
    """The file that was rewritten, with the sha256 of its external data by name."""

    file: str
    sha256: str
    external_data: Mapping[str, str]


@attrs.frozen(kw_only=True)
class WholeGraph:
    """The whole graph before and after in float64: the largest `error` of an output, as a part of its largest value,
    on so many `cases`; `untested` says why there are none, such as an operator that nobody knows.
    `left` are outputs of which float64 has no finite number."""

    error: float | None
    cases: int
    untested: Reason | None = attrs.field(default=None, metadata={OMITTED: True})
    left: tuple[str, ...] = attrs.field(default=(), metadata={OMITTED: True})


@attrs.frozen(kw_only=True)
class RewriteRecord:
    """How a file came from another one: with which options, what was recognised, and what was tested.

    `attentions` are records as `posexport rewrite --json` prints them. `whole` is None where nothing was changed.
    """

    source: RewriteSource
    seed: int
    only: tuple[str, ...] = attrs.field(default=(), metadata={OMITTED: True})
    kv_cache: str | None = attrs.field(default=None, metadata={OMITTED: True})
    angles: str | None = attrs.field(default=None, metadata={OMITTED: True})
    changed: bool
    attentions: tuple[Mapping[str, Any], ...]
    whole: WholeGraph | None
