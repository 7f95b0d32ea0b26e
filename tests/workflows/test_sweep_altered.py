"""Altered files in the folder of a sweep, and unlucky names among its inputs: no other file is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import onnx
import pytest
from helpers import exported, small_spec
from sweep_fake import job

from posexport.artifact.onnx_artifact import write_onnx
from posexport.errors import RequestError
from posexport.verify.matrix.table import Cell, Entry, Matrix, read
from posexport.workflows.sweep import local_jobs
from posexport.workflows.sweep.folder import Folder
from posexport.workflows.sweep.job_files import Hashes, stage_files
from posexport.workflows.sweep.job_plan import Plan
from posexport.workflows.sweep.jobs import FAILED, PASSED, Job, Outcome
from posexport.workflows.sweep.local_jobs import JobCommand, JobRunner
from posexport.workflows.sweep.ray import Cluster

ROPE = Entry(encoding="rope", form="native", dtype="fp32", mode="prefill")


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_jobs, "CHILD", "sweep_fake")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.fixture
def one() -> Job:
    return job("cells", kind="matrix")


@pytest.fixture
def folder(tmp_path: Path, one: Job) -> Folder:
    """A sweep of one matrix job that has ended."""
    matrix = Matrix(made_by={"torch": "1"})
    matrix.put([Cell(entry=ROPE, column="ort-cpu", state="failed", reason="off")])
    sweep = Folder(tmp_path / "sweep")
    with sweep.hold():
        sweep.keep(one, Outcome(state=PASSED, result=matrix.to_dict()), 1)
    return sweep


def alter(file: Path, change: Callable[[Any], object]) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


@pytest.mark.parametrize("target", ["a/../../victim", "a\0b", "", "\ud800", "x" * 5000])
def test_a_target_that_is_none_names_no_file(target: str, tmp_path: Path, folder: Folder, one: Job) -> None:
    (folder.path / "matrix-a").mkdir()
    (tmp_path / "victim.json").write_text("precious")
    alter(folder.path / f".state/parts/matrix-{one.id}.json", lambda data: data.update(target=target))
    with pytest.raises(RequestError, match=r"has the target .*, not one of portable.*: remove it, so that its job"):
        folder.collect(Plan([one]), folder.records())
    assert (tmp_path / "victim.json").read_text() == "precious"


def test_half_a_surrogate_pair_in_a_cell_is_replaced(folder: Folder, one: Job) -> None:
    def change(data: Any) -> None:
        data["cells"][0]["reason"] = "off \ud800"
        data["made_by"]["\ud800"] = "\udcff"
        data["cpus"] = [{"cpu": "\ud800", "\ud800": 1}]

    alter(folder.path / f".state/parts/matrix-{one.id}.json", change)
    folder.collect(Plan([one]), folder.records())
    matrix = read(folder.path / "matrix.json")
    assert [cell.reason for cell in matrix.ordered()] == ["off ?"]
    assert (matrix.made_by["?"], matrix.cpus) == ("?", [{"cpu": "?", "?": 1}])


@pytest.mark.parametrize("result", ["../victim.json", "sweep.json", "a\0b", "results/verify-0.json"])
def test_a_record_that_names_another_file_is_none(result: str, tmp_path: Path, folder: Folder, one: Job) -> None:
    (tmp_path / "victim.json").write_text("{}")
    (folder.path / "sweep.json").write_text("{}")
    (folder.path / "results").mkdir()
    (folder.path / "results/verify-0.json").write_text("{}")
    assert list(folder.records()) == [one.id]
    alter(folder.path / f".state/jobs/{one.id}.json", lambda data: data.update(result=result))
    assert folder.records() == {}


@pytest.mark.parametrize("name", [".error.json", "error.json"])
def test_the_error_of_a_command_is_written_over_no_input(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("precious")
    given = Hashes().file(tmp_path / name)
    outcome = JobRunner().run(JobCommand.of(job("wrong", exit=2), 60), lambda place: stage_files([given], place))
    assert (outcome.state, outcome.reason) == (FAILED, "told so")
    assert (tmp_path / name).read_text() == "precious"


def test_a_long_time_limit_is_waited_for_in_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for seconds in (3e6, 1e30):  # more than the system accepts as one timeout
        assert JobRunner().run(JobCommand.of(job("fine"), seconds), lambda place: None).state == PASSED
    monkeypatch.setattr(local_jobs, "_WAIT_SECONDS", 0.05)
    slow = JobRunner().run(JobCommand.of(job("slow", log=tmp_path / "log", sleep=0.3), 60), lambda place: None)
    assert slow.state == PASSED and slow.result is not None
    late = JobRunner().run(JobCommand.of(job("hangs", once=tmp_path / "place"), 0.2), lambda place: None)
    assert (late.state, late.reason) == (FAILED, "no end within 0.2 s")


def artifact(folder: Path, location: str) -> Path:
    """An artifact as written by onnx's own `save_as_external_data`, without a manifest."""
    write_onnx(exported(small_spec("rope")), folder / "made.onnx")
    path = folder / "a.onnx"
    model = onnx.load(folder / "made.onnx")
    onnx.save_model(model, path, save_as_external_data=True, location=location, size_threshold=16)
    return path


@pytest.mark.parametrize("location", ["w.bin", ".error.json"])
def test_external_data_without_a_manifest_comes_with_a_job(location: str, tmp_path: Path) -> None:
    files = Hashes().artifact(artifact(tmp_path, location))
    assert [file.name for file in files] == ["a.onnx", location]


def test_external_data_outside_of_its_folder_does_not(tmp_path: Path) -> None:
    path = artifact(tmp_path, "w.bin")
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "w.bin").symlink_to(tmp_path / "w.bin")
    (inside / "a.onnx.data").symlink_to(tmp_path / "w.bin")
    (inside / "a.onnx").write_bytes(path.read_bytes())
    assert [file.name for file in Hashes().artifact(inside / "a.onnx")] == ["a.onnx"]
    for location in ("../w.bin", str(tmp_path / "w.bin")):
        model = onnx.load(path, load_external_data=False)
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = location
        (inside / "a.onnx").write_bytes(model.SerializeToString())
        assert [file.name for file in Hashes().artifact(inside / "a.onnx")] == ["a.onnx"]


@pytest.mark.parametrize("ending", ["json", "json.sig"])
def test_a_manifest_that_is_no_file_is_refused(ending: str, tmp_path: Path) -> None:
    (tmp_path / "a.onnx").touch()
    (tmp_path / f"a.onnx.{ending}").symlink_to("nowhere")
    with pytest.raises(RequestError, match=f"a.onnx.{ending}' is not there"):
        Hashes().artifact(tmp_path / "a.onnx")


def test_a_label_that_is_not_utf8_is_given_to_ray_as_text() -> None:
    """Ray is a stand-in here. It accepts only UTF-8."""
    cluster = Cluster.__new__(Cluster)
    cluster._ray = MagicMock()
    cluster._ray.exceptions.RayError = KeyError
    cluster._task, cluster._time_limit = MagicMock(), 1.0
    cluster._nodes, cluster._running = {"a": {"CPU": 2.0}}, {}
    cluster.submit(job("verify b\udcff.onnx"))
    assert cluster._task.options.call_args.kwargs["name"] == "posexport verify b\\udcff.onnx"
