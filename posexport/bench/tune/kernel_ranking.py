"""Ranking plans by what TensorRT's builder chose, where there is no GPU to time it on.

The order of merit is fused attention first, then the number of kernels and host steps, then planned memory, then the
size of the plan: each kernel reads and writes its tensors in full, and fused attention never writes the scores at all.
It says nothing of how fast each kernel is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

METHOD = "by kernel table: no GPU"


def unknown(fact: Mapping[str, Any]) -> str | None:
    """Why a plan can't be ranked, or None."""
    if "error" in fact:
        return str(fact["error"])
    reason = fact["kernels"].get("unknown")
    return None if reason is None else str(reason)


def merit(fact: Mapping[str, Any], objective: str) -> tuple[float, ...]:
    """Smaller is better; equal where the tables don't differ."""
    kernels = fact["kernels"]
    speed = (float(kernels["fused_attention"] is not True), float(kernels["count"] + (kernels["host_steps"] or 0)))
    memory, size = float(planned(fact)), float(fact["size"])
    return {
        "latency": (*speed, memory, size),
        "memory": (memory, *speed, size),
        "size": (size, *speed, memory),
    }[objective]


def planned(fact: Mapping[str, Any]) -> int:
    """Bytes of scratch, activations and weights that the builder plans for."""
    return sum(size or 0 for size in fact["memory"].values())


def summary(fact: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that a report shows."""
    kernels = fact["kernels"]
    names = ("count", "fused_attention", "attention_kernels", "attention_layers", "host_steps")
    return {**{name: kernels[name] for name in names}, "planned_memory": planned(fact)}


def describe_plan(fact: Mapping[str, Any], objective: str) -> str:
    """One plan in a few words, the objective first."""
    kernels = fact["kernels"]
    fused = "fused attention" if kernels["fused_attention"] else "attention not fused"
    speed = f"{fused}, {kernels['count']} kernels and {kernels['host_steps']} host steps"
    memory, size = f"{planned(fact):,} bytes planned", f"a plan of {fact['size']:,} bytes"
    order = {"latency": (speed, memory, size), "memory": (memory, speed, size), "size": (size, speed, memory)}
    return ", ".join(order[objective])
