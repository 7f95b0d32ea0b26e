"""Tokens from a decoder in ONNX Runtime, one step after the other, with its caches bound where it runs.

The file has the inputs and outputs of posexport.models.whole. Its caches are grown, or buffers of a fixed length that
are written in place. Rows of a batch may have prompts of different lengths: shorter ones are padded on the left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnxruntime

from posexport.errors import RequestError, shown
from posexport.spec.fields import integer, number

Array = np.ndarray[Any, Any]

BUFFER = "max_sequence_length"
"""The dimension of a cache that is a buffer."""

LENGTH = "past_sequence_length"
"""The input that says how many tokens buffers hold, where nothing else does."""

_DTYPES = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(double)": np.dtype(np.float64),
}


@attrs.frozen(kw_only=True)
class GenerationOptions:
    """How tokens are chosen. With a `temperature` of 0 the likeliest is; else one is drawn by `seed` from the `top_k`
    likeliest (0: all) that have `top_p` of the probability together."""

    max_new_tokens: int = integer(64, "the most tokens that are made", at_least=1)
    temperature: float = number(0.0, "0 for the likeliest token, more for more chance", at_least=0, at_most=100)
    top_k: int = integer(0, "how many tokens are drawn from", at_least=0)
    top_p: float = number(1.0, "the part of probability that is drawn from", at_least=0, at_most=1)
    seed: int = integer(0, "seed of what is drawn", at_least=0)
    stop: tuple[int, ...] = ()


@attrs.frozen(kw_only=True)
class Generated:
    """The new tokens of each row, up to and with the one that stopped it, and seconds of the prompt and of each step."""

    tokens: tuple[tuple[int, ...], ...]
    prompt_seconds: float
    step_seconds: tuple[float, ...]


class Decoder:
    """A file in a session of ONNX Runtime, with the caches of the sequences under way."""

    def __init__(self, session: onnxruntime.InferenceSession, device: str = "cpu") -> None:
        self._session, self._device = session, device
        self.inputs = {value.name: value for value in session.get_inputs()}
        outputs = [value.name for value in session.get_outputs()]
        self.pasts = [name for name in self.inputs if name.startswith("past_key_values.")]
        presents = [name.replace("past_key_values", "present", 1) for name in self.pasts]
        lacking = [name for name in ("input_ids", "attention_mask") if name not in self.inputs]
        lacking += [name for name in ("logits", *presents) if name not in outputs]
        if lacking:
            raise RequestError(f"the file has no {shown(lacking[0])}: give a decoder with logits, and caches or none.")
        size = next(value.shape[-1] for value in session.get_outputs() if value.name == "logits")
        self.vocabulary = size if isinstance(size, int) else None
        self.is_shared = any(BUFFER in self.inputs[name].shape for name in self.pasts)
        self._caches: dict[str, Any] = {}
        self._seen = np.zeros((0, 0), np.int64)

    def start(self, rows: int, room: int) -> None:
        """Begin sequences of at most `room` tokens."""
        self._seen = np.zeros((rows, 0), np.int64)
        self._caches = {}
        for name in self.pasts:
            _, heads, _, size = self.inputs[name].shape
            kind = self.inputs[name].type
            if kind not in _DTYPES:
                raise RequestError(f"caches are {kind}, which generation can't bind: export them in fp32 or fp16.")
            empty = np.zeros((rows, heads, room if self.is_shared else 0, size), _DTYPES[kind])
            self._caches[name] = onnxruntime.OrtValue.ortvalue_from_numpy(empty, self._device, 0)

    def step(self, input_ids: Array, mask: Array) -> Array:
        """The logits [rows, vocabulary] float32 behind the last of these tokens [rows, tokens], of which `mask` says
        which are no padding."""
        past = self._seen.shape[1]
        self._seen = np.concatenate((self._seen, mask), 1)
        positions = np.maximum(self._seen.cumsum(1) - 1, 0)[:, past:]
        if not self.pasts:
            raise RequestError("the file has no caches, so each step would compute all tokens again.")
        given = {"input_ids": input_ids, "attention_mask": self._seen, "position_ids": positions}
        given[LENGTH] = np.array([past], np.int64)
        binding = self._session.io_binding()
        for name, value in self.inputs.items():
            if name in self._caches:
                binding.bind_ortvalue_input(name, self._caches[name])
                continue
            if name not in given:
                raise RequestError(f"the file has the input {shown(name)}, which no decoder of posexport has.")
            dtype = np.int32 if value.type == "tensor(int32)" else np.int64
            binding.bind_cpu_input(name, np.ascontiguousarray(given[name].astype(dtype)))
        for output in self._session.get_outputs():
            cache = output.name.replace("present", "past_key_values", 1)
            if output.name.startswith("present.") and self.is_shared:
                binding.bind_ortvalue_output(output.name, self._caches[cache])
            else:
                binding.bind_output(output.name, self._device if output.name.startswith("present.") else "cpu")
        self._session.run_with_iobinding(binding)
        results = dict(zip((output.name for output in self._session.get_outputs()), binding.get_outputs(), strict=True))
        if not self.is_shared:
            self._caches = {name: results[name.replace("past_key_values", "present", 1)] for name in self.pasts}
        logits: Array = results["logits"].numpy()[:, -1].astype(np.float32)
        return logits


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    told: Callable[[list[int | None]], None] = lambda _: None,
) -> Generated:
    """Tokens behind each prompt; `told` gets the token of each row, None for rows that have stopped, as they come."""
    largest = max(map(max, prompts))
    if decoder.vocabulary is not None and largest >= decoder.vocabulary:
        raise RequestError(f"the token {largest} is none of the model's: give ids from 0 to {decoder.vocabulary - 1}.")
    longest, rows = max(map(len, prompts)), len(prompts)
    tokens, mask = np.zeros((rows, longest), np.int64), np.zeros((rows, longest), np.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1
    decoder.start(rows, longest + options.max_new_tokens)
    chooser = _Chooser(options)
    made: list[list[int]] = [[] for _ in prompts]
    running = [True] * rows
    seconds = []
    for _ in range(options.max_new_tokens):
        begin = time.perf_counter()
        chosen = chooser.choose(decoder.step(tokens, mask))
        seconds.append(time.perf_counter() - begin)
        fresh = [token if on else None for token, on in zip(chosen, running, strict=True)]
        for row, token in enumerate(fresh):
            if token is not None:
                made[row].append(token)
                running[row] = token not in options.stop
        told(fresh)
        if not any(running):
            break
        tokens, mask = np.array(chosen, np.int64)[:, None], np.ones((rows, 1), np.int64)
    return Generated(tokens=tuple(map(tuple, made)), prompt_seconds=seconds[0], step_seconds=tuple(seconds[1:]))


class _Chooser:
    def __init__(self, options: GenerationOptions) -> None:
        self._options = options
        self._generator = np.random.default_rng(options.seed)

    def choose(self, logits: Array) -> list[int]:
        """A token for each row."""
        if not self._options.temperature:
            return [int(index) for index in logits.argmax(1)]
        return [self._drawn(row.astype(np.float64) / self._options.temperature) for row in logits]

    def _drawn(self, logits: Array) -> int:
        order = np.argsort(-logits, kind="stable")[: self._options.top_k or None]
        weights = np.exp(logits[order] - logits[order[0]])
        weights /= weights.sum()
        kept = np.concatenate(([True], np.cumsum(weights)[:-1] < self._options.top_p))
        weights = np.where(kept, weights, 0.0)
        return int(self._generator.choice(order, p=weights / weights.sum()))
