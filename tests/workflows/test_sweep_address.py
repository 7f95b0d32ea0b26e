"""Addresses of Ray clusters: invalid ones and ones without an answer are reported at once. Ray itself is a stand-in."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest
from helpers import cli, refused

from posexport.errors import RequestError, RuntimeMissingError
from posexport.runtimes.installation import install_command
from posexport.workflows.sweep.ray import CONNECT_SECONDS, check_address, check_answers, connect

BAD = ("foo", "head:", ":6379", "head:0", "head:65536", "head:port", "http://head:6379", "10.0.0.1:6379/x", "::1:63")
SIGNALLED = Path(__file__).parents[1] / "support" / "signalled.py"
JOB = ("sweep", "--job", "matrix encoding=none", "--ray")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def stand_in(monkeypatch: pytest.MonkeyPatch, find: Any = None) -> MagicMock:
    """A module `ray` whose address for `auto` is the result of `find`."""
    ray, services = MagicMock(), types.ModuleType("ray._private.services")
    services.get_ray_address_from_environment = find  # type: ignore[attr-defined]
    for name, module in {"ray": ray, "ray._private": ray._private, services.__name__: services}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return ray


@pytest.fixture
def silent() -> str:
    """An address of this machine where nothing listens."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{opened.getsockname()[1]}"


@pytest.mark.parametrize("given", BAD)
def test_what_is_no_address_is_refused_before_anything_is_made(given: str, tmp_path: Path) -> None:
    refused(
        cli(*JOB, given, "-o", tmp_path / "out"), f"--ray is {given!r}: give the host and port of the cluster's head"
    )
    assert not (tmp_path / "out").exists()


def test_addresses() -> None:
    for given in ("auto", "local", "head:6379", "10.0.0.1:1", "[fe80::1]:65535", "head.example.org:6379"):
        check_address(given)


def test_a_head_that_is_gone_is_told_and_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, silent: str
) -> None:
    ray = stand_in(monkeypatch)
    monkeypatch.setenv("RAY_ADDRESS", silent)
    found = cli(*JOB, "auto", "-o", tmp_path / "out")
    assert (found.exit_code, found.stdout) == (3, "")
    assert found.stderr == (
        f"Error: no Ray cluster answers at '{silent}', the address in RAY_ADDRESS (Connection refused): start one with "
        "'ray start --head', give --ray the host and port of one that runs, or leave --ray out to run here.\n"
    )
    assert not (tmp_path / "out").exists()
    ray.init.assert_not_called()
    monkeypatch.setenv("RAY_ADDRESS", "foo")
    refused(cli(*JOB, "auto", "-o", tmp_path / "out"), "RAY_ADDRESS is 'foo': give the host and port")


def test_auto_is_what_ray_says(monkeypatch: pytest.MonkeyPatch, silent: str) -> None:
    def none(asked: str, folder: None) -> str:
        raise ConnectionError("Could not find any running Ray instance.")

    stand_in(monkeypatch, lambda asked, folder: silent)
    with pytest.raises(RuntimeMissingError, match=f"at '{silent}', the last one that was started on this machine"):
        check_answers("auto")
    stand_in(monkeypatch, none)
    with pytest.raises(RuntimeMissingError, match=r"at 'auto' \(none runs on this machine\): start one with"):
        check_answers("auto")
    del sys.modules["ray._private.services"].get_ray_address_from_environment
    check_answers("auto")  # then Ray finds out by itself


def test_the_wait_for_an_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(where: tuple[str, int], timeout: float) -> socket.socket:
        raise TimeoutError(f"{where}: {timeout:g} s")

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(RuntimeMissingError, match=rf"the address given \(\('fe80::1', 6379\): {CONNECT_SECONDS:g} s\)"):
        check_answers("[fe80::1]:6379")


def test_one_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        check_answers(f"127.0.0.1:{opened.getsockname()[1]}")
    check_answers("local")


def test_without_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    found = cli(*JOB, "auto", "-o", tmp_path / "out")
    assert found.exit_code == 3
    assert found.stderr == (
        f"Error: --ray needs Ray, which is not installed: {install_command('posexport[ray]')}, or leave --ray out to "
        "run here.\n"
    )
    assert not (tmp_path / "out").exists()


def test_a_cluster_of_its_own_where_ray_was_imported_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    monkeypatch.delenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", raising=False)
    with pytest.raises(RequestError, match="in a process of its own"):
        connect("local")


@pytest.mark.slow
def test_ray_still_says_which_cluster_auto_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, silent: str) -> None:
    """With the real Ray. After the head of a cluster was killed, the file with its address remains."""
    pytest.importorskip("ray")
    from ray._private import services

    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(silent)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(services, "find_gcs_addresses", frozenset)
    with pytest.raises(RuntimeMissingError, match=f"at '{silent}', the last one that was started on this machine"):
        check_answers("auto")


LISTENING = """
import psutil, sys
from posexport.temporary import registered, remove_since
from posexport.workflows.sweep.ray import connect
before = registered()
try:
    ray, _ = connect("local")
    assert ray.get(ray.remote(lambda: 1).remote()) == 1
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    sockets = [socket for process in processes for socket in process.net_connections("inet")]
    print(*{socket.laddr.ip for socket in sockets if socket.status == "LISTEN" or socket.type == 2})
    ray.shutdown()
finally:
    remove_since(before)
"""


@pytest.mark.slow
def test_a_cluster_of_this_machine_alone_listens_on_the_loopback_interface_and_leaves_no_files(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with tempfile.TemporaryDirectory(prefix="ray") as short:  # the path of a socket must fit into 107 bytes
        environment = {**os.environ, "TMPDIR": short}
        command = [sys.executable, "-c", LISTENING]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
        addresses = {ipaddress.ip_address(text.removeprefix("::ffff:")) for text in done.stdout.split()}
        assert addresses and all(address.is_loopback for address in addresses), done.stdout
        assert list(Path(short).glob("posexport-*")) == []


STARTING = {
    "a process of Ray is there": ("ray._private.services", "start_raylet", "after"),
    "Ray connects": ("ray._private.worker", "connect", "before"),
    "Ray is connected": ("ray._private.worker", "connect", "after"),
    "the machines are read": ("posexport.workflows.sweep.ray", "Cluster._look", "before"),
}
"""Moments of a start: a function, and when the signal comes."""


def _session(leader: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) == leader and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("moment", STARTING)
def test_a_signal_while_ray_starts_leaves_no_process_and_no_file(moment: str, number: int, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    module, name, when = STARTING[moment]
    # Ray reads these when it is imported, which is early here
    own = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}
    command = [sys.executable, SIGNALLED, module, name, "1", str(int(number)), when, "--", *JOB, "local"]
    with tempfile.TemporaryDirectory(prefix="r") as short:
        sweep = subprocess.Popen(
            [*command, "-o", tmp_path / "out"],
            env={**os.environ, **own, "TMPDIR": short},
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        _, said = sweep.communicate(timeout=120)
        assert sweep.returncode == 128 + number, said
        assert said.splitlines()[-1].startswith("Error: "), said
        assert list(Path(short).iterdir()) == []
        until = time.monotonic() + 20
        while (left := _session(sweep.pid)) and time.monotonic() < until:
            time.sleep(0.2)
        assert left == []
