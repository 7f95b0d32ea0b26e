"""Generates tokens with a decoder in ONNX Runtime, step by step. Its caches are bound on the device where it runs.

The file has the inputs and outputs of posexport.models.whole, which are also those of optimum's decoders. Its caches
are grown, or are buffers of a fixed length that are written in place. Without caches, each step computes all tokens
again. States of linear attention have a fixed size.
Rows of a batch may have prompts of different lengths: shorter ones are padded on the left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import onnxruntime

from posexport.errors import NotFiniteError, RequestError, shown
from posexport.spec.arrays import Array
from posexport.spec.fields import integer, number
from posexport.spec.input_roles import is_state

BUFFER = "max_sequence_length"
"""The dimension of a cache that is a buffer."""

NOT_FINITE_LOGITS = "the logits are NaN or infinity"
"""How the reason begins for which no token can be chosen."""

LENGTH = "past_sequence_length"
"""The input with the number of tokens in the buffers, for files in which no other input tells it."""

_PAST = "past_key_values."

DTYPES: Mapping[str, np.dtype[Any]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(double)": np.dtype(np.float64),
    "tensor(int64)": np.dtype(np.int64),
    "tensor(int32)": np.dtype(np.int32),
}
"""The dtypes that inputs may have, by ONNX Runtime's names."""

_LOGITS, _CACHE = ["batch", "sequence", "vocabulary"], ["batch", "heads", "tokens", "size"]
"""The axes of logits, and of a cache of keys or values."""

_NEEDED = ("input_ids", "attention_mask")
"""Inputs that a decoder without an encoder needs. With an encoder it needs no mask, because its rows begin alike."""

_UNKNOWN = {
    "use_cache_branch": "it is a merged decoder of two graphs: give the file of one of them",
    "encoder_hidden_states": "it computes keys and values of an encoder's output in each step: give a decoder that "
    "takes them, as `export --model` writes it",
    "inputs_embeds": "it takes vectors in place of tokens: give a decoder that takes input_ids",
}
"""Inputs of other decoders that can't be given here, with what is wrong."""


@attrs.frozen(kw_only=True)
class GenerationOptions:
    """How tokens are chosen.

    With a `temperature` of 0, the likeliest token is chosen. Otherwise one is drawn by `seed` from the `top_k`
    likeliest tokens (0: all) that together have the probability `top_p`. `stop` are the ids after which a row ends.
    `suppressed` ids are never chosen; `suppressed_first` ids are not chosen as the first new token. If there are
    `forced_last` ids, the last of `max_new_tokens` tokens is one of them.
    """

    max_new_tokens: int = integer(64, "the most tokens that are made", at_least=1)
    temperature: float = number(0.0, "0 for the likeliest token, more for more chance", at_least=0, at_most=100)
    top_k: int = integer(0, "how many tokens are drawn from", at_least=0)
    top_p: float = number(1.0, "the part of probability that is drawn from", at_least=0, at_most=1)
    seed: int = integer(0, "seed of what is drawn", at_least=0)
    stop: tuple[int, ...] = ()
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()
    forced_last: tuple[int, ...] = ()


@attrs.frozen(kw_only=True)
class Generated:
    """The new tokens of each row, and the seconds of the prompt and of each step.

    The last token of a row is the one that stopped it. `cache` is "grown", "buffers", "states" or "none".
    """

    tokens: tuple[tuple[int, ...], ...]
    prompt_seconds: float
    step_seconds: tuple[float, ...]
    cache: str


