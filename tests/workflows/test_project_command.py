"""`posexport build` and `posexport verify` without arguments on real files: one project with a fault of each kind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
from checkpoint_files import LLAMA, llama_tensors, written
from helpers import cli, refused, tree
from manifest_data import read_manifest_data, write_manifest_data
from safetensors.torch import save_file

from posexport.files import sha256_of
from posexport.workflows.project.file import find_project
from posexport.workflows.project.products import request_of

pytestmark = pytest.mark.xdist_group("test_project_command")  # only one worker makes its fixture

HEAD = 'require = ["ort-cpu"]\nruntimes = ["ort-cpu"]\n'


def entry(name: str, more: str = "", encoding: str = "none") -> str:
    return f'\n[[artifact]]\nname = "{name}"\nencoding = "{encoding}"\nhidden-size = 8\nnum-heads = 2\n{more}\n'


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a built project: tight allows no error at all, and fat exceeds its size budget."""
    folder = tmp_path_factory.mktemp("project")
    tight = "tolerance = {multiple = 1e-9, floor = 1e-12, ceiling = 1e-12}"
    fat = 'budget = {size = "1 kB"}'
    (folder / "pyproject.toml").write_text('[tool.posexport]\nfolder = "out"\n')
    (folder / "posexport.toml").write_text(HEAD + entry("tight", tight) + entry("fat", fat, "alibi"))
    result = cli("build", "--project", folder / "posexport.toml", "--json")
    assert result.exit_code == 0, result.output
    assert [each["state"] for each in json.loads(result.stdout)["files"]] == ["made", "made"]
    return folder


def test_what_is_up_to_date_is_left_and_the_same_command_gives_the_same_bytes(made: Path) -> None:
    project = ("--project", made / "posexport.toml")
    before = tree(made)
    again = cli("build", *project)
    assert again.exit_code == 0
    assert "2 up to date" in again.stdout
    assert cli("build", *project, "--check").exit_code == 0
    forced = cli("build", "tight", *project, "--force")
    assert forced.exit_code == 0
    assert "1 made" in forced.stdout
    assert tree(made) == before


@pytest.mark.slow
def test_verify_fails_for_each_fault_and_names_it(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "copy")
    folder = tmp_path / "copy"
    text = (folder / "posexport.toml").read_text()
    (folder / "posexport.toml").write_text(
        text.replace("num-heads = 2\nbudget", "num-heads = 4\nbudget") + entry("gone") + entry("good", "seed = 0")
    )
    for suffix in (".onnx", ".onnx.json"):
        shutil.copy(folder / "artifacts" / f"tight{suffix}", folder / "artifacts" / f"good{suffix}")
    result = cli("verify", "--project", folder / "posexport.toml", "--json", "--junit", tmp_path / "r.xml")
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert (found["kind"], found["exit_code"]) == ("verify", 1)
    states = {(Path(each["artifact"]).stem, each["check"]): each["state"] for each in found["verdicts"]}
    assert states == {
        ("tight", "up to date"): "passed",
        ("tight", "parity"): "failed",
        ("fat", "up to date"): "failed",
        ("fat", "size"): "failed",
        ("fat", "parity"): "passed",
        ("gone", "up to date"): "failed",
        ("good", "up to date"): "passed",
        ("good", "parity"): "passed",
    }
    reasons = {(Path(each["artifact"]).stem, each["check"]): each["reason"] for each in found["verdicts"]}
    assert "num_heads is 2, asked for is 4: run 'posexport build'" in reasons["fat", "up to date"]
    assert "not there: run 'posexport build'" in reasons["gone", "up to date"]
    stated = {Path(each["artifact"]).stem: each["tolerance"] for each in found["verdicts"] if each["tolerance"]}
    assert stated["tight"] == {"multiple": 1e-9, "floor": 1e-12, "ceiling": 1e-12}
    assert stated["good"]["multiple"] == 8
    assert "run 'posexport build'" in (tmp_path / "r.xml").read_text()


def test_check_names_what_is_out_of_date_and_writes_nothing(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "copy")
    file = tmp_path / "copy" / "posexport.toml"
    file.write_text(file.read_text().replace("hidden-size = 8", "hidden-size = 16") + entry("new"))
    before = tree(tmp_path)
    result = cli("build", "--project", file, "--check")
    assert result.exit_code == 1
    assert "hidden_size is 8, asked for is 16" in result.stdout
    assert "3 out of date" in result.stdout
    assert tree(tmp_path) == before


