"""What the manifest of a rewritten file says of its origin and of the evidence: its key `rewrite`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from posexport.errors import Reason
from posexport.jsondata import omitted

if TYPE_CHECKING:
    import onnx

REWRITTEN = "rewritten"
"""The state of an attention that was."""

_CORES = {
    "native": {("", "Attention")},
    "contrib": {("com.microsoft", "MultiHeadAttention"), ("com.microsoft", "GroupQueryAttention")},
}
"""The operators of which each attention in a form has one."""


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
    untested: Reason | None = omitted(None)
    left: tuple[str, ...] = omitted(())


@attrs.frozen(kw_only=True)
class RewriteRecord:
    """How a file came from another one: with which options, what was recognised, and what was tested.

    `attentions` are records as `posexport rewrite --json` prints them. `whole` is None where nothing was changed.
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
        """Whether every attention was, so that metadata of posexport's own name the form and the target."""
        return self.changed and self.angles is None and all(self._rewritten())

    def fits(self, form: str | None, model: onnx.ModelProto) -> bool:
        """Whether a graph has what each attention has that was rewritten into a form."""
        if not self.changed or self.angles is not None or not any(self._rewritten()):
            return True
        if form == "function":
            return any(function.domain == "posexport" for function in model.functions)
        if form not in _CORES:
            return form is not None
        from posexport.artifact.onnx_limits import nodes_within  # which loads onnx

        nodes = (node for holder in (model.graph, *model.functions) for _, node in nodes_within(holder) if node)
        return any((node.domain.removeprefix("ai.onnx"), node.op_type) in _CORES[form] for node in nodes)

    def _rewritten(self) -> list[bool]:
        return [one.get("state") == REWRITTEN for one in self.attentions]
