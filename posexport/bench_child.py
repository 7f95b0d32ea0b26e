"""The parent's side of one timing process: requests with a time limit, and what its end means."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import Any


class ChildError(Exception):
    """A runtime that couldn't be timed; `kind` is "refused" (it can't run this) or "failed"."""

    def __init__(self, sentence: str, kind: str = "failed") -> None:
        super().__init__(sentence)
        self.kind = kind


class Child:
    """A process that opens one artifact on one runtime (see `posexport.bench_worker`)."""

    def __init__(self, command: Sequence[str] = (sys.executable, "-P", "-m", "posexport.bench_worker")) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def ask(self, do: str, *, limit: float, **fields: Any) -> Mapping[str, Any]:
        """The reply to one request; ChildError where it fails, takes over `limit` seconds, or ends the process."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=limit)
        except queue.Empty:
            self.close()
            raise ChildError(f"no answer within {limit:g} s, so it was ended") from None
        except OSError:  # it ended before the request reached it
            line = None
        if line is None:
            raise ChildError(self._obituary())
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise ChildError(reply["error"], reply["kind"])
        return reply

    def _obituary(self) -> str:
        code = self._process.wait(timeout=10)
        if code < 0:
            return f"its process crashed with {signal.Signals(-code).name}"
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        return f"its process ended with code {code}" + (f": {last[0][:200]}" if last else "")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._reader.join(timeout=5)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was still to be written finds nobody
                    pipe.close()
        self._errors.close()
