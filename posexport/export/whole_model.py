"""Writes a whole model of a Hugging Face checkpoint as ONNX models, with its attention in one of the forms.

transformers builds the model, torch exports it, and posexport.rewrite recognises its attention and gives it the form.
One layer of each kind is traced and rewritten, and copied for the others (posexport.export.repeated_layers). Weights
have no values until the model is written: their tensors are the mapped files of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import attrs
import onnx_ir as ir
import torch
from onnx.checker import ValidationError
from onnx.shape_inference import InferenceError
from onnx_ir.passes.common import RemoveUnusedOpsetsPass
from torch import nn

from posexport import temporary
from posexport.artifact import onnx_file
from posexport.artifact.manifest import ModuleSource
from posexport.errors import FieldError, RequestError, shown
from posexport.export import exporter, support
from posexport.export.expert_loops import LoopsOverAllExperts
from posexport.export.fewer_nodes import with_fewer_nodes
from posexport.export.half_overflow import ClampsAlways
from posexport.export.layer_kinds import Layers, LayersDifferError, check_alike, find_layers
from posexport.export.linear_attention import linear_attention_as_operator
from posexport.export.model_errors import check_draws_nothing, exporting, exporting_some_layers, running
from posexport.export.module_conversions import traced_conversions
from posexport.export.repeated_layers import CACHE, copy_layers, only_traced, owners, without_markers
from posexport.export.tensor_lengths import traced_lengths
from posexport.export.traced import describe, name_values, translatable
from posexport.export.unfolded_windows import CopiesWindows
from posexport.export.whole_tensors import CheckpointTensors
from posexport.export.window_attention import windows_as_masks
from posexport.graphs.attention.describe import Describer
from posexport.graphs.function_bodies import Functions
from posexport.graphs.inspection import described_one
from posexport.models.pretrained import DECODER, ENCODER, Pretrained, main_dtype, without_values
from posexport.models.whole import SEQUENCE, Signature, decoder_of, unchanged, without_keys_of_others
from posexport.models.whole_encoder import encoder_of
from posexport.models.whole_kept_keys import check_keys
from posexport.models.whole_padding import check_rows
from posexport.models.whole_translator import translator_of
from posexport.progress import Progress, silent
from posexport.rewrite.angles.rewriter import rewrite_exactly
from posexport.rewrite.request import RewriteOptions
from posexport.rewrite.result import is_left, site_record
from posexport.rewrite.rewriter import Rewritten, rewrite_as
from posexport.runtimes.tokens import trained_length

_PADDED = {
    "input_ids": torch.zeros(2, 4, dtype=torch.int64),
    "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]),
}
"""A batch with padding, so that the model makes masks: models leave them out if nothing is hidden."""


@attrs.frozen(kw_only=True)
class ExportedModel:
    """A whole model, or its `part` "encoder" or "decoder".

    `attentions` has a record of each attention as in `posexport rewrite --json`. If it has `like`, the attention of
    that name was tested instead, in a layer of the same kind.
    """

    model: ir.Model
    architecture: str
    attentions: tuple[Mapping[str, Any], ...]
    part: str = ""

    @property
    def inputs(self) -> list[str]:
        """The names of the file's inputs."""
        return [str(value.name) for value in self.model.graph.inputs]

    def left(self) -> list[Mapping[str, Any]]:
        """The records of the attentions that are not in the form."""
        return [one for one in self.attentions if is_left(one)]


@attrs.frozen(kw_only=True)
class HowToExport:
    """How the model is written.

    `dtype` is that of the weights, None for the checkpoint's. `kv_cache` is "none", "concat" (grown) or "shared"
    (buffers). `angles` is "exact" or None. `hidden_states` adds the states that enter the head to the outputs.
    """

    form: str = "decomposed"
    target: str = "portable"
    opset: int | None = None
    dtype: torch.dtype | None = None
    kv_cache: str = "concat"
    angles: str | None = None
    hidden_states: bool = False


