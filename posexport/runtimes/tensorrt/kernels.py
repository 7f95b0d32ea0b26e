"""What TensorRT's builder chose: kernels, the ONNX nodes in each, and memory, read from its log. Imports no engine.

At ProfilingVerbosity.DETAILED, the builder logs one message `Layers:` with a row for each step of the plan. Without a
GPU, nothing else shows fusion. The format is not documented, so anything unexpected in it is "not known", with the
reason.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from posexport.artifact.manifest import KernelRow, PlanKernels

HOST_STEPS = ("shape_call", "signal", "wait", "reshape", "cast", "ShapeHostToDevice")
"""Types of rows that launch no kernel: shapes computed on the host, waits between streams."""

_ROW = re.compile(r"Name: (?P<name>.+?), LayerType: (?P<type>\w+), .*Metadata: ?(?P<metadata>.*)")
_NODE = re.compile(r"\[ONNX Layer: (.+)\]")
_SEPARATOR = "\x1f"
_MEMORY = {
    "scratch": re.compile(r"Max Scratch Memory: (\d+) bytes"),
    "activation": re.compile(r"Total Activation Memory: (\d+) bytes"),
    "weights": re.compile(r"Total Weights Memory: (\d+) bytes"),
}


def read_kernels(messages: Iterable[str], layers: int) -> PlanKernels:
    """The kernels from the builder's messages; `layers` is the number of attention layers in the graph."""
    tables = [message for message in messages if message.startswith("Layers:")]
    if len(tables) != 1:
        count = "no table of layers" if not tables else f"{len(tables)} tables of layers"
        return PlanKernels.unlisted(layers, f"the builder logged {count}")
    rows, host = [], 0
    for line in tables[0].removeprefix("Layers:").strip("\n").split("\n\n", 1)[0].split("\n"):
        match = _ROW.fullmatch(line.strip())
        if match is None:
            return PlanKernels.unlisted(layers, "the builder's table of layers has a row of an unknown kind")
        if match["type"] in HOST_STEPS:
            host += 1
        else:  # an unknown type counts as a kernel, so that the number is never too small
            parts = (_NODE.fullmatch(part.strip()) for part in match["metadata"].split(_SEPARATOR))
            rows.append(
                KernelRow(name=match["name"], type=match["type"], nodes=tuple(node[1] for node in parts if node))
            )
    if not rows:
        return PlanKernels.unlisted(layers, "the builder's table of layers holds no kernel")
    attention = sum(row.attention for row in rows)
    return PlanKernels(
        count=len(rows),
        fused_attention=attention == layers,
        attention_kernels=attention,
        attention_layers=layers,
        host_steps=host,
        rows=tuple(rows),
    )


def read_memory(messages: Iterable[str]) -> dict[str, int | None]:
    """Bytes of scratch, activation and weight memory that the builder plans for; None if it did not log them."""
    memory: dict[str, int | None] = dict.fromkeys(_MEMORY)
    for message, (key, pattern) in itertools.product(messages, _MEMORY.items()):
        if (match := pattern.fullmatch(message.strip())) is not None:
            memory[key] = int(match[1])
    return memory
