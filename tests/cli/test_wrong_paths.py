"""A wrong path is reported before heavy packages are imported. A child process lists the packages that it loaded."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import exported, small_spec

from posexport.artifact.onnx_artifact import write_onnx
from posexport.artifact.paths import check_onnx
from posexport.errors import RequestError

pytestmark = pytest.mark.few_inputs

HEAVY = ("torch", "onnx", "numpy", "onnxruntime", "matplotlib", "sympy", "tensorrt_rtx", "cattrs", "ray")
COMMANDS = {
    "verify": ("verify",),
    "inspect": ("inspect",),
    "bench": ("bench",),
    "compile": ("compile",),
    "package": ("package", "--triton"),
    "rewrite": ("rewrite", "-o", "out.onnx"),
    "report": ("report",),
}
CODE = (
    "import sys\nfrom posexport.cli import main\n"
    "try:\n    main()\nfinally:\n    print([name for name in {heavy} if name in sys.modules])"
)


def loaded(*arguments: object, heavy: tuple[str, ...] = HEAVY) -> tuple[int, str, str]:
    """The exit code of a command, its stderr, and the last line of its stdout: the packages in `heavy` that it
    loaded."""
    command = [sys.executable, "-c", CODE.format(heavy=list(heavy)), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr, done.stdout.splitlines()[-1]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "wrong"), [*itertools.product(COMMANDS, ["missing", "folder", "text", "cut"])])
def test_a_wrong_path_is_reported_before_an_engine_loads(tmp_path: Path, name: str, wrong: str) -> None:
    path = tmp_path / "a.onnx"
    if wrong == "folder":
        path.mkdir()
    elif wrong == "text":
        path.write_text("a block with rope")
    elif wrong == "cut":
        path.write_bytes(b"\x08\x0a\x3a\xff\x7f graph")
    code, error, packages = loaded(*COMMANDS[name], path)
    assert (code, packages) == (2, "[]"), error
    assert error.startswith("Error: ")
    assert path.name in error


def test_inspect_loads_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    write_onnx(exported(small_spec("rope")), path)
    code, error, packages = loaded("inspect", path, heavy=("torch", "sympy", "onnx_ir", "onnxscript", "onnxruntime"))
    assert (code, packages) == (0, "[]"), error


def test_a_file_cut_anywhere_in_its_graph_is_no_onnx_file(tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    write_onnx(exported(small_spec("none")), path)
    check_onnx(path)
    whole = path.read_bytes()
    for length in (0, 1, 2, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(RequestError, match=r"a\.onnx"):
            check_onnx(path)


@pytest.mark.parametrize("bits", [31, 62, 63, 64])
def test_a_field_longer_than_any_file_is_no_onnx_file(bits: int, tmp_path: Path) -> None:
    """An impossible length is compared with the file's size before a seek, which the system or Python would refuse."""
    length, varint = 2**bits - 1, bytearray()
    while length >= 0x80:
        varint.append(length & 0x7F | 0x80)
        length >>= 7
    path = tmp_path / "a.onnx"
    path.write_bytes(bytes([7 << 3 | 2, *varint, length]))
    with pytest.raises(RequestError, match=r"a\.onnx' is not an ONNX file"):
        check_onnx(path)
