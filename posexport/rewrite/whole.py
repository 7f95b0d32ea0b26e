"""Evidence for a whole rewritten graph: all its outputs before and after, in float64, on the same drawn inputs.

Sites are tested one by one, with drawn features (posexport.rewrite.evidence); here they are tested together, with the
model's own features. Only tokens that are not padding count: padding sees no key, and its outputs differ between
runtimes too.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np
import onnx_ir as ir
import torch

from posexport.errors import Reason, RequestError
from posexport.graphs.attention.dataflow import bodies
from posexport.graphs.draw import DrawnInputs
from posexport.graphs.evaluate import Evaluator
from posexport.graphs.node_arguments import ROUNDING
from posexport.rewrite.shared_cache import buffered, returned_caches
from posexport.runtimes.tensors import to_tensors

LIMIT = 1e-7
"""The largest difference, as a part of the largest value of an output. Rounding of float64 grows through the layers of
a model, but not beyond this."""

FILL = 1e30
"""Numbers farther from zero than this are not used as a scale, if they are the same in both graphs.

They are, for example, logits of tokens that are never chosen.
"""

WORK = 5e10
"""The most that all cases may cost together, in weights times tokens.

Each case costs CALL tokens more, since the weights are converted to float64 for each. There are at least MIN_CASES.
"""

CALL, MIN_CASES = 50, 3

NARROW_CASES = 3
"""The number of cases with padding that are also evaluated in the dtypes of the file.

