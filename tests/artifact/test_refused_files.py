"""Files that are refused for what they hold: operators that draw numbers, and keys that a parser takes minutes for."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from helpers import cli, exported, small_spec

from posexport.artifact import onnx_file
from posexport.artifact.onnx_artifact import read_onnx, write_onnx
from posexport.errors import RequestError
from posexport.spec.toml_file import read_toml


@pytest.mark.parametrize("operator", ["RandomUniform", "RandomNormalLike", "Bernoulli"])
def test_a_graph_whose_results_differ_from_run_to_run_is_refused(operator: str, tmp_path: Path) -> None:
    path = tmp_path / "random.onnx"
    node = onnx.helper.make_node(operator, [] if operator == "RandomUniform" else ["x"], ["y"])
    value = onnx.helper.make_tensor_value_info("x", 1, [1])
    graph = onnx.helper.make_graph([node], "g", [value], [onnx.helper.make_tensor_value_info("y", 1, [1])])
    onnx.save(onnx.helper.make_model(graph), path)
    with pytest.raises(RequestError, match=f"the operator {operator}, whose results differ"):
        onnx_file.read(path)


def test_a_key_of_toml_with_thousands_of_parts_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    for text in ("a" + ".a" * 200_000 + " = 1", "[a" + ".a" * 100_000 + "]"):
        path.write_text(text)
        with pytest.raises(RequestError, match="more than 64 parts"):
            read_toml(path, "the file")


def test_where_external_data_would_be_says_nothing_of_a_tensor_that_holds_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    write_onnx(exported(small_spec("rope")), path)
    model = onnx.load(path)
    model.graph.initializer[0].external_data.add(key="location", value="../elsewhere")
    path.write_bytes(model.SerializeToString())
    assert read_onnx(path).external_files() == []
    assert cli("inspect", path).exit_code == 0
