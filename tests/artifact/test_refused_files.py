"""Files that are refused for their content: operators that draw random numbers, and keys that take a parser minutes."""

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


@pytest.mark.parametrize(("training", "is_read"), [(None, True), (False, True), (True, False), ("input", False)])
def test_dropout_that_draws_what_it_drops_is_refused(
    training: bool | str | None, is_read: bool, tmp_path: Path
) -> None:
    path, make = tmp_path / "dropout.onnx", onnx.helper.make_tensor_value_info
    inputs, constants = [make("x", 1, [1])], []
    if training == "input":
        inputs.append(make("mode", onnx.TensorProto.BOOL, []))
    elif training is not None:
        constants.append(onnx.helper.make_tensor("mode", onnx.TensorProto.BOOL, [], [training]))
    node = onnx.helper.make_node("Dropout", ["x"] if training is None else ["x", "", "mode"], ["y"])
    graph = onnx.helper.make_graph([node], "g", inputs, [make("y", 1, [1])], constants)
    onnx.save(onnx.helper.make_model(graph), path)
    if is_read:
        onnx_file.read(path)
    else:
        with pytest.raises(RequestError, match=r"Dropout, whose results differ .* in evaluation mode"):
            onnx_file.read(path)


def test_a_key_of_toml_with_thousands_of_parts_is_refused_at_once(tmp_path: Path) -> None:
    path, key = tmp_path / "deep.toml", ".a" * 200_000
    for text in (
        f"a{key} = 1",
        f"[a{key}]",
        f'"="{key} = 1',
        f"['='{key}]",
        f"set = {{a{key} = 1}}",
        f"set = {{b = 1, 'a'{key.replace('.', ' . ')} = 1}}",
        f'b = "\\\\"  # it\'s\n"\\"=#"{key} = 1',
        f'set = {{b = """ " """, a{key} = 1}}',
        f'set = {{b = """ \\"""""", a{key} = 1}}',
        f"set = {{b = ''' \" ''''', a{key} = 1}}",
    ):
        path.write_text(text)
        with pytest.raises(RequestError, match="more than 64 parts"):
            read_toml(path, "the file")


def test_texts_and_comments_with_many_dots_are_no_keys(tmp_path: Path) -> None:
    path, dots = tmp_path / "dots.toml", "a." * 100
    quotes = ("'{}'", '"# {}"', '"""\n"{}\n"""""', "'''{}\n{}'''''")
    path.write_text(
        f"# {dots}\nd = {[0.5] * 500}\n"
        + "".join(f"{'abcd'[at]}1 = {quote.format(dots, dots)} # {dots}\n" for at, quote in enumerate(quotes))
    )
    assert read_toml(path, "the file") == {
        "d": [0.5] * 500,
        "a1": dots,
        "b1": f"# {dots}",
        "c1": f'"{dots}\n""',
        "d1": f"{dots}\n{dots}''",
    }


@pytest.mark.parametrize("text", ['"""', '"\\"', "'''", '."', ". ", '"\\', '"""\\"', "a\t", "a.\t"])
def test_toml_without_an_end_is_refused_at_once(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(f"a = {text * 150_000}")
    with pytest.raises(RequestError, match="is not TOML"):
        read_toml(path, "the file")


def test_where_external_data_would_be_says_nothing_of_a_tensor_that_holds_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    write_onnx(exported(small_spec("rope")), path)
    model = onnx.load(path)
    model.graph.initializer[0].external_data.add(key="location", value="../elsewhere")
    path.write_bytes(model.SerializeToString())
    assert read_onnx(path).external_files() == []
    assert cli("inspect", path).exit_code == 0
