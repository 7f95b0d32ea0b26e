"""What became of a rewritten file, as data: the attentions, the evidence, and the new file. Imports no engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from posexport.artifact import rewrite_record
from posexport.artifact.manifest import Tensor, WeightSource
from posexport.artifact.rewrite_record import RewriteSource, WholeGraph
from posexport.errors import Reason
from posexport.rewrite.angles.result import PARITY, SiteAngles, angles_record

if TYPE_CHECKING:
    from posexport.artifact.onnx_artifact import Artifact

REWRITTEN, KEPT = rewrite_record.REWRITTEN, "kept"

ALREADY = "already-in-form"
"""The code of the reason of an attention that needs no rewriting."""

NOT_CHOSEN = "not-chosen"
"""The code of the reason of an attention that nobody asked to rewrite."""


@attrs.frozen(kw_only=True)
class Block:
    """What the metadata of an artifact of posexport say, as its manifest must say it."""

    version: str
    form: str
    target: str | None
    spec: Mapping[str, Any]
    weights: WeightSource | None
    tools: Mapping[str, str] | None


def block_of(own: Artifact, metadata: Mapping[str, str]) -> Block:
    """The block of a file with these `metadata` that was made from the artifact `own`."""
    return Block(
        version=own.version,
        form=metadata["posexport.form"],
        target=metadata.get("posexport.target"),
        spec=own.spec.to_dict(),
        weights=own.weight_source,
        tools=None if own.origin is None else own.origin.tools,
    )


@attrs.frozen(kw_only=True)
class RewriteResult:
    """What became of a file. `attentions` are records with the keys of `posexport rewrite --json`.

    `hashes` has the sha256 of each new file by name. If nothing was `changed`, the files are copies, and `whole` is
    None. `block` is what the new file's metadata say, if posexport made the original.
    """

    source: RewriteSource
    attentions: tuple[Mapping[str, Any], ...]
    changed: bool
    whole: WholeGraph | None
    hashes: Mapping[str, str]
    block: Block | None
    form: str
    target: str
    opset: int
    domains: Mapping[str, int]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @property
    def refused(self) -> list[Mapping[str, Any]]:
        """The attentions that should have been rewritten and could not be."""
        settled = (ALREADY, NOT_CHOSEN)
        return [one for one in self.attentions if one["state"] == KEPT and _code(one["reason"]) not in settled]

    @property
    def angles_left(self) -> list[Mapping[str, Any]]:
        """The attentions whose angles are not exact although that was asked for."""
        return [one for one in self.attentions if _has_angles_left(one)]

    @property
    def left(self) -> list[Mapping[str, Any]]:
        """The attentions that are not in the requested form, or whose angles are not exact although that was asked
        for."""
        return [one for one in self.attentions if is_left(one) or _has_angles_left(one)]

    @property
    def is_complete(self) -> bool:
        """Whether all attention is in the form; False for a file without attention."""
        return bool(self.attentions) and not self.left


def is_left(one: Mapping[str, Any]) -> bool:
    """Whether the record of an attention says that it is not in the form."""
    return one["state"] == KEPT and _code(one["reason"]) != ALREADY


def _has_angles_left(one: Mapping[str, Any]) -> bool:
    return (one["angles"] or {}).get("state") == PARITY


def _code(reason: Mapping[str, Any] | None) -> str | None:
    return None if reason is None else str(reason["code"])


def site_record(
    description: Mapping[str, Any], state: str, reason: Reason | None, evidence: Any, angles: SiteAngles | None = None
) -> dict[str, Any]:
    """One attention: its description as in `posexport inspect --json`, what became of it, why, and the evidence.

    It also has what became of its angles.
    """
    return {
        **description,
        "state": state,
        "reason": None if reason is None else {"code": reason.code, "text": reason.text},
        "error": None if evidence is None or not evidence.cases else rounded(evidence.error),
        "cases": 0 if evidence is None else evidence.cases,
        "angles": angles_record(angles),
    }


def rounded(error: float) -> float:
    """An error with two digits: further digits are chance."""
    return float(f"{error:.1e}")
