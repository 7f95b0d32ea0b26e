"""A torch module in a Python file of the user, named as FILE.py:NAME.

Loading it runs the file with the rights of whoever runs posexport. This happens only if the option --module asks for
it. NAME is a module, a class that needs no arguments, or a function that returns a module. Random weights are drawn
from seed 0, so that they are the same each time. The module is in eval mode.

In addition to forward, these say what an export needs: `example_inputs` (a tuple, or a dictionary by parameter),
`dynamic_shapes` and `output_names`. Each is an attribute or a method of the module, or a variable or a function of the
file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import numpy as np
import torch

from posexport.errors import PosexportError, RequestError, said, shown, system_error
from posexport.files import TEXT_LIMIT, read_bytes, real_path
from posexport.runtimes.module_reference import module_parts
from posexport.runtimes.trace_errors import TraceError, chain_of

SEED = 0
"""The seed of the random weights of a module that sets no seed itself."""


@attrs.frozen(kw_only=True)
class UserModule:
    """A loaded module. `reference` is FILE.py:NAME as it was given; `sha256` is that of the file."""

    reference: str
    path: Path
    name: str
    sha256: str
    module: torch.nn.Module
    file: ModuleType

    constants = frozenset[str]()
    """Names of buffers that keep their dtype if the weights get another: none."""

    @property
    def label(self) -> str:
        """What ran, for people."""
        return f"{self.path.name}:{self.name}"

    def setting(self, name: str) -> Any:
        """What the module, or otherwise the file, has under this name; called if possible, None if there is nothing.

        RequestError for what goes wrong in it.
        """
        value = getattr(self.module, name, None)
        value = getattr(self.file, name, None) if value is None else value
        with self.running(f"{name} of"):
            return value() if callable(value) else value

    def running(self, what: str) -> contextlib.AbstractContextManager[None]:
        """A context in which the user's code runs. `what` describes for messages what is done with it."""
        return user_code(self.path, f"{what} {self.reference!r}")


def load_module(reference: str) -> UserModule:
    """The module that FILE.py:NAME names; RequestError if there is none, and for what goes wrong in the file."""
    path, name = module_parts(reference)
    _seed()
    with system_error(f"--module {shown(reference)} can't be read", "give an existing .py file"):
        file, sha256 = _run(path)
    if not hasattr(file, name):
        names = [known for known, value in vars(file).items() if _makes_module(value, file)]
        raise RequestError(f"{str(path)!r} has no {shown(name)}: it has {', '.join(names) or 'no torch module'}.")
    value = getattr(file, name)
    if not isinstance(value, torch.nn.Module) and callable(value):
        _seed()  # again: imports of the file may draw numbers when they first run
        with user_code(path, f"making {reference!r}"):
            value = value()
    if not isinstance(value, torch.nn.Module):
        raise RequestError(
            f"{reference!r} is {type(value).__name__}: it must be a torch.nn.Module, a class that is made without "
            "arguments, or a function that returns a module."
        )
    return UserModule(reference=reference, path=path, name=name, sha256=sha256, module=value.eval(), file=file)


def _seed() -> None:
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)


def _makes_module(value: object, file: ModuleType) -> bool:
    """Whether a variable of the file is a module or a class of modules, as far as is known without calling it."""
    own = getattr(value, "__module__", None) == file.__name__
    return isinstance(value, torch.nn.Module) or (
        own and isinstance(value, type) and issubclass(value, torch.nn.Module)
    )


def _run(path: Path) -> tuple[ModuleType, str]:
    """The file as a Python module, and the sha256 of its source."""
    source = read_bytes(path, TEXT_LIMIT)
    file = ModuleType(f"posexport_file_{path.stem}")
    file.__file__ = str(real_path(path))
    sys.modules[file.__name__] = file  # dataclasses look their modules up
    with user_code(path, f"running {str(path)!r}"):
        exec(compile(source, file.__file__, "exec"), vars(file))
    return file, hashlib.sha256(source).hexdigest()


@contextlib.contextmanager
def user_code(path: Path, what: str) -> Iterator[None]:
    """A context in which code of the file at `path` runs.

    The code finds modules beside the file, and what it prints goes to stderr. If it changes the working folder, that is
    undone, since other names refer to the folder of before. What it raises becomes a RequestError that names the line,
    also sys.exit and a TraceError of its export.
    """
    folder = str(real_path(path).parent)
    sys.path.insert(0, folder)
    try:
        with _stdout_on_stderr(), _working_folder_kept():
            yield
    except TraceError as error:
        raise RequestError(f"{what} failed{place_of(error, path)}: {error}") from None
    except (PosexportError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise RequestError(f"{what} failed{place_of(error, path)}: {said(chain_of(error)[-1])}.") from None
    finally:
        with contextlib.suppress(ValueError):  # the code may have taken it out
            sys.path.remove(folder)


@contextlib.contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """A context in which what is printed goes to stderr, also by other programs that are started and by compiled
    code."""
    saved = None
    with contextlib.suppress(OSError, ValueError):  # one of them is closed
        sys.stdout.flush()
        saved = os.dup(1)
        os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if saved is not None:
            os.dup2(saved, 1)
            os.close(saved)


@contextlib.contextmanager
def _working_folder_kept() -> Iterator[None]:
    """A context after which the working folder is the one of before."""
    before = Path.cwd()
    try:
        yield
    finally:
        os.chdir(before)


def place_of(error: BaseException, path: Path) -> str:
    """` at line 12 of 'model.py'`: the user's last line before the first cause of an error; empty if none is known.

    The line is in the file at `path`, or in a file beside or below it.
    """
    for each in reversed(chain_of(error)):
        found = _line(each, path)
        if found is not None:
            return f" at line {found[1]} of {found[0]!r}"
    return ""


def _line(error: BaseException, path: Path) -> tuple[str, int | None] | None:
    """The user's last line that an error passed through, with the file as the user would name it."""
    real = real_path(path)
    if isinstance(error, SyntaxError) and error.filename == str(real):
        return str(path), error.lineno
    found, trace = None, error.__traceback__
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        if file == real:
            found = str(path), trace.tb_lineno
        elif file.is_relative_to(real.parent) and "site-packages" not in file.parts:
            found = str(path.parent / file.relative_to(real.parent)), trace.tb_lineno
        trace = trace.tb_next
    return found
