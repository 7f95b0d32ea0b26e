"""Whether the two files of an encoder-decoder make the same tokens as transformers in float64.

The encoder file reads three texts of different lengths, padded on the right, or three random sounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import attrs
import numpy as np

from posexport.errors import Reason
from posexport.graphs.axes import BATCH, ENCODER, PAST, SEQ
from posexport.graphs.draw import draw_inputs
from posexport.runtimes import Runtime
from posexport.runtimes.base import Arrays
from posexport.runtimes.generation import Generated, GenerationOptions
from posexport.runtimes.generation_encoder import MASK
from posexport.runtimes.generation_process import generate_in_child
from posexport.spec.arrays import Array
from posexport.verify.graph.greedy import LENGTHS, TOKENS, GreedyCheck
from posexport.verify.graph.reference import Evaluation
from posexport.verify.graph.subject import GraphSubject
from posexport.verify.graph.truth import module_reference
from posexport.verify.result import GENERATION, NO_ENCODER, NOT_RUN, OTHER_TOKENS, PASSED, State, Verdict


def reads_encoder(subject: GraphSubject) -> bool:
    """Whether a file decodes tokens with keys and values from an encoder."""
    return "logits" in subject.outputs and "past_key_values.0.encoder.key" in subject.inputs


@attrs.frozen(kw_only=True)
class TranslationCheck(GreedyCheck):
    """The check of the decoder of an encoder-decoder.

    `encoder` is the file of its encoder, None if it is missing. Each row begins with the tokens `begin`.
    """

    encoder: GraphSubject | None
    begin: tuple[int, ...]

    def verdict(self, row: Runtime, parity: State) -> Verdict:
        """The verdict on the tokens of one runtime; "not run" if the files beside the decoder don't say enough.

        `parity` is the state of the verdict on the decoder's outputs.
        """
        path, missing = self.subject.path, None
        if self.encoder is None:
            missing = "the file of its encoder is not beside it: encoder_NAME.onnx of decoder_NAME.onnx"
        elif not self.begin:
            missing = f"config.json in {self.module!r} has no decoder_start_token_id, with which the decoder begins"
        if missing is None:
            made = super().verdict(row, parity)
            if (made.reason_code, parity) == (OTHER_TOKENS, PASSED):
                made = attrs.evolve(made, where="the decoder alone is right: verify the encoder beside it")
            return made
        return Verdict.of(str(path), row.name, NOT_RUN, Reason(NO_ENCODER, missing), check=GENERATION)

    @property
    def count(self) -> int:
        """How many tokens are made for each row."""
        begin = len(self.begin)
        return max(min(TOKENS, (self.trained_length or TOKENS + begin) - begin), 1)

    def prompts(self) -> list[list[int]]:
        """The token ids of each row."""
        return [[*self.begin]] * len(LENGTHS)

    def generated(self, row: Runtime, prompts: Sequence[Sequence[int]], options: GenerationOptions) -> Generated:
        """The tokens that both files make; raises what `generate_in_child` raises."""
        path = self.pool.folder / "encoder_inputs.npz"
        np.savez(path, **self.encoder_inputs)  # type: ignore[arg-type]
        return generate_in_child(
            self.subject.path, row.options, [], options, encoder=self._encoder().path, inputs=path, begin=self.begin
        )

    def _encoder(self) -> GraphSubject:
        if self.encoder is None:
            raise AssertionError("verdict says that there is none")
        return self.encoder

    @cached_property
    def encoder_inputs(self) -> Arrays:
        """The inputs of the encoder, by name."""
        rng, width, roles = np.random.default_rng((self.seed, 6)), max(LENGTHS), self._encoder().roles()
        arrays = draw_inputs(roles, {BATCH: len(LENGTHS), SEQ: width, PAST: 0, ENCODER: width}, rng).arrays
        kinds = {role.kind: name for name, role in roles.items()}
        if {"token_ids", "attention_mask"} <= {*kinds}:
            mask = np.arange(width) < np.array(LENGTHS)[:, None]
            for kind in ("token_ids", "attention_mask"):
                array = arrays[kinds[kind]]
                arrays[kinds[kind]] = (mask * (array if kind == "token_ids" else 1)).astype(array.dtype)
        return arrays

    def evaluated(self, prompts: Sequence[Sequence[int]], made: Sequence[Sequence[int]]) -> Evaluation:
        """The module's logits [rows, count, vocabulary] at the places before these tokens, with one pass for all
        rows."""
        encoded = module_reference(self.pool, self._encoder(), [self.encoder_inputs], self.module).evaluation(0)
        if encoded.failure is not None:
            return encoded
        rows = np.array([[*prompt, *tokens] for prompt, tokens in zip(prompts, made, strict=True)])
        inputs = [self._decoder_inputs(rows, outputs) for outputs in (encoded.exact, encoded.own[0])]
        exact, own = (
            module_reference(self.pool, self.subject, [one], self.module).evaluation(0) for one in inputs
        )  # the second also rounds what the encoder gives
        failed = next((one for one in (exact, own) if one.failure is not None), None)
        if failed is not None:
            return failed
        return Evaluation(exact=self.before(exact.exact), own=[self.before(own.own[0])])

    def _decoder_inputs(self, rows: Array, encoded: Arrays) -> Arrays:
        """The inputs of one pass over whole rows, by the file's names; the decoder's own caches are empty."""
        sizes = {BATCH: len(rows), SEQ: rows.shape[1], PAST: 0, ENCODER: max(LENGTHS)}
        arrays = draw_inputs(self.roles, sizes, np.random.default_rng(self.seed)).arrays
        arrays["input_ids"] = rows.astype(arrays["input_ids"].dtype)
        for name in arrays:
            if ".encoder." in name:
                arrays[name] = encoded[name.replace("past_key_values.", "present.")]
        if MASK in arrays:
            arrays[MASK] = self.encoder_inputs["attention_mask"].astype(arrays[MASK].dtype)
        return arrays
