"""Torch modules in a user's file: how they are loaded, what an export needs of them, and errors in them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import user_modules
from helpers import tree

from posexport.errors import RequestError
from posexport.runtimes.module_file import load_module

FILE = Path(user_modules.__file__)


@pytest.mark.parametrize(("name", "kind"), [("Plain", "Plain"), ("make_plain", "Plain"), ("made", "Own")])
def test_a_class_a_function_and_a_module(name: str, kind: str) -> None:
    user = load_module(f"{FILE}:{name}")
    assert type(user.module).__name__ == kind
    assert not user.module.training
    assert (user.name, user.path, len(user.sha256)) == (name, FILE, 64)


def test_random_weights_are_the_same_each_time() -> None:
    first = load_module(f"{FILE}:Plain").module.state_dict()
    torch.manual_seed(99)
    for name, tensor in load_module(f"{FILE}:Plain").module.state_dict().items():
        assert torch.equal(tensor, first[name])


def written(folder: Path, text: str) -> str:
    """Write a file with imports and this text. Return the reference to its `Model`."""
    (folder / "model.py").write_text(f"import torch\nfrom torch import nn\n{text}\n")
    return f"{folder / 'model.py'}:Model"


def test_settings_of_the_module_come_before_those_of_the_file(tmp_path: Path) -> None:
    user = load_module(
        written(
            tmp_path,
            "class Model(nn.Module):\n    output_names = ['mine']\n    def example_inputs(self): return (1,)\n"
            "def example_inputs(): return (2,)\ndef dynamic_shapes(): return ({},)\noutput_names = ['other']",
        )
    )
    assert user.setting("output_names") == ["mine"]
    assert user.setting("example_inputs") == (1,)
    assert user.setting("dynamic_shapes") == ({},)
    assert user.setting("input_names") is None


def test_a_file_finds_its_neighbours_prints_to_stderr_and_leaves_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_parts.py").write_text("from torch import nn\nclass Part(nn.Module): pass\n")
    reference = written(tmp_path, "from my_parts import Part\nprint('loading')\nclass Model(Part): pass")
    path, before = list(sys.path), {name for name in tree(tmp_path) if "__pycache__" not in name}
    try:
        load_module(reference)
    finally:
        sys.modules.pop("my_parts", None)
    assert sys.path == path
    assert (capsys.readouterr().out, {name for name in tree(tmp_path) if "my_parts" not in name}) == ("", {"model.py"})
    assert before == {"my_parts.py", "model.py"}


def test_what_other_programs_print_goes_to_stderr_and_the_working_folder_stays(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output on stdout may be JSON, and names that were given are relative to the folder of before."""
    monkeypatch.chdir(tmp_path)
    text = "import os\nos.mkdir('else')\nos.chdir('else')\nos.system('echo from outside')\nclass Model(nn.Module): pass"
    load_module(written(tmp_path, text))
    printed = capfd.readouterr()
    assert (printed.out, "from outside" in printed.err) == ("", True)
    assert Path.cwd() == tmp_path
    with pytest.raises(RequestError, match="ZeroDivisionError"):
        load_module(written(tmp_path, "import os\nos.chdir('else')\n1 / 0"))
    assert Path.cwd() == tmp_path


WRONG = {
    "no such name": ("class Other(nn.Module): pass", "has no 'Model': it has Other."),
    "nothing to export": ("x = 3", "has no 'Model': it has no torch module."),
    "no module": ("Model = 3", "is int: it must be a torch.nn.Module, a class that is made without arguments, or a"),
    "makes no module": ("def Model(): return 3", "is int: it must be a torch.nn.Module"),
    "needs arguments": (
        "class Model(nn.Module):\n    def __init__(self, width): super().__init__()",
        "making '{reference}' failed: TypeError: Model.__init__() missing 1 required positional argument: 'width'.",
    ),
    "raises": ("1 / 0", "running '{path}' failed at line 3 of '{path}': ZeroDivisionError: division by zero."),
    "several lines": ("raise ValueError('one\\n\\ntwo')", "failed at line 3 of '{path}': ValueError: one."),
    "a list": ("raise ValueError('conflicts:\\n  - one\\n  - two')", "of '{path}': ValueError: conflicts: - one."),
    "raises deep inside": (
        "def fall(): return torch.zeros(2) @ torch.zeros(3)\n\n\nclass Model(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        fall()",
        "making '{reference}' failed at line 3 of '{path}': RuntimeError: inconsistent tensor size",
    ),
    "ends the program": ("import sys\nsys.exit(3)", "failed at line 4 of '{path}': SystemExit: 3."),
    "no Python": ("def (", "failed at line 3 of '{path}': SyntaxError: invalid syntax"),
    "not installed": ("import not_there", "line 3 of '{path}': ModuleNotFoundError: No module named 'not_there'."),
    "a cause": (
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise RuntimeError('outer') from error",
        "failed at line 4 of '{path}': ZeroDivisionError: division by zero.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_goes_wrong_is_one_sentence_with_file_and_line(name: str, tmp_path: Path) -> None:
    text, said = WRONG[name]
    reference = written(tmp_path, text)
    with pytest.raises(RequestError) as caught:
        load_module(reference)
    sentence = str(caught.value)
    assert said.format(path=tmp_path / "model.py", reference=reference) in sentence
    assert "\n" not in sentence


def test_an_error_in_a_setting_names_it(tmp_path: Path) -> None:
    user = load_module(
        written(tmp_path, "class Model(nn.Module):\n    def example_inputs(self):\n        return 1 / 0")
    )
    with pytest.raises(
        RequestError, match=r"^example_inputs of '.*model.py:Model' failed at line 5 of .*model.py': Zero"
    ):
        user.setting("example_inputs")


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("model.py", "give a file and a name in it, such as model.py:Model"),
        ("model:Model", "give a file and a name in it"),
        ("model.py:two words", "give a file and a name in it"),
        ("model.py:", "give a file and a name in it"),
        ("not-there.py:Model", "'not-there.py' is not there"),
        ("folder.py:Model", "'folder.py' is no regular file"),
        ("bytes.py:Model", "failed: SyntaxError"),
    ],
)
def test_what_is_no_reference(reference: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.py").mkdir()
    Path("bytes.py").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError) as caught:
        load_module(reference)
    assert said in str(caught.value)


def test_an_interrupt_is_none_of_the_files_errors(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        load_module(written(tmp_path, "raise KeyboardInterrupt"))
