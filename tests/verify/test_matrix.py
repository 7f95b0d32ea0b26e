"""`posexport matrix`: its cells, which cells are measured again, faults, interrupts, and the files it writes."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from helpers import CHILD_PATH, cli, refused

from posexport.artifact.onnx_artifact import write_onnx
from posexport.errors import Reason, RequestError, RuntimeMissingError
from posexport.export import export
from posexport.models import ENCODINGS
from posexport.models.weights import seeded_weights
from posexport.spec.forms import FORMS
from posexport.spec.spec import DTYPES
from posexport.verify.matrix import run, worker
from posexport.verify.matrix.schedule import Column, Selection, settle, spec_hash
from posexport.verify.matrix.table import BUILD, COLUMNS, MODES, Cell, Entry, Key, Matrix, cpu_facts, read
from posexport.verify.result import Comparison, Verdict

pytestmark = pytest.mark.few_inputs

ALIBI = Entry(encoding="alibi", form="decomposed", dtype="fp32", mode="prefill")
WINDOWS = {"swin", "swinv2"}  # their tokens are the cells of a window in reading order
HERE = {name: Column(version="1", builder="tensorrt-rtx") for name in COLUMNS}
AWAY = Column(missing="no GPU: there is none")


@pytest.fixture
def _engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", CHILD_PATH)


def passed(entry: Entry, column: str, **over: Any) -> Cell:
    cell = Cell(entry=entry, column=column, state="passed", spec=spec_hash(entry), version="1", error=1e-6, eager=1e-6)
    return attrs.evolve(cell, **over)


def test_there_is_a_cell_for_everything() -> None:
    cells = Selection().cells()
    assert len(cells) == len(set(cells)) == len(ENCODINGS) * len(FORMS) * len(DTYPES) * len(MODES) * len(COLUMNS)
    for name in MODES:
        assert name in cli("matrix", "--help").stdout


def test_refused_cells_are_those_that_export_refuses_in_the_same_words() -> None:
    uncached = {name for name, cls in ENCODINGS.items() if cls.no_cache_reason} | {"rope-dinov3"}  # without a grid
    free = {name for name, cls in ENCODINGS.items() if cls.axes > 1} - WINDOWS  # on grids of any size
    never = {(name, mode) for name in uncached for mode in MODES if mode.startswith("decode")}
    never |= {(name, mode) for name in free for mode in MODES if mode.endswith("consecutive")}
    entries = [entry for entry in Selection().entries() if entry.refusal("portable")]
    refused = Counter((entry.encoding, entry.mode) for entry in entries)
    assert {key for key, number in refused.items() if number == len(FORMS) * len(DTYPES)} == never
    found = {(entry.form, entry.mode) for entry in entries if (entry.encoding, entry.mode) not in never}
    assert found == {("contrib", "decode-shared")}
    for entry in Selection(encoding=["rope"], form=["contrib"], mode=["decode-shared"], dtype=["fp16"]).entries():
        why = entry.refusal("portable")
        assert why is not None
        with pytest.raises(RequestError) as error:
            export(entry.spec(), {}, form=entry.form)
        assert str(error.value) == f"{why}."
        assert entry.refusal("ort") is None


def test_an_entry_that_contradicts_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODES, "prefill", attrs.evolve(MODES["prefill"], fields={"cross": True}))
    why = ALIBI.refusal("portable")
    assert why is not None and "with cross" in why
    matrix, todo = settle(None, Selection(encoding=["alibi"], mode=["prefill"]), HERE, "portable")
    assert {cell.state for cell in matrix.cells.values()} == {"refused"}
    assert not todo


def test_causality_is_left_out_where_there_is_no_order() -> None:
    causal = {
        (encoding, mode) for mode, row in MODES.items() for encoding in ENCODINGS if row.fields_for(encoding)["causal"]
    }
    everything = {(encoding, mode) for encoding in ENCODINGS for mode in MODES}
    several = [name for name, cls in ENCODINGS.items() if cls.axes > 1]
    assert everything - causal == {(name, mode) for name in several for mode in MODES if not mode.startswith("decode")}


@pytest.mark.parametrize(
    ("change", "here", "again"),
    [
        ({}, {}, []),
        ({"state": "not run", "reason": "no bf16"}, {}, []),
        ({"state": "not run", "reason": "its library can't be loaded", "version": None}, {}, ["ort-cpu"]),
        ({"state": "failed", "reason": "off"}, {}, ["ort-cpu"]),
        ({"version": "0.9"}, {}, ["ort-cpu"]),
        ({"version": None}, {}, ["ort-cpu"]),
        ({"spec": "another"}, {}, ["ort-cpu"]),
        ({"version": "0.9"}, {"ort-cpu": AWAY}, []),
        ({"spec": "another"}, {"ort-cpu": AWAY}, []),
    ],
)
def test_a_cell_is_kept_as_long_as_what_made_it(change: dict[str, Any], here: dict[str, Any], again: list[str]) -> None:
    old = Matrix()
    old.put([passed(ALIBI, "ort-cpu", **change), passed(ALIBI, BUILD)])
    selection = Selection(encoding=["alibi"], form=["decomposed"], dtype=["fp32"], mode=["prefill"],
                          runtime=["ort-cpu", BUILD])  # fmt: skip
    matrix, todo = settle(old, selection, HERE | here, "portable")
    assert todo == ({ALIBI: again} if again else {})
    assert ((ALIBI, "ort-cpu") in matrix.cells) is not bool(again)
    assert matrix.cells[ALIBI, BUILD] == old.cells[ALIBI, BUILD]
    if "spec" in change and here:  # a result of another block must not be kept
        assert matrix.cells[ALIBI, "ort-cpu"].reason == AWAY.missing
    elif here:
        assert matrix.cells[ALIBI, "ort-cpu"] == old.cells[ALIBI, "ort-cpu"]


@pytest.mark.parametrize(
    "change", [{"target": "ort"}, {"made_by": {"posexport": "0.0"}}], ids=["another target", "another posexport"]
)
def test_files_made_otherwise_are_measured_again_and_none_is_lost(change: dict[str, Any]) -> None:
    old = Matrix(**change)
    other = attrs.evolve(ALIBI, form="function")
    old.put([passed(ALIBI, "ort-cpu"), passed(other, "ort-cpu")])
    matrix, todo = settle(old, Selection(encoding=["alibi"], runtime=["ort-cpu"]), HERE, "portable")
    assert not {key for key in old.cells if key in matrix.cells}
    assert {ALIBI, other} <= set(todo)
    narrow = Selection(encoding=["alibi"], form=["decomposed"], runtime=["ort-cpu"])
    with pytest.raises(RequestError, match=r"holds 1 cells that aren't asked for, .*--no-resume"):
        settle(old, narrow, HERE, "portable")


def test_cells_that_were_not_asked_for_stay_where_they_are_current() -> None:
    everything, _ = settle(None, Selection(), HERE | {"ort-cuda": AWAY}, "portable")
    current, stale = attrs.evolve(ALIBI, form="function"), attrs.evolve(ALIBI, form="native")
    everything.put([passed(current, "ort-cpu"), passed(stale, "ort-cpu", version="0.9")])
    refused = next(key for key, cell in everything.cells.items() if cell.state == "refused")
    everything.put([attrs.evolve(everything.cells[refused], reason="what was so once")])
    matrix, _ = settle(everything, Selection(encoding=["rope"]), HERE | {"ort-cuda": AWAY}, "portable")
    assert set(everything.cells) - set(matrix.cells) == {(stale, "ort-cpu"), refused}


def test_what_could_not_run_is_for_good_only_where_the_file_is_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def verdict(code: str) -> Verdict:
        return Verdict.of("a.onnx", "ort-cpu", "not run", Reason(code, "the same sentence"))

    assert worker._cell(verdict("unsupported"))["lasting"] is True
    worst = Comparison(case="long", output="output", state="passed", max_error=1.234e-6, torch_error=1e-6)
    numbers = worker._cell(attrs.evolve(verdict("unsupported"), worst=worst))
    assert (numbers["error"], numbers["eager"], numbers["ratio"]) == (1.2e-6, 1e-6, 1.2)
    assert [worker._cell(verdict(code))["lasting"] for code in ("runtime-missing", "slow", "out-of-memory")] == [
        False
    ] * 3

    def missing(*_: object) -> None:
        raise RuntimeMissingError("its library can't be loaded.")

    spec = attrs.evolve(ALIBI, dtype="fp16").spec()
    write_onnx(export(spec, seeded_weights(spec, 0)), tmp_path / "a.onnx")
    monkeypatch.setattr("posexport.runtimes.tensorrt.builder.build", missing)
    answer = worker.build(str(tmp_path / "a.onnx"), "tensorrt-rtx")
    assert answer["cell"] == {"state": "not run", "reason": "its library can't be loaded", "lasting": False}


def test_nothing_run_of_what_was_asked_is_exit_3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("posexport.verify.matrix.schedule.columns_here", lambda: dict.fromkeys(COLUMNS, AWAY))
    result = cli("matrix", "--encoding", "rope", "--mode", "prefill", "-o", tmp_path / "out")
    assert result.exit_code == 3, result.output


DAMAGE: dict[str, tuple[str, str, Any]] = {
    "text for a number": ("cells", "error", "abc"),
    "half a kernel": ("cells", "kernels", 1.5),
    "a number for text": ("cells", "reason", 3),
    "text for a truth": ("cells", "fused", "yes"),
    "an error below 0": ("cells", "error", -1.0),
    "a ratio below 0": ("cells", "ratio", -5.0),
    "a number for a list": ("cpus", "instruction_sets", 5),
    "text for cores": ("cpus", "cores", "two"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_file_of_wrong_values_is_no_matrix(how: str, tmp_path: Path) -> None:
    matrix, path = Matrix(), tmp_path / "matrix.json"
    matrix.put([passed(ALIBI, "ort-cpu")])
    matrix.put_cpus([cpu_facts()])
    matrix.write(path)
    assert read(path).to_dict() == matrix.to_dict()
    part, name, value = DAMAGE[how]
    data = json.loads(path.read_text())
    data[part][0][name] = value
    path.write_text(json.dumps(data))
    with pytest.raises(RequestError, match="is no matrix"):
        read(path)


def test_not_here_is_not_run_with_the_reason_and_never_asked_for() -> None:
    matrix, todo = settle(None, Selection(encoding=["rope"]), HERE | {"ort-cuda": AWAY}, "portable")
    cells = [cell for cell in matrix.cells.values() if cell.column == "ort-cuda"]
    assert {(cell.state, cell.reason) for cell in cells if cell.state != "refused"} == {("not run", AWAY.missing)}
    assert all("ort-cuda" not in columns for columns in todo.values())


@pytest.mark.usefixtures("_engines")
def test_what_fails_in_a_child_is_the_failure_of_its_own_cells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "WORKER", "engines.matrix_script")
    selection = Selection(encoding=["alibi"], dtype=["fp16"], mode=["prefill"], runtime=["torch", "ort-cpu", BUILD])
    matrix, todo = settle(None, selection, HERE, "portable")
    done: list[int] = []
    run.measure(matrix, todo, HERE, jobs=1, save=lambda so_far: None, advance=lambda what, number: done.append(number))
    assert list(matrix.cells) and set(matrix.cells) == set(selection.cells())
    assert sum(done) == run.steps(todo) == 8
    states = {(entry.form, column): cell.state for (entry, column), cell in matrix.cells.items()}
    failed = {("native", "torch"), ("native", "ort-cpu"), ("native", BUILD), ("function", BUILD)}
    failed |= {("contrib", "torch"), ("contrib", "ort-cpu")}
    assert {key for key, state in states.items() if state == "failed"} == failed
    assert {key for key, state in states.items() if state == "passed"} == set(states) - failed
    reasons = {(entry.form, column): cell.reason for (entry, column), cell in matrix.cells.items()}
    assert reasons["native", BUILD] == "it can't be exported: ValueError: no such thing", "no folder of this machine"
    assert "SIGSEGV" in str(reasons["function", BUILD])
    assert "SIGABRT" in str(reasons["contrib", "ort-cpu"])
    sound = matrix.cells[attrs.evolve(ALIBI, dtype="fp16"), "ort-cpu"]
    assert (sound.error, sound.eager, sound.ratio, sound.cases, sound.version) == (1.2e-6, 1e-6, 1.2, 8, "1")
    plan = matrix.cells[attrs.evolve(ALIBI, dtype="fp16"), BUILD]
    assert (plan.kernels, plan.fused) == (6, True)


@pytest.mark.usefixtures("_engines")
def test_an_interrupt_keeps_what_is_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "WORKER", "engines.matrix_script")
    monkeypatch.setattr(run, "BATCH", 1)
    monkeypatch.setattr("posexport.verify.matrix.schedule.columns_here", lambda: HERE)
    real = Matrix.write
    saved: list[int] = []

    def write(matrix: Matrix, path: Path) -> None:
        real(matrix, path)
        saved.append(len(matrix.cells))
        if saved[-1] >= 3:
            raise KeyboardInterrupt

    cells = len(DTYPES) * len(MODES)
    arguments = ("matrix", "--encoding", "alibi", "--form", "decomposed", "--runtime", "ort-cpu", "--jobs", "1",
                 "-o", tmp_path / "out")  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(Matrix, "write", write)
        result = cli(*arguments)
    assert result.exit_code == 130
    kept = len(read(tmp_path / "out" / "matrix.json").cells)
    assert kept >= 3
    assert f"{cells - kept} cells are left, so run it again" in result.stderr
    asked: list[int] = []
    measure = run.measure

    def counting(matrix: Matrix, todo: Any, *rest: Any, **more: Any) -> None:
        asked.append(len(todo))
        measure(matrix, todo, *rest, **more)

    monkeypatch.setattr(run, "measure", counting)
    assert cli(*arguments).exit_code == 0
    assert len(read(tmp_path / "out" / "matrix.json").cells) == cells
    assert cli(*arguments).exit_code == 0
    assert asked == [cells - kept, 0]


@pytest.mark.slow
@pytest.mark.usefixtures("_engines")
def test_a_wrong_graph_is_exit_1_and_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "WORKER", "engines.matrix_slopes")
    out = tmp_path / "out"
    asked = ("--encoding", "alibi", "--form", "decomposed", "--dtype", "fp32", "--mode", "prefill")
    result = cli("matrix", *asked, "--runtime", "torch", "--runtime", "ort-cpu", "--jobs", "1", "-o", out)
    assert result.exit_code == 1, result.output
    cells = read(out / "matrix.json").cells
    assert cells[ALIBI, "torch"].state == "passed"
    assert cells[ALIBI, "ort-cpu"].state == "failed"
    assert "slopes" in str(cells[ALIBI, "ort-cpu"].reason)
    assert "failed: alibi-decomposed-fp32-prefill on ort-cpu: output 'output' is off by" in result.stdout
    assert "✗ failed [1]" in (out / "matrix.md").read_text()


def _file(folder: Path) -> None:
    (folder / "out").write_text("words")


def _no_matrix(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "matrix.json").write_text('{"cells": 3}')


@pytest.mark.parametrize(
    ("arguments", "before", "said"),
    [
        (("--encoding", "ropes"), None, "did you mean 'rope'"),
        (("--form", "functions"), None, "did you mean 'function'"),
        (("--dtype", "fp8"), None, "unknown dtype 'fp8'"),
        (("--mode", "decoding"), None, "did you mean 'decode'"),
        (("--runtime", "builds"), None, "did you mean 'build'"),
        (("--target", "tensor"), None, "did you mean 'tensorrt'"),
        (("--jobs", "0"), None, "jobs is '0'"),
        (("-o", "nowhere/out"), None, "its own folder isn't there"),
        (("-o", "out"), _file, "is a file"),
        (("-o", "out"), _no_matrix, "is no matrix of posexport"),
    ],
)
def test_a_wrong_request_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
    before: Callable[[Path], None] | None,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if before is not None:
        before(tmp_path)
    names = sorted(path.name for path in tmp_path.rglob("*"))
    refused(cli("matrix", *arguments), said)
    assert sorted(path.name for path in tmp_path.rglob("*")) == names


def keys(matrix: Matrix) -> list[Key]:
    return [(cell.entry, cell.column) for cell in matrix.ordered()]


def test_a_file_is_read_as_it_was_written_in_a_fixed_order_and_without_what_is_no_more(tmp_path: Path) -> None:
    matrix, _ = settle(None, Selection(encoding=["rope", "alibi"]), HERE | dict.fromkeys(COLUMNS, AWAY), "portable")
    matrix.put(passed(entry, column, kernels=None) for entry, column in list(matrix.cells)[::7])
    matrix.write(tmp_path / "a.json")
    again = read(tmp_path / "a.json")
    assert again.cells == matrix.cells
    shuffled = Matrix(cells=dict(reversed(matrix.cells.items())))
    assert shuffled.to_bytes() == again.to_bytes() == matrix.to_bytes()
    assert keys(again) == [key for key in Selection().cells() if key in matrix.cells]
    text = (tmp_path / "a.json").read_text().replace('"encoding": "rope"', '"encoding": "of old"')
    (tmp_path / "a.json").write_text(text)
    assert {entry.encoding for entry, _ in read(tmp_path / "a.json").cells} == {"alibi"}
    (tmp_path / "a.json").write_text(text.replace('"state": "passed"', '"state": "fine"'))
    with pytest.raises(RequestError, match="is no matrix"):
        read(tmp_path / "a.json")


@pytest.mark.usefixtures("_engines")
def test_what_time_does_not_reach_is_not_run_and_measured_the_next_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The time is over after half of the batches."""
    monkeypatch.setattr(run, "WORKER", "engines.matrix_script")
    monkeypatch.setattr(run, "LIMITED_BATCH", 3)
    monkeypatch.setattr("posexport.verify.matrix.schedule.columns_here", lambda: HERE)
    batches = len(DTYPES) * len(MODES) // 3
    looks = itertools.chain([0.0] * (1 + batches // 2), itertools.repeat(60.0))  # at the start, then before each batch
    arguments = ("matrix", "--encoding", "alibi", "--form", "decomposed", "--runtime", "ort-cpu", "--jobs", "1",
                 "--no-picture", "-o", tmp_path / "out")  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(run, "monotonic", lambda: next(looks))
        result = cli(*arguments, "--minutes", "1")
    assert result.exit_code == 0, result.output
    cells = read(tmp_path / "out" / "matrix.json").cells.values()
    done = batches // 2 * 3
    states = Counter((cell.state, cell.reason) for cell in cells)
    assert states == {("passed", None): done, ("not run", run.OUT_OF_TIME): len(cells) - done}
    in_order = {*list(MODES)[: len(MODES) // 2]}
    assert {cell.entry.mode for cell in cells if cell.state == "passed"} != in_order, "in order, not drawn"
    assert cli(*arguments).exit_code == 0
    assert {cell.state for cell in read(tmp_path / "out" / "matrix.json").cells.values()} == {"passed"}


def test_minutes_are_a_number_above_0(tmp_path: Path) -> None:
    refused(cli("matrix", "--minutes", "0", "-o", tmp_path / "out"), "minutes")
