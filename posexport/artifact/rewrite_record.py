"""What the manifest of a rewritten file says about its source and the evidence: its key `rewrite`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from posexport.errors import Reason
from posexport.jsondata import omitted

if TYPE_CHECKING:
    import onnx

REWRITTEN = "rewritten"
"""The state of an attention that was rewritten."""

_CORES = {
    "native": {("", "Attention")},
    "contrib": {("com.microsoft", "MultiHeadAttention"), ("com.microsoft", "GroupQueryAttention")},
}
"""The operators of each form. Each attention in a form has one of them."""


@attrs.frozen(kw_only=True)
class RewriteSource:
    """The file that was rewritten, with the sha256 of its external data by name."""

    file: str
    sha256: str
    external_data: Mapping[str, str]


@attrs.frozen(kw_only=True)
class WholeGraph:
    """The comparison of the whole graph before and after the rewrite in float64.

    `error` is the largest error of an output relative to its largest value, over `cases` cases. `untested` says why
    there are none, such as an unknown operator. `left` are outputs without a finite number in float64.
    """

    error: float | None
    cases: int
    untested: Reason | None = omitted(None)
    left: tuple[str, ...] = omitted(())


@attrs.frozen(kw_only=True)
class RewriteRecord:
    """How a file was made from another file: the options, what was recognised, and what was tested.

    `attentions` are records as `posexport rewrite --json` prints them. `whole` is None if nothing was changed.
    """

    source: RewriteSource
    seed: int
    only: tuple[str, ...] = omitted(())
    kv_cache: str | None = omitted(None)
    angles: str | None = omitted(None)
    changed: bool
    attentions: tuple[Mapping[str, Any], ...]
    whole: WholeGraph | None

    def all_rewritten(self) -> bool:
        """Whether every attention was rewritten, so that posexport's own metadata gives the form and the target."""
        return self.changed and self.angles is None and all(self._rewritten())

    def fits(self, form: str | None, model: onnx.ModelProto) -> bool:
        """Whether a graph contains what each attention that was rewritten into a form contains."""
        if not self.changed or self.angles is not None or not any(self._rewritten()):
            return True
        if form == "function":
            return any(function.domain == "posexport" for function in model.functions)
        if form not in _CORES:
            return form is not None
        from posexport.artifact.onnx_limits import nodes_within  # it loads onnx

        nodes = (node for holder in (model.graph, *model.functions) for _, node in nodes_within(holder) if node)
        return any((node.domain.removeprefix("ai.onnx"), node.op_type) in _CORES[form] for node in nodes)

    def _rewritten(self) -> list[bool]:
        return [one.get("state") == REWRITTEN for one in self.attentions]