def test_weights_are_known_by_their_content(made: Path, tmp_path: Path) -> None:
    import torch

    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    file = tmp_path / "posexport.toml"
    file.write_text(entry("own", 'weights = "w.safetensors"'))
    states = []
    for value in (1.0, 1.0, 2.0):
        save_file({f"{name}.weight": torch.full((8, 8), value) for name in names}, tmp_path / "w.safetensors")
        (row,) = json.loads(cli("build", "--project", file, "--json").stdout)["files"]
        states.append((row["state"], "weights" in row["reason"]))
    assert states == [("made", False), ("up to date", False), ("made", True)]


def test_a_checkpoint_s_folder_gives_its_weights(tmp_path: Path) -> None:
    """Layer 0 is used without `layer`, also in the manifest. The file is out of date after the checkpoint gets other
    weights."""
    folder = tmp_path / "llama"
    folder.mkdir()
    written(folder, **LLAMA)
    file = tmp_path / "posexport.toml"
    file.write_text('[[artifact]]\nname = "layer"\nfrom = "llama"\n')
    refused(cli("build", "--project", file), "artifact 'layer'", "llama' holds neither model.safetensors nor")
    states = []
    for scale in (1, 1, 2):
        save_file({name: tensor * scale for name, tensor in llama_tensors().items()}, folder / "model.safetensors")
        (row,) = json.loads(cli("build", "--project", file, "--json").stdout)["files"]
        states.append((row["state"], "weights" in str(row["reason"])))
    assert states == [("made", False), ("up to date", False), ("made", True)]
    weights = json.loads(Path(f"{row['file']}.json").read_bytes())["weights"]
    assert (weights["source"], weights["folder"], weights["layer"]) == ("checkpoint", "llama", 0)


def test_weights_are_compared_with_those_that_an_entry_names(tmp_path: Path) -> None:
    """A file whose weights were changed together with its manifest is not an export of its entry."""
    import torch

    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    save_file({f"{name}.weight": torch.full((8, 8), 0.5) for name in names}, tmp_path / "w.safetensors")
    (tmp_path / "llama").mkdir()
    written(tmp_path / "llama", **LLAMA)
    save_file(llama_tensors(), tmp_path / "llama" / "model.safetensors")
    file = tmp_path / "posexport.toml"
    layer = '[[artifact]]\nname = "layer"\nfrom = "llama"\nlayer = 1\n'
    file.write_text(HEAD + entry("own", 'weights = "w.safetensors"') + layer)
    assert cli("build", "--project", file).exit_code == 0
    for name in ("own", "layer"):
        path = tmp_path / "artifacts" / f"{name}.onnx"
        model = onnx.load(path)
        tensor = next(one for one in model.graph.initializer if one.name == "q_proj.weight")
        values = onnx.numpy_helper.to_array(tensor) * np.float32(1.5)
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
        onnx.save(model, path)
        write_manifest_data(path, {**read_manifest_data(path), "sha256": sha256_of(path)})
    result = cli("verify", "--project", file, "--json")
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)["verdicts"]
    assert [(each["check"], each["state"], each["reason_code"]) for each in found] == [
        ("up to date", "passed", None),
        ("parity", "failed", "other-weights"),
    ] * 2
    assert "not an export of weights w.safetensors: q_proj.weight has different weights" in found[1]["reason"]
    assert "not an export of checkpoint llama, layer 1: q_proj.weight" in found[3]["reason"]


