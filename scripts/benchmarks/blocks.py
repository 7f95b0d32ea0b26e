"""The blocks that benchmarks compare, named `encoding` or `encoding:parameter=value`."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from plain_torch import PLAIN, PlainAttention, plain_block

from posexport.custom_ops.operator import Operator
from posexport.models import ENCODINGS, read_spec
from posexport.models.block import build_block
from posexport.spec.spec import Spec


def names(quick: bool) -> list[str]:
    """Every encoding that a textbook block is written for, with its defaults, and the other layout of rope."""
    return ["rope"] if quick else [*PLAIN, "rope:layout=half"]


def parameters_of(name: str) -> tuple[str, dict[str, Any]]:
    """The encoding of a named block and its parameters; tables of trained positions reach 1024."""
    encoding, _, rest = name.partition(":")
    parameters: dict[str, Any] = dict([rest.split("=")]) if rest else {}
    if encoding == "learned":
        parameters["max_positions"] = 1024
    return encoding, parameters


def spec(name: str, hidden: int, heads: int, **fields: object) -> Spec:
    """The spec of a named block."""
    encoding, parameters = parameters_of(name)
    return read_spec(
        {"encoding": {"name": encoding, **parameters}, "hidden_size": hidden, "num_heads": heads, **fields}
    )


def positions(encoding: str, batch: int, seq: int) -> torch.Tensor:
    """Consecutive positions [batch, seq], or a grid of 32 columns [batch, seq, 2] for two axes."""
    ids = torch.arange(seq).expand(batch, seq)
    return torch.stack((ids % 32, ids // 32), -1) if ENCODINGS[encoding].axes == 2 else ids.contiguous()


def plain(name: str, hidden: int, heads: int, weights: Mapping[str, torch.Tensor]) -> PlainAttention:
    """The same block in plain torch."""
    encoding, parameters = parameters_of(name)
    return plain_block(encoding, hidden, heads, weights, **parameters)


def own(name: str, hidden: int, heads: int, weights: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """posexport's own block, its operators replaced by their plain torch bodies, so that torch exports those."""

    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = build_block(spec(name, hidden, heads), weights)

        def forward(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            with mock.patch.object(Operator, "__call__", lambda operator, *args: operator.eager(*args)):
                out: torch.Tensor = self.block(hidden_states, position_ids)
            return out

    return Plain()


def plain_export(block: torch.nn.Module, hidden: int, encoding: str, path: Path) -> None:
    """torch's own export at opset 18 with its default optimizations; dynamic batch and sequence."""
    inputs = (torch.zeros(2, 7, hidden), positions(encoding, 2, 7))
    dims: dict[int, Any] = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it lists torchvision's operators as missing
    with torch.no_grad(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        torch.onnx.export(
            block,
            inputs,
            path,
            dynamo=True,
            opset_version=18,
            input_names=["hidden_states", "position_ids"],
            output_names=["output"],
            dynamic_shapes=(dims,) * len(inputs),
            external_data=False,
            verbose=False,
        )
