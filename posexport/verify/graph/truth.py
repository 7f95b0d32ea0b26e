"""What the outputs of a file must be.

That is the float64 evaluation of the file itself, or of what it is compared with: another file or a torch module. The
yardstick is the rounding error of an honest evaluation in the dtypes of the file that is the truth. If a file of a
coarser dtype is compared with another file, its own rounding error is allowed too, but no other kind of error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial

import attrs
import numpy as np

from posexport.errors import Reason
from posexport.graphs.baked import agree
from posexport.runtimes.base import Arrays
from posexport.runtimes.module_reference import checkpoint_of
from posexport.runtimes.pool import Pool
from posexport.runtimes.tensors import NUMPY_DTYPES, forget_pages
from posexport.runtimes.wide_outputs import columns_of
from posexport.spec.arrays import Array
from posexport.spec.contract import split_layer
from posexport.spec.input_roles import is_state
from posexport.verify.graph.cases import GraphCase
from posexport.verify.graph.outputs import TokenAxes, selected, token_axes
from posexport.verify.graph.parity import Expected, coarser, own_error_share, tolerance_of
from posexport.verify.graph.reference import Evaluation, Reference
from posexport.verify.graph.subject import GraphSubject
from posexport.verify.parity import UNCLEAR
from posexport.verify.result import Tolerance


def converted(arrays: Arrays, subject: GraphSubject) -> Arrays:
    """Inputs in the dtypes of another file; arrays that already have its dtype are not copied."""
    dtypes = {name: NUMPY_DTYPES.get(dtype) or np.dtype(dtype) for name, (_, dtype) in subject.inputs.items()}
    return {name: array.astype(dtypes[name], copy=False) for name, array in arrays.items()}


ROUNDING = 2.0
"""How many rounding errors two files may differ by in float64 if they store or compute constants in different ways."""

LUCK = 4.0
"""How many times smaller one draw of rounding errors may be than others.

Differences up to this are compared with several draws.
"""


HOPELESS = 3
"""On how many cases the whole numbers of a file's own dtypes may explain nothing, before they are no longer tried."""


@attrs.frozen
class Difference:
    """How far two files are from each other in float64.

    `share` is the difference as a part of the root mean square, `of_rounding` as a multiple of what the rounding of
    constants explains, in this output on this case.
    """

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
    """The evaluations of a module. A checkpoint is rounded to the dtype of the file, which may be another than its
    own."""
    dtype = None if checkpoint_of(module) is None else subject.dtype
    return Reference(pool, subject.path, arrays, module=module, dtype=dtype, wide=wide, large=subject.is_large)


class Truth:
    """The evaluations of a file, or of the file `against` or the `module` that it is compared with, on all cases.

    They are started at once.
    """

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
        """The cases that could not be evaluated, by number, with the reason; waits for all evaluations."""
        failures: dict[int, Reason] = {}
        for index in range(len(self.cases)):
            for reference in filter(None, (self._reference, self._itself)):
                failure = reference.evaluation(index).failure
                if failure is not None:
                    failures.setdefault(index, failure)
        return failures

    @cached_property
    def refused(self) -> dict[int, Reason]:
        """The cases that the other file or the module takes and this file doesn't, by number, with the reason.

        Empty if this file can't be evaluated at all, which says nothing about the inputs.
        """
        if self._itself is None or not self.tried:
            return {}
        return self._failures_of(self._itself, self._reference)

    @cached_property
    def taken_alone(self) -> dict[int, Reason]:
        """The cases that this file takes and the other file or the module doesn't, by number, with the reason."""
        return {} if self._itself is None else self._failures_of(self._reference, self._itself)

    def _failures_of(self, one: Reference, other: Reference) -> dict[int, Reason]:
        """Why `one` fails, on the cases on which `other` doesn't."""
        failures = {index: one.evaluation(index).failure for index in range(len(self.cases))}
        return {
            index: failure
            for index, failure in failures.items()
            if failure is not None and other.evaluation(index).failure is None
        }

    @cached_property
    def tried(self) -> list[int]:
        """The numbers of the cases that could be evaluated.

        If the own dtypes are far from float64, but near it once float64 uses their whole numbers and truth values, then
        these count.
        """
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
        """Whether all cases can be evaluated, and the axes of outputs have the sizes that the graph declares."""
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
        """The least scale of an output's errors.

        It is 1 for bounded outputs, and the largest value for outputs of a softmax and for states. The heads of states
        decay in different ways, so their values differ by orders of magnitude.
        """
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
        """Also evaluate copies of a case honestly, for more draws of rounding errors."""
        self._reference.draw_again(index)
        if self._itself is not None and self._coarser:
            self._itself.draw_again(index)

    def left_out(self) -> Iterator[str]:
        """The outputs of which only some columns were compared."""
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
        """How far the file is from the one that it is compared with, both in float64; None without such a file.

        If several outputs differ, the one that differs most, compared with the rounding of constants, is returned.
        """
        if self._itself is None:
            return None
        return max((Difference(), *self._differences), key=lambda one: one.of_rounding)

    @property
    def first_layer(self) -> int | None:
        """The first layer whose cache differs in float64 from that of the other file; None if no cache does.

        Only differences beyond rounding count.
        """
        differ = {one.output for one in self._differences if one.of_rounding > 1}
        found = filter(None, map(split_layer, differ))
        return min((layer for before, layer, kind in found if before == "present" and kind), default=None)

    @cached_property
    def _differences(self) -> list[Difference]:
        """How far each output on each case is from that of the other file, both in float64.

        If float64 gives this file other whole numbers than its own dtypes do, as for a distance at the edge of a
        bucket, those of its own dtypes count. They are asked for until they explain nothing on HOPELESS cases.
        """
        itself, found, hopeless = self._itself, list[Difference](), 0
        if itself is None:
            return []
        for index in self.tried:
            differences = self._differences_on(index, itself.evaluation(index).exact)
            if hopeless < HOPELESS and any(one.of_rounding > 1 for one in differences):
                decided = itself.decide(index)
                again = [] if decided is None else self._differences_on(index, decided.exact)
                if again and all(one.of_rounding <= 1 for one in again):
                    differences = again
                else:
                    hopeless += 1
            found += differences
        return found

    def _differences_on(self, index: int, mine: Arrays) -> list[Difference]:
        """How far these outputs of the file on a case are from those of the other file."""
        found = []
        for each in self.expected(index):
            if each.name in mine and mine[each.name].shape == each.exact.shape:
                share = own_error_share(attrs.evolve(each, own=[mine[each.name]]))
                rounding = max(ROUNDING * own_error_share(each), each.tolerance.floor)
                if rounding < share <= LUCK * rounding:
                    rounding = max(rounding, ROUNDING * self._largest_own_share(index, each))
                found.append(Difference(share, share / rounding, each.name, self.cases[index].name))
        return found

    def _largest_own_share(self, index: int, each: Expected) -> float:
        """The largest of several draws of rounding errors. They are not used for comparisons with a runtime."""
        draws = (outputs.get(each.name) for outputs in self._reference.draws(index))
        return max((own_error_share(attrs.evolve(each, own=[one])) for one in draws if one is not None), default=0.0)


def _rounded(name: str, exact: Array, itself: Evaluation | None) -> list[Array]:
    """The exact values with the rounding errors of the file itself."""
    if itself is None or name not in itself.exact or itself.exact[name].shape != exact.shape:
        return []
    if exact.dtype.kind in "biu":
        return []
    return [exact + (np.asarray(own[name]).astype(np.float64) - itself.exact[name]) for own in itself.own]
