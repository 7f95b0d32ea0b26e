"""Tables that equal the checkpoint's need not be read row by row. Others must be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from helpers import cli
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file
from small_decoders import exported_model, small_checkpoint

from posexport.verify.graph.lookups import ROWS, checkpoint_tables

COUNT = ROWS + 200
TABLE = torch.randn(COUNT, 4, generator=torch.Generator().manual_seed(0))


def graph(*nodes: tuple[str, list[str], str], table: np.ndarray[Any, Any], **attributes: int) -> ir.Model:
    """A graph with nodes that read `ids` [batch, seq] and the table `table`."""
    made = [helper.make_node(kind, inputs, [output]) for kind, inputs, output in nodes]
    for node in made:
        if node.op_type == "Gather":
            node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
        if node.op_type == "Cast":
            node.attribute.append(helper.make_attribute("to", TensorProto.INT32))
    values = [
        helper.make_tensor_value_info("ids", TensorProto.INT64, ["b", "s"]),
        helper.make_tensor_value_info("y", TensorProto.UNDEFINED, None),
    ]
    constants = [numpy_helper.from_array(table, "table"), numpy_helper.from_array(np.int64(3), "three")]
    proto = helper.make_graph(made, "g", values[:1], values[1:], constants)
    return ir.from_proto(helper.make_model(proto, opset_imports=[helper.make_opsetid("", 18)], ir_version=9))


LOOKUP = ("Gather", ["table", "ids"], "y")


def changed(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array = array.copy()
    array[ROWS + 100, 2] += 1
    return array


F32, F16 = TABLE.numpy(), TABLE.half().numpy()
FOUND: dict[str, tuple[ir.Model, bool]] = {
    "lookup": (graph(LOOKUP, table=F32), True),
    "half precision": (graph(LOOKUP, table=F16), True),
    "cast ids": (graph(("Cast", ["ids"], "i"), ("Gather", ["table", "i"], "y"), table=F32), True),
    "length of ids": (graph(("Shape", ["ids"], "n"), LOOKUP, table=F32), True),
    "one number is another": (graph(LOOKUP, table=changed(F32)), False),
    "one of half precision": (graph(LOOKUP, table=changed(F16)), False),
    "fewer rows": (graph(LOOKUP, table=F32[:-1].copy()), False),
    "columns": (graph(LOOKUP, table=F32, axis=1), False),
    "other ids": (graph(("Add", ["ids", "three"], "i"), ("Gather", ["table", "i"], "y"), table=F32), False),
    "ids are compared too": (graph(("Equal", ["ids", "three"], "pad"), LOOKUP, table=F32), False),
    "nothing is looked up": (graph(("Identity", ["ids"], "y"), table=F32), False),
    "ids are data": (graph(("Gather", ["ids", "three"], "y"), table=F32), False),
}


@pytest.mark.parametrize("name", FOUND)
def test_tables_are_found_where_ids_do_nothing_else(name: str, tmp_path: Path) -> None:
    model, found = FOUND[name]
    save_file(
        {"other": torch.zeros(COUNT, 4), "wte": TABLE, "bias": torch.zeros(COUNT)}, tmp_path / "model.safetensors"
    )
    assert checkpoint_tables(model, ["ids", "missing"], tmp_path) == ({"ids": "wte"} if found else {})


def test_weights_in_bf16_become_fp16(tmp_path: Path) -> None:
    half = TABLE.bfloat16()
    save_file({"wte": half}, tmp_path / "model.safetensors")
    assert checkpoint_tables(graph(LOOKUP, table=half.half().numpy()), ["ids"], tmp_path) == {"ids": "wte"}
    assert checkpoint_tables(graph(LOOKUP, table=F32), ["ids"], tmp_path) == {}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with a larger vocabulary than cases read, and its file without a manifest."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("large")
    small_checkpoint(folder / "checkpoint", vocab_size=COUNT, num_hidden_layers=1)
    path = exported_model(folder / "checkpoint", folder / "model.onnx", "--form", "native", "--opset", "24")
    onnx.save(onnx.load(path), folder / "alone.onnx")
    return folder / "alone.onnx", folder / "checkpoint"


def one_row(model: onnx.ModelProto) -> None:
    """Rows of tokens that no case reads are changed."""
    (tensor,) = (one for one in model.graph.initializer if one.name == "model.embed_tokens.weight")
    array = numpy_helper.to_array(tensor).copy()
    array[4000:4100] *= 1.5
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


@pytest.mark.slow
@pytest.mark.few_inputs
@pytest.mark.parametrize("change", [None, one_row])
def test_tokens_that_are_not_read_are_left_open_where_their_table_is_another(
    change: Callable[[onnx.ModelProto], None] | None, large: tuple[Path, Path], tmp_path: Path
) -> None:
    path, folder = large
    model = onnx.load(path)
    if change is not None:
        change(model)
    onnx.save(model, tmp_path / "model.onnx")
    done = cli("verify", tmp_path / "model.onnx", "--from", folder, "--runtime", "ort-cpu", "--strict", "--json")
    parity = json.loads(done.stdout)["verdicts"][0]
    notes, left = " ".join(parity["notes"]), " ".join(parity["not_shown"])
    known = f"of {COUNT} token ids were not read, but their table is the checkpoint's model.embed_tokens.weight"
    if change is None:
        assert done.exit_code == 0, done.stdout
        assert known in notes
        assert "token ids" not in left
    else:
        assert done.exit_code == 1
        assert "token ids were not read" in left or parity["state"] == "failed"
        assert "but their table" not in notes
