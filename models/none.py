"""No positional encoding: attention alone, so that permuting the tokens permutes the outputs (NoPE)."""

from __future__ import annotations

from typing import ClassVar

import attrs

from posexport.spec.encoding import Encoding


@attrs.frozen(kw_only=True)
class NoEncoding(Encoding):
    """The block without positions; its graph has no `position_ids`."""

    name: ClassVar[str] = "none"
    summary: ClassVar[str] = "no positional encoding"
    source: ClassVar[str] = "Haviv et al. 2022, arXiv:2203.16634"
    axes: ClassVar[int] = 0
    in_cross: ClassVar[bool] = True