def export_whole(pretrained: Pretrained, how: HowToExport, progress: Progress = silent) -> list[ExportedModel]:
    """The model of a checkpoint, or the encoder and the decoder of an encoder-decoder.

    RequestError for a model that torch can't export, and for what the form can't express.
    """
    opset = support.checked_opset(None, how.form, how.target, how.opset, how.kv_cache == "shared")
    functions = Functions(opset, how.form, how.target)
    temporary.usual_parent()
    dtype = how.dtype or main_dtype(pretrained)
    if pretrained.kind == ENCODER:
        check_rows(pretrained.model)
    check_keys(pretrained.model, trained_length(pretrained.folder))
    with without_values(pretrained, dtype):
        progress("running the model")
        with running(pretrained.model, pretrained.kind == DECODER):
            parts = _parts(pretrained, how, dtype)
        return [_exported(_Export(pretrained, part, how, functions, progress)) for part in parts]


@attrs.frozen(kw_only=True)
class _Part:
    """A module that becomes a file; `run` calls the model with a batch that has padding."""

    name: str = ""
    module: nn.Module
    signature: Signature
    layers: Layers | None = None
    run: Callable[[], Any] | None = None


def _parts(pretrained: Pretrained, how: HowToExport, dtype: torch.dtype) -> list[_Part]:
    model: Any = pretrained.model
    config = pretrained.text_config
    configs = (pretrained.config, config)
    if pretrained.kind not in (ENCODER, DECODER):
        for option, given in (("kv_cache", how.kv_cache != "concat"), ("hidden_states", how.hidden_states)):
            if given:
                complaint = "an encoder-decoder, whose caches grow and whose encoder gives its hidden states: drop it."
                raise FieldError(option, f"was given for {pretrained.architecture}, {complaint}")
        modules = translator_of(model, dtype, pretrained.folder)
        return [_Part(name=name, module=module, signature=one) for name, (module, one) in modules.items()]
    if pretrained.kind == ENCODER:
        if how.kv_cache != "concat":
            raise FieldError("kv_cache", f"was given for {pretrained.architecture}, which has no caches: drop it.")
        encoder, signature = encoder_of(model, dtype, how.hidden_states, pretrained.folder)
        layers = find_layers(model, getattr(pretrained.config, "num_hidden_layers", 0), configs)
        padded = {**signature.example}
        if "attention_mask" in padded:
            padded["attention_mask"] = padded["attention_mask"].clone()
            padded["attention_mask"][0, -1] = 0
        return [_Part(module=encoder, signature=signature, layers=layers, run=lambda: encoder(**padded))]
    module, signature = decoder_of(model, dtype, how.kv_cache != "none", how.hidden_states)
    if how.kv_cache == "none":  # else it ran to find its caches
        with torch.no_grad(), unchanged(model):
            model(**_PADDED, use_cache=False)
    layers = find_layers(model, config.num_hidden_layers, configs, model.get_decoder())
    return [_Part(module=module, signature=signature, layers=layers, run=lambda: model(**_PADDED, use_cache=False))]


def _exported(export: _Export) -> ExportedModel:
    part = export.part
    if part.layers is not None and part.run is not None:
        try:
            with running(export.pretrained.model):
                check_alike(export.pretrained.model, part.layers, part.run)
            return export.run(part.layers)
        except LayersDifferError:
            pass
    return export.run(None)