class Decoder:
    """A file in a session of ONNX Runtime, with the caches of the current sequences.

    `trained_length` is the number of positions that the model was trained for, None if it is not known. `encoded` are
    the inputs that an encoder gives, by name; they are the same for each step. RequestError for a file whose inputs and
    outputs are not those of a decoder.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        device: str = "cpu",
        trained_length: int | None = None,
        encoded: Mapping[str, onnxruntime.OrtValue] | None = None,
    ) -> None:
        self._session, self._device, self._trained_length = session, device, trained_length
        self._encoded = dict(encoded or {})
        self._inputs = {value.name: value for value in session.get_inputs()}
        outputs = {value.name: value for value in session.get_outputs()}
        self._outputs = list(outputs)
        pasts = [
            name
            for name in self._inputs
            if name not in self._encoded and (name.startswith(_PAST) or (name.startswith("past") and is_state(name)))
        ]
        self._present = {name: _present_of(name) for name in pasts}
        for name in self._inputs:
            if name not in (*self._present, *self._encoded, *_NEEDED, "position_ids", LENGTH):
                text = _UNKNOWN.get(name, "decoders that can be run here have no such input: give one without it")
                raise RequestError(f"the file has the input {shown(name)}, {text}.")
        needed = _NEEDED[:1] if self._encoded else _NEEDED
        lacking = [f"input {shown(name)}" for name in needed if name not in self._inputs]
        lacking += [f"output {shown(name)}" for name in ("logits", *self._present.values()) if name not in outputs]
        if lacking:
            raise RequestError(f"the file has no {lacking[0]}, which decoders have: give a file of a decoder.")
        for value in (*(self._inputs[name] for name in self._present), outputs["logits"]):
            if value.type not in DTYPES:
                raise RequestError(f"{shown(value.name)} is {value.type}: give a decoder in fp32 or fp16.")
        # others are states of a fixed size; each step returns the new ones
        self._grow = [name for name in self._present if name.endswith((".key", ".value"))]
        for value, axes in ((outputs["logits"], _LOGITS), *((self._inputs[name], _CACHE) for name in self._grow)):
            if len(value.shape) != len(axes):
                raise RequestError(f"{shown(value.name)} has the shape {value.shape}: it must be {axes}.")
        width = outputs["logits"].shape[-1]
        self.vocabulary: int | None = width if isinstance(width, int) else None
        lengths = [self._inputs[name].shape[2] for name in self._grow]
        self._has_buffers = any(length == BUFFER or isinstance(length, int) for length in lengths)
        self._capacity = min((length for length in lengths if isinstance(length, int)), default=None)
        self._caches: dict[str, Any] = {}
        self._tokens = self._mask = np.zeros((0, 0), np.int64)

    @property
    def cache(self) -> str:
        """Which caches the file has: "grown", "buffers", only "states", or "none"."""
        if not self._grow:
            return "states" if self._present else "none"
        return "buffers" if self._has_buffers else "grown"

    def start(self, rows: int, room: int) -> None:
        """Begin sequences of which at most `room` tokens are read, including padding."""
        if self._capacity is not None and room > self._capacity:
            raise RequestError(
                f"prompt and new tokens but the last are {room} together, and the caches have room for "
                f"{self._capacity}: give a shorter prompt, or a smaller --max-new-tokens."
            )
        self._tokens = self._mask = np.zeros((rows, 0), np.int64)
        for name in self._present:
            value = self._inputs[name]
            sizes = list(value.shape[1:])
            if name in self._grow and not isinstance(sizes[1], int):
                sizes[1] = room if self._has_buffers else 0
            if not all(isinstance(size, int) for size in sizes):
                raise RequestError(f"{shown(name)} has the shape {value.shape}: heads and their size must be numbers.")
            try:
                empty = np.zeros((rows, *sizes), DTYPES[value.type])
                self._caches[name] = onnxruntime.OrtValue.ortvalue_from_numpy(empty, self._device, 0)
            except (MemoryError, ValueError):  # ValueError if the size is beyond the address space
                raise RequestError(
                    f"memory ran out for caches of {room} tokens: give a shorter prompt, or a smaller --max-new-tokens."
                ) from None

    def step(self, input_ids: Array, mask: Array) -> Array:
        """The logits [rows, vocabulary] float32 after the last of these tokens int64 [rows, tokens].

        `mask` is 1 for tokens and 0 for padding. RequestError if a position is beyond those of the file.
        """
        past = self._tokens.shape[1] if self._present else 0
        self._tokens = np.concatenate((self._tokens, input_ids), 1)
        self._mask = np.concatenate((self._mask, mask), 1)
        positions = np.maximum(self._mask.cumsum(1) - 1, 0)[:, past:]
        given = {"input_ids": self._tokens[:, past:], "attention_mask": self._mask, "position_ids": positions}
        given[LENGTH] = np.array([past], np.int64)
        try:
            results = self._run(given)
        except Exception:
            last = int(positions.max())
            if self._trained_length is None or last < self._trained_length:
                raise
            raise RequestError(
                f"prompt and new tokens reach position {last}, and the model has the positions 0 to "
                f"{self._trained_length - 1} only: give a shorter prompt, or a smaller --max-new-tokens."
            ) from None
        found: Array = results["logits"].numpy()
        if found.ndim != len(_LOGITS) or len(found) != len(input_ids) or 0 in found.shape:
            raise RequestError(f"the logits of {len(input_ids)} rows have the shape {[*found.shape]}: export it again.")
        logits: Array = found[:, -1].astype(np.float32)
        if not (logits < np.inf).all():
            raise NotFiniteError(
                f"{NOT_FINITE_LOGITS}, so no token is the likeliest: see what `posexport verify` says."
            )
        return logits

    def _run(self, given: Mapping[str, Array]) -> dict[str, Any]:
        """All outputs by name. New caches replace the old ones."""
        binding = self._session.io_binding()
        for name, value in self._inputs.items():
            if name in self._caches or name in self._encoded:
                binding.bind_ortvalue_input(name, self._caches.get(name) or self._encoded[name])
            else:
                binding.bind_cpu_input(name, np.ascontiguousarray(given[name].astype(DTYPES[value.type])))
        presents = {*self._present.values()}
        buffers = {self._present[past]: self._caches[past] for past in self._grow} if self._has_buffers else {}
        for name in self._outputs:
            if name in buffers:
                binding.bind_ortvalue_output(name, buffers[name])
            else:
                binding.bind_output(name, self._device if name in presents else "cpu")
        self._session.run_with_iobinding(binding)
        results = dict(zip(self._outputs, binding.get_outputs(), strict=True))
        self._caches |= {past: results[present] for past, present in self._present.items() if present not in buffers}
        return results


def _present_of(past: str) -> str:
    """The output that corresponds to an input: transformers.js has `past_conv.N` and `present_conv.N`."""
    return f"present.{past.removeprefix(_PAST)}" if past.startswith(_PAST) else f"present{past.removeprefix('past')}"


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """Token ids and their mask, both int64 [rows, longest]: shorter rows begin with zeros."""
    longest = max(map(len, prompts))
    ids = np.array([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], np.int64)
    mask = np.array([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], np.int64)
    return ids, mask


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    options: GenerationOptions,
    told: Callable[[list[int | None]], None] = lambda _: None,
) -> Generated:
    """New tokens for each prompt. `told` gets the token of each row as it is made, None for rows that have stopped.

    RequestError for a token that the model doesn't have.
    """
    largest = max(map(max, prompts))
    if decoder.vocabulary is not None and largest >= decoder.vocabulary:
        raise RequestError(f"the token {largest} is none of the model's: give ids from 0 to {decoder.vocabulary - 1}.")
    tokens, mask = left_padded(prompts)
    decoder.start(len(prompts), tokens.shape[1] + options.max_new_tokens - 1)  # the last token is not read
    choose = _chooser(options)
    made: list[list[int]] = [[] for _ in prompts]
    running = [True] * len(prompts)
    seconds: list[float] = []
    while any(running) and len(seconds) < options.max_new_tokens:
        begin = time.perf_counter()
        chosen = choose(_finite(_allowed(decoder.step(tokens, mask), options, len(seconds)), running))
        seconds.append(time.perf_counter() - begin)
        told([token if on else None for token, on in zip(chosen, running, strict=True)])
        for row, token in enumerate(chosen):
            if running[row]:
                made[row].append(token)
                running[row] = token not in options.stop
        tokens, mask = np.array(chosen, np.int64)[:, None], np.ones((len(prompts), 1), np.int64)
    return Generated(
        tokens=tuple(map(tuple, made)), prompt_seconds=seconds[0], step_seconds=tuple(seconds[1:]), cache=decoder.cache
    )


def _allowed(logits: Array, options: GenerationOptions, made: int) -> Array:
    """The logits after `made` new tokens; those of tokens that may not be chosen are minus infinity."""
    if options.forced_last and made == options.max_new_tokens - 1:
        return _forced(logits, options.forced_last)
    hidden = {*options.suppressed, *(() if made else options.suppressed_first)}
    columns = sorted(token for token in hidden if token < logits.shape[1])
    if len(columns) == logits.shape[1]:
        raise RequestError(
            "generation_config.json suppresses all tokens that the model has: take some out of suppress_tokens, "
            "begin_suppress_tokens or bad_words_ids."
        )
    logits[:, columns] = -np.inf
    return logits


def _finite(logits: Array, running: Sequence[bool]) -> Array:
    """The logits, with zeros in stopped rows that allow no token; RequestError if a running row allows none."""
    empty = np.isneginf(logits).all(1)
    if (empty & np.asarray(running, dtype=bool)).any():
        raise RequestError(
            "the logits of all tokens that may be chosen are minus infinity, so none is the likeliest: see what "
            "`posexport verify` says, and what generation_config.json suppresses."
        )
    logits[empty] = 0
    return logits


def _forced(logits: Array, tokens: Sequence[int]) -> Array:
    """Logits with which one of these tokens is chosen; all are equally likely."""
    if max(tokens) >= logits.shape[1]:
        raise RequestError(
            f"generation_config.json has the forced_eos_token_id {max(tokens)}, which is none of the model's tokens: "
            f"give ids from 0 to {logits.shape[1] - 1}, or take it out."
        )
    forced = np.full_like(logits, -np.inf)
    forced[:, list(tokens)] = 0
    return forced


def _chooser(options: GenerationOptions) -> Callable[[Array], list[int]]:
    """A function that chooses a token for each row of logits."""
    if not options.temperature:
        return lambda logits: [int(index) for index in logits.argmax(1)]
    generator = np.random.default_rng(options.seed)

    def chosen(logits: Array) -> list[int]:
        rows = logits.astype(np.float64)
        with np.errstate(over="ignore"):  # with a temperature near 0, minus infinity is right
            rows = (rows - rows.max(1, keepdims=True)) / options.temperature
        return [_drawn(row, options, generator) for row in rows]

    return chosen


def _drawn(logits: Array, options: GenerationOptions, generator: np.random.Generator) -> int:
    order = np.argsort(-logits, kind="stable")[: options.top_k or None]
    weights = np.exp(logits[order] - logits[order[0]])
    weights /= weights.sum()
    before = np.cumsum(weights) - weights  # the probability of the likelier ones
    weights[1:][before[1:] >= options.top_p] = 0
    return int(generator.choice(order, p=weights / weights.sum()))
