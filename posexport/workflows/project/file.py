"""The project file: what a repository ships, in `[tool.posexport]` of a pyproject.toml or in a posexport.toml.

Each artifact has the options of `posexport export` under the names of the command line, and its checks: runtimes,
tolerances, a budget. Paths are relative to the file. Unknown keys are errors. Imports no engine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs

from posexport.bench.candidates import CANDIDATES
from posexport.errors import RequestError, check_known, located, shown, unknown
from posexport.files import is_there, real_path
from posexport.runtimes import runtime
from posexport.runtimes.tensorrt.options import PlanOptions
from posexport.spec.fields import check_types, choice, text
from posexport.spec.forms import FORMS
from posexport.spec.spec import Spec
from posexport.spec.toml_file import read_toml
from posexport.workflows.project.limits import Budget, Latency, Tolerances, names, percent

T = TypeVar("T")
EXPORT_OPTIONS = (
    *("config", "preset", "from", "layer", "encoding", "set"),
    *(field.name for field in attrs.fields(Spec) if field.name != "encoding"),
    *("target", "opset", "batch", "seq", "max_seq", "weights", "seed"),
)
"""The options of `posexport export` that an artifact may have in addition to `form`."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@attrs.frozen(kw_only=True)
class Entry:
    """One artifact of a project. `options` are those of its export, and the other fields are its checks."""

    name: str = text(None, "what its files are called")
    form: str | None = choice(None, tuple(FORMS), "its form")
    forms: tuple[str, ...] | None = names("several forms, a file each")
    runtimes: tuple[str, ...] | None = names("where parity is checked and time taken")
    compile: PlanOptions | None = None
    tolerance: Tolerances = attrs.field(factory=Tolerances)
    budget: Budget = attrs.field(factory=Budget)
    baseline: str | None = text(None, "a saved result, or a folder of them")
    max_regression: float | None = percent("how much slower than the baseline it may be")
    options: Mapping[str, Any] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        if self.form is not None and self.forms is not None:
            raise RequestError("both form and forms were given: drop one.")
        for form in self.forms or ():
            check_known("form", form, FORMS)
        if not isinstance(self.options.get("set", {}), dict):
            raise RequestError("set must be a table of parameters, such as set = {theta = 500000}.")
        for name in ("kernels", "fused_attention", "plan_size"):
            if getattr(self.budget, name) is not None and self.compile is None:
                raise RequestError(f"budget {_key(name)} is of a plan: say how it is built with compile, or drop it.")
        if self.budget.fused_attention is False:
            raise RequestError("budget fused-attention is false, which checks nothing: give true, or drop it.")
        if self.max_regression is not None and self.baseline is None:
            raise RequestError("max-regression was given without a baseline: give one, or drop it.")
        for name in self.runtimes or ():
            runtime(name)
        self._check_latency()
        several = len(self.all_forms) > 1 or self.compile is not None
        if several and self.baseline is not None and self.baseline.endswith(".json"):
            raise RequestError(
                "baseline is one file, but it has several: give a folder, which 'posexport bench --save' fills."
            )

    def _check_latency(self) -> None:
        """RequestError for a latency budget that applies to none of its runtimes."""
        known = [name for name, candidate in CANDIDATES.items() if not candidate.role]
        plan = () if self.compile is None else (self.compile.runtime,)
        timed = known if self.runtimes is None else [name for name in known if name in (*self.runtimes, *plan)]
        if self.budget.latency and not timed:
            raise RequestError(
                f"budget latency was given, but none of its runtimes is timed: add one of {', '.join(known)}."
            )
        for latency in self.budget.latency:
            if latency.runtime is not None and latency.runtime not in timed:
                raise unknown("runtime in budget latency,", latency.runtime, timed)

    @property
    def all_forms(self) -> tuple[str | None, ...]:
        """The forms in which it is written. None is the form of its config, or posexport's default."""
        return self.forms or (self.form,)

    def stem(self, form: str | None) -> str:
        """The name of its files without their ending. It includes the form if there are several."""
        return self.name if len(self.all_forms) == 1 else f"{self.name}-{form}"


_ENTRY_KEYS = (*(field.name for field in attrs.fields(Entry) if field.name != "options"), *EXPORT_OPTIONS)


@attrs.frozen(kw_only=True)
class Project:
    """A project as its `file` describes it."""

    file: Path
    folder: str = text("artifacts", "the folder that artifacts are written to")
    require: tuple[str, ...] = names("runtimes that must run", ())
    runtimes: tuple[str, ...] | None = names("where parity is checked and time taken, unless an entry says otherwise")
    entries: tuple[Entry, ...] = ()

    def __attrs_post_init__(self) -> None:
        for name in (*self.require, *(self.runtimes or ())):
            runtime(name)
        seen: dict[str, str] = {}
        for entry in self.entries:
            for form in entry.all_forms:
                stem = entry.stem(form).lower()  # on some systems the case of names does not count
                if stem in seen:
                    raise RequestError(
                        f"artifacts {seen[stem]!r} and {entry.name!r} are both written to {stem}.onnx: give another "
                        "name."
                    )
                seen[stem] = entry.name

    @property
    def root(self) -> Path:
        """The folder to which all paths are relative."""
        return self.file.parent


def find_project(named: str | None, allow_outside: bool = False) -> Project:
    """The project in the file `named`, otherwise in the nearest file here or in a folder above.

    RequestError if there is none, or if two files of one folder both describe one. Unless `allow_outside`, also if
    artifacts would be written outside the folder of the file.
    """
    project = _find(named)
    is_there(project.root / project.folder)  # RequestError for links in a circle
    if not allow_outside:
        _check_inside(project)
    return project


