"""Models without caches as modules, with transformers' own names.

They read text, images or sound and return features or logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posexport.errors import RequestError
from posexport.models.image_size import GUESSED, image_size, of_pictures
from posexport.models.pretrained import text_config
from posexport.models.whole import BATCH, SEQUENCE, TRACED, Signature, takes, unchanged
from posexport.models.whole_hidden_states import last_hidden_states

OUTPUTS = (
    *("logits", "start_logits", "end_logits", "prediction_logits", "seq_relationship_logits"),
    *("last_hidden_state", "pooler_output", "text_embeds", "image_embeds", "reconstruction"),
    *("embeddings", "relevance_logits", "heatmaps", "alphas"),
    *("class_queries_logits", "masks_queries_logits", "pred_boxes", "predicted_depth"),
)
"""The outputs of transformers' models that a file has, if the model has them."""

ALPHABETS = ("char_logits", "bpe_logits", "wp_logits")
"""The outputs of a model that reads a text in three alphabets, which loaders expect in place of a tuple of logits."""

HIDDEN = "last_hidden_state"

Dimensions = tuple[int | str, ...]


class Encoder(nn.Module):
    """A model that returns the named tensors in `outputs`. `hidden` adds the last hidden states before its head."""

    def __init__(self, model: nn.Module, outputs: Sequence[str], hidden: bool = False) -> None:
        super().__init__()
        self.model, self.outputs, self.hidden = model, tuple(outputs), hidden

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        bbox: Tensor | None = None,
        pixel_values: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        input_values: Tensor | None = None,
        input_features: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the outputs by name. Only inputs that the model has are given."""
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "bbox": bbox,
            "pixel_values": pixel_values,
            "pixel_values_videos": pixel_values_videos,
            "input_values": input_values,
            "input_features": input_features,
        }
        with last_hidden_states(self.model) as hidden:
            made = self.model(**{name: value for name, value in given.items() if value is not None}, return_dict=True)
        by_name = _by_name(made)
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
    inputs = encoder_inputs(model, folder)
    configuration: Any = model.config
    for config in (configuration, text_config(configuration)):
        if getattr(config, "use_cache", False):  # a decoder without a head, whose caches nothing reads
            config.use_cache = False
    try:
        example, made = _first_run(model, inputs, dtype)
    except Exception:
        own = [name for name in _OF_DECODERS if takes(model, name)]
        if own and getattr(configuration, "is_encoder_decoder", False):
            raise RequestError(
                f"the decoder of {type(model).__name__} reads {own[0]}, which a file has no input for: of the "
                "encoder-decoders, those are exported that make tokens."
            ) from None
        raise
    by_name = _by_name(made)
    names = [name for name in (*OUTPUTS, *ALPHABETS) if isinstance(by_name.get(name), Tensor)]
    if not names:
        raise RequestError(
            f"{type(model).__name__} gives {', '.join(made)}, and a file has one of {', '.join(OUTPUTS[:-2])}: give a "
            "checkpoint of another class."
        )
    module = Encoder(model, names, hidden)
    outputs = [*names, *([HIDDEN] if hidden and HIDDEN not in names else [])]
    shapes = {
        name: {axis: torch.export.Dim.AUTO for axis, size in enumerate(shape) if isinstance(size, str)}
        for name, shape in inputs.items()
    }
    return module, Signature(inputs=inputs, outputs=dict.fromkeys(outputs), example=example, shapes=shapes)


_OF_DECODERS = ("decoder_input_ids", "decoder_input_values")
"""Inputs of the decoder of an encoder-decoder. Models such as BartModel make them of the text if they are missing."""


def _first_run(model: nn.Module, inputs: Mapping[str, Dimensions], dtype: torch.dtype) -> tuple[dict[str, Tensor], Any]:
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


def _made(model: nn.Module, example: Mapping[str, Tensor]) -> Any:
    """Run the model on an example."""
    with torch.no_grad(), unchanged(model):
        return model(**example, return_dict=True)


def _by_name(made: Any) -> dict[str, Any]:
    """Return what a model made, with logits for several alphabets as outputs of their own."""
    logits = made.get("logits")
    several = isinstance(logits, tuple) and len(logits) == len(ALPHABETS)
    return {**made, **(dict(zip(ALPHABETS, logits, strict=True)) if several else {})}


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


def encoder_inputs(model: nn.Module, folder: Path | None = None) -> dict[str, Dimensions]:
    """Return the inputs of a model by name, with sizes and names of dimensions."""
    config: Any = model.config
    parts = {
        name for name in ("text_config", "vision_config", "audio_config") if getattr(config, name, None) is not None
    }
    if len(parts) > 1:
        raise RequestError(
            f"{type(model).__name__} reads {' and '.join(sorted(name.removesuffix('_config') for name in parts))} "
            "together: give a checkpoint of one of its parts."
        )
    main = str(getattr(model, "main_input_name", "input_ids"))
    if main not in _SHAPES and isinstance(getattr(model, "encoder", None), nn.Module):  # a model of two models
        encoder: Any = model.encoder
        main, config = str(encoder.main_input_name), encoder.config
    if not takes(model, main):  # some classes have the default name
        main = next(iter(inspect.signature(model.forward).parameters))
    if main not in _SHAPES:
        raise RequestError(f"{type(model).__name__} reads {main}: only models of {', '.join(_SHAPES)} are exported.")
    inputs = {main: _SHAPES[main](config, folder)}
    if main == "input_ids":
        if takes(model, "attention_mask"):
            inputs["attention_mask"] = (BATCH, SEQUENCE)
        if takes(model, "token_type_ids") and (getattr(config, "type_vocab_size", None) or 0) > 1:
            inputs["token_type_ids"] = (BATCH, SEQUENCE)
        if takes(model, "bbox"):
            if not getattr(config, "max_2d_position_embeddings", None):
                raise RequestError(
                    f"{type(model).__name__} reads places of tokens on a page, bbox, that are no whole numbers, which "
                    "a file has no input for: it is not exported."
                )
            inputs["bbox"] = (BATCH, SEQUENCE, 4)
    parameters = inspect.signature(model.forward).parameters.values()
    needed = [one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    if missing := [name for name in needed if name not in inputs]:
        raise RequestError(
            f"{type(model).__name__} needs {' and '.join(missing)} too, which a file has no input for: it is not "
            "exported."
        )
    return inputs


_OPTIONAL = (
    *("attention_mask", "pixel_mask", "pixel_values", "image", "langs", "global_attention_mask"),
    *("entity_ids", "visual_embeds", "visual_feats"),
)
"""Inputs of transformers' models besides the main one that are optional."""


