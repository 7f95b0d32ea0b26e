"""The encoder of an encoder-decoder in ONNX Runtime: computes once what the decoder needs of a text or a sound.

Both files are as `export --model` writes them. The encoder gives the keys and values of cross-attention as
`present.N.encoder.key|value`, and the decoder takes them as `past_key_values.N.encoder.key|value`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime

from posexport.errors import RequestError, shown
from posexport.runtimes.base import Arrays
from posexport.runtimes.generation import DTYPES
from posexport.spec.arrays import Array

MASK = "encoder_attention_mask"
"""The decoder's input that has the encoder's mask."""

_IDS, _OWN_MASK = "input_ids", "attention_mask"


def reads_encoder(decoder: onnxruntime.InferenceSession) -> bool:
    """Whether a decoder takes keys and values that an encoder gives."""
    return any(_of_encoder(value.name) for value in decoder.get_inputs())


def _of_encoder(name: str) -> bool:
    return name.startswith("past_key_values.") and ".encoder." in name


def arrays_of_prompts(encoder: onnxruntime.InferenceSession, prompts: Sequence[Sequence[int]]) -> Arrays:
    """Token ids of each row, padded on the right with zeros, and their mask.

    RequestError for an encoder that takes no tokens, and for rows of different lengths if it takes no mask.
    """
    names = {value.name for value in encoder.get_inputs()}
    if _IDS not in names:
        raise RequestError(
            f"its encoder takes {', '.join(map(shown, sorted(names)))} and no text: give --inputs with a .npz file."
        )
    lengths = np.array([len(prompt) for prompt in prompts])
    places = np.arange(lengths.max())
    mask = (places < lengths[:, None]).astype(np.int64)
    if _OWN_MASK not in names and not mask.all():
        raise RequestError("its encoder takes no mask: give prompts of as many tokens.")
    ids = np.zeros_like(mask)
    ids[mask == 1] = np.concatenate([np.asarray(prompt, np.int64) for prompt in prompts])
    return {_IDS: ids, _OWN_MASK: mask} if _OWN_MASK in names else {_IDS: ids}


def encode(
    encoder: onnxruntime.InferenceSession,
    decoder: onnxruntime.InferenceSession,
    inputs: Arrays,
    device: str = "cpu",
    vocabulary: int | None = None,
) -> tuple[int, dict[str, onnxruntime.OrtValue]]:
    """The number of rows, and the inputs of the decoder that the encoder gives, by name.

    RequestError for inputs that the encoder doesn't take, for ids that are not below `vocabulary`, and for a file that
    is not this decoder's encoder.
    """
    binding, taken = encoder.io_binding(), {value.name: value for value in encoder.get_inputs()}
    if {*inputs} != {*taken}:
        raise RequestError(
            f"its encoder takes {', '.join(map(shown, taken))}, and {', '.join(map(shown, inputs)) or 'nothing'} was "
            "given: give arrays of these names."
        )
    rows = {len(array) if array.ndim else 0 for array in inputs.values()}
    if len(rows) != 1 or 0 in rows:
        raise RequestError("inputs of the encoder have no rows, or not as many: give one row of each at least.")
    sizes: dict[str, tuple[str, int]] = {}
    for name, value in taken.items():
        _check(name, inputs[name], value)
        for dim, size in zip(value.shape, inputs[name].shape, strict=True):
            other, known = sizes.setdefault(dim, (name, size)) if isinstance(dim, str) else (name, size)
            if known != size:
                raise RequestError(
                    f"{shown(name)} has {size} of {shown(dim)}, and {shown(other)} has {known}: give as many of both."
                )
        _check_values(name, inputs[name], vocabulary)
        binding.bind_cpu_input(name, np.ascontiguousarray(inputs[name].astype(DTYPES[value.type])))
    wanted = [value for value in decoder.get_inputs() if _of_encoder(value.name)]
    sources = {value.name: value.name.replace("past_key_values.", "present.") for value in wanted}
    given = {value.name: value for value in encoder.get_outputs()}
    for value in wanted:
        source = given.get(sources[value.name])
        if source is None or source.type != value.type or not _fits(source.shape, value.shape):
            raise RequestError(
                f"its encoder doesn't give {shown(value.name)} as it takes it: put the encoder that was exported with "
                "it beside it."
            )
        binding.bind_output(source.name, device)
    encoder.run_with_iobinding(binding)
    made = dict(zip(sources, binding.get_outputs(), strict=True))
    if any(value.name == MASK for value in decoder.get_inputs()):
        if _OWN_MASK not in inputs:
            raise RequestError(
                "its decoder takes a mask of what the encoder reads, and the encoder beside it has none: put the "
                "encoder that was exported with it there."
            )
        made[MASK] = onnxruntime.OrtValue.ortvalue_from_numpy(inputs[_OWN_MASK].astype(np.int64), device, 0)
    return rows.pop(), made


def _check(name: str, array: Array, value: onnxruntime.NodeArg) -> None:
    """RequestError for an array that doesn't fit the input's shape and kind."""
    if value.type not in DTYPES:
        raise RequestError(f"its encoder takes {shown(name)} as {value.type}: give a model in fp32 or fp16.")
    fits = array.ndim == len(value.shape) and _fits(array.shape, value.shape)
    if not fits or array.size == 0:
        raise RequestError(f"{shown(name)} has shape {list(array.shape)}, and its encoder takes {value.shape}.")
    if (array.dtype.kind in "iu") != (DTYPES[value.type].kind == "i") or array.dtype.kind not in "iuf":
        raise RequestError(f"{shown(name)} is {array.dtype}, and its encoder takes {value.type}.")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise RequestError(f"{shown(name)} holds NaN or Inf: every value must be finite.")


def _check_values(name: str, array: Array, vocabulary: int | None) -> None:
    """RequestError for ids that the model doesn't have, and for a mask that has other values or hides a whole row."""
    if name == _IDS:
        wrong = array[(array < 0) | (array >= (vocabulary or np.iinfo(np.int64).max))]
        if wrong.size:
            last = "" if vocabulary is None else f" to {vocabulary - 1}"
            raise RequestError(f"the token {wrong[0]} is none of the model's: give ids from 0{last}.")
    if name == _OWN_MASK and (not np.isin(array, (0, 1)).all() or not array.any(tuple(range(1, array.ndim))).all()):
        raise RequestError(f"{shown(name)} must be 1 at tokens and 0 at padding, with one token in each row at least.")


def _fits(shape: Sequence[object], other: Sequence[object]) -> bool:
    """Whether all sizes that both shapes know are equal."""
    pairs = zip(shape, other, strict=False)
    return len(shape) == len(other) and all(
        one == two for one, two in pairs if isinstance(one, int) and isinstance(two, int)
    )
