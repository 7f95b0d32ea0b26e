"""The user's module as a reference: in float64 even if it names other dtypes, in its own dtype, and by the input and
output names of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
import user_modules
from helpers import Array

from posexport.errors import RequestError
from posexport.processes import INVALID
from posexport.runtimes import Runtime
from posexport.runtimes import torch_module as engine
from posexport.runtimes.pool import Pool, result
from posexport.runtimes.tensors import BF16

FILE = Path(user_modules.__file__)

IMPORTS = "import torch\nfrom torch import nn\n"


def graph(folder: Path, inputs: str, outputs: str) -> Path:
    """An ONNX file with these inputs and outputs. Each output is the sum of all inputs. Only the names are used."""
    names = [entry.split()[-1] for entry in inputs.split(", ")]
    nodes = "\n".join(f"{entry.split()[-1]} = Sum({', '.join(names)})" for entry in outputs.split(", "))
    text = f'<ir_version: 8, opset_import: ["": 18]> g ({inputs}) => ({outputs}) {{ {nodes} }}'
    path = folder / "graph.onnx"
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    return path


def run(
    folder: Path, body: str, inputs: dict[str, Array], outputs: str = "float[n] y", **options: Any
) -> dict[str, Array]:
    """The outputs of a module with this body of `forward(self, x)`."""
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    (folder / "model.py").write_text(
        f"{IMPORTS}class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.w = nn.Parameter(torch.full((4,), 0.1))\n"
        "        self.register_buffer('third', torch.tensor(1 / 3))\n"
        "        self.register_buffer('turn', torch.tensor(0.5 + 1j))\n"
        f"        self.kept = torch.tensor(0.7)\n    def forward(self, x):\n{lines}\n"
    )
    path = graph(folder, ", ".join(f"float[n] {name}" for name in inputs), outputs)
    engine._kept.clear()
    return engine.load(path, {"module": f"{folder / 'model.py'}:Model", **options}).run(inputs)


X = np.linspace(0.1, 3.0, 4, dtype=np.float32)
WIDE, W, THIRD, KEPT = X.astype(np.float64), float(np.float32(0.1)), float(np.float32(1 / 3)), float(np.float32(0.7))

BODIES: dict[str, tuple[str, Array]] = {
    "weights": ("return x * self.w", WIDE * W),
    "buffers": ("return x + self.third", WIDE + THIRD),
    "tensors that are no buffers": ("return x * self.kept", WIDE * KEPT),
    "casts": ("return (x.half().float() * 3).to(torch.bfloat16)", WIDE * 3),
    "a softmax with a dtype": ("return x.softmax(-1, dtype=torch.float32)", np.exp(WIDE) / np.exp(WIDE).sum()),
    "what is made without a dtype": ("return x * torch.tensor(0.1) + torch.ones(4) / 3", WIDE * 0.1 + 1 / 3),
    "what is made in a dtype that the file doesn't have": (
        "return x + torch.arange(4, dtype=torch.float16) / 3",
        WIDE + (np.arange(4, dtype=np.float16) / np.float16(3)).astype(np.float64),
    ),
    "whole numbers": ("return x / torch.arange(1, 5).float()", WIDE / np.arange(1, 5)),
    "complex numbers": ("return torch.view_as_real(torch.polar(x, x) * 1j)[..., 0]", -WIDE * np.sin(WIDE)),
    "complex buffers": ("return torch.view_as_real(x * self.turn).sum(-1)", WIDE * 1.5),
    "the largest of a dtype": (
        "return x.masked_fill(x > 2, torch.finfo(x.dtype).max).clamp(max=9.0)",
        np.where(WIDE > 2, 9, WIDE),
    ),
    "attention": (
        "q = x.view(1, 1, 4, 1)\nreturn nn.functional.scaled_dot_product_attention(q, q, q, scale=1.0).view(-1)",
        np.exp(np.outer(WIDE, WIDE)) @ WIDE / np.exp(np.outer(WIDE, WIDE)).sum(1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_the_reference_is_float64_all_through(name: str, tmp_path: Path) -> None:
    body, exact = BODIES[name]
    made = run(tmp_path, body, {"x": X})["y"]
    assert (made.dtype, made.shape) == (np.float64, exact.shape)
    np.testing.assert_allclose(made, exact, rtol=4e-15)
    own = run(tmp_path, body, {"x": X}, wide=False)["y"]
    assert own.dtype == (BF16 if name == "casts" else np.float32)
    np.testing.assert_allclose(own.astype(np.float64), exact, rtol=0.01)


def test_float64_is_asked_for_by_its_dtype_too(tmp_path: Path) -> None:
    made = run(tmp_path, "return x * self.w", {"x": X}, wide=False, dtype="fp64")["y"]
    np.testing.assert_allclose(made, WIDE * W, rtol=1e-15)
    half = run(tmp_path, "return x * self.w", {"x": X}, dtype="fp16")["y"]
    np.testing.assert_array_equal(half, X.astype(np.float16) * np.float16(0.1))
    assert torch.get_default_dtype() == torch.float32


def test_last_bits_of_weights(tmp_path: Path) -> None:
    ones = np.ones(4, np.float32)
    plain = run(tmp_path, "return x * self.w", {"x": ones}, wide=False)["y"]
    changed = [run(tmp_path, "return x * self.w", {"x": ones}, wide=False, last_bits=seed)["y"] for seed in (0, 0, 1)]
    steps = {np.nextafter(plain[0], np.float32(end)) for end in (-1, 1)}
    assert {*changed[0], *changed[2]} == steps
    np.testing.assert_array_equal(changed[0], changed[1])


def test_last_bits_are_those_of_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    ones, options = np.ones(4, np.float32), {"wide": False, "dtype": "fp16", "last_bits": 0}
    made = run(tmp_path, "return x * self.w", {"x": ones}, **options)["y"]
    assert {*made} == {np.nextafter(np.float16(0.1), np.float16(end)) for end in (-1, 1)}


def test_inputs_and_outputs_of_other_names_are_taken_in_order(tmp_path: Path) -> None:
    body = "return {'twice': 2 * x, 'thrice': 3 * x}"
    by_name = run(tmp_path, body, {"x": X}, "float[n] thrice, float[n] twice", wide=False)
    np.testing.assert_array_equal(by_name["thrice"], 3 * X)
    by_place = run(tmp_path, body, {"q": X}, "float[n] a, float[n] b", wide=False)
    np.testing.assert_array_equal(by_place["a"], 2 * X)
    assert list(by_place) == ["a", "b"]


PAIRS = {
    "another output": (
        {"x": X},
        "float[n] twice, float[n] b",
        "returns 'twice', 'thrice', and the file has the outputs 'twice', 'b'",
    ),
    "an output too few": (
        {"x": X},
        "float[n] a",
        "returns 'twice', 'thrice', and the file has the outputs 'a': both must be the same.",
    ),
    "an input too many": (
        {"x": X, "z": X},
        "float[n] twice, float[n] thrice",
        "takes 'x', and the file has the inputs 'x', 'z'",
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_names_that_contradict_each_other_are_refused(name: str, tmp_path: Path) -> None:
    inputs, outputs, said = PAIRS[name]
    with pytest.raises(RequestError) as caught:
        run(tmp_path, "return {'twice': 2 * x, 'thrice': 3 * x}", inputs, outputs)
    assert said in str(caught.value)


def test_inputs_in_lists_and_dictionaries(tmp_path: Path) -> None:
    names = ["x", "past.0.key", "past.0.value", "past.1.key", "past.1.value", "scale"]
    present = [name.replace("past", "present") for name in names[1:5]]
    path = graph(tmp_path, ", ".join(f"float[n] {name.replace('.', '_')}" for name in names), "float[n] y")
    model = onnx.load(path)
    for entry, name in zip(model.graph.input, names, strict=True):
        entry.name = name
    model.graph.node[0].input[:] = names
    for name in present:
        model.graph.output.add().CopyFrom(onnx.helper.make_tensor_value_info(name, 1, ["n"]))
        model.graph.node.add(op_type="Identity", input=["x"], output=[name])
    onnx.save(model, path)
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((1, 2, 8)).astype(np.float32) for name in names}
    made = engine.load(path, {"module": f"{FILE}:Cached", "wide": False}).run(arrays)
    np.testing.assert_array_equal(made["y"], arrays["x"] * arrays["scale"])
    for name in present:
        np.testing.assert_array_equal(
            made[name], np.concatenate([arrays[name.replace("present", "past")], arrays["x"]], 1)
        )


def test_what_goes_wrong_in_a_worker_is_a_reason(tmp_path: Path) -> None:
    row = Runtime("module", "the module", "posexport.runtimes.torch_module", "torch", "torch")
    (tmp_path / "model.py").write_text(
        f"{IMPORTS}class Model(nn.Module):\n    def forward(self, x):\n        print('on the way')\n"
        "        if len(x) > 4: raise ValueError('too long')\n        return x + 1\n"
    )
    path = graph(tmp_path, "float[n] x", "float[n] y")
    options = {"module": f"{tmp_path / 'model.py'}:Model"}
    with Pool(60.0) as pool:
        good = result(pool.submit(row, path, [{"x": X}], options))
        bad = result(pool.submit(row, path, [{"x": np.ones(5, np.float32)}], options))
    np.testing.assert_array_equal(good.outputs[0]["y"], WIDE + 1)
    assert good.describe["engine"] == "torch, model.py:Model in float64"
    assert bad.failure is not None
    assert bad.failure.code == INVALID
    assert f"failed at line 6 of '{tmp_path / 'model.py'}': ValueError: too long." in bad.failure.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "no module was given"),
        ({"module": "model.py:Model", "width": True}, "unknown option of the module 'width'"),
        ({"module": "model.py:Model", "dtype": "fp8"}, "unknown dtype of the module 'fp8'"),
    ],
)
def test_wrong_options(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=said):
        engine.load(graph(tmp_path, "float[n] x", "float[n] y"), options)


def test_it_can_be_timed(tmp_path: Path) -> None:
    path = graph(tmp_path, "float[n] x, int64[n] position_ids", "float[n] output")
    runner = engine.load(path, {"module": f"{FILE}:Plain", "wide": False})
    inputs = {"x": np.ones((2, 5, 16), np.float32), "position_ids": np.tile(np.arange(5), (2, 1))}
    assert runner.prepare(inputs)() > 0


def test_a_reference_that_casts_is_a_planted_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: without the float64 mode, `float()` rounds, and the tests above show it."""
    monkeypatch.setattr(engine, "_WIDE", {})
    body, exact = BODIES["casts"]
    made = run(tmp_path, body, {"x": X})["y"].astype(np.float64)
    assert np.abs(made - exact).max() > 1e-4
