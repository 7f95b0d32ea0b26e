"""A whole model of a Hugging Face checkpoint as a torch module. transformers builds it and maps its weights from disk.

Only transformers' own classes are used. Code in a checkpoint is never run.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from posexport.errors import RequestError, plain, said, shown
from posexport.files import is_there
from posexport.jsondata import read_json
from posexport.models.checkpoints.config import FILE
from posexport.models.checkpoints.tensors import INDEX, Tensors, weights_file
from posexport.models.pretrained_angles import stateless_angles
from posexport.models.pretrained_buffers import computed_again
from posexport.models.pretrained_limits import check_counts, limited_to
from posexport.models.pretrained_parts import language_model

EXPERTS = "batched_mm"
"""How experts of a mixture are computed: the only implementation of transformers that can be exported to ONNX."""

ENCODER, DECODER, TRANSLATOR = "encoder", "decoder", "encoder-decoder"
"""What a model gives: features or logits; next tokens; or next tokens after it has read another text or sound."""

POOLING = "add_pooling_layer"
"""The argument that builds models such as ViTModel without a pooler. An untrained pooler must not be exported.

Models such as Swin have a pooler without weights."""

_QUANTIZED = ("quantization_config", "compression_config")
"""The keys of config.json that say how weights are quantized."""

KERNELS = ("sdpa", "eager")
"""Implementations of attention in transformers, in the order in which they are tried."""


@attrs.frozen(kw_only=True)
class Pretrained:
    """A model in evaluation mode.

    `weights` by name have the dtypes of the checkpoint and are mapped from `files`. `unread` are the tensors in these
    files that the model does not have. `around` is the configuration of the checkpoint if the model is the language
    model inside that of the checkpoint (posexport.models.pretrained_parts).
    """

    folder: Path
    files: tuple[str, ...]
    model: nn.Module
    weights: dict[str, Tensor]
    unread: tuple[str, ...] = ()
    around: Any = None

    @property
    def config(self) -> Any:
        """The configuration that transformers made from config.json."""
        return self.model.config

    @property
    def text_config(self) -> Any:
        """The configuration of the part of the model that reads tokens."""
        return text_config(self.config)

    @property
    def kind(self) -> str:
        """ENCODER, DECODER or TRANSLATOR, by the list of transformers that contains its class."""
        from transformers.models.auto import modeling_auto as lists

        decoders = (
            lists.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            lists.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
            lists.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        )
        translators = (
            lists.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
            lists.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
            lists.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        )
        if getattr(self.config, "is_encoder_decoder", False):
            return TRANSLATOR if any(self._is_among(names) for names in translators) else ENCODER
        reads_tokens = self.model.main_input_name == "input_ids"
        decodes = self.around is not None or any(self._is_among(names) for names in decoders)
        decodes &= getattr(self.config, "causal", None) is not False  # XLM's head for hidden words has the same class
        return DECODER if reads_tokens and decodes else ENCODER

    @property
    def left_out(self) -> tuple[str, ...]:
        """What a decoder reads besides tokens, such as "vision". A file of the decoder contains none of it.

        Some configurations have parts that are not modules of their own, such as "attn" of MPT. These do not count.
        """
        if self.around is not None:
            return tuple(sorted({name.removesuffix("_config") for name in self.around.sub_configs} - {"text"}))
        others = getattr(self.config, "sub_configs", {}) if self.kind == DECODER else {}
        kinds = {type(module.config) for module in self.model.modules() if hasattr(module, "config")}
        parts = {name: getattr(self.config, name, None) for name in others}
        found = (name for name, part in parts.items() if type(part) in kinds and part != self.text_config)
        return tuple(sorted(name.removesuffix("_config") for name in found))

    def _is_among(self, names: Any) -> bool:
        """Whether the class is in one of transformers' lists, which have one name or several for each config."""
        return any(self.architecture in ((one,) if isinstance(one, str) else one) for one in names.values())

    @property
    def architecture(self) -> str:
        """The name of the model's class in transformers."""
        return type(self.model).__name__

    @property
    def checkpoint_class(self) -> str:
        """The name of the class that config.json names. It is the model's, or that of the model around it."""
        return self.architecture if self.around is None else str(self.around.architectures[0])


def text_config(config: Any) -> Any:
    """Return the configuration of the part of a model that reads tokens; of several parts, that of the decoder."""
    try:
        return config.get_text_config()
    except ValueError:  # transformers says that there are several
        return config.get_text_config(decoder=True)


