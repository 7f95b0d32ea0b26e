"""A whole model of a Hugging Face checkpoint becomes an ONNX model, its attention in one of the forms.

transformers builds the model, torch exports it, posexport.rewrite recognises its attention and gives it the form. One
layer of each kind is traced and rewritten, and copied for the others (posexport.export.repeated_layers). Weights have no
values until the model is written: their tensors are the checkpoint's files, mapped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs
import onnx_ir as ir
import torch
from onnx_ir.passes.common import RemoveUnusedOpsetsPass
from torch import Tensor, nn

from posexport import __version__, temporary
from posexport.artifact import onnx_file
from posexport.artifact.manifest import ModuleSource
from posexport.artifact.onnx_artifact import module_metadata
from posexport.errors import RequestError
from posexport.export import complex_numbers, exporter, support
from posexport.export.repeated_layers import (
    Layers,
    LayersDifferError,
    copy_layers,
    find_layers,
    only_traced,
    without_markers,
)
from posexport.graphs.function_bodies import Functions
from posexport.models.pretrained import Pretrained, main_dtype, without_values
from posexport.models.whole import TRACED, SEQUENCE, Decoder, Signature, cache_sizes, decoder_signature
from posexport.progress import Progress, silent
from posexport.rewrite.result import ALREADY, KEPT, site_record
from posexport.rewrite.rewriter import Rewritten, rewrite_model

_CACHE = re.compile(r"(?:past_key_values|present)\.(\d+)\..+")


@attrs.frozen(kw_only=True)
class ExportedModel:
    """A whole model; `attentions` is a record of each attention, with `name`, `layer`, `state`, `reason`, `error` and
    `cases`: where `like` names another one, that was tested, whose layer is of the same kind."""

    model: ir.Model
    architecture: str
    attentions: tuple[Mapping[str, Any], ...]

    def left(self) -> list[Mapping[str, Any]]:
        """The records of those that are not in the form."""
        return [one for one in self.attentions if one["state"] == KEPT and one["reason"]["code"] != ALREADY]


def export_decoder(
    pretrained: Pretrained,
    *,
    form: str = "decomposed",
    target: str = "portable",
    opset: int | None = None,
    dtype: torch.dtype | None = None,
    kv_cache: str = "concat",
    progress: Progress = silent,
) -> ExportedModel:
    """A causal language model with its caches as inputs and outputs.

    `dtype` is that of the weights, None for the checkpoint's; `kv_cache` "none", "concat" (grown) or "shared" (buffers).
    RequestError for a model that torch can't export, and for what the form can't express.
    """
    opset = support.checked_opset(None, form, target, opset)
    temporary.usual_parent()
    model, config = pretrained.model, pretrained.text_config
    layers = find_layers(model, config.num_hidden_layers)
    dtype = dtype or main_dtype(pretrained)
    with without_values(pretrained, dtype):
        sizes: dict[int, tuple[int, int, int]] = {}
        if kv_cache != "none":
            progress("running the model")
            sizes = cache_sizes(model, torch.zeros(1, TRACED[SEQUENCE], dtype=torch.int64))
        module = Decoder(model, tuple(sizes) if sizes else None)
        signature = decoder_signature(module, sizes, config.vocab_size, dtype)
        exporting = _Export(
            pretrained, module, signature, Functions(opset, form, target), form, target, dtype, progress
        )
        try:
            exported = exporting.run(layers, kv_cache)
        except LayersDifferError:
            exported = exporting.run(None, kv_cache)
    return exported


@attrs.frozen
class _Export:
    pretrained: Pretrained
    module: nn.Module
    signature: Signature
    functions: Functions
    form: str
    target: str
    dtype: torch.dtype
    progress: Progress

    def run(self, layers: Layers | None, kv_cache: str) -> ExportedModel:
        """The model; with `layers`, one of each kind is traced."""
        progress, form = self.progress, self.form
        model = self._captured(layers)
        _name_values(model, self.signature)
        if layers is not None:
            _drop_untraced(model, layers)
        exporter.finish(model, form)
        boundaries = None if layers is None else without_markers(model, layers)
        _name_dimensions(model, self.signature)
        self._fill(model)
        progress("looking for attention")
        shared = "shared" if kv_cache == "shared" else None
        rewritten = rewrite_model(model, form=form, target=self.target, opset=self.functions.opset, kv_cache=shared)
        model = rewritten.model
        if layers is not None and boundaries is not None:
            copy_layers(model, layers, boundaries, self._tensor)
        RemoveUnusedOpsetsPass()(model)
        origin = module_metadata(ModuleSource(name=self.pretrained.architecture))
        model.metadata_props.update({"posexport.form": form, "posexport.version": __version__, **origin})
        if rewritten.changed and self.target != "portable":
            model.metadata_props["posexport.target"] = self.target
        model.producer_name, model.producer_version = "posexport", __version__
        onnx_file.check(model)
        return ExportedModel(
            model=model, architecture=self.pretrained.architecture, attentions=tuple(_records(rewritten, layers))
        )

    def _captured(self, layers: Layers | None) -> ir.Model:
        from contextlib import nullcontext

        model = self.pretrained.model
        with torch.no_grad(), exporter.quiet(), nullcontext() if layers is None else only_traced(model, layers):
            self.progress("tracing the model")
            program = torch.export.export(
                self.module,
                (),
                dict(self.signature.example),
                dynamic_shapes=dict(self.signature.shapes),
                strict=False,
                prefer_deferred_runtime_asserts_over_guards=True,
            )
            program = complex_numbers.without_complex_operators(program)
            self.progress("writing the graph")
            return exporter.capture(program, self.functions)

    def _fill(self, model: ir.Model) -> None:
        """Give the initializers the names of the checkpoint's weights, and their tensors; a weight that has two names
        is there once."""
        weights, first = self.pretrained.weights, dict[int, ir.Value]()
        for name, value in list(model.graph.initializers.items()):
            plain = name.removeprefix("model.")
            if plain not in weights:
                continue
            known = first.setdefault(id(weights[plain]), value)
            if known is not value:
                value.replace_all_uses_with(known)
                model.graph.initializers.pop(name)
                continue
            value.name = plain
            value.const_value = self._tensor(plain, value)

    def _tensor(self, name: str, like: ir.Value) -> ir.TensorProtocol:
        weights = self.pretrained.weights
        if name not in weights:
            named = dict(self.pretrained.model.named_buffers())
            return ir.tensor_adapters.TorchTensor(named[name.removeprefix("model.")], name=name)
        weight: Tensor = weights[name]
        dtype = like.dtype
        if dtype is None:
            raise AssertionError(f"{name} has no dtype")

        def make() -> ir.TensorProtocol:
            return ir.tensor_adapters.TorchTensor(weight.to(ir.tensor_adapters.to_torch_dtype(dtype)), name=name)

        return onnx_file.lazy(name, tuple(weight.shape), dtype, make)


def _name_values(model: ir.Model, signature: Signature) -> None:
    """Give inputs and outputs their names, which nothing else in the graph may have."""
    graph = model.graph
    taken = {*signature.inputs, *signature.outputs}
    for node in graph.all_nodes():
        for value in node.outputs:
            if value.name in taken:
                value.name = f"{value.name}_inner"
    for value, name in zip(graph.inputs, signature.inputs, strict=True):
        value.name = name
    for at, (value, name) in enumerate(zip(graph.outputs, signature.outputs, strict=True)):
        if value.producer() is None:
            node = ir.node("Identity", [value], num_outputs=1)
            graph.append(node)
            node.outputs[0].shape, node.outputs[0].type = value.shape, value.type
            graph.outputs[at] = value = node.outputs[0]
        value.name = name


def _name_dimensions(model: ir.Model, signature: Signature) -> None:
    """The shapes of inputs and outputs as they are declared; those between, which name other sizes, are dropped."""
    for node in model.graph.all_nodes():
        for value in node.outputs:
            value.shape = None
    for values, shapes in ((model.graph.inputs, signature.inputs), (model.graph.outputs, signature.outputs)):
        for value in values:
            value.shape = ir.Shape(shapes[str(value.name)])


def _drop_untraced(model: ir.Model, layers: Layers) -> None:
    """Remove the caches of layers that were not traced."""
    for values in (model.graph.inputs, model.graph.outputs):
        kept = []
        for value in list(values):
            match = _CACHE.fullmatch(str(value.name))
            if match is None or int(match[1]) in layers.traced:
                kept.append(value)
        values.clear()
        values.extend(kept)


def _records(rewritten: Rewritten, layers: Layers | None) -> list[Mapping[str, Any]]:
    """A record of each attention of all layers."""
    sites = [
        site_record({"name": site.attention.name}, site.state, site.reason, site.evidence) for site in rewritten.sites
    ]
    if layers is None or len(sites) != len(layers.traced):
        return sites
    by_layer = dict(zip(layers.traced, sites, strict=True))
    records = []
    for index, kind in enumerate(layers.stands_for):
        name = by_layer[kind]["name"]
        like = {} if index == kind else {"like": f"layers.{kind}.{name}"}
        records.append({**by_layer[kind], "name": f"layers.{index}.{name}", "layer": index, **like})
    return records
