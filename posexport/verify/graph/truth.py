"""What the outputs of a file must be: the float64 evaluation of the file itself, or of what it is held against, another
file or a torch module.

The yardstick is the rounding error of an honest evaluation in the dtypes of the file that is the truth. A file of a
coarser dtype that is held against another may have its own rounding error as well, never an error of another kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import attrs
import numpy as np

from posexport.errors import Reason
from posexport.graphs.baked import agree
from posexport.runtimes.base import Arrays
from posexport.runtimes.module_reference import checkpoint_of
from posexport.runtimes.pool import Pool
from posexport.runtimes.tensors import NUMPY_DTYPES, forget_pages
from posexport.runtimes.wide_outputs import columns_of
from posexport.spec.contract import split_layer
from posexport.spec.input_roles import is_state
from posexport.verify.graph.cases import GraphCase
from posexport.verify.graph.outputs import TokenAxes, selected, token_axes
from posexport.verify.graph.parity import Expected, coarser, own_error_share, tolerance_of
from posexport.verify.graph.reference import Evaluation, Reference
from posexport.verify.graph.subject import GraphSubject
from posexport.verify.parity import UNCLEAR
from posexport.verify.result import Tolerance

Array = np.ndarray[Any, Any]


def converted(arrays: Arrays, subject: GraphSubject) -> Arrays:
    """Inputs in the dtypes of another file; those that have them are the same arrays."""
    dtypes = {name: NUMPY_DTYPES.get(dtype) or np.dtype(dtype) for name, (_, dtype) in subject.inputs.items()}
    return {name: array.astype(dtypes[name], copy=False) for name, array in arrays.items()}


ROUNDING = 2.0
"""Two files that store or compute their constants otherwise may differ in float64 by so many rounding errors."""

LUCK = 4.0
"""One draw of rounding errors may be so many times smaller than others: differences up to this are held to several."""


@attrs.frozen
class Difference:
    """How far two files are from each other in float64: as a part of the root mean square, and of what the rounding of
    constants explains, in this output on this case."""

    share: float = 0.0
    of_rounding: float = 0.0
    output: str = ""
    case: str = ""

    def __str__(self) -> str:
        at = f", in {self.output!r} on {self.case}" if self.share else ""
        return f"both in float64 differ by {self.share:.2g} of the root mean square{at}"


def _shapes(arrays: Arrays) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in arrays.items()}


def module_reference(
    pool: Pool, subject: GraphSubject, arrays: Sequence[Arrays], module: str, wide: Mapping[str, int] | None = None
) -> Reference:
    """The evaluations of a module; that of a checkpoint rounds as the file does, whose dtype may be another."""
    dtype = None if checkpoint_of(module) is None else subject.dtype
    return Reference(pool, subject.path, arrays, module=module, dtype=dtype, wide=wide, large=subject.is_large)


class Truth:
    """The evaluations of a file, or of the file or `module` that it is held `against`, on all cases, under way from the
    start."""

    def __init__(
        self,
        pool: Pool,
        subject: GraphSubject,
        cases: Sequence[GraphCase],
        against: GraphSubject | None = None,
        module: str | None = None,
    ) -> None:
        self.subject, self.against, self.cases = subject, against, cases
        arrays = [case.arrays for case in cases]
        reference = partial(Reference, pool, wide=subject.wide, large=subject.is_large)
        self._coarser = against is not None and coarser(subject.dtype, against.dtype) != against.dtype
        self._itself: Reference | None = None
        if module is not None:
            self._reference = module_reference(pool, subject, arrays, module, subject.wide)
            self._itself = reference(subject.path, arrays, own=False)
        elif against is None:
            self._reference = reference(subject.path, arrays)
        else:
            self._reference = reference(against.path, [converted(one, against) for one in arrays])
            self._itself = reference(subject.path, arrays, own=self._coarser)
        self.decided: list[int] = []

    @cached_property
    def untried(self) -> dict[int, Reason]:
        """The cases that could not be evaluated, by their number, with the reason; waits for all evaluations."""
        failures: dict[int, Reason] = {}
        for index in range(len(self.cases)):
            for reference in filter(None, (self._reference, self._itself)):
                failure = reference.evaluation(index).failure
                if failure is not None:
                    failures.setdefault(index, failure)
        return failures

    @cached_property
    def refused(self) -> dict[int, Reason]:
        """The cases that the other file or the module takes and this one doesn't, by their number, with the reason;
        none where this file can't be evaluated at all, which says nothing of the inputs."""
        if self._itself is None or not self.tried:
            return {}
        return self._failures_of(self._itself, self._reference)

    @cached_property
    def taken_alone(self) -> dict[int, Reason]:
        """The cases that this file takes and the other file or the module doesn't, by their number, with the reason."""
        return {} if self._itself is None else self._failures_of(self._reference, self._itself)

    def _failures_of(self, one: Reference, other: Reference) -> dict[int, Reason]:
        """Why the first fails on cases on which the other doesn't."""
        failures = {index: one.evaluation(index).failure for index in range(len(self.cases))}
        return {
            index: failure
            for index, failure in failures.items()
            if failure is not None and other.evaluation(index).failure is None
        }

    @cached_property
    def tried(self) -> list[int]:
        """The numbers of the other cases. Where the own dtypes are far from float64, but near it once it has their
        whole numbers and truth values, those count."""
        tried = [index for index in range(len(self.cases)) if index not in self.untried]
        for index in tried:
            if self._share(index) * UNCLEAR <= self._ceiling:
                continue
            before = self._reference.evaluation(index)
            decided = self._reference.decide(index)
            if decided is not None:
                self._reference.replace(index, decided)
                if self._share(index) * UNCLEAR <= self._ceiling:
                    self.decided.append(index)
                else:
                    self._reference.replace(index, before)
        return tried

    @property
    def agrees(self) -> bool:
        """Whether all cases can be evaluated, and axes of outputs have the sizes that the graph says."""
        given, made = self.subject.inputs, self.subject.outputs
        return not self.untried and all(
            agree(given, made, _shapes(case.arrays), _shapes(self._reference.evaluation(index).exact))
            for index, case in enumerate(self.cases)
        )

    @property
    def _ceiling(self) -> float:
        return tolerance_of(self.subject.dtype, self.subject.dtype).ceiling

    def _share(self, index: int) -> float:
        return max(map(own_error_share, self.expected(index)), default=0.0)

    @cached_property
    def _axes(self) -> dict[str, TokenAxes | None]:
        """The axes of tokens of each output."""
        indices = [index for index in range(len(self.cases)) if index not in self.untried]
        exact = [self._reference.evaluation(index).exact for index in indices]
        cases = [self.cases[index] for index in indices]
        names = dict.fromkeys(name for outputs in exact for name in outputs)
        return {name: token_axes(name, cases, [outputs[name].shape for outputs in exact]) for name in names}

    def expected(self, index: int) -> list[Expected]:
        """What each output must be on a case. What was read of other cases is forgotten where they may be many times
        the weights."""
        if self.subject.is_large:
            forget_pages()
        evaluation, case = self._reference.evaluation(index), self.cases[index]
        itself = self._itself.evaluation(index) if self._itself is not None and self._coarser else None
        found = []
        for name, exact in evaluation.exact.items():
            dtype = self.subject.outputs[name][1] if name in self.subject.outputs else ""
            found.append(
                Expected(
                    name=name,
                    exact=exact,
                    own=[outputs[name] for outputs in evaluation.own] + _rounded(name, exact, itself),
                    select=selected(case, self._axes[name], exact.shape),
                    dtype=dtype,
                    tolerance=self.tolerance(name),
                    least_scale=self._least_scale(name, exact),
                    columns=columns_of(exact.shape, self.subject.wide.get(name)),
                )
            )
        return found

    def _least_scale(self, name: str, exact: Array) -> float:
        """The least scale of an output's errors: 1 of parts of 1, and the largest value of those of a softmax and of
        states, whose heads decay in their own ways and differ in size by orders of magnitude."""
        kind = self.subject.bounded.get(name, "")
        if kind == "Softmax" or is_state(name):
            return float(np.abs(exact).max(initial=0.0))
        return 1.0 if kind else 0.0

    def tolerance(self, name: str) -> Tolerance:
        """The tolerance of an output."""
        dtype = self.subject.outputs[name][1] if name in self.subject.outputs else ""
        mains = self.subject.dtype if self.against is None else coarser(self.subject.dtype, self.against.dtype)
        return tolerance_of(dtype, mains)

    def draw_again(self, index: int) -> None:
        """Take the errors of the honest evaluation on copies of a case too."""
        self._reference.draw_again(index)
        if self._itself is not None and self._coarser:
            self._itself.draw_again(index)

    def left_out(self) -> Iterator[str]:
        """Of which outputs some columns alone were compared."""
        for name, width in self.subject.wide.items():
            arrays = [self._reference.evaluation(index).exact.get(name) for index in self.tried]
            columns = [array.shape[-1] for array in arrays if array is not None]
            if few := sum(count != width for count in columns):
                yield (
                    f"{min(columns):,} of {width:,} columns of {name!r} were compared on the {few} sets of inputs with "
                    f"the most tokens, all on {len(columns) - few}"
                )

    @cached_property
    def padded(self) -> bool:
        """Whether some output has tokens that are padding, which are not compared."""
        return any(each.select is not None for index in self.tried for each in self.expected(index))

    @cached_property
    def difference(self) -> Difference | None:
        """How far the file is from the one it is held against, both in float64; None without such a file.

        Where that is more than the rounding of constants explains, the one that is worst by this measure counts.
        """
        if self._itself is None:
            return None
        return max((Difference(), *self._differences), key=lambda one: one.of_rounding)

    @property
    def first_layer(self) -> int | None:
        """Of a whole model that is another function than the module: the first layer whose cache differs in float64;
        None where no cache does."""
        differ = {one.output for one in self._differences if one.of_rounding > 1}
        found = filter(None, map(split_layer, differ))
        return min((layer for before, layer, kind in found if before == "present" and kind), default=None)

    @cached_property
    def _differences(self) -> list[Difference]:
        """How far each output on each case is from that of the other file, both in float64."""
        itself = self._itself
        if itself is None:
            return []
        found = []
        for index in self.tried:
            mine = itself.evaluation(index).exact
            for each in self.expected(index):
                if each.name in mine and mine[each.name].shape == each.exact.shape:
                    share = own_error_share(attrs.evolve(each, own=[mine[each.name]]))
                    rounding = max(ROUNDING * own_error_share(each), each.tolerance.floor)
                    if rounding < share <= LUCK * rounding:
                        rounding = max(rounding, ROUNDING * self._largest_own_share(index, each))
                    found.append(Difference(share, share / rounding, each.name, self.cases[index].name))
        return found

    def _largest_own_share(self, index: int, each: Expected) -> float:
        """The largest of several draws of rounding errors, which no comparison with a runtime sees."""
        draws = (outputs.get(each.name) for outputs in self._reference.draws(index))
        return max((own_error_share(attrs.evolve(each, own=[one])) for one in draws if one is not None), default=0.0)


def _rounded(name: str, exact: Array, itself: Evaluation | None) -> list[Array]:
    """The exact values with the rounding errors that the file itself has."""
    if itself is None or name not in itself.exact or itself.exact[name].shape != exact.shape:
        return []
    if exact.dtype.kind in "biu":
        return []
    return [exact + (np.asarray(own[name]).astype(np.float64) - itself.exact[name]) for own in itself.own]
