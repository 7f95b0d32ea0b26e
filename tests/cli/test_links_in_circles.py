"""Symbolic links that lead to themselves, in every place where a command takes a file or a folder: one sentence, no
traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_files import LLAMA, written
from helpers import case, cli, exported, refused

from posexport.artifact.onnx_artifact import write_onnx
from posexport.bench.result import check_place
from posexport.errors import RequestError
from posexport.files import is_there, real_path

PACKAGE = Path(__file__).parents[2]

BLOCK = "--encoding rope --hidden-size 64 --num-heads 4"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with an artifact whose weights are in a.onnx.data, a checkpoint and a project."""
    monkeypatch.chdir(tmp_path)
    write_onnx(exported(case("rope")), tmp_path / "a.onnx", external_from=0)
    (tmp_path / "checkpoint").mkdir()
    written(tmp_path / "checkpoint", **LLAMA)
    (tmp_path / "p.toml").write_text('folder = "loop"\n[[artifact]]\nname = "one"\nencoding = "rope"\n')
    return tmp_path


def loop(path: Path) -> Path:
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)
    return path


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("a.onnx.data", "inspect a.onnx"),
        ("a.onnx.data", "verify a.onnx --runtime ort-cpu"),
        ("a.onnx.data", "bench a.onnx --runtime ort-cpu --save t.json"),
        ("a.onnx.data", "compile a.onnx --runtime trt-rtx"),
        ("a.onnx.data", "package a.onnx --triton"),
        ("a.onnx.data", "report a.onnx"),
        ("a.onnx.json", "verify a.onnx --runtime ort-cpu"),
        ("loop.onnx", "inspect loop.onnx"),
        ("loop.onnx", "verify loop.onnx"),
        ("loop.onnx", "bench loop.onnx"),
        ("loop.onnx", "compile loop.onnx"),
        ("loop.onnx", "package loop.onnx --triton"),
        ("loop.onnx", "report loop.onnx"),
        ("loop.plan", "verify loop.plan"),
        ("loop.json", "report loop.json"),
        ("loop", "verify loop"),
        ("loop", "report loop"),
        ("loop", "export --from loop --layer 0"),
        ("loop", "build --project p.toml"),
        ("loop", "build --project p.toml --allow-outside"),
        ("loop", "verify --project p.toml"),
        ("checkpoint/config.json", "export --from checkpoint --layer 0"),
        ("checkpoint/config.json", "verify a.onnx --from checkpoint --layer 0 --runtime ort-cpu"),
        ("loop.toml", "build --project loop.toml"),
        ("loop.toml", "verify --project loop.toml"),
        ("loop.toml", "export --config loop.toml"),
        ("loop.toml", "sweep loop.toml --dry-run"),
        ("loop.safetensors", f"export {BLOCK} --weights loop.safetensors"),
        ("loop.npz", "verify a.onnx --inputs loop.npz --runtime ort-cpu"),
        ("loop.pub", "verify a.onnx --trust loop.pub --runtime ort-cpu"),
        ("loop.pem", f"export {BLOCK} --sign loop.pem"),
    ],
)
def test_what_leads_to_itself_is_refused(name: str, command: str, here: Path) -> None:
    loop(here / name)
    said = [] if name == "a.onnx.data" else ["symbolic links"]
    refused(cli(*command.split()), *said)


@pytest.mark.parametrize(
    "command",
    [
        f"export {BLOCK} -o loop/x.onnx",
        "compile a.onnx --runtime trt-rtx -o loop/x.plan",
        "package a.onnx --triton -o loop",
        "package a.onnx --triton -o loop/r",
        "report a.onnx -o loop/page.html",
        "report a.onnx -o page.html --markdown loop/page.md",
        "verify a.onnx --runtime ort-cpu --junit loop/r.xml",
        "bench a.onnx --runtime ort-cpu --save loop/r.json",
        f"tune {BLOCK} --scenario prefill:8 -o loop/x.onnx",
        "matrix -o loop",
        "matrix -o loop/m",
        "plot alibi -o loop/x.png",
        "positions --grid 4x4 -o loop/x.npy",
        "sweep jobs.toml -o loop",
        "sweep jobs.toml -o loop/s",
    ],
)
def test_a_folder_for_outputs_that_leads_to_itself_is_refused(command: str, here: Path) -> None:
    loop(here / "loop")
    (here / "jobs.toml").write_text('[[job]]\nkind = "verify"\nartifact = "a.onnx"\n')
    refused(cli(*command.split()), "loop")


@pytest.mark.parametrize("command", ["verify a.onnx --runtime ort-cpu --reach seq=9 --junit {}", "report a.onnx -o {}"])
def test_an_output_takes_the_place_of_such_a_link(command: str, here: Path) -> None:
    target = loop(here / "out.html")
    loop(here / "out.md")
    done = cli(*command.format("out.html").split(), "--markdown", "out.md")
    assert done.exit_code == 0, done.output
    assert target.is_file() and (here / "out.md").is_file()


def test_a_saved_result_takes_the_place_of_such_a_link(here: Path) -> None:
    check_place(loop(here / "t.json"), baseline=loop(here / "b.json"))
    with pytest.raises(RequestError, match="both"):
        check_place(here / "t.json", baseline=here / "t.json")


def test_where_a_path_leads(here: Path) -> None:
    """The planted fault is the behaviour of Python before 3.13."""
    link = loop(here / "l")
    assert real_path(link) == real_path(here) / "l"
    assert is_there(here / "a.onnx")
    assert not is_there(here / "nothing") and not is_there(here / "a.onnx" / "b")
    assert not is_there(Path("a\0b")) and not is_there(Path("\ud800"))
    for path in (link, link / "b"):
        with pytest.raises(RequestError, match="circle"):
            is_there(path)


def test_nothing_resolves_a_path_in_another_way() -> None:
    assert _resolves("path.resolve()")
    files = [path for name in ("posexport", "models", "custom_ops") for path in (PACKAGE / name).rglob("*.py")]
    assert len(files) > 100
    assert [path for path in files if _resolves(path.read_text(encoding="utf-8"))] == []


def _resolves(code: str) -> bool:
    return ".resolve(" in code
