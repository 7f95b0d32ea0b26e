"""`scripts/rewrite_results tensorrt`: kernels and fused attentions that TensorRT for RTX chooses, before and after.

The graphs are the suite's architectures in fp16, as torch.onnx.export writes them. They are built without a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import onnx
import torch
from building import build
from exporters import EXPORTERS
from limited import record_of
from make_one import one_line
from table import ARCHITECTURES
from wrappers import wrap

from posexport import temporary
from posexport.artifact.graph_file import read_graph
from posexport.artifact.manifest import MOMENTS, PlanKernels
from posexport.rewrite.draft import rewrite_file
from posexport.rewrite.request import RewriteOptions
from posexport.runtimes.tensorrt.builder import Shapes
from posexport.runtimes.tensorrt.builder import build as build_plan
from posexport.runtimes.tensorrt.options import BuildOptions

DYNAMO = (
    *("llama", "qwen3", "gpt_neox", "gptj", "gpt2", "phi3", "bloom", "gemma2"),
    *("bert", "modernbert", "roformer", "t5_encoder", "deberta_v2", "dinov3_vit", "vit", "swin"),
)
"""Decoders with caches, and encoders of tokens and images."""

NAMES = (
    *(f"{name}-dynamo18" for name in DYNAMO),
    *("llama-torchscript17", "bert-torchscript17", "llama-dynamo23", "qwen3-dynamo23", "gpt_neox-dynamo23"),
)
"""The files to build: an architecture and its exporter."""

RUNTIME = "tensorrt-rtx"
REWRITTEN = {form: RewriteOptions(form=form, target="tensorrt") for form in ("native", "contrib")}

RANGES = {"batch": (1, 1, 4), "tokens": (1, 16, 128), "past": (1, 256, 512), "total": (2, 272, 640)}
"""The smallest, usual and largest size of dynamic dimensions."""


def built(name: str) -> dict[str, Any]:
    """What TensorRT chooses for one of NAMES, by form. "original" is the file before rewriting."""
    architecture, _, exporter = name.partition("-")
    row = attrs.evolve(ARCHITECTURES[architecture], dtype="float16")
    wrapped = wrap(row, build(row))
    result: dict[str, Any] = {"file": name, "sites": row.sites, "files": {}}
    with temporary.folder() as folder:
        files = {"original": folder / "original.onnx", **{form: folder / f"{form}.onnx" for form in REWRITTEN}}
        with torch.no_grad():
            EXPORTERS[exporter](wrapped, wrapped.draw(2, 6, 3, 0), files["original"])
        for form, path in files.items():
            try:
                if form in REWRITTEN:
                    rewrite_file(files["original"], path, REWRITTEN[form])
                kernels = kernels_of(path, row.sites)
            except Exception as error:
                result["files"][form] = {"problem": one_line(error)}
            else:
                fused = kernels.attention_kernels
                result["files"][form] = {"kernels": kernels.count, "fused": fused and min(fused, row.sites)}
    return result


def kernels_of(path: Path, sites: int) -> PlanKernels:
    """The kernels of a plan for a file."""
    graph = read_graph(path)
    shapes = Shapes(profiles=profiles_of(graph.model), dimensions={}, attentions=sites)
    return build_plan(graph, BuildOptions(runtime=RUNTIME), shapes=shapes).kernels


def profiles_of(model: onnx.ModelProto) -> dict[str, dict[str, list[int]]]:
    """The shapes {min, opt, max} of each input with dynamic dimensions."""
    profiles = {}
    caches = any(value.name.startswith("past") for value in model.graph.input)
    for value in model.graph.input:
        second = "past" if value.name.startswith("past") else "tokens"
        kinds = ["batch", *["total" if caches and value.name == "attention_mask" else second] * 3]
        dims = list(zip(value.type.tensor_type.shape.dim, kinds, strict=False))
        if any(dim.dim_param for dim, _ in dims):
            shapes = ([dim.dim_value or RANGES[kind][at] for dim, kind in dims] for at in range(len(MOMENTS)))
            profiles[value.name] = dict(zip(MOMENTS, shapes, strict=True))
    return profiles


def measure(work: Path, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rows of all files. Each is made in a process of its own and kept in `work`."""
    (work / "tensorrt").mkdir(parents=True, exist_ok=True)
    rows = []
    for name in names or NAMES:
        row, _ = record_of(work / "tensorrt" / f"{name}.json", built, name)
        sites = ARCHITECTURES[name.partition("-")[0]].sites
        failed = {"file": name, "sites": sites, "files": {"original": {"problem": row.get("ended", "")}}}
        rows.append(failed if "ended" in row else row)
    return rows
