"""Torch's outputs in the artifact's dtype; their error is the yardstick for runtimes.

A few sets of inputs have most of the tokens. On these, torch's error is seldom a smaller part of the outputs than on
the others, since more values are compared. So torch runs on the small sets. On a large set, a runtime must be within
the limit of torch's usual error, the median of the errors on the small sets. If it is not, torch runs on that set too.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import attrs
import numpy as np

from posexport.errors import Reason
from posexport.machine import usable
from posexport.runtimes.base import Arrays
from posexport.runtimes.pool import Answer, result
from posexport.runtimes.tensors import dtype_name
from posexport.verify.blocks import absolute_errors, root_mean_square
from posexport.verify.cases import Case
from posexport.verify.ordinary import first_index, ordinary
from posexport.verify.parity import SMALLEST
from posexport.verify.result import Comparison, Tolerance
from posexport.verify.rounding import Rerun

MANY = 256
"""A set of inputs with more tokens than this is large; all rows are counted."""

ENOUGH = 16
"""If there are fewer small sets of inputs than this, torch runs on all sets at once."""


@attrs.define
class TorchOutputs:
    """Torch's outputs on `cases`: `answer` has those of the indices `known_at`; torch runs on the others if needed."""

    run: Rerun
    cases: Sequence[Case]
    known_at: Sequence[int]
    answer: Future[Answer]
    later: dict[int, Arrays] = attrs.field(factory=dict)

    @classmethod
    def submitted(cls, run: Rerun, cases: Sequence[Case], on_all: bool) -> TorchOutputs:
        """Submit the small cases to torch, or all cases if `on_all` is set."""
        indices = [index for index, case in enumerate(cases) if case.sizes["batch"] * case.sizes["seq"] <= MANY]
        if on_all or len(indices) < ENOUGH:
            indices = [*range(len(cases))]
        return cls(run, cases, indices, run([cases[index].arrays for index in indices], {}))

    @property
    def failure(self) -> Reason | None:
        """Why there are no outputs, after torch has answered."""
        return result(self.answer).failure

    def known(self) -> dict[int, Arrays]:
        """The known outputs by the index of their case."""
        return {**dict(zip(self.known_at, result(self.answer).outputs, strict=True)), **self.later}

    def ask(self, indices: Sequence[int]) -> Reason | None:
        """Run torch on those of these cases on which it was not run. Returns why it failed, None if it did not."""
        known = self.known()
        missing = [index for index in indices if index not in known]
        if not missing:
            return None
        answer = result(self.run([self.cases[index].arrays for index in missing], {}))
        if answer.failure is None:
            self.later.update(zip(missing, answer.outputs, strict=True))
        return answer.failure

    def compared(
        self,
        indices: Sequence[int],
        compare: Callable[[int, Arrays], list[Comparison]],
        within: Callable[[int, Mapping[str, float]], list[Comparison] | None],
    ) -> dict[int, list[Comparison]] | Reason:
        """The comparisons of these cases by index; or why torch failed, if it was asked and failed.

        `compare` makes them with torch's outputs on a case, `within` with torch's usual errors (`usual_shares`) if
        torch was not run.
        """
        with ThreadPoolExecutor(usable()) as threads:  # numpy lets threads run in parallel
            known = self.known()
            first = [index for index in indices if index in known]
            found = dict(zip(first, threads.map(lambda index: compare(index, known[index]), first), strict=True))
            shares = usual_shares(itertools.chain(*found.values()))
            others = [index for index in indices if index not in known]
            made = dict(zip(others, threads.map(lambda index: within(index, shares), others), strict=True))
            missing = [index for index in others if made[index] is None]
            failure = self.ask(missing)
            if failure is not None:
                return failure
            later = self.known()
            made |= zip(missing, threads.map(lambda index: compare(index, later[index]), missing), strict=True)
        return {index: found.get(index) or made.get(index) or [] for index in indices}


def usual_shares(comparisons: Iterable[Comparison]) -> dict[str, float]:
    """The median of torch's errors on cases by output, as parts of the reference's root mean square."""
    shares = defaultdict[str, list[float]](list)
    for each in comparisons:
        if each.torch_error is not None and each.reference_rms:
            shares[each.output].append(each.torch_error / each.reference_rms)
    return {output: statistics.median(of_output) for output, of_output in shares.items()}


def within_usual(
    case: Case,
    reference: Arrays,
    outputs: Arrays,
    dtypes: Mapping[str, str],
    tolerance: Tolerance,
    shares: Mapping[str, float],
) -> list[Comparison] | None:
    """The comparisons of a case on which torch was not run, with its usual errors, `shares`, in place of its own.

    None if these don't suffice: an output is over the limit, or is not an array of finite numbers of ordinary size with
    the reference's shape.
    """
    comparisons = []
    if set(outputs) != set(reference):
        return None
    for name, exact in reference.items():
        output = outputs[name]
        if name not in shares or output.shape != exact.shape or dtype_name(output.dtype) != dtypes[name]:
            return None
        rms = root_mean_square(exact) if exact.size else 0.0
        if not np.isfinite(rms) or not rms or ordinary(exact) is not None:
            return None
        errors = absolute_errors(output, exact)
        index = first_index(errors)
        torch_error, error = shares[name] * rms, float(errors[index])
        limit = max(tolerance.limit(torch_error, rms), SMALLEST[dtypes[name]])
        if not error <= limit:  # false for NaN, too
            return None
        numbers = {"max_error": error, "rms_error": root_mean_square(errors), "torch_error": torch_error}
        numbers |= {"limit": limit, "reference_rms": rms, "got": float(output[index]), "reference": float(exact[index])}
        comparisons.append(Comparison.of(case.name, name, None, far_out=case.far_out, index=index, **numbers))
    return comparisons