There, two masks may add up to minus infinity, which rows of padding then spread as NaN. In float64 they are finite.
"""

DIFFERS, NOT_TESTED = "whole-graph-differs", "not-tested"
"""Codes of reasons why a whole graph differs, or was not tested."""


@attrs.frozen(kw_only=True)
class WholeEvidence:
    """The largest difference of an output, relative to its largest value, the number of cases, and the problem.

    `problem` says how the graphs differ. `untested` says why there is no case. `left` are outputs that have no finite
    number in any case.
    """

    error: float = 0.0
    cases: int = 0
    problem: Reason | None = None
    untested: Reason | None = None
    left: tuple[str, ...] = ()


def whole_evidence(
    before: ir.Model, after: ir.Model, cases: Sequence[DrawnInputs], buffers: Sequence[str] = (), few: int | None = None
) -> WholeEvidence:
    """What the cases show about two graphs; `buffers` are the inputs of `after` that are caches of a fixed length.

    One case with more queries than `few` is tried if there is one.
    """
    old, new = Evaluator(before), Evaluator(after)
    outputs = [value.name or "" for value in before.graph.outputs]
    missing = [name for name in outputs if name not in {value.name for value in after.graph.outputs}]
    if missing:
        return WholeEvidence(problem=_differs(f"it has no output {missing[0]!r}"))
    outputs += _read_by_unread(before, cases)
    twice = next(_given_twice(before, after), None)
    if twice is not None:  # runtimes refuse that
        return WholeEvidence(problem=_differs(f"two of its nodes give {twice!r}"))
    error, tried, untested = 0.0, 0, Reason(NOT_TESTED, "no inputs were drawn")
    computable, finite = set[str](), set[str]()
    narrow, returned = NARROW_CASES, returned_caches(before, buffers)
    for case in _affordable(before, cases, few):
        try:
            expected = _evaluated(old, case.arrays, outputs)
        except RequestError as problem:  # the model itself takes no such inputs
            untested = Reason(NOT_TESTED, f"float64 can't be computed: {problem}".rstrip("."))
            continue
        computable |= set(expected)
        if set(expected) != computable:  # the model takes such inputs only in part, as positions beyond a table
            continue
        arrays = buffered(case, buffers, after) if buffers else case.arrays
        lengths = {output: arrays[cache].shape[2] for output, cache in returned.items()}
        try:
            actual = new.run(to_tensors(arrays), list(expected))
        except RequestError:
            return WholeEvidence(problem=_differs(f"it takes no inputs such as {case.label}"))
        told = {name for name, want in expected.items() if bool(torch.isfinite(want).any())}
        finite |= told
        tried += bool(told)
        if not told:  # numbers that are none in both graphs say nothing
            untested = Reason(NOT_TESTED, f"no output is finite in float64, for example on {case.label}")
        for name, want in expected.items():
            have = _used(actual[name], want, lengths.get(name))
            if want.shape != have.shape:
                text = f"output {name!r} has shape {list(have.shape)} instead of {list(want.shape)}"
                return WholeEvidence(problem=_differs(f"{text} on {case.label}"))
            error = max(error, _difference(want, have, case))
            if not error <= LIMIT:
                text = f"output {name!r} differs by {error:.2g} of its largest value on {case.label}"
                return WholeEvidence(error=error, cases=tried, problem=_differs(text))
        if narrow and not case.tokens.all():
            narrow -= 1
            overflowing = _overflowing(before, after, case, arrays, list(expected), lengths)
            if overflowing is not None:
                text = f"in the dtypes of the file output {overflowing!r} is finite in only one of the two"
                return WholeEvidence(error=error, cases=tried, problem=_differs(f"{text} on {case.label}"))
    left = tuple(value.name or "" for value in before.graph.outputs if value.name not in finite) if tried else ()
    return WholeEvidence(error=error, cases=tried, untested=None if tried else untested, left=left)


def _read_by_unread(model: ir.Model, cases: Sequence[DrawnInputs]) -> list[str]:
    """The floats that are read by operators whose outputs are drawn like inputs (posexport.graphs.unread)."""
    inputs = {value.name for value in model.graph.inputs}
    drawn = {name for case in cases[:1] for name in case.arrays} - inputs
    nodes = [node for node in model.graph if any(value.name in drawn for value in node.outputs)]
    read = [value for node in nodes for value in node.inputs if value is not None and value.producer() is not None]
    quantised = {value for value in read if value.dtype is not None and not value.dtype.is_floating_point()}
    rounded = {value for value in read if (node := value.producer()) and node.op_type in ROUNDING} | quantised
    return [value.name or "" for value in dict.fromkeys(read) if value not in rounded]


def _used(have: torch.Tensor, want: torch.Tensor, length: int | None) -> torch.Tensor:
    """Of a buffer with `length` places, the part that a growing cache has; of other outputs, which have None, all."""
    return have[:, :, : want.shape[2]] if length is not None and have.shape[2:3] == (length,) else have


def _overflowing(
    before: ir.Model,
    after: ir.Model,
    case: DrawnInputs,
    arrays: Mapping[str, np.ndarray[Any, Any]],
    outputs: Sequence[str],
    lengths: Mapping[str, int],
) -> str | None:
    """The first output that is finite at different tokens in the two graphs, in the dtypes of the file.

    `arrays` are the inputs of `after`, and `lengths` the lengths of the buffers that it returns. Also None if these
    dtypes can't be evaluated.
    """
    try:
        expected = Evaluator(before, wide=False).run(to_tensors(case.arrays), outputs)
        actual = Evaluator(after, wide=False).run(to_tensors(arrays), outputs)
    except RequestError:
        return None
    for name, want in expected.items():
        have = _used(actual[name], want, lengths.get(name))
        finite = torch.isfinite(want), torch.isfinite(have)
        if all(bool((a != b).any()) for a, b in _selections(*finite, case)):
            return name
    return None


def _evaluated(
    evaluator: Evaluator, arrays: Mapping[str, np.ndarray[Any, Any]], outputs: Sequence[str]
) -> dict[str, torch.Tensor]:
    """The outputs that are tensors and can be evaluated; RequestError if there are none."""
    try:
        values = evaluator.run(to_tensors(arrays), outputs)
    except RequestError as error:
        values, first = {}, error
        for name in outputs:
            with contextlib.suppress(RequestError):
                values |= evaluator.run(to_tensors(arrays), [name])
        if not values:
            raise first from None
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def _differs(text: str) -> Reason:
    return Reason(DIFFERS, f"the whole graph would be another, {text.rstrip('.')}")


def _affordable(model: ir.Model, cases: Sequence[DrawnInputs], few: int | None = None) -> list[DrawnInputs]:
    """The cases that a model of this size can be evaluated on: all, or some from every part of the list.

    A case with more queries than `few` is always among them.
    """
    tensors = (value.const_value for value in model.graph.initializers.values())
    weights = sum(math.prod(tensor.shape.numpy()) for tensor in tensors if tensor is not None and len(tensor.shape) > 1)
    for count in range(len(cases), 0, -1):
        chosen = [cases[(2 * at + 1) * len(cases) // (2 * count)] for at in range(count)]
        if count <= MIN_CASES or weights * sum(case.tokens.size + CALL for case in chosen) <= WORK:
            for at, is_needed in ((-1, _is_unseen), (0, _is_biased), (count // 2, partial(_has_more, few))):
                needed = [case for case in cases if is_needed(case)]
                if needed and not any(map(is_needed, chosen)):
                    chosen[at] = needed[0]
            return chosen
    return []


def _is_biased(case: DrawnInputs) -> bool:
    return case.kinds.scores == "biased"


def _has_more(few: int | None, case: DrawnInputs) -> bool:
    return few is not None and case.tokens.shape[-1] > few


def _is_unseen(case: DrawnInputs) -> bool:
    return case.kinds.unseen


def _difference(want: torch.Tensor, have: torch.Tensor, case: DrawnInputs) -> float:
    """The largest difference as a part of the largest value; infinite if another value is finite.

    If tokens see no key, only finite values count: the graph promises nothing else there.
    """
    selections = [*_selections(want, have, case)]
    if case.kinds.unseen:
        selections = [(a[torch.isfinite(a)], b[torch.isfinite(a)]) for a, b in selections]
    if not want.is_floating_point():
        return 0.0 if min(float((a != b).sum()) for a, b in selections) == 0 else math.inf
    return min(_relative(a, b) for a, b in selections)


def _selections(
    want: torch.Tensor, have: torch.Tensor, case: DrawnInputs
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both as a whole, and for each axis that may be that of tokens: without padding and free places of buffers.

    Rows are on one of the first two axes: keys and values of a layer may be one output [2, rows, heads, tokens, size].
    """
    yield want, have
    for rows, axis in itertools.permutations(range(want.dim()), 2):
        for keys in (case.tokens, case.keys, case.slots, case.encoder_keys) if rows < 2 else ():
            if (want.shape[rows], want.shape[axis]) == keys.shape and not keys.all():
                seen = torch.from_numpy(keys)
                yield want.movedim((rows, axis), (0, 1))[seen], have.movedim((rows, axis), (0, 1))[seen]