def _check_inside(project: Project) -> None:
    """RequestError if the project's folder, with all links followed, is outside the folder of its file."""
    root, folder = (real_path(path) for path in (project.root, project.root / project.folder))
    if not folder.is_relative_to(root):
        raise RequestError(
            f"{project.file}: folder is {project.folder!r}, which leads to {str(folder)!r}, outside the project: name "
            "one inside it, or give --allow-outside where you trust this file."
        )


def _find(named: str | None) -> Project:
    if named is not None:
        path = Path(named)
        if (table := _table(path)) is None:
            raise RequestError(
                f"{str(path)!r} has no [tool.posexport]: describe the project's artifacts there."
                if is_there(path)
                else f"project {str(path)!r} is not there: give a pyproject.toml or a posexport.toml."
            )
        return read_project(path, table)
    start = Path.cwd()
    for folder in (start, *start.parents):
        files = (folder / "pyproject.toml", folder / "posexport.toml")
        tables = {file: table for file in files if (table := _table(file)) is not None}
        if len(tables) > 1:
            raise RequestError(
                f"{' and '.join(f'{str(file)!r}' for file in tables)} both describe a project: keep posexport.toml or "
                "[tool.posexport], not both."
            )
        for file, table in tables.items():
            return read_project(Path(os.path.relpath(file)), table)
    raise RequestError(
        f"no project was found in {str(start)!r} or above: give the files that are meant, or describe those of this "
        "repository in a posexport.toml or in [tool.posexport] of a pyproject.toml."
    )


def _table(path: Path) -> dict[str, Any] | None:
    """The project's table in a file. None if the file doesn't exist or has none."""
    if not is_there(path):
        return None
    data: Any = read_toml(path, "project")
    if path.name == "pyproject.toml":
        tool = data.get("tool")
        data = tool.get("posexport") if isinstance(tool, dict) else None
        if data is None:
            return None
    if not isinstance(data, dict):
        raise RequestError(f"{str(path)!r}: tool.posexport must be a table.")
    return data


def read_project(file: Path, table: Mapping[str, Any]) -> Project:
    """A project from its table. RequestError names the file and the artifact."""
    where, header = str(file), f"[[{'tool.posexport.' if file.name == 'pyproject.toml' else ''}artifact]]"
    project_keys = ("folder", "require", "runtimes", "artifact")
    for key in table:
        if key.replace("-", "_") in set(_ENTRY_KEYS) - set(project_keys):
            raise RequestError(f"{where}: {key!r} is a key of an artifact: begin each artifact with a line {header}.")
    data = _keys(table, where, project_keys)
    listed, common = data.pop("artifact", []), data.get("runtimes")
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise RequestError(f"{where}: artifact must be written {header}, with two brackets, once for each artifact.")
    if not listed:
        raise RequestError(f"{where}: it lists no artifact: add an {header} for each.")
    usual = {} if common is None else {"runtimes": common}
    entries = tuple(_entry({**usual, **entry}, where, index) for index, entry in enumerate(listed, 1))
    return _made(Project, {**data, "file": file, "entries": entries}, where)


def _entry(data: Mapping[str, Any], where: str, index: int) -> Entry:
    name = data.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        what = f"has the name {name!r}" if "name" in data else "has no name"
        raise RequestError(
            f"{where}: artifact {index} {what}: give one of letters, digits, '-', '_' and '.', such as encoder."
        )
    if name.endswith((".onnx", ".plan")):
        raise RequestError(f"{where}: artifact {index} has the name {name!r}: its files get their endings, so drop it.")
    where = f"{where}, artifact {name!r}"
    data = _keys(data, where, _ENTRY_KEYS)
    options = {key: data.pop(key) for key in EXPORT_OPTIONS if key in data}
    for key, kind in (("compile", PlanOptions), ("tolerance", Tolerances), ("budget", Budget)):
        if key in data:
            data[key] = _nested(kind, data[key], f"{where}, {key}")
    return _made(Entry, {**data, "options": options}, where)


def _keys(data: Any, where: str, allowed: Sequence[str]) -> dict[str, Any]:
    """A table with `_` for `-` in its keys. RequestError for unknown ones."""
    if not isinstance(data, dict):
        raise RequestError(f"{where} is {shown(data)}: it must be a table.")
    values: dict[str, Any] = {}
    for key, value in data.items():
        name = key.replace("-", "_")
        if name not in allowed:
            raise unknown(f"key in {where}:", key, map(_key, allowed))
        if name in values:
            raise RequestError(f"{where} gives {name} twice, with '-' and with '_': drop one.")
        values[name] = value
    return values


def _key(name: str) -> str:
    """The spelling of a field in a project's file."""
    return name.replace("_", "-")


def _nested(kind: type[T], data: Any, where: str) -> T:
    values = _keys(data, where, [field.name for field in attrs.fields(kind)])  # type: ignore[arg-type]
    for name, value in values.items():
        texts = [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
        if len(set(texts)) < len(texts):
            raise RequestError(f"{where}: {_key(name)} is {shown(value)}: it must be a list of different values.")
    if kind is Budget and "latency" in values:
        tables = values["latency"] if isinstance(values["latency"], list) else [values["latency"]]
        values["latency"] = tuple(_nested(Latency, table, f"{where}, latency") for table in tables)
    return _made(kind, values, where)


def _made(kind: type[T], data: Mapping[str, Any], where: str) -> T:
    with located(where, _key):
        check_types(kind, data)
        return kind(**data)
