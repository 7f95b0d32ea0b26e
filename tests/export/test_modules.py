"""Torch modules of all kinds as graphs: names, dimensions, forms, and refusals."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from helpers import Array, run_ort
from torch import Tensor, nn
from torch.export import Dim
from user_modules import Cached, Own, Plain

from posexport.artifact import read_manifest, write_onnx
from posexport.artifact.graph_file import read_graph
from posexport.artifact.manifest import ModuleSource, OnnxManifest
from posexport.errors import RequestError
from posexport.export import export_module
from posexport.export.modules import ExportedModule, export_any


def shapes(values: Any) -> dict[str, list[int | str]]:
    """The dimensions of values by name."""
    return {value.name: [dim if isinstance(dim, int) else dim.value for dim in value.shape] for value in values}


def seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().eval()


def inputs(batch: int, seq: int) -> dict[str, Array]:
    rng = np.random.default_rng(seq)
    x = rng.standard_normal((batch, seq, 16)).astype(np.float32)
    return {"x": x, "position_ids": np.tile(rng.permutation(seq), (batch, 1))}


@functools.cache
def exported(kind: type[nn.Module], form: str = "decomposed", target: str = "portable") -> ExportedModule:
    module = seeded(kind)
    return export_any(module, module.example_inputs(), form=form, target=target)  # type: ignore[operator]


def check_on_ort(module: nn.Module, model: ir.Model) -> None:
    """Asserts that the graph agrees with the module at sizes that were not traced."""
    for batch, seq in ((3, 9), (1, 1)):
        given = inputs(batch, seq)
        with torch.no_grad():
            wanted = module(*map(torch.from_numpy, given.values()))
        made = run_ort(model, given)["output"]
        assert made.shape == wanted.shape
        np.testing.assert_allclose(made, wanted, atol=1e-5)


FORMS = [("decomposed", "portable"), ("function", "portable"), ("native", "portable"), ("contrib", "ort")]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("form", "target"), FORMS)
def test_operators_of_posexport_get_the_form_directly(form: str, target: str) -> None:
    made = exported(Own, form, target)
    assert (made.operators, made.rewritten, made.summary()) == (1, None, "1 by posexport's operators")
    kinds = {node.op_type for node in made.model.graph}
    expected = {
        "decomposed": "Softmax",
        "function": "PositionalAttention",
        "native": "Attention",
        "contrib": "GroupQueryAttention",
    }
    assert expected[form] in kinds
    assert ("RotaryEmbedding" in kinds) == (form in ("native", "contrib"))
    check_on_ort(seeded(Own), made.model)
    metadata = made.model.metadata_props
    assert (metadata["posexport.form"], metadata.get("posexport.target")) == (form, "ort" if target == "ort" else None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["native", "decomposed"])
def test_attention_of_torch_gets_the_form_by_rewriting(form: str) -> None:
    made = exported(Plain, form)
    assert (made.operators, made.summary()) == (0, "1 of 1 in the form")
    assert ("Attention" in {node.op_type for node in made.model.graph}) == (form == "native")
    check_on_ort(seeded(Plain), made.model)
    (record,) = made.attentions()
    assert [*record] == ["name", "state", "reason", "error", "cases", "angles"]
    assert made.left() == []


def test_a_module_without_attention_says_so() -> None:
    made = export_any(nn.Linear(3, 2).eval(), torch.ones(2, 3), form="native")
    assert (made.operators, made.attentions(), made.summary()) == (0, [], "none found")
    assert made.model.metadata_props["posexport.form"] == "native"


@pytest.mark.slow
def test_names_and_dimensions_that_torch_finds() -> None:
    graph = exported(Own).model.graph
    assert shapes(graph.inputs) == {"x": ["x_axis0", "x_axis1", 16], "position_ids": ["x_axis0", "x_axis1"]}
    assert shapes(graph.outputs) == {"output": ["x_axis0", "x_axis1", 16]}
    assert {"qkv.weight", "qkv.bias", "out.weight", "out.bias", "frequencies"} <= {*graph.initializers}


@pytest.mark.slow
def test_names_and_dimensions_of_the_user_and_values_in_lists() -> None:
    module = Cached()
    example = module.example_inputs()
    made = export_module(module, example, module.dynamic_shapes())
    past = {f"past.{layer}.{kind}": ["batch", "past", 8] for layer in range(2) for kind in ("key", "value")}
    present = {name.replace("past", "present"): ["batch", "past + seq", 8] for name in past}
    assert shapes(made.graph.inputs) == {"x": ["batch", "seq", 8], **past, "scale": [8]}
    assert shapes(made.graph.outputs) == {"y": ["batch", "seq", 8], **present}
    given = {name: np.random.default_rng(0).standard_normal((3, 4, 8)).astype(np.float32) for name in ("x", *past)}
    given["scale"] = np.ones(8, np.float32)
    out = run_ort(made, given)
    assert out["present.1.value"].shape == (3, 8, 8)
    np.testing.assert_array_equal(out["y"], given["x"])


class Odd(nn.Module):
    """The outputs are an input, a weight and one value twice; an input has the name of an inner value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, mul: Tensor) -> tuple[Tensor, ...]:
        y = x * mul + 1
        return x, self.weight, y, y