def _relative(want: torch.Tensor, have: torch.Tensor) -> float:
    same = (want == have) | (torch.isnan(want) & torch.isnan(have))
    if bool(same.all()):
        return 0.0
    different, actual = want[~same], have[~same]
    if not bool(torch.isfinite(different).all() and torch.isfinite(actual).all()):
        return math.inf
    is_fill = same & (want.abs() > FILL)
    largest = float(want[torch.isfinite(want) & ~is_fill].abs().max())
    return float((different - actual).abs().max()) / max(largest, 1e-300)


def _given_twice(before: ir.Model, after: ir.Model) -> Iterator[str]:
    """Names that two nodes of a graph give, and names in subgraphs that an outer graph also has.

    Names that `before` already hides in this way are left out.
    """
    names = Counter(value.name for node in after.graph for value in node.outputs if value.name)
    yield from (name for name, count in names.items() if count > 1)
    known = {*_hidden_by_inner(before.graph, frozenset())}
    yield from (name for name in _hidden_by_inner(after.graph, frozenset()) if name not in known)


def _hidden_by_inner(graph: ir.Graph, outer: frozenset[str]) -> Iterator[str]:
    """Names of values in subgraphs that a value of an outer graph also has; `outer` are the names around `graph`."""
    values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    names = {value.name for value in values if value.name}
    yield from names & outer
    for node in graph:
        for inner in bodies(node):
            yield from _hidden_by_inner(inner, outer | names)