@attrs.frozen
class _Export:
    pretrained: Pretrained
    part: _Part
    how: HowToExport
    functions: Functions
    progress: Progress

    def run(self, layers: Layers | None) -> ExportedModel:
        """The model. With `layers`, only one layer of each kind is traced."""
        progress, how, signature = self.progress, self.how, self.part.signature
        if layers is not None:
            signature = without_keys_of_others(signature, layers.traced)
        model = self._captured(layers, signature)
        name_values(model, [*signature.inputs], [*signature.outputs])
        if layers is not None:
            _drop_untraced(model, layers)
        exporter.finish(model, how.form)
        boundaries = None if layers is None else without_markers(model, layers)
        _name_dimensions(model, signature)
        tensors = CheckpointTensors(self.pretrained)
        tensors.fill(model)
        progress("looking for attention")
        owned: dict[str, int] = {}
        if layers is not None and boundaries is not None:
            owned = owners(model, layers, boundaries, tensors.names, tensors.of)
        rewritten = self._rewritten(model)
        model = rewritten.model
        if layers is not None and boundaries is not None:
            copy_layers(model, layers, boundaries, tensors.names, tensors.of)
        with_fewer_nodes(model)
        RemoveUnusedOpsetsPass()(model)
        target = how.target if rewritten.changed and how.target != "portable" else None
        describe(model, ModuleSource(name=self.pretrained.architecture), how.form, target)
        self._check(model)
        records = attention_records(rewritten, layers, owned)
        return ExportedModel(
            model=model, architecture=self.pretrained.architecture, attentions=tuple(records), part=self.part.name
        )

    def _check(self, model: ir.Model) -> None:
        """RequestError for bfloat16 at an opset in which an operator, such as Conv before 22, doesn't accept it."""
        try:
            onnx_file.check(model)
        except (InferenceError, ValidationError) as error:
            if (self.how.dtype or main_dtype(self.pretrained)) != torch.bfloat16:
                raise
            said = shown(" ".join(str(error).split())[-200:])
            raise RequestError(
                f"{self.pretrained.architecture} can't be written in bf16 at opset {self.functions.opset}, since "
                f"ONNX says {said}: give --opset 22, or --dtype fp32 or fp16."
            ) from None

    def _rewritten(self, model: ir.Model) -> Rewritten:
        how = self.how
        options = RewriteOptions(
            form=how.form,
            target=how.target,
            opset=self.functions.opset,
            kv_cache="shared" if how.kv_cache == "shared" else None,
            angles=how.angles,
        )
        return rewrite_as(model, options) if how.angles is None else rewrite_exactly(model, options)

    def _captured(self, layers: Layers | None, signature: Signature) -> ir.Model:
        model = self.pretrained.model
        alone = nullcontext() if layers is None else only_traced(model, layers)
        cached = self.pretrained.kind == DECODER and self.how.kv_cache != "none"
        failing = exporting_some_layers() if layers is not None else exporting(self.pretrained.architecture, cached)
        with torch.no_grad(), exporter.quiet(), unchanged(model), alone, failing:
            self.progress("tracing the model")
            with (
                ClampsAlways(),
                CopiesWindows(),
                linear_attention_as_operator(model),
                traced_conversions(),
                traced_lengths(model),
                LoopsOverAllExperts(),
                windows_as_masks(model),
            ):
                program = torch.export.export(
                    self.part.module,
                    (),
                    dict(signature.example),
                    dynamic_shapes=dict(signature.shapes),
                    strict=False,
                    prefer_deferred_runtime_asserts_over_guards=True,
                )
            check_draws_nothing(program, self.pretrained.architecture)
            _check_sizes(program, signature, self.pretrained)
            program = translatable(program)
            self.progress("writing the graph")
            return exporter.capture(program, self.functions)


UNREAD = 8
"""The most rows at the beginning of a table of positions that no token reads: RoBERTa has 2."""


def _check_sizes(program: torch.export.ExportedProgram, signature: Signature, pretrained: Pretrained) -> None:
    """RequestError if tracing fixed a dynamic size, or if the trace takes fewer tokens than the model was trained for.

    torch may report a fixed size only in its ranges. A few tokens fewer are allowed (UNREAD): tables may have rows that
    no token reads.
    """
    architecture, length = pretrained.architecture, trained_length(pretrained.folder)
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    for given, (name, shape) in zip(program.graph_signature.user_inputs, signature.inputs.items(), strict=True):
        for size, traced in zip(shape, values[str(given)].shape, strict=True):
            expression = getattr(getattr(traced, "node", None), "expr", None)
            limits = program.range_constraints.get(expression)
            if isinstance(size, str) and (expression is None or (limits is not None and limits.is_singleton())):
                raise RequestError(
                    f"{architecture} is not exported as a whole: its code fixes the size {size!r} of {shown(name)}, as "
                    "a loop over rows or tokens does. Give --layer in place of --model for one layer of it."
                )
            most = None if limits is None or not limits.upper.is_Integer else int(limits.upper)
            if size == SEQUENCE and most is not None and length is not None and most < length - UNREAD:
                raise RequestError(
                    f"{architecture} is not exported as a whole: its code, traced once, takes at most {most} tokens, "
                    f"as a loop over chunks does, and the model was trained for {length}: {_advice(pretrained)}give "
                    "--layer in place of --model for one layer of it."
                )


