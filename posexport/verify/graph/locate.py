"""Where a file departs: the first node, in topological order, whose output the runtime computes differently.

Functions are inlined, and every value of the file is made an output. The failing runtime runs the file on the failing
inputs, and each value is compared with float64; the yardstick is the error of an honest evaluation. A runtime may fuse
nodes, but not if the values between them are outputs. So if no value departs, single values are made outputs, and the
first wrong one is found by bisection.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np
import onnx_ir as ir

from posexport import temporary
from posexport.artifact.graph_file import dtype_name
from posexport.artifact.graph_writer import write_graph
from posexport.errors import plain, shown
from posexport.files import staged
from posexport.graphs.load import model_at
from posexport.runtimes import Runtime
from posexport.runtimes.base import Arrays
from posexport.runtimes.integer_products import ADVICE, overflows
from posexport.runtimes.pool import result
from posexport.spec.arrays import Array
from posexport.verify.graph.cases import GraphCase
from posexport.verify.graph.outputs import selected, token_axes
from posexport.verify.graph.parity import Expected, compare, tolerance_of
from posexport.verify.graph.reference import evaluate
from posexport.verify.graph.truth import converted
from posexport.verify.result import FAILED, ONLY_AS_A_WHOLE

if TYPE_CHECKING:
    from posexport.verify.graph.job import GraphJob


LARGEST = 1_000_000_000
"""The most bytes of weights of a graph that is written again to look inside it."""

LOOSE = 4.0
"""How many times the error of outputs the values inside a graph may have, since many of them are looked at."""

COARSE = 64.0
"""How many floors of the tolerance a value may be off by if the file is compared with another one."""

SAME = 1e-9
"""The part of a value by which two files may differ in float64 and still count as the same."""


def departure(job: GraphJob, row: Runtime, index: int) -> str:
    """Where a runtime departs on the case with this number, as far as that can be found; never raises."""
    try:
        if job.subject.weight_bytes > LARGEST:
            return "the weights are too large to look inside the graph"
        with temporary.folder(job.pool.folder) as folder:
            search = _Search(job, row, job.cases[index], folder)
            return (search.between_files() if job.against is not None else None) or search.within()
    except Exception as error:  # a damaged graph may break any tool that looks into it
        return f"could not be found ({type(error).__name__}: {' '.join(str(error).split())[:200]})"


class _Search:
    """The search in one file, whose values are looked at on one case."""

    def __init__(self, job: GraphJob, row: Runtime, case: GraphCase, folder: Path) -> None:
        self._job, self._row, self._case, self._folder = job, row, case, folder
        self._model = model_at(job.path)
        self._written = 0

    def between_files(self) -> str | None:
        """The first node of the file whose output differs in float64 from the same value in the other file."""
        other = self._job.against
        assert other is not None
        theirs = model_at(other.path)
        known = {str(value.name) for node in theirs.graph for value in node.outputs if value.name}
        model = model_at(self._job.path)
        names = [str(value.name) for node in model.graph for value in node.outputs if value.name in known]
        mine = self._evaluated(self._job.path, self._case.arrays, names)
        exact = self._evaluated(other.path, converted(self._case.arrays, other), names)
        if isinstance(mine, str) or isinstance(exact, str):
            return None
        for node in model.graph:
            for value in node.outputs:
                name = str(value.name)
                if name in mine and name in exact and (how := _differs(mine[name], exact[name])):
                    return f"{_called(node)} is the first whose output differs from {other.path.name} in float64: {how}"
        return None

    def within(self) -> str:
        """The first node whose output differs between the runtime and float64."""
        self._model = model_at(self._job.path)
        nodes = list(self._model.graph)
        names = [str(value.name) for node in nodes for value in node.outputs if value.name]
        exact = self._evaluated(self._job.path, self._case.arrays, names)
        own = self._evaluated(self._job.path, self._case.arrays, names, wide=False)
        if isinstance(exact, str) or isinstance(own, str):
            return f"its values can't be evaluated: {exact if isinstance(exact, str) else own}"
        have = self._run([name for name in names if name in exact])
        if isinstance(have, str):
            return f"with its values as outputs it does not run: {' '.join(have.split())[:200].rstrip('.')}"
        for node in nodes:
            how = self._departs(node, have, exact, own)
            if how is not None:
                cause = f" ({ADVICE})" if overflows(node.op_type, self._row.name) else ""
                return f"{_called(node)} is the first whose output differs from float64: {how}{cause}"
        return self._halving(nodes, exact, own) or ONLY_AS_A_WHOLE

    def _halving(self, nodes: list[ir.Node], exact: Arrays, own: Arrays) -> str | None:
        """The first node that departs if only its outputs are added to the graph's, so that other nodes are fused.

        It is found by bisection, since what follows a fault departs too.
        """
        low, high, found = 0, len(nodes) - 1, None
        while low <= high:
            middle = (low + high) // 2
            node = nodes[middle]
            asked = [str(value.name) for value in node.outputs if value.name and str(value.name) in exact]
            have = self._run(asked) if asked else {}
            how = None if isinstance(have, str) else self._departs(node, have, exact, own)
            if how is not None:
                found, high = (
                    f"{_called(node)} differs from float64 if the nodes before it are fused: {how}",
                    middle - 1,
                )
            else:
                low = middle + 1
        return found

    def _departs(self, node: ir.Node, have: Arrays, exact: Arrays, own: Arrays) -> str | None:
        """How the outputs of a node depart, in one clause; None if they don't."""
        main = self._job.subject.dtype
        for value in node.outputs:
            name = str(value.name)
            if name not in have or name not in exact or name not in own:
                continue
            tolerance = tolerance_of("" if value.dtype is None else dtype_name(value.dtype), main)
            axes = token_axes(name, [self._case], [exact[name].shape])
            if self._job.against is not None:  # its digits count: what a cast to half precision loses is a fault
                tolerance = attrs.evolve(tolerance, floor=COARSE * tolerance.floor)
            expected = Expected(
                name=name,
                exact=exact[name],
                own=[_widened_errors(exact[name], own[name])] if self._job.against is None else [],
                select=selected(self._case, axes, exact[name].shape),
                dtype="",
                tolerance=tolerance,
                least_scale=1.0 if node.op_type in ("Softmax", "Sigmoid", "Tanh", "Erf") else 0.0,
            )
            (found, *_), _ = compare(self._case.name, [expected], {name: have[name]})
            if found.state == FAILED:
                return f"{found.reason}"
        return None

    def _evaluated(self, path: Path, arrays: Arrays, names: list[str], wide: bool = True) -> Arrays | str:
        options = {"wide": wide, "outputs": names}
        answer = result(evaluate(self._job.pool, path, [arrays], options, self._job.subject.wide))
        return answer.outputs[0] if answer.failure is None else answer.failure.text

    def _run(self, names: list[str]) -> Arrays | str:
        """The values with these names in the failing runtime, or why there are none.

        The weights are copied from file to file, so they take no memory here.
        """
        self._written += 1
        path = self._folder / f"exposed{self._written}.onnx"
        with staged() as files:
            written = write_graph(_with_outputs(self._model, names), self._job.path, path, files)
        run = self._job.runs[self._row.name]
        kept = self._job.subject.wide
        answer = result(self._job.pool.submit(self._row, path, [self._case.arrays], run.options, wide=kept))
        for name in written:
            path.with_name(name).unlink()
        return answer.outputs[0] if answer.failure is None else answer.failure.text