def open_pretrained(folder: Path) -> Pretrained:
    """Return the model of a checkpoint folder. RequestError if transformers cannot build a model from it."""
    transformers = _transformers()
    if not folder.is_dir():
        raise RequestError(f"{str(folder)!r} is no folder: give that of a checkpoint, with config.json and weights.")
    tensors = Tensors(folder, whole=True)
    files = tensors.files()
    if weights_file(folder) == INDEX and not isinstance(read_json(folder / INDEX).get("metadata"), dict):
        raise RequestError(
            f"{str(folder / INDEX)!r} has no table 'metadata', which transformers needs: add '\"metadata\": {{}}'."
        )
    stored = sum((folder / name).stat().st_size for name in files)
    known = _known_class(folder, transformers)
    # transformers names packages with GPU kernels when a model first runs
    logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
    model, problem = None, ""
    # a class's own method reads further files, and may not return what was loaded
    load = transformers.PreTrainedModel.from_pretrained.__func__
    with quiet(transformers), limited_to(folder, len(tensors), stored):
        for kernel in KERNELS:
            try:
                options = {"attn_implementation": kernel, "local_files_only": True, "use_safetensors": True}
                options |= {"dtype": "auto", "output_loading_info": True}
                options["ignore_mismatched_sizes"] = True  # mismatches are listed, and refused below
                model, loaded = load(known, str(folder), trust_remote_code=False, **options)
                pools = POOLING in signature(known.__init__).parameters and not tensors.has_module("pooler")
                if pools and any("pooler" in name.split(".") for name in loaded["missing_keys"]):
                    options[POOLING] = False  # config.json does not say it
                    model, loaded = load(known, str(folder), trust_remote_code=False, **options)
                break
            except RequestError:
                raise
            except Exception as error:  # the class lacks this kernel, or the checkpoint is damaged
                problem = f"{said(error)[:300]}{_setting(error, read_json(folder / FILE))}"
    if model is None:
        raise RequestError(f"transformers can't make a {known.__name__} of {str(folder)!r} ({problem}).")
    for what, names in (
        ("no tensor for", {name for name in loaded["missing_keys"] if not _is_unread(name, model)}),
        ("a tensor of another shape for", {name for name, *_ in loaded["mismatched_keys"]}),
    ):
        if names:
            raise RequestError(
                f"{str(folder)!r} has {what} {shown(min(names))} of {known.__name__}"
                f"{f' and {len(names) - 1} others' if len(names) > 1 else ''}: give a checkpoint of such a model."
            )
    if (method := _method(model.config.to_dict())) is not None:  # missing if transformers dequantized
        raise RequestError(
            f"{str(folder)!r} is quantized ({plain(method)}): give the checkpoint that it was quantized from."
        )
    if hasattr(model.config, "_experts_implementation"):
        model.set_experts_implementation(EXPERTS)
    inner = language_model(model)
    around, model = (None, model) if inner is None else (model.config, inner)
    model.eval().requires_grad_(False)
    stateless_angles(model)
    weights = dict(model.named_parameters(remove_duplicate=False))
    if _method(read_json(folder / FILE)) is None:  # else transformers has made plain weights of them
        tensors.check_stored(weights)
    values = {name: weight.data for name, weight in weights.items()}
    unread = tuple(sorted(loaded["unexpected_keys"]))
    return Pretrained(folder=folder, files=files, model=model, weights=values, unread=unread, around=around)


def _setting(error: Exception, config: Mapping[str, Any]) -> str:
    """Which settings have the value that transformers looked up in vain: a KeyError says only the value."""
    unknown = error.args[0] if isinstance(error, KeyError) and error.args else None
    places = {"": config, **{f"{name}.": part for name, part in config.items() if isinstance(part, dict)}}
    found = [f"{place}{key}" for place, part in places.items() for key, value in part.items() if value == unknown]
    return f", the {' and '.join(found)} of {FILE}" if isinstance(unknown, str) and found else ""


def _is_unread(name: str, model: Any) -> bool:
    """Whether a weight is one of the pooler that transformers puts behind the encoder of a model of two models, which
    reads the states before it: checkpoints such as TrOCR's have none."""
    return bool(model.config.is_encoder_decoder) and name.startswith("encoder.pooler.")


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise RequestError(
            "whole models are built by transformers, which is not installed: pip install 'posexport[transformers]'."
        ) from None
    return transformers


def _known_class(folder: Path, transformers: Any) -> Any:
    """Return the class that config.json names. RequestError if transformers does not have it."""
    if not is_there(folder / FILE):
        raise RequestError(f"{str(folder)!r} holds no {FILE}: give the folder of a checkpoint.")
    try:
        data = read_json(folder / FILE)
    except (OSError, ValueError):
        data = None
    if not isinstance(data, dict):
        raise RequestError(f"{str(folder / FILE)!r} can't be read as JSON: give the folder of a checkpoint.")
    check_counts(data, str(folder / FILE))
    _check_quantized(folder, data)
    _check_generation(folder)
    names = data.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    known = getattr(transformers, name, None) if name is not None and name.isidentifier() else None
    if name is None:
        raise RequestError(
            f"{str(folder / FILE)!r} has no 'architectures': add the model's class in transformers, such as "
            '["LlamaForCausalLM"].'
        )
    needed = getattr(known, "_backends", None)  # of a class that stands for one whose packages are missing
    if needed:
        packages = " and ".join(map(str, needed))
        raise RequestError(
            f"{str(folder / FILE)!r} names the architecture {shown(name)}, for which transformers needs {packages}, "
            f"which is not installed: install {packages} too."
        )
    if not (isinstance(known, type) and issubclass(known, transformers.PreTrainedModel)):
        code = " Code that a checkpoint brings with it is not run." if "auto_map" in data else ""
        raise RequestError(
            f"{str(folder / FILE)!r} names the architecture {shown(name)}, which transformers "
            f"{transformers.__version__} doesn't have: give a checkpoint of one that it has.{code}"
        )
    return known


