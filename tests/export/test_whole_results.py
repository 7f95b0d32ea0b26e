"""The matrix of whole models: its cells, their texts, and that the page agrees with the committed data."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import attrs
import pytest
from result_pages import figures_of

pytestmark = pytest.mark.few_inputs

SCRIPTS = Path(__file__).parents[2] / "scripts"
Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """A module of scripts/whole."""
    for folder in ("benchmarks", "suite", "whole"):
        monkeypatch.syspath_prepend(str(SCRIPTS / folder))
    return importlib.import_module


def test_the_page_is_of_the_committed_data(load: Load) -> None:
    data, results = load("whole_data"), load("results")
    assert (
        figures_of(results.RESULTS / "models.md")
        == "\n".join(load("whole_page").figures(data.read())).strip("\n") + "\n"
    )


def test_the_data_hold_what_the_schema_says_and_nothing_else(load: Load) -> None:
    from posexport.jsondata import unstructure

    data = load("whole_data")
    assert unstructure(data.read()) == load("results").read_results("models")


def test_the_table_names_models_that_transformers_has(load: Load) -> None:
    import transformers

    rows = load("whole_rows").ROWS
    assert len(rows) >= 30
    assert {name for row in rows.values() for name in (row.config, row.model)} <= {*dir(transformers)}


def test_layers_that_differ_come_twice(load: Load) -> None:
    deeper = load("whole_rows").deeper
    given = {"num_hidden_layers": 2, "layer_types": ["a", "b"], "hidden_size": 8, "attention_types": [[["c"], 1]]}
    assert deeper(given) == {
        "num_hidden_layers": 4,
        "layer_types": ["a", "b", "a", "b"],
        "hidden_size": 8,
        "attention_types": [[["c"], 2]],
    }


def test_only_decoders_have_kinds_of_caches(load: Load) -> None:
    data = load("whole_data")
    columns = [one.column for one in data.cells(["llama"])]
    assert len(set(columns)) == len(columns) == 12 and columns[0] == "native/fp32/concat"
    for name in ("vit", "t5"):
        assert [one.column for one in data.cells([name])][:3] == ["native/fp32", "contrib/fp32", "decomposed/fp32"]


def test_the_page_says_every_reason_once(load: Load) -> None:
    data = load("whole_data")
    cell = attrs.evolve(next(data.cells(["llama"])), state="equal", of_limit=0.25, attentions=4, in_form=3, kept=("a",))
    other = attrs.evolve(cell, form="contrib", state="refused", reason="no | such.", kept=())
    facts = load("results").read_results("models")["machine"]
    lines = load("whole_page").figures(data.Results(machine=facts, cells=(cell, other)))
    assert "| llama | 0.25, 3/4 [1] |  |  |  | refused [2] |" in "\n".join(lines)
    assert "1. Left as it was: a." in lines and "2. no \\| such." in lines


@pytest.mark.slow
def test_a_cell_is_equal_and_a_planted_fault_is_seen(load: Load, tmp_path: Path) -> None:
    cell = load("whole_cell").cell
    (tmp_path / "checkpoints").mkdir()
    record = cell("vit", "native", "fp32", "", str(tmp_path))
    assert (record["state"], record["in_form"], record["attentions"]) == ("equal", 4, 4)
    assert 0 < record["of_limit"] < 1
    assert cell("vit", "native", "fp32", "", str(tmp_path), True)["state"] == "different"


def test_what_ends_a_cell_is_its_reason(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("whole_cell")
    (tmp_path / "checkpoints" / "vit").mkdir(parents=True)
    (tmp_path / "checkpoints" / "vit" / "config.json").write_text("{}")
    record = module.cell("vit", "native", "fp32", "", str(tmp_path))
    assert record["state"] == "refused" and "model.safetensors" in record["reason"]

    def broken(*_: object) -> None:
        raise ValueError("raw")

    monkeypatch.setattr("posexport.cli.export_command.write_model", broken)
    record = module.cell("vit", "native", "fp32", "", str(tmp_path))
    assert (record["state"], record["reason"]) == ("crashed", "export: ValueError: raw")
