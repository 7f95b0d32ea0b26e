"""Stacks: one layer of each kind is traced and copied, and weights stream into the file one layer at a time."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import safetensors.torch
import torch
from helpers import cli, exported, open_ort, refused, tree, weights_for
from stack_helpers import STACKS, difference, stack, traced_whole

from posexport.artifact.manifest import OnnxManifest, read_manifest_of
from posexport.artifact.onnx_artifact import read_onnx, write_onnx
from posexport.cli.console import runs
from posexport.cli.export_command import _tensors
from posexport.errors import RequestError
from posexport.export import export
from posexport.models.block import Streamed, build_block
from posexport.models.weights import LazyWeights, seeded, seeded_weights, weight_shapes
from posexport.runtimes import torch_eager
from posexport.spec.contract import graph_inputs, graph_outputs

QUICK = {("pattern", "decomposed")}
"""Cases of the default run; the others run by `scripts/test slow`."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, marks=() if (name, form) in QUICK else pytest.mark.slow)
        for name in STACKS
        for form in ("decomposed", "function")
    ],
)
def test_the_graph_is_that_of_a_trace_of_all_layers(name: str, form: str) -> None:
    spec = stack(name)
    made = ir.to_proto(exported(spec, form))
    assert difference(made, traced_whole(spec, form), weight_shapes(spec)) is None


def faults(model: onnx.ModelProto) -> Iterator[onnx.ModelProto]:
    """Copies of the graph, each with another kind of fault in a copied layer."""
    nodes = [index for index, node in enumerate(model.graph.node) if node.name.startswith("layers.3.")]
    reads = next(i for i in nodes if "layers.3.q_proj.weight" in model.graph.node[i].input)
    for plant in (
        lambda graph: graph.node[reads].input.__setitem__(0, "layers.0.q_proj.weight"),
        lambda graph: graph.node.__delitem__(nodes[-1]),
        lambda graph: graph.node[nodes[2]].attribute.add(name="more", i=1, type=onnx.AttributeProto.INT),
        lambda graph: graph.output.insert(0, graph.output.pop()),
        lambda graph: graph.initializer.pop(),
        lambda graph: graph.initializer[-2].__setattr__("raw_data", bytes(len(graph.initializer[-2].raw_data))),
    ):
        faulty = onnx.ModelProto()
        faulty.CopyFrom(model)
        plant(faulty.graph)
        yield faulty


def test_the_comparison_of_graphs_sees_faults() -> None:
    spec = stack("pattern")
    sound = ir.to_proto(exported(spec, "decomposed"))
    assert difference(sound, sound, weight_shapes(spec)) is None
    for faulty in faults(sound):
        assert difference(faulty, sound, weight_shapes(spec)) is not None


def test_names_tell_the_layer_and_what_all_share_has_none() -> None:
    model = ir.to_proto(exported(stack("pattern"), "function"))
    layers = {node.name.split(".")[1] for node in model.graph.node if node.name.startswith("layers.")}
    assert layers == set("01234")
    for node in model.graph.node:
        if node.op_type in ("Sinusoids", "KeyPositions"):
            assert not node.name.startswith("layers.")
    names = [value.name for value in model.graph.input if value.name.startswith("past_")]
    assert names == [f"past_{kind}.{index}" for index in range(5) for kind in ("key", "value")]


def feeds(name: str) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs of a stack: two rows of three tokens after four cached."""
    sizes = {"batch": 2, "seq": 3, "past_seq": 4, "past_seq + seq": 7, "total_seq": 7, "max_seq": 9, "encoder_seq": 5}
    rng, found = np.random.default_rng(0), {}
    for key, (shape, dtype) in graph_inputs(stack(name)).items():
        dims = [sizes.get(dim, dim) for dim in shape]
        found[key] = rng.standard_normal(dims).astype(np.float32) if dtype == "fp32" else np.ones(dims, np.int64)
    if "position_ids" in found:
        found["position_ids"] = np.tile(np.arange(4, 7), (2, 1))
    return found


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_stack_computed_layer_by_layer_is_the_block(name: str, dtype: torch.dtype) -> None:
    spec, weights = stack(name), weights_for(stack(name))
    inputs = [torch.from_numpy(each) for each in feeds(name).values()]
    inputs = [each.to(dtype) if each.is_floating_point() else each for each in inputs]
    whole = build_block(spec, weights, dtype)(*inputs)
    twice = Streamed(spec, weights, dtype).run([inputs, inputs])
    for made in twice:
        assert list(made) == list(graph_outputs(spec))
        for one, two in zip(made.values(), whole if isinstance(whole, tuple) else (whole,), strict=True):
            assert torch.equal(one, two)


class Counted(Mapping[str, torch.Tensor]):
    """Weights that record how many layers' tensors are alive at the same time, and the order of requests."""

    def __init__(self, weights: LazyWeights) -> None:
        self.weights, self.asked, self.most = weights, list[str](), 0
        self._alive: dict[str, weakref.ref[torch.Tensor]] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.weights[name]
        self.asked.append(name)
        self._alive[name] = weakref.ref(tensor)
        alive = [name for name, each in self._alive.items() if each() is not None and name.startswith("layers.")]
        self.most = max(self.most, len({name.split(".")[1] for name in alive}))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


