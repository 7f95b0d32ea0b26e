"""A prepared file as data: what is run on it, and what its outputs must be. This module imports no engine.

Arrays are in a safetensors file beside it, with these names for case N: `N/input/NAME`, `N/exact/NAME` in float64,
`N/ownK/NAME` for honest evaluations in the file's dtypes, and `N/select/NAME` if only some values mean something. For a
decoder there are also `tokens/exact` and `tokens/own` [rows, count, vocabulary], the logits before its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from posexport.errors import Reason
from posexport.verify.result import Tolerance

ARRAYS = "references.tensors"
"""The file of the arrays."""


@attrs.frozen(kw_only=True)
class PreparedOutput:
    """What is known about an output on a case, except its values (posexport.verify.graph.parity.Expected).

    `error` is the largest error of the honest evaluations. If they are farther from a reference, it is not the one that
    was prepared.
    """

    name: str
    error: float
    dtype: str
    tolerance: Tolerance
    least_scale: float = 0.0
    evaluations: int = 1
    selected: bool = False


@attrs.frozen(kw_only=True)
class PreparedCase:
    """One set of inputs by name, and what the outputs must be."""

    name: str
    far_out: bool
    inputs: tuple[str, ...]
    outputs: tuple[PreparedOutput, ...]


@attrs.frozen(kw_only=True)
class PreparedRun:
    """How a runtime runs the file: the affordable `cases`, its `options`, or why it can't take the file.

    If it is `excused`, its failure says nothing about the file.
    """

    cases: tuple[int, ...] = ()
    options: Mapping[str, Any] = attrs.field(factory=dict)
    refused: Reason | None = None
    excused: bool = False


@attrs.frozen(kw_only=True)
class PreparedTokens:
    """The tokens [rows, count] that follow prompts. Each is the likeliest in float64, or so within the limit."""

    prompts: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    tolerance: Tolerance


@attrs.frozen(kw_only=True)
class PreparedFile:
    """The ONNX file `model` in a folder of its own, with the sha256 of every file there by name.

    `reference` says whose float64 values are the truth. `wide` has the outputs of which only a few columns are kept
    (posexport.runtimes.wide_outputs), with the number of columns that they have.
    """

    model: str
    sha256: Mapping[str, str]
    reference: str
    cases: tuple[PreparedCase, ...]
    runs: Mapping[str, PreparedRun]
    wide: Mapping[str, int] = attrs.field(factory=dict)
    tokens: PreparedTokens | None = None
