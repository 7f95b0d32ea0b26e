"""config.json, read key by key: what a reader asked for is remembered, so that whatever else is there can be refused.

A key that is left out has the value that transformers gives it, which the readers pass as `default`. An alternative
name of a key is one of an older version.
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
    """A set of keys from text that holds them apart by spaces."""
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
"""Keys of any config.json that say nothing of an attention layer at inference. Weights that `quantization_config`
packs are refused where they are read, by their dtype or because the plain ones are not there."""

INERT: Mapping[str, tuple[Any, ...]] = {
    "pruned_heads": ({}, None),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
}
"""Keys of any config.json that say nothing where they have one of these values."""


class Config:
    """A table of a config.json. `where` names the file, `inside` the table in it (empty for the outermost); `known` are
    keys that nobody needs to read."""

    def __init__(self, data: Mapping[str, Any], where: str, inside: str = "", known: Collection[str] = ()) -> None:
        self.data, self.where, self._inside, self._known = data, where, inside, known
        self._read: set[str] = set()
        self._tables: dict[str, Config] = {}

    def value(self, *names: str, default: Any = None) -> Any:
        """What a key says, by whichever of its names; RequestError where two of them say different things."""
        self._read.update(names)
        given = {name: self.data[name] for name in names if name in self.data}
        said = {name: value for name, value in given.items() if value is not None}
        if any(value != next(iter(said.values())) for value in said.values()):
            raise RequestError(f"{self.where}: {' and '.join(said)} are names of one key and differ: drop one of them.")
        return next(iter(said.values())) if said else None if given else default

    def integer(self, *names: str, default: int, at_least: int = 1) -> int:
        """A whole number."""
        found = self.optional_integer(*names, default=default, at_least=at_least)
        if found is None:
            raise self.wrong(names[0], f"a whole number from {at_least}")
        return found

    def optional_integer(self, *names: str, default: int | None = None, at_least: int = 1) -> int | None:
        """A whole number, or None where the key is null."""

        def read(value: Any) -> int | None:
            fits = isinstance(value, int) and not isinstance(value, bool) and at_least <= value < 2**31
            return value if fits else None

        return self._checked(names, default, read, f"a whole number from {at_least}")

    def number(self, *names: str, default: float) -> float:
        """A finite number."""
        found = self.optional_number(*names, default=default)
        if found is None:
            raise self.wrong(names[0], NUMBER)
        return found

    def optional_number(self, *names: str, default: float | None = None) -> float | None:
        """A finite number, or None where the key is null."""

        def read(value: Any) -> float | None:
            fits = isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST
            return value if fits else None

        return self._checked(names, default, read, NUMBER)

    def flag(self, *names: str, default: bool) -> bool:
        """True or false."""
        found = self._checked(names, default, lambda value: value if isinstance(value, bool) else None, "true or false")
        if found is None:
            raise self.wrong(names[0], "true or false")
        return found

    def integers(self, *names: str, default: list[int] | None = None) -> list[int] | None:
        """A list of whole numbers from 0, or None where the key is null."""

        def read(value: Any) -> list[int] | None:
            fits = isinstance(value, list) and all(isinstance(one, int) and 0 <= one < 2**31 for one in value)
            return value if fits else None

        return self._checked(names, default, read, "a list of whole numbers")

    def text(self, *names: str, allowed: Collection[str], default: str) -> str:
        """One of a few words."""
        found = self.value(*names, default=default)
        if not isinstance(found, str) or found not in allowed:
            raise self.wrong(names[0], f"one of {', '.join(allowed)}")
        return found

    def must(self, name: str, *allowed: Any, default: Any = None) -> None:
        """Refuse a key that says anything but one of `allowed`, the first of which is the default."""
        if self.value(name, default=allowed[0] if default is None else default) not in allowed:
            said = " or ".join(json.dumps(value) for value in allowed)
            raise self.wrong(name, f"{said}, since a block has no way to be otherwise")

    def table(self, name: str, known: Collection[str] = ()) -> Config:
        """A table in this one; an empty one where it is null or isn't there."""
        value = self.value(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, "a table")
        return self._tables.setdefault(name, Config(value or {}, self.where, f"{self._inside}{name}.", known))

    def wrong(self, name: str, allowed: str) -> RequestError:
        """The error for what a key says."""
        said = json.dumps(self.data[name]) if name in self.data else "not there"
        return RequestError(f"{self.where}: {self._inside}{name} is {said}: it must be {allowed}.")

    def refuse_unread(self, model_type: str, known: Collection[str] = ()) -> None:
        """RequestError for the first key that nobody read, and that isn't known to say nothing of attention."""
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
        """What a key says where `read` takes it; None where it is null."""
        value = self.value(*names, default=default)
        found = None if value is None else read(value)
        if value is not None and found is None:
            name = next(name for name in names if name in self.data)
            raise self.wrong(name, allowed)
        return found


def open_config(path: Path) -> dict[str, Any]:
    """The data of a config.json, given as itself or as the folder that it lies in; RequestError where it isn't one."""
    file = path / FILE if path.is_dir() else path
    try:
        if file.is_char_device():
            raise OSError(errno.EINVAL, "it is a device")  # which may never end
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
