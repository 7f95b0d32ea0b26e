"""The schemas of the kept facts of a tuning, by kind. A fact that doesn't fit its schema is measured anew."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from posexport.artifact.manifest import PlanKernels
from posexport.jsondata import DataError, structure


class _Exported(TypedDict):
    sha256: str
    size: int


class _Refused(TypedDict):
    refused: str


class _Fitted(TypedDict):
    sizes: dict[str, int]
    profile: list[str]
    spec: dict[str, Any]


class _Identity(TypedDict):
    identity: str


class _Kernels(TypedDict):
    kernels: PlanKernels
    memory: dict[str, int | None]
    size: int
    version: str


class _Verified(TypedDict):
    state: Literal["passed"]
    reason: str | None


class _Rounds(TypedDict):
    rounds: list[dict[str, float]]
    failed: dict[str, str]
    memory: dict[str, int]
    runs: int
    turn: int
    machine_load: float
    seconds: float


_KINDS: Mapping[str, tuple[type, ...]] = {
    "export": (_Exported,),
    "fit": (_Fitted, _Refused),
    "identify": (_Identity,),
    "kernels": (_Kernels,),
    "verify": (_Verified,),
    "rounds": (_Rounds,),
}


_SHORTEST, _LONGEST = 1e-9, 1e9  # seconds of a call


def fits(key: Mapping[str, Any], fact: Any) -> bool:
    """Whether a fact is of the kind that the key's `what` names, and has the key's candidates and rounds."""
    for kind in _KINDS.get(key.get("what", ""), ()):
        try:
            structure(fact, kind)
        except DataError:
            continue
        return kind is not _Rounds or _are_those_of(key, fact)
    return False


def _are_those_of(key: Mapping[str, Any], fact: Mapping[str, Any]) -> bool:
    names = {str(entry[0]) for entry in key["entries"]}
    return (
        len(fact["rounds"]) == key["rounds"]
        and all({*timed} == names for timed in fact["rounds"])
        and all(_SHORTEST <= seconds <= _LONGEST for timed in fact["rounds"] for seconds in timed.values())
        and 0 <= fact["machine_load"] <= 1
    )
