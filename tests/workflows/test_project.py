"""The project file: where it is found, what it may contain, and what is refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import cli, refused

from posexport.cli import main
from posexport.errors import RequestError
from posexport.workflows.project.file import EXPORT_OPTIONS, find_project
from posexport.workflows.project.limits import Tolerances
from posexport.workflows.project.products import products

pytestmark = pytest.mark.few_inputs

ONE = '[[artifact]]\nname = "one"\nencoding = "rope"\n'


def read(folder: Path, text: str) -> Exception | None:
    """The error for a posexport.toml with this text, or None."""
    file = folder / "posexport.toml"
    file.write_text(text)
    try:
        find_project(str(file))
    except RequestError as error:
        return error
    return None


def test_all_of_a_project_is_read(tmp_path: Path) -> None:
    text = """
folder = "out"
require = ["ort-cpu"]
runtimes = ["ort-cpu", "torch"]

[[artifact]]
name = "encoder"
preset = "vit-base"
forms = ["decomposed", "native"]
compile = {profile = ["batch=1:1:8"], compute-capability = ["8.9"]}
tolerance = {multiple = 2, floor = 1e-6}
budget = {size = "6 MB", plan-size = "1 MiB", kernels = 8, fused-attention = true, latency = [
    {scenario = "prefill:512", of-torch = 0.6, of-ort-optimizer = 1}, {scenario = "batch:8", of-lower-bound = 2}]}
baseline = "bench"
max-regression = "5%"

