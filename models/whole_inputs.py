"""The inputs of a model without caches, by transformers' names, with their dimensions.

A model reads text, images or sound, or several of them. If several are read, their rows may belong together, as a
question and its picture do. Or each text is compared with each image, as CLIP does; then their numbers of rows differ.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posexport.errors import RequestError
from posexport.jsondata import is_whole
from posexport.models.image_size import GUESSED, image_size, of_pictures, preprocessor
from posexport.models.whole import BATCH, SEQUENCE, TRACED, takes

TEXT_ROWS = "text_batch"
"""The name of the number of texts that are compared with something else."""

_OTHER_ROWS = {
    "pixel_values": "image_batch",
    "pixel_values_videos": "video_batch",
    "input_values": "audio_batch",
    "input_features": "audio_batch",
}
"""By input: the name of the number of what texts are compared with."""

GLOBAL = "global_attention_mask"
"""The input that says which tokens see all others, and are seen by them, in a model with windows of attention."""

TASK = "task_inputs"
"""The input with the tokens of the sentence that says what a segmentation is for."""

Dimensions = tuple[int | str, ...]


def encoder_inputs(model: nn.Module, folder: Path | None = None) -> dict[str, Dimensions]:
    """Return the inputs of the encoder of an encoder-decoder by name, with sizes and names of dimensions.

    RequestError for an encoder that reads text together with something else.
    """
    if not _parts(model):
        return _main_inputs(model, folder)
    whole: Any = model
    read = _mains(whole.get_encoder())
    if len(read) == 1 and read[0] != "input_ids":  # only the decoder reads text
        return _inputs_of(model, read, whole.config, folder)
    raise refused_together(model)


def reads_among_text(model: nn.Module) -> bool:
    """Whether a model puts images or sound in the place of tokens of its text."""
    config: Any = model.config
    return bool(_parts(model)) and any(getattr(config, name, None) is not None for name in _MARKS)


def refused_together(model: nn.Module) -> RequestError:
    """Return the refusal of a model that reads text together with images or sound."""
    parts = " and ".join(_parts(model))
    return RequestError(f"{type(model).__name__} reads {parts} together: give a checkpoint of one of its parts.")


def possible_inputs(model: nn.Module, folder: Path | None = None) -> Iterator[dict[str, Dimensions]]:
    """Yield the sets of inputs that a model may need, in the order in which they are tried.

    RequestError for a model that needs an input that is not known.
    """
    several, parts = _mains(model), _parts(model)
    if len(several) < 2:
        inputs = _main_inputs(model, folder)
        yield inputs
        rows, *sizes = inputs.get("input_features", ("",))
        if sizes[:1] == ["frames"]:  # some encoders of sound read its features before its frames
            yield {**inputs, "input_features": (rows, *reversed(sizes))}
        return
    if parts and model.can_generate():  # type: ignore[operator]
        raise refused_together(model)
    config: Any = model.config
    among_text = reads_among_text(model)
    alone = not _needed(model, several)
    if alone and (among_text or not parts):
        yield _main_inputs(model, folder)
    inputs = _checked(model, _inputs_of(model, several, config, folder))
    if parts:
        yield {name: (_OTHER_ROWS.get(name, TEXT_ROWS), *shape[1:]) for name, shape in inputs.items()}
    yield inputs
    if alone and parts and not among_text:
        yield _main_inputs(model, folder)


_MARKS = ("image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
"""Settings with the token in whose place a model puts an image or a sound."""


def _main_inputs(model: nn.Module, folder: Path | None) -> dict[str, Dimensions]:
    main, config = _main(model)
    return _checked(model, _inputs_of(model, (main,), config, folder))


def _parts(model: nn.Module) -> list[str]:
    """The kinds of data that a model reads, if it has an input and a configuration for each. Empty if it has fewer
    than two."""
    config: Any = model.config
    found = [
        name for name in ("audio", "image", "text", "vision") if getattr(config, f"{name}_config", None) is not None
    ]
    return found if len(found) > 1 and len(_mains(model)) > 1 else []


def _needed(model: nn.Module, names: Sequence[str]) -> bool:
    """Whether a model can't be called without all of these inputs."""
    parameters = inspect.signature(model.forward).parameters
    return len(names) > 1 and all(parameters[name].default is inspect.Parameter.empty for name in names)