def test_outputs_that_are_inputs_weights_or_each_other() -> None:
    batch = Dim("batch")
    made = export_module(Odd(), (torch.ones(2, 3), torch.ones(2, 3)), ({0: batch}, {0: batch}))
    assert shapes(made.graph.inputs) == {"x": ["batch", 3], "mul": ["batch", 3]}
    assert [*shapes(made.graph.outputs)] == ["output_0", "output_1", "output_2", "output_3"]
    given = {"x": np.full((4, 3), 5, np.float32), "mul": np.full((4, 3), 2, np.float32)}
    out = run_ort(made, given)
    assert [float(out[f"output_{at}"].max()) for at in range(4)] == [5, 1, 11, 11]
    names, said = (
        ["a", "weight", "c", "d"],
        "an output has the name of an input or a weight, 'weight': give output_names",
    )
    with pytest.raises(RequestError, match=said):
        export_module(Odd(), (torch.ones(2, 3), torch.ones(2, 3)), ({0: batch}, {0: batch}), output_names=names)


def test_axes_of_size_1_are_named_and_fixed_ones_are_numbers() -> None:
    made = export_any(nn.Linear(3, 2).eval(), {"input": torch.ones(1, 5, 3)}, output_names=["y"])
    assert made.fixed == ("input[0]",)
    assert shapes(made.model.graph.inputs) == {"input": [1, "input_axis1", 3]}
    assert shapes(made.model.graph.outputs) == {"y": [1, "input_axis1", 2]}


def test_a_module_in_training_is_exported_in_eval_mode_and_left_as_it_was() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3))
    module[1].eval()
    made = export_module(module, torch.ones(2, 3))
    assert "Dropout" not in {node.op_type for node in made.graph}
    assert [each.training for each in module.modules()] == [True, True, False]