@pytest.mark.parametrize("external_from", [0, 10**9], ids=["external", "inline"])
def test_writing_holds_the_weights_of_one_layer(tmp_path: Path, external_from: int) -> None:
    spec = stack("plain")
    counted = Counted(seeded(spec, 0))
    write_onnx(export(spec, counted), tmp_path / "a.onnx", external_from)
    assert counted.most == 1
    assert counted.asked == list(weight_shapes(spec))
    write_onnx(exported(spec), tmp_path / "b.onnx", external_from)  # with all weights in memory at once
    suffix = ".data" if external_from == 0 else ""
    assert (tmp_path / f"a.onnx{suffix}").read_bytes() == (tmp_path / f"b.onnx{suffix}").read_bytes()


def test_small_weights_are_asked_for_once_each() -> None:
    spec = attrs.evolve(stack("plain"), qk_norm=True)
    counted = Counted(seeded(spec, 0))
    export(spec, counted)
    norms = [name for name in counted.asked if "_norm" in name]
    assert norms
    assert len(norms) == len(set(norms))


def test_computing_holds_the_weights_of_one_layer() -> None:
    spec = stack("plain")
    counted = Counted(seeded(spec, 0))
    inputs = [torch.from_numpy(each) for each in feeds("plain").values()]
    assert len(list(Streamed(spec, counted, torch.float32).run([inputs] * 3))) == 3
    assert counted.most == 1
    assert sorted(counted.asked) == sorted(weight_shapes(spec))


def test_the_counter_sees_who_holds_all_layers() -> None:
    counted = Counted(seeded(stack("plain"), 0))
    assert dict(counted)
    assert counted.most == 5


