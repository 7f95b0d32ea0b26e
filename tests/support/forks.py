"""Workers of tests are forks of one process that has imported the engines. This saves each worker seconds of imports.

That process forks twice, and the test process adopts the orphan (Linux's "child subreaper"). So the worker is like any
other child: it is waited for and killed as usual, and the kernel ends it with its parent. Other systems start workers
as the product does.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

PRELOADED = (
    "torch",
    "torch.onnx",
    "torch.export",
    "onnxscript",
    "onnxruntime",
    "onnx.reference",
    "posexport.export.exporter",
    "posexport.rewrite.files",
    "posexport.runtimes.onnx_reference",
    "posexport.runtimes.ort",
    "posexport.runtimes.torch_eager",
    "posexport.runtimes.worker",
)
PRELOADED_LATER = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "posexport.runtimes.torch_module",
    "scipy.stats",
)
"""The forked process imports these modules only after the test process has imported them: many tests need none of
them."""
_PR_SET_CHILD_SUBREAPER = 36
_POPEN = subprocess.Popen


class Forks:
    """Starts workers instead of `subprocess.Popen`. The process that forks is started together with the first
    worker."""

    def __init__(self) -> None:
        self._lock, self._control = threading.Lock(), None

    def popen(self, command: list[str], *, stderr: IO[bytes], **options: Any) -> subprocess.Popen[str]:
        """What `Popen` of a worker's command returns: a process with text pipes at its input and output."""
        if subprocess.Popen is not _POPEN:  # a test replaced it
            return subprocess.Popen(command, stderr=stderr, **options)
        (child_in, parent_in), (parent_out, child_out) = os.pipe(), os.pipe()
        request = {
            "command": command[3:],  # after "python -P -m"
            "environment": dict(options["env"]),
            "folder": str(Path.cwd()),
            "parent": os.getpid(),
            "preloaded": [name for name in PRELOADED_LATER if name in sys.modules],
        }
        with self._lock:
            control = self._control = self._control or _start()
            socket.send_fds(control, [json.dumps(request).encode()], [child_in, child_out, stderr.fileno()])
            pid = int(control.recv(32))
        os.close(child_in)
        os.close(child_out)
        process: subprocess.Popen[str] = _POPEN.__new__(_POPEN)
        vars(process).update(
            args=command,
            pid=pid,
            returncode=None,
            stdin=open(parent_in, "w", encoding="utf-8"),  # noqa: PTH123, SIM115
            stdout=open(parent_out, encoding="utf-8"),  # noqa: PTH123, SIM115
            stderr=None,
            _child_created=True,
            _waitpid_lock=threading.Lock(),
            _sigint_wait_secs=0.25,
            _communication_started=False,
        )
        return process


def _start() -> socket.socket:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        theirs.set_inheritable(True)
        os.posix_spawn(sys.executable, [sys.executable, "-P", __file__, str(theirs.fileno())], os.environ)
    return ours


def install() -> None:
    """Let workers of this process be forks from now on, if the system can do this."""
    if sys.platform == "linux":
        from posexport import processes

        vars(processes)["subprocess"] = SimpleNamespace(**{**vars(subprocess), "Popen": Forks().popen})


def serve(control: socket.socket) -> None:
    """Fork a worker for each request, until the other end is closed."""
    os.chdir("/")  # a test's folder is deleted later, and transformers asks for the current folder when it is imported
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # otherwise the garbage collector of a worker would copy the memory pages of all modules
    while True:
        message, pipes, _, _ = socket.recv_fds(control, 2**20, 3)
        if not message:
            return
        request = json.loads(message)
        for name in request.pop("preloaded"):
            if name not in sys.modules:
                importlib.import_module(name)
                gc.freeze()
        if os.fork() == 0:
            worker = os.fork()
            if worker == 0:
                control.close()
                _become(pipes, **request)
            control.send(str(worker).encode())
            os._exit(0)
        os.wait()
        for pipe in pipes:
            os.close(pipe)


def _become(pipes: list[int], command: list[str], environment: dict[str, str], folder: str, parent: int) -> None:
    """Become `python -P -m COMMAND` with these three pipes, after the parent has adopted this process."""
    while os.getppid() != parent:
        time.sleep(0.001)
    for number, pipe in enumerate(pipes):
        os.dup2(pipe, number)
        os.close(pipe)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # searched again in this environment
    os.chdir(folder)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv = list(command)
    code = 1
    try:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
