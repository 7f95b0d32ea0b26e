"""Whether a runtime makes the same tokens as transformers in float64, one after the other, with the caches of a file.

Three prompts of different lengths, padded on the left, are continued by 64 tokens, each the likeliest. transformers
then reads each row by itself, in one pass without a cache: each token must also be the likeliest in float64 after the
same tokens. If another token is likelier in float64, but by at most twice the limit of an error of logits, either is
right.

If it is not, but transformers makes the same token from padded rows, the model itself lets padding affect its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from posexport.errors import NotFiniteError, PosexportError, Reason
from posexport.graphs.axes import BATCH, PAST, SEQ
from posexport.graphs.draw import draw_inputs
from posexport.graphs.roles import Role
from posexport.runtimes import ORT, Runtime
from posexport.runtimes.base import Arrays
from posexport.runtimes.generation import NOT_FINITE_LOGITS, Generated, GenerationOptions, left_padded
from posexport.runtimes.generation_process import generate_in_child
from posexport.runtimes.pool import Pool
from posexport.verify.graph.judge_tokens import has_likeliest, judge_tokens
from posexport.verify.graph.parity import tolerance_of
from posexport.verify.graph.reference import Evaluation
from posexport.verify.graph.subject import GraphSubject
from posexport.verify.graph.truth import module_reference
from posexport.verify.result import (
    FAILED,
    GENERATION,
    INCONCLUSIVE,
    NO_LOOP,
    NOT_RUN,
    OTHER_TOKENS,
    PASSED,
    REFERENCE_FAILED,
    State,
    Tolerance,
    Verdict,
)

TOKENS = 64
"""New tokens of each row."""

LENGTHS = (9, 2, 14)
"""Tokens of the prompts."""

READS_PADDING = (
    "transformers itself makes other tokens of a row that is padded on the left than of the row alone, and so does the "
    "file: give it rows of one length"
)
"""What is stated about a model that lets padding affect its rows."""


def is_decoder(subject: GraphSubject) -> bool:
    """Whether a file of a whole model decodes tokens by itself: unlike an encoder, it has caches or positions."""
    named = {*subject.inputs}
    needed = {"input_ids", "attention_mask"} <= named and "logits" in subject.outputs
    return needed and ("position_ids" in named or any(name.startswith("past_key_values.") for name in named))


@attrs.frozen(kw_only=True)
class GreedyCheck:
    """The check of a decoder's file against the `module`, the folder of a checkpoint.

    `trained_length` is the number of positions that the model was trained for, None if that is not known.
    """

    pool: Pool
    subject: GraphSubject
    roles: Mapping[str, Role]
    module: str
    trained_length: int | None
    seed: int
    tolerance: Mapping[str, float]

    @property
    def count(self) -> int:
        """How many tokens are made for each row."""
        return max(min(TOKENS, (self.trained_length or TOKENS + max(LENGTHS)) - max(LENGTHS)), 1)

    def verdict(self, row: Runtime, parity: State) -> Verdict:
        """The verdict on the tokens of one runtime. `parity` is the state of its verdict on the outputs of the file."""
        path = str(self.subject.path)
        if row.module != ORT:
            reason = Reason(NO_LOOP, "tokens are made one after the other in ONNX Runtime only")
            return Verdict.of(path, row.name, NOT_RUN, reason, check=GENERATION)
        prompts = self.prompts()
        options = GenerationOptions(max_new_tokens=self.count)
        try:
            made = self.generated(row, prompts, options).tokens
        except PosexportError as error:
            text = str(error).rstrip(".")
            if isinstance(error, NotFiniteError) and self._has_no_logits(prompts):
                text = (
                    f"{INCONCLUSIVE}: {NOT_FINITE_LOGITS}, and so are those of transformers in {self.subject.dtype}: "
                    "export it with --dtype fp32"
                )
                return Verdict.of(path, row.name, NOT_RUN, Reason(INCONCLUSIVE, text), check=GENERATION)
            return Verdict.of(path, row.name, FAILED, Reason(OTHER_TOKENS, text), check=GENERATION)
        evaluation = self.evaluated(prompts, made)
        if evaluation.failure is not None:
            reason = Reason(REFERENCE_FAILED, f"float64 can't be evaluated: {evaluation.failure.text.rstrip('.')}")
            return Verdict.of(path, row.name, NOT_RUN, reason, check=GENERATION)
        verdict = self._judged(row, made, evaluation)
        if verdict.state == FAILED and len({*map(len, prompts)}) > 1:
            padded = self.padded(prompts, made)
            if padded.failure is None and (same := self._judged(row, made, padded)).state == PASSED:
                return attrs.evolve(same, not_shown=(READS_PADDING,))
        return verdict

    def _has_no_logits(self, prompts: Sequence[Sequence[int]]) -> bool:
        """Whether the module in the dtype of the file, as the file would, gives NaN or infinity after some prompt."""
        made = [[0] * self.count for _ in prompts]  # only the place before them counts, which doesn't see them
        evaluations = [self.evaluated(prompts, made)]
        if len({*map(len, prompts)}) > 1:
            evaluations.append(self.padded(prompts, made))
        return any(
            not has_likeliest(own["logits"][:, 0]).all()
            for each in evaluations
            if each.failure is None
            for own in each.own
        )

    def _judged(self, row: Runtime, made: Sequence[Sequence[int]], evaluation: Evaluation) -> Verdict:
        exact, own = evaluation.exact["logits"], evaluation.own[0]["logits"]
        return judge_tokens(str(self.subject.path), row.name, np.array(made), exact, own, self.tolerance_of_logits())

    def generated(self, row: Runtime, prompts: Sequence[Sequence[int]], options: GenerationOptions) -> Generated:
        """The tokens that the file makes after these prompts; raises what `generate_in_child` raises."""
        return generate_in_child(self.subject.path, row.options, prompts, options)

    def tolerance_of_logits(self) -> Tolerance:
        """The tolerance of errors of logits."""
        dtype = self.subject.outputs["logits"][1]
        return attrs.evolve(tolerance_of(dtype, self.subject.dtype), **self.tolerance)

    def evaluated(self, prompts: Sequence[Sequence[int]], made: Sequence[Sequence[int]]) -> Evaluation:
        """The module's logits [rows, count, vocabulary] at the places before these tokens, with one pass for each
        row."""
        alone = [self._inputs([[*prompt, *tokens]]) for prompt, tokens in zip(prompts, made, strict=True)]
        reference = module_reference(self.pool, self.subject, alone, self.module)
        rows = [reference.evaluation(index) for index in range(len(alone))]
        if (failed := next((row for row in rows if row.failure is not None), None)) is not None:
            return failed
        exact, own = (
            np.concatenate([self.before(arrays)["logits"] for arrays in each])
            for each in ([row.exact for row in rows], [row.own[0] for row in rows])
        )
        return Evaluation(exact={"logits": exact}, own=[{"logits": own}])

    def padded(self, prompts: Sequence[Sequence[int]], made: Sequence[Sequence[int]]) -> Evaluation:
        """The same, from one pass over all rows, with shorter rows padded on the left."""
        rows = [[*prompt, *tokens] for prompt, tokens in zip(prompts, made, strict=True)]
        evaluation = module_reference(self.pool, self.subject, [self._inputs(rows)], self.module).evaluation(0)
        if evaluation.failure is not None:
            return evaluation
        return Evaluation(exact=self.before(evaluation.exact), own=list(map(self.before, evaluation.own)))

    def before(self, arrays: Arrays) -> Arrays:
        """The logits at the places before the new tokens."""
        return {"logits": np.asarray(arrays["logits"], np.float64)[:, -self.count - 1 : -1]}

    def prompts(self) -> list[list[int]]:
        """The token ids of each row."""
        width = self.subject.outputs["logits"][0][-1]
        rng = np.random.default_rng((self.seed, 3))
        grouped = any(role.grouped for role in self.roles.values())  # such a file takes no padding on the left
        lengths = [max(LENGTHS)] * len(LENGTHS) if grouped else LENGTHS
        return [rng.integers(0, width if isinstance(width, int) else 2, length).tolist() for length in lengths]

    def _inputs(self, rows: list[list[int]]) -> Arrays:
        """The inputs of one pass over whole rows, by the file's names; caches are empty."""
        ids, mask = left_padded(rows)
        places = np.maximum(mask.cumsum(1) - 1, 0)
        given = {"token_ids": ids, "attention_mask": mask, "position_ids": places}
        sizes = {BATCH: len(rows), SEQ: ids.shape[1], PAST: 0}
        drawn = draw_inputs(self.roles, sizes, np.random.default_rng(self.seed)).arrays
        first = places[:, -1:] - ids.shape[1] + 1  # below 0 if a row begins with padding
        arrays = {
            name: first if role.is_first_position else given.get(role.kind, drawn[name])
            for name, role in self.roles.items()
        }
        return {name: array.astype(drawn[name].dtype) for name, array in arrays.items()}