def _with_outputs(model: ir.Model, names: Collection[str]) -> ir.Model:
    """A copy of the model with further outputs, which have no type: runtimes infer it. Weights are not copied."""
    copy = model.clone()
    have = {output.name for output in copy.graph.outputs}
    for node in copy.graph:
        for value in node.outputs:
            if value.name in names and value.name not in have:
                value.type, value.shape = None, None
                copy.graph.outputs.append(value)
    return copy


def _called(node: ir.Node) -> str:
    operator = plain(node.op_type, 80, "")
    return f"{operator} {shown(node.name)}" if node.name else f"{operator} -> {shown(str(node.outputs[0].name))}"


def _widened_errors(exact: Array, own: Array) -> Array:
    """The honest evaluation with its errors made LOOSE times larger."""
    if exact.dtype.kind in "biu" or exact.shape != own.shape:
        return own
    with np.errstate(invalid="ignore", over="ignore"):  # two infinities, as in masks
        return np.asarray(exact + LOOSE * (own.astype(np.float64) - exact))


def _differs(mine: Array, exact: Array) -> str | None:
    """How a value of one file differs from that of another, both in float64; None if they are the same."""
    if mine.shape != exact.shape:
        return f"shape {list(mine.shape)}, not {list(exact.shape)}"
    if mine.dtype.kind in "biu" or exact.dtype.kind in "biu":
        return None if np.array_equal(mine, exact) else "other whole numbers"
    finite = np.isfinite(mine) & np.isfinite(exact)
    if (np.isfinite(mine) != np.isfinite(exact)).any():
        return "other values that are not finite"
    error, scale = (float(np.abs(values[finite]).max(initial=0.0)) for values in (mine - exact, exact))
    return None if error <= SAME * scale else f"by {error:.3g} of {scale:.3g}"
