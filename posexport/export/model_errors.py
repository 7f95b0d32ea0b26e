"""What goes wrong when a model of transformers runs or is exported, in one sentence.

The sentence names the architecture and, if it is known, the operator of the node at which torch's exporter stopped; the
frames of the error contain this node. If the exporter stopped in the code of the model, the sentence has the line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from typing import Any

import torch
from torch import nn

from posexport.errors import RequestError, said
from posexport.export.layer_kinds import LayersDifferError
from posexport.export.random_draws import draw_of
from posexport.runtimes.trace_errors import chain_of, known_kind, place_of

_SENTENCES = (RequestError, LayersDifferError, MemoryError)
"""Errors that are passed on unchanged."""

_FIXED_SIZE = ("its code fixes a size that is to vary, as a loop over rows or tokens does", "")


_MEDIA = re.compile(r"pixel|image|video|audio|sound|speech|features|protein")
"""What the name of an input contains that is no text."""


def running(model: nn.Module, decodes: bool = False) -> AbstractContextManager[None]:
    """A context in which transformers runs a model, without torch's exporter. What it raises becomes a RequestError.

    `decodes` means that the model is given tokens only.
    """
    name = type(model).__name__
    media = [one for one in signature(model.forward).parameters if decodes and _MEDIA.search(one)]

    def sentence(chain: list[BaseException]) -> str:
        why = f"{said(chain[-1])}{place_of(chain)}"
        needed = next((one for one in media if re.search(rf"\b{one}\b", str(chain[-1]))), None)
        if needed is not None:
            return f"{name} can't read tokens alone ({why}), and a file has no input for {needed}: it is not exported."
        return (
            f"transformers itself can't run {name} on the few tokens, image or sound that a trace takes ({why}): "
            "either config.json or --dtype is wrong for it, or it needs an input that files don't have. Give --layer "
            "in place of --model for one layer of it."
        )

    return _refused(sentence)


def exporting(architecture: str, cached: bool = False) -> AbstractContextManager[None]:
    """A context in which torch's exporter works on a model that runs. What it raises becomes a RequestError.

    `cached` means that the file of a decoder would have caches. Some models can be exported only without.
    """

    def sentence(chain: list[BaseException]) -> str:
        operators = [found for each in chain if (found := _operator(each)) is not None]
        known = _FIXED_SIZE if _fixes_a_size(chain[-1]) else known_kind(chain)
        where = f" because of the operator {operators[-1]}" if operators else ""
        why = said(chain[-1]) if known is None or operators else known[0]
        place = "" if operators else place_of(chain)
        return (
            f"torch can't export {architecture} as a whole{where} ({why}{place}): give "
            f"{'--kv-cache none, or ' * cached}--layer in place of --model for one layer of it."
        )

    return _refused(sentence)


@contextmanager
def exporting_some_layers() -> Iterator[None]:
    """A context in which torch's exporter works on a model with one layer of each kind.

    What it raises becomes a LayersDifferError: a model that reads the states between its layers, such as a backbone,
    may fail without all of them.
    """
    try:
        yield
    except _SENTENCES:
        raise
    except Exception as error:
        raise LayersDifferError(f"the model can't be traced without all layers: {error}") from error


def check_draws_nothing(program: torch.export.ExportedProgram, architecture: str) -> None:
    """RequestError for a model that draws random numbers outside training, as ViTMAE hides patches at random."""
    drawn = draw_of(program)
    if drawn is not None:
        raise RequestError(
            f"{architecture} draws random numbers ({drawn}), so transformers itself gives other results each time, and "
            "no file can be compared with it: it is not exported as a whole."
        )


@contextmanager
def _refused(sentence: Callable[[list[BaseException]], str]) -> Iterator[None]:
    """A context in which errors become a RequestError, with a sentence for the chain of errors."""
    try:
        yield
    except _SENTENCES:
        raise
    except Exception as error:
        raise RequestError(sentence(chain_of(error))) from error


def _operator(error: BaseException) -> str | None:
    """The operator of the node that torch's exporter translated, from the innermost frame that has a node."""
    found, trace = None, error.__traceback__
    while trace is not None:
        node: Any = trace.tb_frame.f_locals.get("node")
        if isinstance(node, torch.fx.Node) and node.op == "call_function":
            found = str(node.target)
        trace = trace.tb_next
    return found


def _fixes_a_size(error: BaseException) -> bool:
    """Whether torch compared the dynamic sizes with those that it traced; it then raises a plain ValueError."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return type(error) is ValueError and module.startswith(("torch.export.", "torch._export."))
