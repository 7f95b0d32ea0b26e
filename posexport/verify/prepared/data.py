"""A prepared file as data: what is run on it, and what its outputs must be. Imports no engine.

Arrays lie in a file of safetensors beside it, by these names: `N/input/NAME`, `N/exact/NAME` in float64, `N/ownK/NAME`
of honest evaluations in the file's dtypes, and `N/select/NAME` where only some values mean something, for case N; and
`tokens/exact` and `tokens/own` [rows, count, vocabulary] of the logits before the tokens of a decoder.
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
    """What is known of an output on a case beside its values (posexport.verify.graph.parity.Expected). `error` is the
    largest of the honest evaluations: a reference from which they are farther is not the one that was prepared."""

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
    """How a runtime runs the file: `cases` that it is fast enough for, its `options`, or why it can't take the file.
    With `excused`, its failure says nothing of the file."""

    cases: tuple[int, ...] = ()
    options: Mapping[str, Any] = attrs.field(factory=dict)
    refused: Reason | None = None
    excused: bool = False


@attrs.frozen(kw_only=True)
class PreparedTokens:
    """The tokens [rows, count] that follow prompts, each the likeliest in float64 or within the limit of it."""

    prompts: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    tolerance: Tolerance


@attrs.frozen(kw_only=True)
class PreparedFile:
    """The ONNX file `model` in a folder of its own, with the sha256 of every file there by its name.

    `reference` says whose float64 values are the truth. Few columns are known of outputs that are `wide`
    (posexport.runtimes.wide_outputs), by the number that they have.
    """

    model: str
    sha256: Mapping[str, str]
    reference: str
    cases: tuple[PreparedCase, ...]
    runs: Mapping[str, PreparedRun]
    wide: Mapping[str, int] = attrs.field(factory=dict)
    tokens: PreparedTokens | None = None