WRONG = {
    "an unknown encoding": (entry("x", encoding="rop"), "artifact 'x': unknown encoding 'rop'"),
    "an unknown preset": ('[[artifact]]\nname="x"\npreset="vit"', "artifact 'x': unknown preset"),
    "preset and config": ('[[artifact]]\nname="x"\npreset="vit-base"\nconfig="c.toml"', "both preset and config"),
    "a config that isn't there": ('[[artifact]]\nname="x"\nconfig="c.toml"', "c.toml"),
    "a preset that is no text": ('[[artifact]]\nname="x"\npreset=1', "preset is 1"),
    "a bad size": (entry("x", "head-dim = 0"), "head-dim is 0"),
    "a number in quotes": (entry("x", 'head-dim = "4"'), "head-dim is '4': it must be a whole number from"),
    "a seed in quotes": (entry("x", 'seed = "4"'), "seed is '4': it must be a whole number from 0"),
    "no encoding": ('[[artifact]]\nname = "x"\nhidden-size = 8', "no encoding was given: give one of"),
    "a bad parameter": (entry("x", "set = {thta = 1}", "rope"), "did you mean 'theta'"),
    "weights that aren't there": (entry("x", 'weights = "w.safetensors"'), "they are not there"),
    "a form that can't": (entry("x", 'form = "native"\nopset = 18'), "artifact 'x'"),
    "an unknown runtime": (entry("x", 'runtimes = ["ort"]'), "unknown runtime 'ort'"),
    "an unknown runtime of a limit": (
        entry("x", 'budget = {latency = {scenario = "prefill:8", of-torch = 1, runtime = "ort-cp"}}'),
        "did you mean 'ort-cpu'",
    ),
    "a limit of another runtime": (
        entry("x", 'runtimes = ["ort-cpu"]\nbudget = {latency = {scenario="batch:8", of-torch=1, runtime="ort-cuda"}}'),
        "allowed: ort-cpu",
    ),
    "a limit that nothing is held to": (
        entry("x", 'runtimes = ["torch"]\nbudget = {latency = {scenario = "batch:8", of-torch = 1}}'),
        "none of its runtimes is timed",
    ),
    "an unknown builder": (entry("x", 'compile = {runtime = "ort-cpu"}'), "artifact 'x', compile"),
    "a bad capability": (entry("x", 'compile = {compute-capability = ["ada"]}'), "compute-capability 'ada' is not X.Y"),
}


def test_a_form_may_stand_in_the_config(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('encoding = "rope"\nform = "native"\n')
    (tmp_path / "posexport.toml").write_text('[[artifact]]\nname = "x"\nconfig = "c.toml"\n')
    project = find_project(str(tmp_path / "posexport.toml"))
    forms = [request_of(project, project.entries[0], form).options.form for form in (None, "contrib")]
    assert (project.entries[0].all_forms, forms) == ((None,), ["native", "contrib"])


@pytest.mark.parametrize("name", WRONG)
def test_a_bad_request_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    text, said = WRONG[name]
    file = tmp_path / "posexport.toml"
    file.write_text(entry("sound") + text)
    refused(cli("build", "--project", file), said, "posexport.toml")
    assert set(tree(tmp_path)) == {"posexport.toml"}


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    (tmp_path / "posexport.toml").write_text('folder = "out"\n' + entry("x"))
    refused(cli("build", "--project", tmp_path / "posexport.toml"), "can't be made (File exists): name another")


def test_a_build_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "posexport.toml").write_text(
        'folder = "a/b"\n[[artifact]]\nname = "x"\nencoding = "rope"\nhidden-size = 4194304\nnum-heads = 4\n'
    )
    refused(cli("build", "--project", tmp_path / "posexport.toml"), "of memory are free: choose smaller sizes")
    assert [path.name for path in tmp_path.iterdir()] == ["posexport.toml"]


def test_options_that_exclude_each_other_are_refused(made: Path) -> None:
    project = ("--project", made / "posexport.toml")
    refused(cli("build", *project, "--check", "--force"), "both --check and --force")
    refused(cli("build", *project, "tigt"), "did you mean 'tight'")
    refused(cli("verify", made / "artifacts", *project), "both files and --project")
    refused(cli("verify", *project, "--inputs", "x.npz"), "--inputs was given without files")
    refused(cli("verify", "--project", made / "pyproject.toml"), "lists no artifact")


@pytest.mark.slow
def test_a_sound_project_passes_from_a_folder_below_and_a_missing_runtime_is_exit_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = HEAD + entry("one", 'forms = ["decomposed", "native"]\nbudget = {size = "1 MB"}', "rope")
    (tmp_path / "posexport.toml").write_text(text)
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert cli("build").exit_code == 0
    fine = cli("verify", "--markdown", "r.md")
    assert fine.exit_code == 0, fine.output
    assert "6 passed, 0 failed, 0 not run" in fine.stdout
    assert "../artifacts/one-native.onnx" in fine.stdout
    assert "6 passed" in (tmp_path / "below" / "r.md").read_text()
    monkeypatch.setattr("posexport.runtimes.importlib.util.find_spec", lambda name: None)
    required = cli("verify")
    assert required.exit_code == 3
    assert "ort-cpu was not run" in required.stderr
