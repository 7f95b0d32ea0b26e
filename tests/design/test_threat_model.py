"""What docs/reference/threat-model.md excludes: checked in the source, and in commands that run with it forbidden."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_architecture import modules

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "angles.json"
FORBIDDEN_MODULES = {
    **dict.fromkeys(("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"), "unpickles"),
    **dict.fromkeys(("urllib.request", "http.client", "requests", "httpx", "ftplib", "smtplib"), "network"),
    **dict.fromkeys(("huggingface_hub", "xmlrpc", "xml.etree", "xml.sax", "xml.dom"), "network, or external entities"),
}
FORBIDDEN_CALLS = {
    **dict.fromkeys(("eval", "exec", "compile", "__import__"), "runs text"),
    **dict.fromkeys(("os.system", "os.popen", "subprocess.getoutput"), "runs a shell"),
    **dict.fromkeys(("torch.load", "torch.jit.load", "torch.hub.load", "yaml.load", "pd.read_pickle"), "unpickles"),
    **dict.fromkeys(("socket.socket", "socket.create_connection", "socket.create_server"), "network"),
}
SAFE_ARGUMENTS = {"allow_pickle": False, "trust_remote_code": False, "weights_only": True, "shell": False}
ALLOWED = {
    *(
        ("posexport.runtimes.module_file", call) for call in ("exec", "compile")
    ),  # the file given to --module, whose code is meant to run
    ("posexport.workflows.sweep.ray", "socket.create_connection"),  # to the head of a cluster, with --ray
    ("posexport.report.drawing", "xml.etree"),  # of a picture that matplotlib has just drawn
    ("posexport.verify.junit", "xml.etree"),  # it writes a report and reads none
}


def offences(source: str, module: str = "") -> Iterator[str]:
    """The forbidden things that a module does."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            for forbidden in FORBIDDEN_MODULES:
                if f"{name}.".startswith(f"{forbidden}.") and (module, forbidden) not in ALLOWED:
                    yield f"imports {name}"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in FORBIDDEN_CALLS and (module, called) not in ALLOWED:
                yield f"calls {called}"
            if called.endswith(".from_pretrained") and "trust_remote_code" not in {one.arg for one in node.keywords}:
                yield f"calls {called} without trust_remote_code"  # otherwise it asks whether it may run code
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if keyword.arg in SAFE_ARGUMENTS and value is not SAFE_ARGUMENTS[keyword.arg]:
                    yield f"gives {keyword.arg}={ast.unparse(keyword.value)}"


def test_no_module_does_what_never_happens() -> None:
    found = {name: list(offences(path.read_text(), name)) for name, path in modules().items()}
    assert {name: each for name, each in found.items() if each} == {}


PLANTED = (
    "import pickle",
    "from pickle import loads",
    "import torch\ntorch.load('x')",
    "np.load('x', allow_pickle=True)",
    "np.load('x', allow_pickle=flag)",
    "Model.from_pretrained('x', trust_remote_code=True)",
    "Model.from_pretrained('x')",
    "Model.from_pretrained('x', **options)",
    "eval('1')",
    "def f():\n    import urllib.request",
    "from urllib import request",
    "subprocess.run('x', shell=True)",
)


@pytest.mark.parametrize("source", PLANTED)
def test_what_is_planted_is_found(source: str) -> None:
    assert list(offences(source))


def test_what_is_allowed_is_not_an_offence() -> None:
    assert list(offences("np.load('x', allow_pickle=False)\nimport torch.nn\nfrom urllib.parse import quote")) == []


HOOK = """
import os, sys

def watch(event, arguments):
    network = event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.bind", "socket.sendto")
    network |= event == "socket.connect" and isinstance(arguments[1], tuple)
    if network or event == "pickle.find_class" or event == "os.system":
        with open(os.environ["WATCHED"], "a") as log:
            log.write(f"{event} {arguments!r}\\n")
        raise PermissionError(event)

sys.addaudithook(watch)
"""
"""A sitecustomize.py. Every Python process that loads it refuses network, unpickling and shells, and logs each
attempt."""

COMMANDS = """
import shlex, sys
from posexport.cli import main

for line in sys.argv[1:]:
    try:
        main(shlex.split(line))
    except SystemExit as end:
        assert end.code in (0, 1), (line, end.code)
"""


LINES = (
    *("list", "export --encoding rope --hidden-size 8 --num-heads 2", "inspect rope.onnx", "positions --grid 2x2"),
    "package rope.onnx --triton -o models",
)
MORE_LINES = (
    *(
        LINES[1],
        f"report {RESULTS} -o r.html",
        "sweep --job 'verify artifact=rope.onnx' --dry-run",
        "verify rope.onnx --junit v.xml --markdown v.md",
        "bench rope.onnx --runtime ort-cpu --shape seq=4 --rounds 1 --save b.json",
    ),
    *("report b.json -o r.html", "plot rope", "sweep --job 'verify artifact=rope.onnx runtime=ort-cpu'"),
    "matrix --encoding rope --form native --dtype fp32 --mode prefill --runtime ort-cpu",
)


def watched(code: str, folder: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run code and all its child processes under the hook. Returns the finished process and the hook's log."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(HOOK)
    log = folder / "log"
    environment = {**os.environ, "PYTHONPATH": str(folder / "site"), "WATCHED": str(log)}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done, log.read_text() if log.exists() else ""


@pytest.mark.slow
def test_commands_use_no_network_and_unpickle_nothing(tmp_path: Path) -> None:
    done, log = watched(COMMANDS, tmp_path, *LINES)
    assert (done.returncode, log) == (0, ""), done.stderr[-2000:]


@pytest.mark.slow
def test_long_commands_use_no_network_and_unpickle_nothing(tmp_path: Path) -> None:
    done, log = watched(COMMANDS, tmp_path, *MORE_LINES)
    assert (done.returncode, log) == (0, ""), done.stderr[-2000:]


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import pickle, pathlib; pickle.loads(pickle.dumps(pathlib.Path('x')))",
        "import subprocess, sys; subprocess.run([sys.executable, '-P', '-c', 'import os; os.system(\"true\")'])",
    ],
)
def test_the_hook_sees_what_it_is_for(code: str, tmp_path: Path) -> None:
    assert watched(code, tmp_path)[1]