def _main(model: nn.Module) -> tuple[str, Any]:
    """Return the main input of a model, and the configuration of what reads it."""
    config: Any = model.config
    main = str(getattr(model, "main_input_name", "input_ids"))
    encoder: Any = getattr(model, "encoder", None)
    if main not in _SHAPES and hasattr(encoder, "main_input_name"):  # a model of two models
        main, config = str(encoder.main_input_name), encoder.config
    if not takes(model, main):  # some classes have the default name
        main = next(iter(inspect.signature(model.forward).parameters))
    if main not in _SHAPES:
        raise RequestError(f"{type(model).__name__} reads {main}: only models of {', '.join(_SHAPES)} are exported.")
    return main, config


def _mains(model: nn.Module) -> tuple[str, ...]:
    """All known inputs of a model that contain text, images or sound."""
    return tuple(name for name in _SHAPES if takes(model, name))


def _inputs_of(model: nn.Module, mains: Sequence[str], config: Any, folder: Path | None) -> dict[str, Dimensions]:
    inputs = {name: _SHAPES[name](config, folder) for name in mains}
    if takes(model, TASK):
        inputs[TASK] = (BATCH, config.task_seq_len)
    if "input_ids" in inputs:
        text: Any = getattr(config, "text_config", None) or config
        if takes(model, "attention_mask"):
            inputs["attention_mask"] = (BATCH, SEQUENCE)
        if takes(model, GLOBAL):
            inputs[GLOBAL] = (BATCH, SEQUENCE)
        if takes(model, "token_type_ids") and (getattr(text, "type_vocab_size", None) or 0) > 1:
            inputs["token_type_ids"] = (BATCH, SEQUENCE)
        if takes(model, "token_type_ids") and (kinds := getattr(text, "type_vocab_sizes", None)):
            inputs["token_type_ids"] = (BATCH, SEQUENCE, len(kinds))  # the place of a token in a table, and other facts
        if takes(model, "bbox"):
            if not getattr(config, "max_2d_position_embeddings", None):
                raise RequestError(
                    f"{type(model).__name__} reads places of tokens on a page, bbox, that are no whole numbers, which "
                    "a file has no input for: it is not exported."
                )
            inputs["bbox"] = (BATCH, SEQUENCE, 4)
    return inputs


_OF_PATCHES = "spatial_shapes"
"""The input with the sizes of images whose patches are a model's pixel_values, in rows of one length. Optional in
transformers' signatures, but such a model doesn't run without it."""