def _advice(pretrained: Pretrained) -> str:
    """What else helps with a model whose code changes at a length: BigBird has a setting for full attention."""
    sparse = getattr(pretrained.config, "attention_type", None) == "block_sparse"
    return 'put "attention_type": "original_full" into config.json for full attention of all texts, or ' * sparse


def _name_dimensions(model: ir.Model, signature: Signature) -> None:
    """Give inputs and outputs their declared shapes, and drop the shapes of inner values, which name other sizes.

    Shapes are as torch traced them if it fixed a size, or if they are not declared.
    """
    outputs = {value.name: value.shape for value in model.graph.outputs}
    for node in model.graph.all_nodes():
        for value in node.outputs:
            value.shape = None
    names: dict[str, str] = {}
    for value in model.graph.inputs:
        traced = list(value.shape or ())
        declared = signature.inputs[str(value.name)]
        shape = [size if isinstance(size, int) else name for size, name in zip(traced, declared, strict=True)]
        names.update(
            (str(size.value), str(name)) for size, name in zip(traced, shape, strict=True) if not isinstance(size, int)
        )
        value.shape = ir.Shape(shape)
    for value in model.graph.outputs:
        declared_output = signature.outputs[str(value.name)]
        traced = list(outputs[value.name] or ())
        value.shape = ir.Shape(
            declared_output
            or [
                size if isinstance(size, int) else names.get(str(size.value), f"{value.name}_{axis}")
                for axis, size in enumerate(traced)
            ]
        )


def _drop_untraced(model: ir.Model, layers: Layers) -> None:
    """Remove the states of layers that were not traced."""
    for values in (model.graph.inputs, model.graph.outputs):
        kept = []
        for value in list(values):
            match = CACHE.fullmatch(str(value.name))
            if match is None or int(match["layer"]) in layers.traced:
                kept.append(value)
        values.clear()
        values.extend(kept)


def attention_records(rewritten: Rewritten, layers: Layers | None, owned: Mapping[str, int]) -> list[Mapping[str, Any]]:
    """A record of each attention of all layers; `owned` says by name which traced layer a node belongs to."""
    view = next((site.view for site in rewritten.sites), None)
    describer = None if view is None else Describer(view)
    sites: list[Mapping[str, Any]] = []
    for result in rewritten.sites:
        description = {"name": result.attention.name}
        if describer is not None:
            description = described_one(describer, result.attention)
        sites.append(site_record(description, result.state, result.reason, result.evidence, result.angles))
    if layers is None:
        return sites
    # nodes of an expanded node have the name of its result before a slash
    of_sites = [owned.get(site["name"], owned.get(site["name"].partition("/")[0])) for site in sites]
    by_layer = {
        kind: [site for site, own in zip(sites, of_sites, strict=True) if own == kind] for kind in layers.traced
    }
    records: list[Mapping[str, Any]] = []
    for index, kind in enumerate(layers.stands_for):
        for site in by_layer[kind]:
            name = site["name"]
            like = {} if index == kind else {"like": f"layers.{kind}.{name}"}
            records.append({**site, "name": f"layers.{index}.{name}", "layer": index, **like})
    others = [site for site, own in zip(sites, of_sites, strict=True) if own is None]
    return [*records, *({**site, "layer": at} for at, site in enumerate(others, len(layers.stands_for)))]