def left_out_inputs(model: nn.Module) -> tuple[str, ...]:
    """Return the inputs that a model of transformers has and its file does not."""
    inputs = encoder_inputs(model)
    return tuple(name for name in _OPTIONAL if takes(model, name) and name not in inputs)


def _image(config: Any, folder: Path | None) -> Dimensions:
    height, width = image_size(config, folder) or (GUESSED, GUESSED)
    config = of_pictures(config)
    frames = _first(config, _FRAMES)  # of models of video
    return (BATCH, *([frames] if frames else []), _first(config, _CHANNELS) or 3, height, width)


_FRAMES, _CHANNELS = ("num_frames", "frames_per_clip"), ("num_channels", "in_chans")
"""Settings with the number of frames of a video, and with the number of channels of a pixel."""


def _sound(config: Any) -> Dimensions:
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length") and hasattr(config, "patch_size"):
        return (BATCH, config.max_length, config.num_mel_bins)  # a spectrogram of fixed length
    is_codec = hasattr(config, "codebook_size")
    return (BATCH, getattr(config, "audio_channels", 1), "samples") if is_codec else (BATCH, "samples")


def _features(config: Any) -> Dimensions:
    config = getattr(config, "encoder_config", None) or config  # of an encoder with a head
    if hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
        return (BATCH, config.num_mel_bins, 2 * config.max_source_positions)
    if hasattr(config, "spec_size"):  # CLAP makes an image of a spectrogram
        raise RequestError(
            f"the configuration of {config.model_type} doesn't say how many frames a spectrogram has, which its layers "
            "depend on: it is not exported."
        )
    width = _first(config, _WIDTHS)
    if width is None:
        raise RequestError(
            f"the configuration of {config.model_type} has none of {', '.join(_WIDTHS)}, which say how wide a frame of "
            "sound is: it is not exported."
        )
    return (BATCH, "frames", width)


def _first(config: Any, names: Sequence[str]) -> int | None:
    """Return the first of these settings that a configuration has and that is not 0."""
    return next((one for name in names if (one := getattr(config, name, None))), None)


_WIDTHS = ("feature_projection_input_dim", "input_feat_per_channel", "num_mel_bins")
"""Settings with the number of features of a frame of sound."""

_SHAPES: Mapping[str, Any] = {
    "input_ids": lambda *_: (BATCH, SEQUENCE),
    "pixel_values": _image,
    "pixel_values_videos": _image,
    "input_values": lambda config, _: _sound(config),
    "input_features": lambda config, _: _features(config),
}
"""By main input of a model: its dimensions as a function of the configuration and the checkpoint's folder."""

_TRACED = {**TRACED, "samples": 4000, "frames": 40}


_MANY = 24
"""Tokens for models that cannot read the few tokens of tracing, such as models that pool over tokens."""


def encoder_example(
    inputs: Mapping[str, Dimensions], dtype: torch.dtype, tokens: int = TRACED[SEQUENCE]
) -> dict[str, Tensor]:
    """Return inputs for tracing with this number of tokens. Floating-point inputs have this dtype."""
    known = {**_TRACED, SEQUENCE: tokens}
    shapes = {
        name: [known[size] if isinstance(size, str) else size for size in shape] for name, shape in inputs.items()
    }
    return {name: _example(name, sizes, dtype) for name, sizes in shapes.items()}


def _example(name: str, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    if name in ("input_ids", "token_type_ids", "bbox"):
        return torch.zeros(sizes, dtype=torch.int64)
    return torch.ones(sizes, dtype=torch.int64 if name == "attention_mask" else dtype)
