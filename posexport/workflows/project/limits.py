"""Validated tables of a project's file: tolerances, and a budget of size, kernels and time. Imports no engine."""

from __future__ import annotations

import math
import re
from typing import Any

import attrs

from posexport.bench.candidates import ROLES
from posexport.bench.scenarios import read_scenario
from posexport.errors import RequestError
from posexport.spec.fields import flag, integer, parsed, positive, text

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
REFERENCES = {f"of_{role.replace('-', '_')}": role for role in ROLES}
"""What a time may be a multiple of: the field that says how much, and the reference's name in `posexport bench`."""


def names(help: str, default: tuple[str, ...] | None = None) -> Any:
    """A list of different names."""

    def read(value: Any) -> tuple[str, ...]:
        if not isinstance(value, list | tuple) or not all(isinstance(name, str) and name for name in value):
            raise TypeError
        if len(set(value)) != len(value) or (not value and default is None):
            raise ValueError
        return tuple(value)

    return parsed(help, "a list of different names", read, default)


def percent(help: str) -> Any:
    """A share such as "5%"."""

    def read(value: str) -> float:
        share = float(value.removesuffix("%")) / 100 if str(value).endswith("%") else math.nan
        if not 0 <= share <= 10:
            raise ValueError
        return share

    return parsed(help, 'text such as "5%"', read)


def amount(help: str) -> Any:
    """Bytes, from "6 MB" (10^6) or "6 MiB" (2^20)."""

    def read(value: Any) -> int:
        match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)\s*([kmg]i?|)b", str(value).strip().lower())
        size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
        if size < 1:
            raise ValueError
        return size

    return parsed(help, 'a size such as "6 MB" or "6 MiB"', read)


def exact_size(size: int) -> str:
    """Bytes in the largest unit that fits, with all digits, so that two sizes never look equal."""
    for name, unit in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= unit:
            return f"{size / unit:.12g} {name}"
    return f"{size} bytes"


@attrs.frozen(kw_only=True)
class Tolerances:
    """The numbers of `posexport.verify.result.Tolerance` that a project sets. None keeps posexport's default."""

    multiple: float | None = positive(None, "times torch eager's error")
    floor: float | None = positive(None, "part of the outputs' rms", at_most=1)
    ceiling: float | None = positive(None, "part of the outputs' rms", at_most=1)


@attrs.frozen(kw_only=True)
class Latency:
    """How long one scenario may take on `runtime` (None: on each that is timed), in multiples of a reference's time."""

    scenario: str = text(None, "what is timed")
    runtime: str | None = text(None, "the runtime that it applies to")
    of_lower_bound: float | None = positive(None, "times the lower bound")
    of_torch: float | None = positive(None, "times torch eager")
    of_torch_compile: float | None = positive(None, "times torch.compile")
    of_torch_onnx: float | None = positive(None, "times torch's own export")
    of_ort_optimizer: float | None = positive(None, "times ONNX Runtime's optimizer")

    def __attrs_post_init__(self) -> None:
        if self.scenario is None:
            raise RequestError("it has no scenario: give one with its size, such as prefill:512.")
        scenarios = read_scenario(self.scenario)
        if len(scenarios) != 1 or ":" not in self.scenario:
            raise RequestError(f"scenario is {self.scenario!r}: give one with its size, such as prefill:512.")
        object.__setattr__(self, "scenario", str(scenarios[0]))  # the name under which it is timed
        if not self.limits():
            keys = ", ".join(field.replace("_", "-") for field in REFERENCES)
            raise RequestError(f"latency {self.scenario} has no limit: give one or more of {keys}.")

    def limits(self) -> dict[str, float]:
        """The largest ratio by reference, under the names of `posexport bench`."""
        ratios = {name: getattr(self, field) for field, name in REFERENCES.items()}
        return {name: ratio for name, ratio in ratios.items() if ratio is not None}


@attrs.frozen(kw_only=True)
class Budget:
    """Limits of each file: bytes of the ONNX file with its weights and of the plan, kernels of the plan, and time."""

    size: int | None = amount("the ONNX file, external data included")
    plan_size: int | None = amount("the plan")
    kernels: int | None = integer(None, "kernels of the plan")
    fused_attention: bool | None = flag(None, "each layer's attention is one kernel of the plan")
    latency: tuple[Latency, ...] = ()