class Grows(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Any:
        if self.kind == "buffer":
            self.count += 1
        if self.kind == "input":
            x.add_(1)
        return {"none": None, "number": 3, "text": {"deep": ["yes"]}}.get(self.kind, x + self.count)


ONES = torch.ones(2, 3)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a buffer that is changed": (lambda: export_module(Grows("buffer"), ONES), "forward changes 'count' in place"),
    "an input that is changed": (lambda: export_module(Grows("input"), ONES.clone()), "forward changes 'x' in place"),
    "no output": (lambda: export_module(Grows("none"), ONES), "forward returned no tensor"),
    "a number": (lambda: export_module(Grows("number"), ONES), "'output' is int: inputs and outputs are tensors"),
    "text inside": (lambda: export_module(Grows("text"), ONES), "'deep.0' is str: inputs and outputs are tensors"),
    "an input that is no tensor": (lambda: export_module(Grows(""), (3,)), "'x' is int: inputs and outputs are"),
    "no input": (lambda: export_module(Grows(""), ()), "don't fit forward(x: 'Tensor') -> 'Any': missing a required"),
    "an unknown input": (lambda: export_module(Grows(""), {"y": ONES}), "don't fit forward(x: 'Tensor') -> 'Any': "),
    "inputs of another kind": (lambda: export_module(Grows(""), 3), "example inputs are int: give a tuple"),
    "a form": (lambda: export_module(Grows(""), ONES, form="fast"), "unknown form 'fast'"),
    "an opset": (lambda: export_module(Grows(""), ONES, form="native", opset=18), "opset is 18: native is written in"),
    "too many names": (
        lambda: export_module(Grows(""), ONES, input_names=["a", "b"]),
        "input_names are ['a', 'b']: give a list of 1 different names, for x.",
    ),
    "a name twice": (
        lambda: export_module(Odd(), (ONES, ONES), input_names=["a", "a"]),
        "input_names are ['a', 'a']: give a list of 2 different names, for x, mul.",
    ),
    "names that are text": (
        lambda: export_module(Grows(""), ONES, output_names="y"),
        "output_names are 'y': give a list of 1 different names, for output.",
    ),
    "too few shapes": (
        lambda: export_module(Odd(), (ONES, ONES), ({},)),
        "dynamic_shapes has 1 entries: give one for each of x, mul.",
    ),
    "shapes of an unknown input": (
        lambda: export_module(Grows(""), ONES, {"y": {0: "batch"}}),
        "dynamic_shapes has {'y': {0: 'batch'}} for forward: its keys are x.",
    ),
    "an axis that is not there": (
        lambda: export_module(Grows(""), ONES, {"x": {2: "batch"}}),
        "dynamic_shapes has {2: 'batch'} for x [2, 3]: give a table from axis to torch.export.Dim or a name.",
    ),
    "shapes of a list": (
        lambda: export_module(Cached(), Cached().example_inputs(), {"past": [{}]}),
        "dynamic_shapes has [{}] for past, a list of 2.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_in_one_sentence(name: str) -> None:
    make, said = REFUSED[name]
    with pytest.raises(RequestError) as caught:
        make()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_axis_that_can_not_vary_is_an_error_of_torch() -> None:
    """Without an error, a length would become a constant. A table of five rows fixes it here."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(5, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table

    with pytest.raises(Exception, match=re.escape("Constraints violated (seq)")):
        export_module(Table(), torch.ones(2, 5, 3), ({1: Dim("seq")},))
    made = export_module(Table(), torch.ones(2, 5, 3))
    assert shapes(made.graph.inputs) == {"x": ["x_axis0", 5, 3]}


def test_the_file_and_its_manifest(tmp_path: Path) -> None:
    path = tmp_path / "own.onnx"
    written = write_onnx(exported(Own).model.clone(), path)
    manifest = read_manifest(path)
    assert isinstance(manifest, OnnxManifest)
    assert manifest == written
    assert (manifest.spec, manifest.form, manifest.opset) == (None, "decomposed", 18)
    assert manifest.module == ModuleSource(name="Own")
    assert [(tensor.name, tensor.shape, tensor.dtype) for tensor in manifest.inputs] == [
        ("x", ("x_axis0", "x_axis1", 16), "fp32"),
        ("position_ids", ("x_axis0", "x_axis1"), "int64"),
    ]
    graph = read_graph(path, manifest.sha256)
    assert graph.metadata()["posexport.module"] == '{"name":"Own"}'
    assert "posexport.spec" not in graph.metadata()
    with pytest.raises(RequestError, match=r"the manifest of 'own\.onnx' has no spec"):
        manifest.block()


@pytest.mark.slow
def test_the_same_module_gives_the_same_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / "one.onnx", tmp_path / "two.onnx"]
    for path in paths:
        module = seeded(Own)
        write_onnx(export_module(module, module.example_inputs()), path)  # type: ignore[operator]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_model_of_somebody_else_is_not_written(tmp_path: Path) -> None:
    model = exported(Own).model.clone()
    model.metadata_props.clear()
    with pytest.raises(RequestError, match="the model is none of posexport's: write what 'export' or 'export_module'"):
        write_onnx(model, tmp_path / "x.onnx")


class Subtracted(nn.Module):
    """Numbers minus tensors of integers."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        return x * (1.5 - position_ids)[..., None] + (2.0 - position_ids.to(torch.int32))[..., None]

    def example_inputs(self) -> tuple[Tensor, ...]:
        return tuple(map(torch.from_numpy, inputs(2, 4).values()))


def test_numbers_minus_integers() -> None:
    """torch's exporter does not accept a number as the first operand of a subtraction."""
    check_on_ort(seeded(Subtracted), exported(Subtracted).model)


class Router(nn.Module):
    """A layer that converts the dtype of another layer in its forward, as routers of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.scores = self.scores.to(self.dtype)
        return self.scores(x.to(self.dtype)).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_module_that_converts_itself(dtype: torch.dtype) -> None:
    """torch cannot change the values of weights during a trace."""
    router = seeded(Router)
    router.dtype = dtype  # type: ignore[assignment]
    weight, bias = (tensor.detach().double().numpy() for tensor in router.parameters())
    x = inputs(2, 5)["x"]
    made = export_any(router, torch.from_numpy(x))
    np.testing.assert_allclose(run_ort(made.model, {"x": x})["output"], x @ weight.T + bias, atol=1e-6)


class Experts(nn.Module):
    """Experts that run one after the other, each for its tokens. The mask has one expert more than there are.

    With `named`, the experts are looked up by a name with their number. Otherwise, experts without tokens are skipped
    by a branch.
    """

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.named = named
        self.router = nn.Linear(16, 3)
        self.experts = nn.ModuleDict({f"expert_{index}": nn.Linear(16, 16) for index in range(3)})

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.reshape(-1, 16)
        weights, indices = self.router(hidden).topk(2, dim=-1)
        mask = nn.functional.one_hot(indices, num_classes=4).permute(2, 1, 0)
        result = hidden * (hidden > hidden.mean())  # a product of two tensors
        for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            if self.named:
                rank, token = torch.where(mask[expert].squeeze(0))
                module = self.experts[f"expert_{expert[0]}"]
            else:
                number = int(expert.item())
                rank, token = torch.where(mask[number].squeeze(0))
                if token.numel() == 0:
                    continue
                module = [*self.experts.values()][number]
            result.index_add_(0, token, module(hidden[token]) * weights[token, rank, None])
        return result.reshape(x.shape)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("named", [True, False])
def test_a_loop_over_experts_that_have_tokens(named: bool) -> None:
    torch.manual_seed(0)
    experts = Experts(named).eval()
    made = export_any(experts, torch.from_numpy(inputs(2, 5)["x"]))
    for batch, seq in ((1, 1), (3, 9)):  # With one token, one expert does not get a token.
        x = inputs(batch, seq)["x"]
        weights = [
            (m.weight.detach().numpy(), m.bias.detach().numpy()) for m in [experts.router, *experts.experts.values()]
        ]
        (router, offset), *matrices = weights
        for row, out in zip(x.reshape(-1, 16), run_ort(made.model, {"x": x})["output"].reshape(-1, 16), strict=True):
            scores = router @ row + offset
            best = np.argsort(scores)[-2:]
            wanted = row * (row > x.mean()) + sum(
                scores[index] * (matrices[index][0] @ row + matrices[index][1]) for index in best
            )
            np.testing.assert_allclose(out, wanted, atol=1e-5)


class HeadsInRows(nn.Module):
    """Heads as additional rows, split again by the number of rows, as in Set Transformer."""

    def forward(self, x: Tensor) -> Tensor:
        heads = torch.cat(x.split(4, 2), 0)
        mixed = torch.softmax(heads.bmm(heads.transpose(1, 2)), 2).bmm(heads)
        return torch.cat(mixed.split(x.size(0), 0), 2)


def test_parts_as_long_as_a_length_that_varies() -> None:
    module = HeadsInRows()
    model = export_module(module, torch.randn(2, 5, 16), form="native")
    assert [node.op_type for node in model.graph].count("Attention") == 1
    x = torch.randn(3, 7, 16)
    np.testing.assert_allclose(run_ort(model, {"x": x.numpy()})["output"], module(x), atol=1e-5)
