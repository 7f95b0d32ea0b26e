"""All user files are read with posexport.files.open_file and written with posexport.files.staged. posexport opens files
in no other way.

A pipe or a device may never end, and a name may point anywhere. The few exceptions are listed with their reasons.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for room in ("posexport", "models", "custom_ops") for path in (ROOT / room).rglob("*.py"))

METHODS = {
    *(
        "open",
        "read_bytes",
        "read_text",
        "write_bytes",
        "write_text",
        "fromfile",
        "memmap",
        "mmap",
        "loadtxt",
        "genfromtxt",
        "safe_open",
    ),
    *("copy2", "copyfile", "copytree", "parse_from_file", "InferenceSession", "optimize_model"),
    *("savefig", "touch", "tofile", "savez", "savez_compressed", "savetxt", "save_file"),
}
"""Names of methods, and of functions in modules, that open a file by its path."""

FUNCTIONS = {
    *("open", "safe_open", "InferenceSession", "shutil.copy", "onnx.load", "onnx.load_model", "ir.load", "np.load"),
    *("torch.load", "json.load", "tomllib.load", "pickle.load"),
    *("onnx.save", "onnx.save_model", "ir.save", "np.save", "torch.save"),
}
"""Functions that are recognised only by their whole name."""

OF_OUR_OWN = "a file of the package itself"
NEW_FOLDER = "a file in a folder that was made for it"
AFTER_CHECK = "its regular file was checked before"
IN_MEMORY = "a file in memory"
IN_A_CHILD = "a child process, whose parent has read the file"

ALLOWED: dict[str, dict[str, str]] = {
    "posexport/files.py": {"os.open": "this is the reader", "write_bytes": NEW_FOLDER},
    "posexport/spec/presets.py": {"read_text": OF_OUR_OWN},
    "posexport/report/page/page.py": {"read_text": OF_OUR_OWN},
    "models/checkpoints/config.py": {"read_text": OF_OUR_OWN},
    "posexport/runtimes/installation.py": {"read_bytes": "what pip wrote; `list` loads it without posexport.files"},
    "posexport/report/drawing.py": {"savefig": IN_MEMORY},
    "posexport/cli/positions_command.py": {"np.savez_compressed": IN_MEMORY},
    "posexport/machine.py": {
        "read_text": "files of the system below /proc and /sys",
        "write_text": "a file of the system below /proc",
    },
    "posexport/processes.py": {
        "os.open": "the null device",
        "open": NEW_FOLDER,
        "write_text": "a file of the system below /proc",
    },
    "posexport/cli/surroundings.py": {"os.open": "the null device", "open": "the standard streams, by their numbers"},
    "posexport/temporary.py": {"os.open": "temporary files of our own, and those left by us, without following links"},
    "posexport/verify/locate.py": {"onnx.save": NEW_FOLDER},
    "posexport/verify/graph/greedy_encoder.py": {"np.savez": NEW_FOLDER},
    "posexport/runtimes/npz.py": {"np.load": "gets an open file"},
    "posexport/artifact/onnx_file.py": {"np.fromfile": "gets an open file"},
    "models/weights.py": {"safetensors.safe_open": AFTER_CHECK},
    "models/checkpoints/tensors.py": {"safetensors.safe_open": AFTER_CHECK},
    "posexport/runtimes/tensors.py": {
        "mmap.mmap": "a file that a child process of ours wrote",
        "path.open": NEW_FOLDER,
    },
    "posexport/runtimes/tensorrt/build_process.py": {"write_bytes": NEW_FOLDER},
    "posexport/export/genai_folder.py": {"write_bytes": NEW_FOLDER, "write_text": NEW_FOLDER},
    "posexport/export/triton/repository.py": {"write_bytes": NEW_FOLDER},
    "posexport/export/triton/served_artifact.py": {"open": NEW_FOLDER},
    "posexport/cli/console.py": {"write_text": "a file that a parent process of ours names"},
    "posexport/runtimes/ort.py": {"onnxruntime.InferenceSession": IN_A_CHILD},
    "posexport/bench/bare_products.py": {"onnxruntime.InferenceSession": "gets bytes that were made here"},
    "posexport/bench/tune/worker.py": {"onnxruntime.InferenceSession": IN_A_CHILD},
    "posexport/bench/alternatives.py": {"optimizer.optimize_model": IN_A_CHILD},
    "posexport/runtimes/tensorrt/builder.py": {"parser.parse_from_file": IN_A_CHILD},
    "posexport/workflows/sweep/job_files.py": {
        "shutil.copyfile": "a file that was hashed, and is the same since",
        "open": NEW_FOLDER,
    },
    "posexport/workflows/sweep/folder.py": {"os.open": "the lock, which is no link and no pipe"},
}
"""By file: the calls that may open files there, and the reasons."""


def opened(source: str) -> list[str]:
    """The calls in a source text that open a file, as written there. Calls that only create a new file are left out."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = ast.unparse(node.func)
            new = name.rsplit(".", 1)[-1] == "open" and _mode(node) in ("x", "xb")
            method = isinstance(node.func, ast.Attribute) and node.func.attr in METHODS
            if (method or name in FUNCTIONS) and not new:
                found.append(name)
    return found


def _mode(call: ast.Call) -> object:
    """The mode in a call of `open`: its second argument, or the first argument of a method."""
    given = [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
    given += call.args[0 if isinstance(call.func, ast.Attribute) else 1 :][:1]
    return given[0].value if given and isinstance(given[0], ast.Constant) else None


def test_files_are_opened_by_the_guarded_functions() -> None:
    """For example posexport.files.open_file, read_bytes and check_regular."""
    for path in SOURCES:
        allowed = ALLOWED.get(str(path.relative_to(ROOT)), {})
        found = opened(path.read_text(encoding="utf-8"))
        others = [name for name in found if name not in allowed and name.rsplit(".", 1)[-1] not in allowed]
        assert not others, f"{path}: use a guarded function in place of {', '.join(others)}"


def test_what_is_allowed_is_there() -> None:
    for name, calls in ALLOWED.items():
        there = opened((ROOT / name).read_text(encoding="utf-8"))
        for call in calls:
            assert any(call in (one, one.rsplit(".", 1)[-1]) for one in there), f"{name} has no {call} any more"


@pytest.mark.parametrize(
    "line",
    [
        "open(path).read()",
        "path.open('rb')",
        "Path(name).read_bytes()",
        "np.load(path)",
        "onnx.load(path)",
        "torch.load(path)",
        "safetensors.safe_open(path, 'pt')",
        "shutil.copyfile(source, target)",
        "path.open('ab')",
        "path.write_text('*')",
        "path.write_text('x')",
        "open('x')",
        "open('x', 'wb')",
        "path.touch()",
        "onnx.save(model, path)",
        "np.save(path, array)",
        "figure.savefig(path)",
    ],
)
def test_a_planted_call_is_found(line: str) -> None:
    assert opened(line)


@pytest.mark.parametrize("line", ["path.open('x')", "open(path, 'xb')", "path.open(mode='x')"])
def test_a_call_that_only_makes_a_new_file_is_none(line: str) -> None:
    assert not opened(line)