def _check_generation(folder: Path) -> None:
    """RequestError for settings of generation that are no JSON: transformers reads them too, whatever their size."""
    path = folder / "generation_config.json"
    if not is_there(path):
        return
    try:
        data = read_json(path)
    except (OSError, ValueError):
        data = None
    if not isinstance(data, dict):
        raise RequestError(f"{str(path)!r} can't be read as a JSON object: restore it, or remove it.")


def _check_quantized(folder: Path, data: Mapping[str, Any]) -> None:
    """Raise RequestError for a checkpoint with quantized weights, unless transformers can dequantize them."""
    method = _method(data)
    if method is None:
        return
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
    from transformers.utils import is_accelerate_available

    known = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    undone = known is not None and "dequantize" in signature(known.__init__).parameters
    if undone and is_accelerate_available():
        return
    how = ", which transformers undoes with the package accelerate" if undone else ""
    advice = "pip install accelerate, or give" if undone else "give"
    raise RequestError(
        f"{str(folder)!r} is quantized ({plain(method)}){how}: {advice} the checkpoint that it was quantized from."
    )


def _method(data: Mapping[str, Any]) -> str | None:
    """Return how the weights of a config.json, or of a part of it, are quantized. None if they are not quantized."""
    for key, value in data.items():
        if isinstance(value, dict):
            method = (
                value.get("quant_method") or "by an unknown method" if value and key in _QUANTIZED else _method(value)
            )
            if method is not None:
                return str(method)
    return None


@contextlib.contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Suppress the progress bars, warnings and logs of transformers."""
    before = logging.root.manager.disable
    bars = transformers.logging.is_progress_bar_enabled()
    logging.disable(logging.WARNING)
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
        if bars:
            transformers.logging.enable_progress_bar()


@contextlib.contextmanager
def without_values(pretrained: Pretrained, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Give the model weights that have shapes but no values, so that tracing and trial runs read nothing from disk.

    Weights in the checkpoint's main dtype get `dtype`.
    """
    main = main_dtype(pretrained)
    parameters = list(pretrained.model.named_parameters())
    others = buffers_in(pretrained, dtype or main)
    buffers = {name: pretrained.model.get_buffer(name) for name in others}
    for name, parameter in parameters:
        own = dtype or main if pretrained.weights[name].dtype == main else parameter.dtype
        parameter.data = torch.zeros((), dtype=own).expand(parameter.shape)
    for name, other in others.items():
        set_buffer(pretrained.model, name, other)
    try:
        yield
    finally:
        for name, parameter in parameters:
            parameter.data = pretrained.weights[name]
        for name, buffer in buffers.items():
            set_buffer(pretrained.model, name, buffer)


def buffers_in(pretrained: Pretrained, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the buffers that have another dtype if the weights have this one, in it."""
    main = main_dtype(pretrained)
    if dtype == main:
        return {}
    constants = constants_of(pretrained.model)
    named = pretrained.model.named_buffers()
    names = [name for name, buffer in named if buffer.dtype == main and name not in constants]
    return computed_again(pretrained.model, names, dtype)


def set_buffer(model: nn.Module, name: str, buffer: Tensor) -> None:
    """Replace a buffer. If the buffer is a view, such as of a mapped file, torch does not allow its data another
    dtype."""
    owner, _, last = name.rpartition(".")
    setattr(model.get_submodule(owner), last, buffer)


def constants_of(model: nn.Module) -> frozenset[str]:
    """Return the buffers that are computed, not stored, and have a dtype of their own, such as frequencies.

    Other computed buffers have the dtype of the weights, such as tables of sinusoids.
    """
    stored = {*model.state_dict()}
    computed = {name: buffer.dtype for name, buffer in model.named_buffers() if name not in stored}
    if not any(dtype.is_floating_point for dtype in computed.values()):
        return frozenset(computed)
    before = torch.get_default_dtype()
    asked = torch.bfloat16 if torch.float16 in computed.values() else torch.float16
    torch.set_default_dtype(asked)
    try:
        with torch.device("meta"), quiet(_transformers()):
            made = dict(type(model)(model.config).named_buffers())
    finally:
        torch.set_default_dtype(before)
    return frozenset(name for name in computed if name not in made or made[name].dtype != asked)


def main_dtype(pretrained: Pretrained) -> torch.dtype:
    """The dtype of most weights."""
    sizes: dict[torch.dtype, int] = {}
    for weight in pretrained.weights.values():
        sizes[weight.dtype] = sizes.get(weight.dtype, 0) + weight.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])
