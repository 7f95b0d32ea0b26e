"""What TensorRT's builder chose: kernels, the ONNX nodes in each, and memory, read from its log. Imports no engine.

At ProfilingVerbosity.DETAILED the builder logs one message `Layers:` with a row for each step of the plan. No other
source shows fusion without a GPU. It is not a documented interface, so anything unexpected in it gives "not known" with
the reason, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import attrs

from posexport.errors import Reason

HOST_STEPS = ("shape_call", "signal", "wait", "reshape", "cast", "ShapeHostToDevice")
"""Types of rows that launch no kernel: shapes computed on the host, waits between streams."""

_ROW = re.compile(r"Name: (?P<name>.+?), LayerType: (?P<type>\w+), .*Metadata: ?(?P<metadata>.*)")
_NODE = re.compile(r"\[ONNX Layer: (.+)\]")
_SEPARATOR = "\x1f"
_ATTENTION = re.compile(r"(^|_)mha(_|$)")
_MEMORY = {
    "scratch": re.compile(r"Max Scratch Memory: (\d+) bytes"),
    "activation": re.compile(r"Total Activation Memory: (\d+) bytes"),
    "weights": re.compile(r"Total Weights Memory: (\d+) bytes"),
}


@attrs.frozen(kw_only=True)
class Kernel:
    """One kernel of a plan; `nodes` are ONNX nodes by name, inside a function as "node | call (function)"."""

    name: str
    type: str
    nodes: tuple[str, ...] = ()

    @property
    def attention(self) -> bool:
        """Whether it is a fused attention kernel: generated code with that name, not a product named after a node."""
        return self.type == "kgen" and _ATTENTION.search(self.name) is not None


@attrs.frozen(kw_only=True)
class Kernels:
    """The kernels of a plan in order; None, with the reason in `unknown`, where the builder did not list them."""

    layers: int
    """Attention layers in the graph."""
    rows: tuple[Kernel, ...] | None = None
    host_steps: int | None = None
    unknown: str | None = None
    unfused: Reason | None = None
    """Why attention is not fused, where it is known not to be."""
    decomposed: int = 0
    """Attention layers of the network that the builder decomposed, because it has no kernel for them."""

    @property
    def attention(self) -> int | None:
        """Fused attention kernels."""
        return None if self.rows is None else sum(row.attention for row in self.rows)

    @property
    def fused_attention(self) -> bool | None:
        """Whether each attention layer is one fused kernel; None where that is not known."""
        return None if self.rows is None else self.attention == self.layers

    def to_dict(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "count": None if self.rows is None else len(self.rows),
            "fused_attention": self.fused_attention,
            "attention_kernels": self.attention,
            "attention_layers": self.layers,
            "host_steps": self.host_steps,
            **({"decomposed_attention": self.decomposed} if self.decomposed else {}),
            **({"unknown": self.unknown} if self.unknown else {}),
            **({"unfused": attrs.asdict(self.unfused)} if self.unfused else {}),
            "rows": [attrs.asdict(row) for row in self.rows or ()],
        }


def read_kernels(messages: Iterable[str], layers: int) -> Kernels:
    """The kernels from the builder's messages; `layers` is the number of attention layers in the graph."""
    tables = [message for message in messages if message.startswith("Layers:")]
    if len(tables) != 1:
        count = "no table of layers" if not tables else f"{len(tables)} tables of layers"
        return Kernels(layers=layers, unknown=f"the builder logged {count}")
    rows, host = [], 0
    for line in tables[0].removeprefix("Layers:").strip("\n").split("\n\n", 1)[0].split("\n"):
        match = _ROW.fullmatch(line.strip())
        if match is None:
            return Kernels(layers=layers, unknown="the builder's table of layers has a row of an unknown kind")
        if match["type"] in HOST_STEPS:
            host += 1
        else:  # an unknown type counts as a kernel, so that the number is never too small
            parts = (_NODE.fullmatch(part.strip()) for part in match["metadata"].split(_SEPARATOR))
            nodes = tuple(node[1] for node in parts if node)
            rows.append(Kernel(name=match["name"], type=match["type"], nodes=nodes))
    if not rows:
        return Kernels(layers=layers, unknown="the builder's table of layers holds no kernel")
    return Kernels(layers=layers, rows=tuple(rows), host_steps=host)


def read_memory(messages: Iterable[str]) -> dict[str, int | None]:
    """Bytes of scratch, activation and weight memory that the builder plans for; None where it did not log them."""
    memory: dict[str, int | None] = dict.fromkeys(_MEMORY)
    for message in messages:
        for key, pattern in _MEMORY.items():
            match = pattern.fullmatch(message.strip())
            if match is not None:
                memory[key] = int(match[1])
    return memory
