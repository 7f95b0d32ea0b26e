"""Models without caches as modules, with transformers' own names.

They read text, images or sound and return features or logits.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posexport.errors import RequestError
from posexport.models.pretrained import text_config
from posexport.models.whole import Signature, takes, unchanged
from posexport.models.whole_hidden_states import last_hidden_states
from posexport.models.whole_inputs import (
    Dimensions,
    encoder_example,
    possible_inputs,
    reads_among_text,
    refused_together,
)
from posexport.models.whole_outputs import HIDDEN, outputs_by_name


class Encoder(nn.Module):
    """A model that returns the named tensors in `outputs`. `hidden` adds the last hidden states before its head."""

    def __init__(self, model: nn.Module, outputs: Sequence[str], hidden: bool = False) -> None:
        super().__init__()
        self.model, self.outputs, self.hidden = model, tuple(outputs), hidden

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        bbox: Tensor | None = None,
        task_inputs: Tensor | None = None,
        pixel_values: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        input_values: Tensor | None = None,
        input_features: Tensor | None = None,
        past_values: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the outputs by name. Only inputs that the model has are given."""
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "global_attention_mask": global_attention_mask,
            "token_type_ids": token_type_ids,
            "bbox": bbox,
            "task_inputs": task_inputs,
            "pixel_values": pixel_values,
            "pixel_values_videos": pixel_values_videos,
            "input_values": input_values,
            "input_features": input_features,
            "past_values": past_values,
        }
        with last_hidden_states(self.model) as hidden:
            by_name = _run(self.model, {name: value for name, value in given.items() if value is not None})
        outputs = {name: by_name[name] for name in self.outputs}
        return {**outputs, HIDDEN: hidden[-1]} if self.hidden and HIDDEN not in outputs else outputs


def encoder_of(
    model: nn.Module, dtype: torch.dtype, hidden: bool = False, folder: Path | None = None
) -> tuple[Encoder, Signature]:
    """Return the module of a model without caches, and its inputs and outputs. Runs the model once to find the outputs.

    `folder` is the folder of its checkpoint, whose preprocessor may give the size of images. Sizes that the
    architecture fixes, such as those of images, are numbers. RequestError for a model with unknown inputs or outputs.
    """
    _check_head(model)
    configuration: Any = model.config
    for config in (configuration, text_config(configuration)):
        if getattr(config, "use_cache", False):  # a decoder without a head, whose caches nothing reads
            config.use_cache = False
    try:
        inputs, example, by_name = _first_that_runs(model, folder, dtype)
    except RequestError:
        raise
    except Exception as error:
        own = [name for name in _OF_DECODERS if takes(model, name)]
        if own and getattr(configuration, "is_encoder_decoder", False):
            raise RequestError(
                f"the decoder of {type(model).__name__} reads {own[0]}, which a file has no input for: of the "
                "encoder-decoders, those are exported that make tokens."
            ) from None
        if missing := _missing(model, error):
            raise RequestError(
                f"{type(model).__name__} needs {' and '.join(missing)} too, which a file has no input for: it is not "
                "exported."
            ) from None
        raise
    if not by_name:
        raise RequestError(
            f"{type(model).__name__} returns no tensor that has a name: give a checkpoint of another class of its kind."
        )
    names = [*by_name]
    module = Encoder(model, names, hidden)
    outputs = [*names, *([HIDDEN] if hidden and HIDDEN not in names else [])]
    shapes = {
        name: {axis: torch.export.Dim.AUTO for axis, size in enumerate(shape) if isinstance(size, str)}
        for name, shape in inputs.items()
    }
    return module, Signature(inputs=inputs, outputs=dict.fromkeys(outputs), example=example, shapes=shapes)


def _missing(model: nn.Module, error: Exception) -> list[str]:
    """The inputs of a model that a complaint about missing ones names and no file has."""
    parameters = inspect.signature(model.forward).parameters
    complains = isinstance(error, ValueError | TypeError) and re.search("specif|None|provide|require|pass", str(error))
    named = re.findall(r"\w+", str(error)) if complains else []
    known = inspect.signature(Encoder.forward).parameters
    return [name for name in dict.fromkeys(named) if name in parameters and name not in (*known, "inputs_embeds")]


_OF_DECODERS = ("decoder_input_ids", "decoder_input_values")
"""Inputs of the decoder of an encoder-decoder. Models such as BartModel make them of the text if they are missing."""


_MANY = 24
"""Tokens for models that cannot read the few tokens of tracing, such as models that pool over tokens."""


def _first_that_runs(
    model: nn.Module, folder: Path | None, dtype: torch.dtype
) -> tuple[Mapping[str, Dimensions], dict[str, Tensor], dict[str, Tensor]]:
    """Return the first inputs with which the model runs, an example of them, and what the model makes of it."""
    failure, most = None, 0
    for inputs in possible_inputs(model, folder):
        try:
            return inputs, *_first_run(model, inputs, dtype)
        except RequestError:
            raise
        except Exception as error:
            if len(inputs) >= most:  # what is wrong with fewer inputs may be that they are too few
                failure, most = error, len(inputs)
    if failure is None:
        raise AssertionError(f"{type(model).__name__} has no inputs")
    if reads_among_text(model):
        raise refused_together(model) from failure
    raise failure


def _first_run(
    model: nn.Module, inputs: Mapping[str, Dimensions], dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return an example of the inputs with which the model runs, and what it makes of them."""
    example = encoder_example(inputs, dtype)
    try:
        return example, _made(model, example)
    except ValueError as error:
        configuration: Any = model.config
        unpadded = getattr(text_config(configuration), "pad_token_id", None) is None
        if "input_ids" in inputs and unpadded and "padding token" in str(error):  # heads read a row's last token
            raise RequestError(
                f"{type(model).__name__} doesn't run on several rows, which end where padding begins, since "
                'config.json has no pad_token_id: add it, such as "pad_token_id": 0.'
            ) from None
        raise
    except RuntimeError as error:
        example = encoder_example(inputs, dtype, _MANY)
        try:
            return example, _made(model, example)
        except Exception:
            raise error from None


def _made(model: nn.Module, example: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run the model on an example."""
    with torch.no_grad(), unchanged(model):
        return _run(model, example)


def _run(model: nn.Module, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what the model makes of its inputs, by name."""
    parameters = inspect.signature(model.forward).parameters.values()
    takes_it = any(one.name == "return_dict" or one.kind is one.VAR_KEYWORD for one in parameters)
    made = model(**given, **({"return_dict": True} if takes_it else {}))
    return outputs_by_name(made if isinstance(made, Mapping) else {})


def _check_head(model: nn.Module) -> None:
    """Raise RequestError for a head that reads several texts at once, or finds the ends of texts by values."""
    from transformers.models.auto import modeling_auto as lists

    name, config = type(model).__name__, getattr(model, "config", None)
    if name in lists.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES.values():
        raise RequestError(
            f"{name} chooses between several texts, which a file has no input for: give a checkpoint of another head, "
            "or of the model without a head."
        )
    classifies = name in lists.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()
    if classifies and getattr(config, "is_encoder_decoder", False):
        raise RequestError(
            f"{name} looks for the last </s> of each text and fails where texts have different numbers of them, which "
            "torch can't export: give a checkpoint of another head, or of the model without a head."
        )