[[artifact]]
name = "small"
encoding = "rope"
set = {theta = 500}
hidden-size = 64
form = "contrib"
runtimes = ["torch"]
"""
    (tmp_path / "posexport.toml").write_text(text)
    project = find_project(str(tmp_path / "posexport.toml"))
    one, two = project.entries
    assert (project.folder, project.require, project.root) == ("out", ("ort-cpu",), tmp_path)
    assert one.all_forms == ("decomposed", "native")
    assert one.runtimes == ("ort-cpu", "torch")
    assert one.options == {"preset": "vit-base"}
    assert one.compile is not None
    assert (one.compile.runtime, one.compile.profile) == ("tensorrt-rtx", ("batch=1:1:8",))
    assert one.tolerance == Tolerances(multiple=2.0, floor=1e-6)
    assert (one.budget.size, one.budget.plan_size, one.budget.kernels) == (6_000_000, 2**20, 8)
    assert [each.limits() for each in one.budget.latency] == [
        {"torch": 0.6, "ort-optimizer": 1.0},
        {"lower_bound": 2.0},
    ]
    assert one.max_regression == pytest.approx(0.05)
    assert (two.all_forms, two.runtimes) == (("contrib",), ("torch",))
    assert two.options == {"encoding": "rope", "set": {"theta": 500}, "hidden_size": 64}


WRONG = {
    "no artifact": ("folder = 'x'", "lists no artifact"),
    "no [[artifact]] line": (
        "name = 'b'\nencoding = 'rope'",
        "'name' is a key of an artifact: begin each artifact with",
    ),
    "an unknown key": ("foldr = 'x'\n" + ONE, "did you mean 'folder'"),
    "an unknown key of an artifact": (ONE + "hidden-sise = 64", "did you mean 'hidden-size'"),
    "an unknown key of a budget": (ONE + "budget = {sice = '1 MB'}", "did you mean 'size'"),
    "an unknown key of a tolerance": (ONE + "tolerance = {flor = 1}", "did you mean 'floor'"),
    "an unknown runtime that no artifact takes": (
        "runtimes = ['ort-cup']\n" + ONE + "runtimes = ['ort-cpu']",
        "'ort-cup'",
    ),
    "output": (ONE + "output = 'x.onnx'", "unknown key"),
    "both spellings": (ONE + "max-seq = 1\nmax_seq = 1", "twice"),
    "one bracket": ("[artifact]\nname = 'x'", "artifact must be written [[artifact]], with two brackets"),
    "a number for artifacts": ("artifact = 3", "artifact must be written [[artifact]], with two brackets"),
    "a nameless artifact": ("[[artifact]]\nencoding = 'rope'", "artifact 1 has no name: give one of letters"),
    "a number for a name": ("[[artifact]]\nname = 3", "artifact 1 has the name 3: give one of letters"),
    "an ending in a name": ("[[artifact]]\nname = 'x.onnx'", "drop it"),
    "fusion that must not be": (ONE + "compile = {}\nbudget = {fused-attention = false}", "checks nothing"),
    "a path for a name": ("[[artifact]]\nname = '../x'", "'../x'"),
    "one name twice": (ONE + ONE, "both written to one.onnx"),
    "names that meet": (
        ONE + "[[artifact]]\nname='tw'\nforms=['native','contrib']\n[[artifact]]\nname='tw-NATIVE'",
        "both written to tw-native.onnx",
    ),
    "form and forms": (ONE + "form = 'native'\nforms = ['native']", "both form and forms"),
    "an unknown form": (ONE + "forms = ['natif']", "did you mean 'native'"),
    "a form twice": (ONE + "forms = ['native', 'native']", "different names"),
    "a size without a unit": (ONE + "budget = {size = 6}", "6 MB"),
    "a size of nothing": (ONE + "budget = {size = '0 MB'}", "6 MB"),
    "kernels without a plan": (ONE + "budget = {kernels = 8}", "compile"),
    "a scenario without end": (
        ONE + f"budget = {{latency = {{scenario = 'prefill:{'9' * 5000}', of-torch = 1}}}}",
        "whole numbers from 1",
    ),
    "a latency without a limit": (ONE + "budget = {latency = {scenario = 'prefill:8'}}", "of-lower-bound"),
    "a whole sweep": (ONE + "budget = {latency = {scenario = 'prefill', of-torch = 1}}", "prefill:512"),
    "an unknown scenario": (
        ONE + "budget = {latency = {scenario = 'prefil:8', of-torch = 1}}",
        "did you mean 'prefill'",
    ),
    "a negative limit": (ONE + "budget = {latency = {scenario = 'prefill:8', of-torch = -1}}", "of-torch is -1"),
    "a regression without a baseline": (ONE + "max-regression = '5%'", "without a baseline"),
    "a regression that is no share": (ONE + "baseline = 'b'\nmax-regression = 5", "5%"),
    "one baseline for two files": (ONE + "forms = ['native', 'contrib']\nbaseline = 'b.json'", "give a folder"),
    "a tolerance of 0": (ONE + "tolerance = {floor = 0}", "floor is 0"),
    "a tolerance that zeros pass": (
        ONE + "tolerance = {ceiling = 2}",
        "ceiling is 2: it must be a number from 1e-30 to 1",
    ),
    "a tolerance in quotes": (ONE + "tolerance = {multiple = '2'}", "multiple is '2': it must be a number from"),
    "kernels in quotes": (ONE + "compile = {}\nbudget = {kernels = '8'}", "without quotes"),
    "an empty profile": (ONE + "compile = {profile = ['']}", "compile: profile is ['']: it must be a list of texts"),
    "a profile twice": (ONE + "compile = {profile = ['seq=8', 'seq=8']}", "must be a list of different values"),
    "thousands of profiles, and one twice": (
        ONE + f"compile = {{profile = {[*map(str, range(50_000)), '0']}}}",
        "must be a list of different values",
    ),
    "a GPU twice": (ONE + "compile = {compute-capability = ['8.9', '8.9']}", "compute-capability is ['8.9', '8.9']"),
    "true in quotes": (ONE + "compile = {tf32 = 'true'}", "tf32 is 'true': it must be true or false, without quotes"),
    "a latency without a scenario": (ONE + "budget = {latency = {of-torch = 1}}", "latency: it has no scenario"),
    "a table that is none": (ONE + "budget = 'none'", "must be a table"),
    "set that is no table": (ONE + "set = 'theta=1'", "set must be a table"),
    "no TOML": ("folder = ", "is not TOML"),
    "a number of 5,000 digits": ("layers = " + "9" * 5000, "value has 5000 digits): fix it"),
    "a folder above": ("folder = 'a/../../x'\n" + ONE, "outside the project: name one inside it"),
    "a folder elsewhere": ("folder = '/tmp'\n" + ONE, "outside the project: name one inside it"),
    "a NUL in the folder": ("folder = 'a\\u0000b'\n".replace("'", '"') + ONE, "'a\\x00b' with a NUL"),
    "a NUL in a key": ('"a\\u0000b" = 1\n' + ONE, "'a\\x00b' with a NUL"),
    "a NUL in a list": (ONE + 'compile = {profile = ["seq=1", "\\u0000"]}', "with a NUL"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    text, said = WRONG[name]
    error = read(tmp_path, text)
    assert error is not None
    assert said in str(error)
    assert "posexport.toml" in str(error)
    assert "\n" not in str(error)


def test_it_is_found_here_or_above_and_a_pyproject_without_the_table_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[[tool.posexport.artifact]]\nname = "one"\nencoding = "rope"\n')
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.other]\n")
    monkeypatch.chdir(below)
    project = find_project(None)
    assert project.file == Path("../../pyproject.toml")
    assert project.entries[0].name == "one"
    (tmp_path / "a" / "posexport.toml").write_text(ONE.replace("one", "two"))
    assert find_project(None).entries[0].name == "two"


def test_two_files_in_one_folder_are_an_error_that_names_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.posexport]\n")
    (tmp_path / "posexport.toml").write_text(ONE)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match=r"pyproject\.toml.*posexport\.toml.*not both"):
        find_project(None)
    named = find_project("posexport.toml")
    assert named.entries[0].name == "one"


def test_without_a_project_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match="describe those of this repository"):
        find_project(None)
    (tmp_path / "pyproject.toml").write_text("[tool.other]\n")
    (tmp_path / "latin.toml").write_bytes(b"folder = '\xe9'")
    with pytest.raises(RequestError, match=r"project 'latin.toml' is not TOML, whose text is UTF-8"):
        find_project("latin.toml")
    for name, said in (("pyproject.toml", r"no \[tool.posexport\]"), ("posexport.toml", "is not there")):
        with pytest.raises(RequestError, match=said):
            find_project(name)


def test_options_are_those_of_the_command_line() -> None:
    command = main.get_command(None, "export")  # type: ignore[arg-type]
    assert command is not None
    names = {parameter.name for parameter in command.params} - {"output", "as_json", "form", "sign"}
    names -= {"module", "example"}  # a project file runs no code
    names -= {"whole", "hidden_states", "require_all"}  # and has no whole models
    assert {"set" if name == "parameters" else name for name in names} == set(EXPORT_OPTIONS)


@pytest.mark.parametrize("place", ["artifacts", "artifacts/deep"])
def test_a_folder_that_a_link_leads_outside_is_refused(place: str, tmp_path: Path) -> None:
    inside, outside = tmp_path / "project", tmp_path / "outside"
    for folder in (inside, outside, outside / "deep"):
        folder.mkdir()
    (inside / "artifacts").symlink_to(outside)
    error = read(inside, f"folder = '{place}'\n{ONE}")
    assert error is not None
    assert str(outside) in str(error)
    assert "--allow-outside" in str(error)
    assert find_project(str(inside / "posexport.toml"), allow_outside=True).folder == place


def test_links_inside_a_project_and_to_a_project_are_followed(tmp_path: Path) -> None:
    (tmp_path / "project" / "real").mkdir(parents=True)
    (tmp_path / "project" / "artifacts").symlink_to("real")
    (tmp_path / "link").symlink_to("project")
    assert read(tmp_path / "link", ONE) is None
    (tmp_path / "project" / "loop").symlink_to("loop")
    assert "links form a circle" in str(read(tmp_path / "link", f"folder = 'loop'\n{ONE}"))


PROFILES = {
    "sqe=8": "unknown input or dimension 'sqe': did you mean 'seq'",
    "seq": "it is not NAME=SIZES",
    "seq=9:8:7": "not ordered",
    "batch=1:2:3": "unknown input or dimension 'batch'",
    "hidden_states=2x1x9": "fixed size 64",
}


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_that_the_graph_does_not_take_is_refused_before_anything_is_made(
    profile: str, tmp_path: Path
) -> None:
    sizes = "hidden-size = 64\nnum-heads = 4\nbatch = 2\n"
    assert read(tmp_path, f"{ONE}{sizes}compile = {{profile = ['{profile}']}}") is None
    project = find_project(str(tmp_path / "posexport.toml"))
    with pytest.raises(RequestError, match=r"artifact 'one', compile") as refusal:
        products(project)
    assert PROFILES[profile] in str(refusal.value)
    assert refusal.value.args[0].count("--profile") >= 1


@pytest.mark.parametrize(("more", "letters"), [("", 242), ("forms = ['native', 'contrib']", 234), ("", 300)])
@pytest.mark.parametrize("command", ["build --check", "build", "verify"])
def test_a_name_that_no_file_beside_it_can_have_is_refused_before_the_work(
    command: str, more: str, letters: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An artifact's signature, NAME.onnx.json.sig, has the longest name. The folder does not exist yet."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "posexport.toml").write_text(f"{ONE.replace('one', 'n' * letters)}{more}\n")
    refused(cli(*command.split()), "posexport.toml, artifact 'nn", "json.sig' beside it", "give a shorter name")
    assert [file.name for file in tmp_path.iterdir()] == ["posexport.toml"]
