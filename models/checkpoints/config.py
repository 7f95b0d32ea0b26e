"""Reads a config.json key by key and records which keys were read, so that any other key is an error.

A missing key has transformers' default, which the readers pass as `default`. Alternative names of a key come from older
versions.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from posexport.errors import RequestError
from posexport.spec.fields import LARGEST

T = TypeVar("T")

FILE = "config.json"

NUMBER = f"a number from {-LARGEST:g} to {LARGEST:g}"


def words(text: str) -> frozenset[str]:
    """The set of keys in a text, which separates them by spaces."""
    return frozenset(text.split())


COMMON = words(
    """
    architectures model_type _name_or_path name_or_path _commit_hash auto_map dtype torch_dtype transformers_version
    quantization_config use_cache cache_implementation tie_word_embeddings tie_encoder_decoder vocab_size max_length
    initializer_range initializer_factor id2label label2id num_labels problem_type finetuning_task task_specific_params
    return_dict output_attentions output_hidden_states output_past torchscript use_bfloat16 gradient_checkpointing
    attn_implementation _attn_implementation _attn_implementation_autoset tokenizer_class prefix tf_legacy_loss
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id decoder_start_token_id
    is_encoder_decoder chunk_size_feed_forward max_position_embeddings pretraining_tp
    hidden_act hidden_activation intermediate_size layer_norm_eps layer_norm_epsilon rms_norm_eps
    attention_dropout hidden_dropout hidden_dropout_prob attention_probs_dropout_prob classifier_dropout
    min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    """
)
"""Keys of any config.json that don't affect attention at inference. Quantized weights (`quantization_config`) are
rejected when they are read, by their dtype or because the plain weights are missing."""

INERT: Mapping[str, tuple[Any, ...]] = {
    "pruned_heads": ({}, None),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
}
"""Keys of any config.json that have no effect with one of these values."""


class Config:
    """A table of a config.json. `where` names the file, `inside` the table's path in it (empty for the outermost),
    `known` the keys that need not be read."""

    def __init__(self, data: Mapping[str, Any], where: str, inside: str = "", known: Collection[str] = ()) -> None:
        self.data, self.where, self._inside, self._known = data, where, inside, known
        self._read: set[str] = set()
        self._tables: dict[str, Config] = {}

    def value(self, *names: str, default: Any = None) -> Any:
        """The value of a key under any of its names; RequestError where two names have different values."""
        self._read.update(names)
        present = [name for name in names if name in self.data]
        values = {name: self.data[name] for name in present if self.data[name] is not None}
        if any(value != next(iter(values.values())) for value in values.values()):
            raise RequestError(
                f"{self.where}: {' and '.join(values)} are names of one key and differ: drop one of them."
            )
        return next(iter(values.values())) if values else None if present else default

    def integer(self, *names: str, default: int, at_least: int = 1) -> int:
        """A whole number."""
        number = self.optional_integer(*names, default=default, at_least=at_least)
        if number is None:
            raise self.wrong(names[0], f"a whole number from {at_least}")
        return number

    def optional_integer(self, *names: str, default: int | None = None, at_least: int = 1) -> int | None:
        """A whole number, or None where the key is null."""

        def read(value: Any) -> int | None:
            fits = isinstance(value, int) and not isinstance(value, bool) and at_least <= value < 2**31
            return value if fits else None

        return self._checked(names, default, read, f"a whole number from {at_least}")

    def number(self, *names: str, default: float) -> float:
        """A finite number."""
        number = self.optional_number(*names, default=default)
        if number is None:
            raise self.wrong(names[0], NUMBER)
        return number

    def optional_number(self, *names: str, default: float | None = None) -> float | None:
        """A finite number, or None where the key is null."""

        def read(value: Any) -> float | None:
            fits = isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST
            return value if fits else None

        return self._checked(names, default, read, NUMBER)

    def flag(self, *names: str, default: bool) -> bool:
        """True or false."""
        value = self._checked(names, default, lambda value: value if isinstance(value, bool) else None, "true or false")
        if value is None:
            raise self.wrong(names[0], "true or false")
        return value

    def integers(self, *names: str, default: list[int] | None = None) -> list[int] | None:
        """A list of whole numbers from 0, or None where the key is null."""

        def read(value: Any) -> list[int] | None:
            fits = isinstance(value, list) and all(isinstance(one, int) and 0 <= one < 2**31 for one in value)
            return value if fits else None

        return self._checked(names, default, read, "a list of whole numbers")

    def text(self, *names: str, allowed: Collection[str], default: str) -> str:
        """One of a few words."""
        value = self.value(*names, default=default)
        if not isinstance(value, str) or value not in allowed:
            raise self.wrong(names[0], f"one of {', '.join(allowed)}")
        return value

    def must(self, name: str, *allowed: Any, default: Any = None) -> None:
        """RequestError for a key with another value than one of `allowed`, whose first is the default."""
        if self.value(name, default=allowed[0] if default is None else default) not in allowed:
            values = " or ".join(json.dumps(value) for value in allowed)
            raise self.wrong(name, f"{values}, because a block supports nothing else")

    def table(self, name: str, known: Collection[str] = ()) -> Config:
        """A table inside this one; empty where it is null or missing."""
        value = self.value(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, "a table")
        return self._tables.setdefault(name, Config(value or {}, self.where, f"{self._inside}{name}.", known))

    def wrong(self, name: str, allowed: str) -> RequestError:
        """The error for a key with a wrong value."""
        value = json.dumps(self.data[name]) if name in self.data else "missing"
        return RequestError(f"{self.where}: {self._inside}{name} is {value}: it must be {allowed}.")

    def refuse_unread(self, model_type: str, known: Collection[str] = ()) -> None:
        """RequestError for the first key that was not read and is not known to be irrelevant to attention."""
        for key, value in self.data.items():
            inert = key in INERT and value in INERT[key]
            if key not in self._read and key not in self._known and key not in known and not inert:
                raise RequestError(
                    f"{self.where}: {self._inside}{key} is {json.dumps(value)[:80]}, and posexport doesn't know what "
                    f"that means for the attention of {model_type}: drop the key if it means nothing."
                )
        for table in self._tables.values():
            table.refuse_unread(model_type)

    def _checked(
        self, names: tuple[str, ...], default: T | None, read: Callable[[Any], T | None], allowed: str
    ) -> T | None:
        """The value of a key as `read` returns it; RequestError where that is None, unless the key is null."""
        value = self.value(*names, default=default)
        checked = None if value is None else read(value)
        if value is not None and checked is None:
            raise self.wrong(next(name for name in names if name in self.data), allowed)
        return checked


def open_config(path: Path) -> dict[str, Any]:
    """The data of a config.json, from the file or its folder; RequestError where it can't be read or is no table."""
    file = path / FILE if path.is_dir() else path
    try:
        if file.is_char_device():
            raise OSError(errno.EINVAL, "it is a device")  # reading it may never end
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RequestError(
            f"{str(file)!r} can't be read ({error.strerror}): give a config.json or the folder of a checkpoint."
        ) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{str(file)!r} is not JSON ({error}): give a config.json of Hugging Face.") from None
    if not isinstance(data, dict):
        raise RequestError(f"{str(file)!r} holds no table: give a config.json of Hugging Face.")
    return data
