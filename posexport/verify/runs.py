"""A file's run on one runtime under way, and its answer on as many sets of inputs as fit in memory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import attrs

from posexport.errors import Reason
from posexport.processes import KILLED, MEMORY
from posexport.runtimes import Runtime
from posexport.runtimes.base import Arrays
from posexport.runtimes.pool import Answer, Pool, result
from posexport.verify.rounding import last_bits_changed

OUT_OF_MEMORY = (MEMORY, KILLED)
"""Codes of failures because memory ran out: an error that says so, and the signal that the kernel sends then."""


COPIES_BYTES = 2**30
"""About how many bytes copies of a case, and the outputs on them, may take at once."""


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

    def on_copies(self, pool: Pool, row: Runtime, arrays: Arrays, seed: int) -> list[Arrays] | Reason:
        """The outputs on copies of a case's inputs that differ in their last bits, drawn from `seed`; or why it fails
        on one.

        One request has as many copies as memory has room for, since TensorRT builds an engine for each request.
        """
        together = max(1, COPIES_BYTES // (2 * sum(array.nbytes for array in arrays.values())))
        copies, outputs = last_bits_changed(arrays, seed), list[Arrays]()
        while inputs := list(itertools.islice(copies, together)):
            answer = result(pool.submit(row, self.path, inputs, self.options))
            if answer.failure is not None:
                return answer.failure
            outputs += answer.outputs
        return outputs