def test_weights_of_an_artifact_are_read_one_by_one(tmp_path: Path) -> None:
    spec = stack("plain")
    write_onnx(exported(spec), tmp_path / "a.onnx", external_from=0)
    found = read_onnx(tmp_path / "a.onnx").weights()
    assert all(torch.equal(tensor, weights_for(spec)[name]) for name, tensor in found.items())
    assert found["layers.4.q_proj.weight"] is not found["layers.4.q_proj.weight"]
    with pytest.raises(KeyError):
        found["layers.5.q_proj.weight"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a stack with caches and external weights."""
    path = tmp_path_factory.mktemp("stack") / "block.onnx"
    write_onnx(exported(stack("pattern")), path, external_from=0)
    return path


def test_runtimes_agree_on_a_stack_with_outside_weights(written: Path) -> None:
    inputs = feeds("pattern")
    truth = torch_eager.load(written, {"dtype": "fp64", "streamed": True}).run(inputs)
    whole = torch_eager.load(written, {}).run(inputs)
    for name, made in open_ort(written)(inputs).items():
        assert np.abs(made - truth[name]).max() < 2e-6
        assert np.abs(whole[name] - truth[name]).max() < 2e-6


@pytest.mark.slow
def test_people_see_a_line_for_a_run_of_layers(written: Path) -> None:
    said, _, attentions = cli("inspect", written).stdout.partition("attention 0")
    lines = {line.split("  ")[0]: line for line in (each.strip() for each in said.splitlines())}
    assert {"past_key.0 ... past_key.4", "present_value.0 ... present_value.4"} <= lines.keys()
    assert "layers.0.q_proj.weight, layers.1.q_proj.weight ... layers.4.q_proj.weight" in lines
    assert "past_key.1" not in said
    assert "{" not in said + attentions
    assert lines["layer_pattern.1"] and lines["encoding"].split() == ["encoding", "alibi"]
    assert lines["theta"].split() == ["theta", "10000.0"]
    manifest = read_manifest_of(OnnxManifest, written)
    assert manifest is not None
    shown = [name for name, _ in _tensors(manifest, "output")]
    assert shown == ["output", "present_key.0 ... present_key.4", "present_value.0 ... present_value.4"]
    assert [one["name"] for one in json.loads(cli("inspect", written, "--json").stdout)["inputs"]] == [
        *graph_inputs(stack("pattern"))
    ]


def test_layers_that_differ_have_lines_of_their_own() -> None:
    facts = [(f"a.{index}", "x" if index < 3 else "y") for index in range(5)]
    assert runs([*facts, ("a.7", "y"), ("b", "y")]) == [
        ("a.0 ... a.2", "x"), ("a.3, a.4", "y"), ("a.7", "y"), ("b", "y"),
    ]  # fmt: skip


@pytest.mark.parametrize("fault", ["another layer's weights", "layers in another order"])
def test_a_fault_in_one_layer_shows(written: Path, tmp_path: Path, fault: str) -> None:
    model = onnx.load(written)
    for node in model.graph.node:
        for at, name in enumerate(node.input):
            if fault == "another layer's weights" and name == "layers.3.v_proj.weight":
                node.input[at] = "layers.0.v_proj.weight"
            elif fault == "layers in another order" and name in ("layers.1.q_proj.weight", "layers.4.q_proj.weight"):
                node.input[at] = name.translate(str.maketrans("14", "41"))
    onnx.save(model, tmp_path / "block.onnx")
    inputs = feeds("pattern")
    truth = torch_eager.load(tmp_path / "block.onnx", {"dtype": "fp64", "streamed": True}).run(inputs)
    assert np.abs(open_ort(tmp_path / "block.onnx")(inputs)["output"] - truth["output"]).max() > 1e-3


STACK = ("export", "--encoding", "rope", "--hidden-size", "32", "--num-heads", "2", "--layers", "5")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("missing", ("lack 'layers.3.k_proj.weight'", "[32, 32]")),
        ("extra", ("hold 'layers.5.q_proj.weight'", "no place")),
        ("shape", ("'layers.3.k_proj.weight' has shape [16, 32]",)),
        ("nan", ("'layers.3.k_proj.weight' holds NaN",)),
        pytest.param("overflow", ("'layers.3.k_proj.weight' overflows in fp16",), marks=pytest.mark.slow),
        pytest.param("integers", ("'layers.3.k_proj.weight' is torch.int64",), marks=pytest.mark.slow),
    ],
    ids=("missing", "extra", "shape", "nan", "overflow", "integers"),
)
def test_a_tensor_of_one_layer_is_named(tmp_path: Path, fault: str, said: tuple[str, ...]) -> None:
    given = seeded_weights(stack("plain"), 0)
    name = "layers.3.k_proj.weight"
    values = given.pop(name)
    spoilt = {
        "missing": {},
        "extra": {name: values, "layers.5.q_proj.weight": values.clone()},
        "shape": {name: values[:16].clone()},
        "nan": {name: torch.where(values == values.max(), torch.nan, values)},
        "overflow": {name: values * 1e9},
        "integers": {name: values.long()},
    }[fault]
    safetensors.torch.save_file({**given, **spoilt}, tmp_path / "w.safetensors")
    before = tree(tmp_path)
    output = ("--weights", tmp_path / "w.safetensors", "--dtype", "fp16", "-o", tmp_path / "block.onnx")
    refused(cli(*STACK, *output), *said)
    assert tree(tmp_path) == before  # No partial file stays, although earlier layers were written.


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(RequestError, match=r"take 0\.\d[1-9] MB and 0\.00 MB are free"):
        write_onnx(exported(stack("plain")), tmp_path / "block.onnx")
    assert tree(tmp_path) == {}


def test_torch_holds_all_layers_only_where_they_fit(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_eager, "available", lambda: 1000)
    with pytest.raises(RequestError, match=r"0\.00 MB of memory are free"):
        torch_eager.load(written, {})
    streamed = torch_eager.load(written, {"streamed": True})
    assert set(streamed.run(feeds("pattern"))) == set(graph_outputs(stack("pattern")))
    with pytest.raises(RequestError, match="can't be timed"):
        streamed.prepare(feeds("pattern"))
