"""The float64 evaluation of a file on each case, and its honest evaluation in the file's own dtypes, in a worker.

A case that float64 can't evaluate doesn't fit the graph: the error tells which fixed sizes or tables the graph
contains. If the own dtypes are far off on a case, it is evaluated again in float64, with the whole numbers and truth
values that the own dtypes compute from floats. For example, if float64 puts a distance in another bucket, that is not a
fault of the runtime.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import attrs

from posexport.errors import Reason
from posexport.graphs.evaluator import EVALUATOR
from posexport.runtimes import TORCH_WORKER
from posexport.runtimes.base import Arrays
from posexport.runtimes.module_reference import MODULE
from posexport.runtimes.pool import Answer, Pool, result
from posexport.verify.rounding import DRAWS, last_bits_changed


def evaluate(
    pool: Pool, path: Path, arrays: Sequence[Arrays], options: Mapping[str, Any], wide: Mapping[str, int] | None = None
) -> Future[Answer]:
    """Evaluate a file in the worker that already has torch loaded, or the user's `module` in a worker of its own."""
    if "module" in options:
        return pool.submit(MODULE, path, arrays, options, wide=wide)
    return pool.submit(EVALUATOR, path, arrays, options, key=TORCH_WORKER, wide=wide)


GROUP, GROUP_BYTES = 16, 2**26
"""How many cases with large weights are evaluated at a time, and the most bytes of their inputs.

A single case may have more bytes. The weights are then read and converted once for all of these cases.
"""


def starts_of(sizes: Sequence[int], most: int) -> list[int]:
    """Where groups of cases begin, if the inputs of cases have these bytes. Each group has at most `most` cases."""
    starts, held = [0], 0
    for index, size in enumerate(sizes):
        if index > starts[-1] and (index - starts[-1] == most or held + size > GROUP_BYTES):
            starts.append(index)
            held = 0
        held += size
    return starts


@attrs.define
class Evaluation:
    """The evaluations of one file on one case: `exact` in float64, `own` in its dtypes, and `failure` if one failed."""

    exact: Arrays = attrs.field(factory=dict)
    own: list[Arrays] = attrs.field(factory=list)
    failure: Reason | None = None
    decided: bool = False


class Reference:
    """The evaluations of the file at `path`, or of the `module` that it was exported from, started at once.

    `arrays` are the inputs of each case. `dtype` is that of a module's honest evaluation, by default the module's own.
    Only a few columns of `wide` outputs are kept. `large` says that the weights are large.
    """

    def __init__(
        self,
        pool: Pool,
        path: Path,
        arrays: Sequence[Arrays],
        own: bool = True,
        module: str | None = None,
        dtype: str | None = None,
        wide: Mapping[str, int] | None = None,
        large: bool = False,
    ) -> None:
        self._wide = wide
        self._pool, self._path, self._arrays = pool, path, arrays
        self._options = {} if module is None else {"module": module}
        self._own_options = {"wide": False, **({} if dtype is None else {"dtype": dtype})}
        self._starts = starts_of([sum(array.nbytes for array in one.values()) for one in arrays], GROUP if large else 1)
        self._exact = self._submit_groups({})
        self._own = self._submit_groups(self._own_options) if own else []
        self._known: dict[int, Evaluation] = {}
        self._draws: dict[int, list[Arrays]] = {}

    def _submit_groups(self, options: Mapping[str, Any]) -> list[Future[Answer]]:
        ends = [*self._starts[1:], len(self._arrays)]
        return [
            self._submit(self._arrays[start:end], options)
            for start, end in zip(self._starts, ends, strict=True)
            if start < end
        ]

    def _submit(self, arrays: Sequence[Arrays], options: Mapping[str, Any]) -> Future[Answer]:
        return evaluate(self._pool, self._path, arrays, {**self._options, **options}, self._wide)

    def _answered(self, groups: Sequence[Future[Answer]], index: int, options: Mapping[str, Any]) -> Answer:
        """The answer for one case. If the group of the case failed, the case is evaluated by itself."""
        number = bisect_right(self._starts, index) - 1
        start, end = [*self._starts, len(self._arrays)][number : number + 2]
        answer = result(groups[number])
        if answer.failure is None:
            return attrs.evolve(answer, outputs=answer.outputs[index - start : index - start + 1])
        return answer if end - start == 1 else result(self._submit([self._arrays[index]], options))

    def evaluation(self, index: int) -> Evaluation:
        """The evaluations on a case; waits for them."""
        if index not in self._known:
            known = self._known[index] = Evaluation()
            for groups, options, keep in ((self._exact, {}, "exact"), (self._own, self._own_options, "own")):
                if not groups or known.failure is not None:
                    continue
                answer = self._answered(groups, index, options)
                if answer.failure is not None:
                    known.failure = answer.failure
                elif keep == "exact":
                    known.exact = answer.outputs[0]
                else:
                    known.own.append(answer.outputs[0])
        return self._known[index]

    def decide(self, index: int) -> Evaluation | None:
        """The evaluation with the decisions of the own dtypes; None if it fails."""
        answer = result(self._submit([self._arrays[index]], {"decisions": True}))
        if answer.failure is not None:
            return None
        return attrs.evolve(self.evaluation(index), exact=answer.outputs[0], decided=True)

    def replace(self, index: int, evaluation: Evaluation) -> None:
        """Use another evaluation for a case."""
        self._known[index] = evaluation

    def draw_again(self, index: int) -> None:
        """Also evaluate copies of a case in the own dtypes, whose inputs and weights differ in their last bits."""
        known = self.evaluation(index)
        if len(known.own) < 2:
            known.own += self.draws(index)

    def draws(self, index: int) -> list[Arrays]:
        """The evaluations of such copies."""
        if index not in self._draws:
            futures = [
                self._submit([arrays], {**self._own_options, "last_bits": seed})
                for seed, arrays in enumerate(last_bits_changed(self._arrays[index], index))
            ]
            answers = [result(future) for future in futures[:DRAWS]]
            self._draws[index] = [answer.outputs[0] for answer in answers if answer.failure is None]
        return self._draws[index]
