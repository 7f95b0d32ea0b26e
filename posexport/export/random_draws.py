"""Operators of a traced program that draw random numbers, such as a dropout outside training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

_FRAME = re.compile(r'File "(.+)", line (\d+)')

_IN_TRAINING = ("train", "training")
"""Arguments that turn drawing off if they are false."""

_SHARES = ("p", "dropout_p", "dropout")
"""Arguments that turn drawing off if they are 0."""


def draw_of(program: torch.export.ExportedProgram) -> str | None:
    """The operator that draws numbers which a result depends on, with its line; None if there is none."""
    modules = [each for each in program.graph_module.modules() if isinstance(each, GraphModule)]
    drawing = next((node for each in modules for node in _used(each) if _draws(node)), None)
    if drawing is None:
        return None
    return f"{str(drawing.target).removesuffix('.default')}{_place(drawing)}"


def _used(module: GraphModule) -> list[Node]:
    """The nodes that results depend on, in order. A node that changes a tensor in place counts as one of them."""
    used: set[Node] = set()
    for node in reversed(module.graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if node.op == "output" or node in used or (schema is not None and schema.is_mutable):
            used.update((node, *node.all_input_nodes))
    return [node for node in module.graph.nodes if node in used]


def _draws(node: Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    given = _arguments(node)
    return all(given[name] for name in (*_IN_TRAINING, *_SHARES) if name in given)


def _arguments(node: Node) -> dict[str, Any]:
    """The arguments of an operator by name, with defaults."""
    schema: Any = getattr(node.target, "_schema")  # noqa: B009  a node's target may have any type
    defaults = {one.name: one.default_value for one in schema.arguments}
    return {**defaults, **dict(zip(defaults, node.args, strict=False)), **node.kwargs}


def _place(node: Node) -> str:
    """`, at line 8 of model.py`: the innermost line of the program that is not torch's; empty if none is known."""
    torch_itself = Path(torch.__file__).parent
    frames = [(Path(file), line) for file, line in _FRAME.findall(node.meta.get("stack_trace") or "")]
    own = [f", at line {line} of {file.name}" for file, line in frames if not file.is_relative_to(torch_itself)]
    return own[-1] if own else ""