def _checked(model: nn.Module, inputs: dict[str, Dimensions]) -> dict[str, Dimensions]:
    parameters = inspect.signature(model.forward).parameters.values()
    needed = [one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    if "pixel_values" in inputs and takes(model, _OF_PATCHES) and _OF_PATCHES not in needed:
        needed.append(_OF_PATCHES)
    if missing := [name for name in needed if name not in inputs]:
        raise RequestError(
            f"{type(model).__name__} needs {' and '.join(missing)} too, which a file has no input for: it is not "
            "exported."
        )
    return inputs


_OPTIONAL = (
    *("attention_mask", "pixel_mask", "pixel_values", "image", "langs", GLOBAL),
    *("entity_ids", "visual_embeds", "visual_feats", "input_points", "input_boxes", "input_masks"),
    *("xpath_tags_seq", "xpath_subs_seq"),
    *("padding_mask", "padding_mask_videos", "input_features_mask", "pixel_attention_mask", "spatial_shapes"),
    *("task_type_ids", "lang_ids", "input_shape_ids", "input_pronunciation_ids", "question_positions"),
    *("past_observed_mask", "observed_mask", "past_values_padding", "freq", "prompt_depth", "dataset_index"),
)
"""Inputs of transformers' models besides the main one that are optional."""


def left_out_inputs(model: nn.Module, inputs: Collection[str]) -> tuple[str, ...]:
    """Return the optional inputs of a model of transformers that its file, with these `inputs`, does not have."""
    return tuple(name for name in _OPTIONAL if takes(model, name) and name not in inputs)


def _image(config: Any, folder: Path | None) -> Dimensions:
    height, width = image_size(config, folder) or (GUESSED, GUESSED)
    config = of_pictures(config)
    frames = _first(config, _FRAMES)  # of models of video
    channels = _first(config, _CHANNELS) or _first(getattr(config, "backbone_config", None), _CHANNELS) or 3
    return (BATCH, *([frames] if frames else []), channels, height, width)


_FRAMES, _CHANNELS = ("num_frames", "frames_per_clip"), ("num_channels", "in_chans")
"""Settings with the number of frames of a video, and with the number of channels of a pixel."""


def _sound(config: Any) -> Dimensions:
    config = getattr(config, "audio_config", None) or config
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length") and hasattr(config, "patch_size"):
        return (BATCH, config.max_length, config.num_mel_bins)  # a spectrogram of fixed length
    is_codec = hasattr(config, "codebook_size")
    return (BATCH, getattr(config, "audio_channels", 1), "samples") if is_codec else (BATCH, "samples")


def _features(config: Any, folder: Path | None) -> Dimensions:
    for part in ("audio_config", "encoder_config"):  # of a model of text and sound, and of an encoder with a head
        config = getattr(config, part, None) or config
    if hasattr(config, "max_source_positions") and hasattr(config, "num_mel_bins"):
        return (BATCH, config.num_mel_bins, 2 * config.max_source_positions)
    if hasattr(config, "spec_size"):
        return _spectrogram(config, folder)
    width = _first(config, _WIDTHS)
    if width is None:
        raise RequestError(
            f"the configuration of {config.model_type} has none of {', '.join(_WIDTHS)}, which say how wide a frame of "
            "sound is: it is not exported."
        )
    return (BATCH, "frames", width)


def _spectrogram(config: Any, folder: Path | None) -> Dimensions:
    """A sound of CLAP, which makes an image of a spectrogram of a fixed number of frames."""
    data = {} if folder is None else preprocessor(folder)
    samples, hop = data.get("nb_max_samples"), data.get("hop_length")
    if not (is_whole(samples) and is_whole(hop) and 0 < hop <= samples):
        raise RequestError(
            f"the configuration of {config.model_type} doesn't say how many frames a spectrogram has, which its layers "
            "depend on: put nb_max_samples and hop_length into preprocessor_config.json beside it."
        )
    if config.enable_fusion:
        raise RequestError(
            f"the model of {config.model_type} has enable_fusion and reads is_longer besides a spectrogram, which a "
            "file has no input for: it is not exported."
        )
    return (BATCH, 1, samples // hop + 1, config.num_mel_bins)


def _series(config: Any) -> Dimensions:
    """The values of a model of time series that divides a context of a fixed length into patches."""
    channels = getattr(config, "num_input_channels", None)
    if channels is None:
        raise RequestError(
            f"models of {config.model_type} read past_values with other inputs or of any length, which a file has no "
            "input for: of the models of time series, those with num_input_channels in config.json are exported."
        )
    return (BATCH, config.context_length, channels)


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
    "input_features": lambda config, folder: _features(config, folder),
    "past_values": lambda config, _: _series(config),
}
"""By main input of a model: its dimensions as a function of the configuration and the checkpoint's folder."""

_TRACED = {**TRACED, "samples": 4000, "frames": 40, TEXT_ROWS: 4, **dict.fromkeys(_OTHER_ROWS.values(), 2)}
"""Sizes for tracing. The texts are a multiple of the images, because a model may read several for each image."""


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
    if name in ("input_ids", "token_type_ids", "bbox", TASK):
        return torch.zeros(sizes, dtype=torch.int64)
    return torch.ones(sizes, dtype=torch.int64 if name.endswith("attention_mask") else dtype)
