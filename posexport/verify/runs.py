"""A file's run on one runtime under way, and its answer on as many sets of inputs as fit in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import attrs

from posexport.processes import KILLED, MEMORY
from posexport.runtimes import Runtime
from posexport.runtimes.base import Arrays
from posexport.runtimes.pool import Answer, Pool, result

OUT_OF_MEMORY = (MEMORY, KILLED)
"""Codes of failures because memory ran out: an error that says so, and the signal that the kernel sends then."""


@attrs.frozen
class Ran:
    """The answer of a run, the cases that it is about, and what was left out, in clauses."""

    answer: Answer
    indices: list[int]
    left_out: tuple[str, ...] = ()


@attrs.frozen
class Run:
    """A run of a file on one runtime under way, on the cases with these indices, with these options."""

    answer: Future[Answer]
    indices: list[int]
    path: Path
    options: Mapping[str, Any]

    def where_memory_is_enough(self, pool: Pool, row: Runtime, inputs: Sequence[Arrays]) -> Ran:
        """The answer on as many of the cases as fit in memory; `inputs` are those of all cases.

        If memory ran out, or the kernel ended the process, the smaller half of the inputs is tried, and again half of
        these. If a file does not even run on the smallest, its answer is that failure.
        """
        indices, answer = self.indices, result(self.answer)
        by_size = sorted(indices, key=lambda index: sum(array.nbytes for array in inputs[index].values()))
        while answer.failure is not None and answer.failure.code in OUT_OF_MEMORY and len(indices) > 1:
            indices = sorted(by_size[: len(indices) // 2])
            answer = result(pool.submit(row, self.path, [inputs[index] for index in indices], self.options))
        if len(indices) == len(self.indices) or answer.failure is not None:
            return Ran(answer, indices)
        left = f"memory ran out on larger inputs: {len(indices)} of {len(self.indices)} sets of inputs were tried"
        return Ran(answer, indices, (left,))
