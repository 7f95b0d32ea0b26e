"""From what a person asks for to jobs: tables `[[job]]` of a TOML or JSON file, or `--job "matrix encoding=rope"`.

kind         a row of KINDS
its keys     options of that command; several values of an axis are several jobs
cpus         how many of a machine's CPUs one job takes, or "all"
gpu, gpus    the type of GPU that it needs ("H100"), and how many of them
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from glob import glob, has_magic
from itertools import product
from pathlib import Path
from typing import Any

import attrs

from posexport.errors import RequestError, unknown
from posexport.files import read_bytes, read_toml
from posexport.workflows.sweep.job_files import Hashes
from posexport.workflows.sweep.jobs import File, Job, JobResources
from posexport.workflows.sweep.kinds import KINDS, Kind, whole

PLACE = ("cpus", "gpu", "gpus")
"""What may be said of every kind of job."""

Said = Mapping[str, Any]


@attrs.define
class Plan:
    """Jobs in order, each once; and the combinations that are none, because a form refuses them: what and why."""

    jobs: list[Job] = attrs.field(factory=list)
    refused: list[tuple[Mapping[str, str], str]] = attrs.field(factory=list)

    def add(self, jobs: Iterator[Job]) -> None:
        """Add those that it does not have yet."""
        known = {job.id for job in self.jobs}
        for job in jobs:
            if job.id not in known:
                known.add(job.id)
                self.jobs.append(job)


def read_tables(path: Path) -> list[Said]:
    """The tables of a file; RequestError where it can't be read or holds something else."""
    data = _read_json(path) if path.suffix == ".json" else read_toml(path, "the sweep")
    if not isinstance(data, dict):
        raise RequestError(f"the sweep {str(path)!r} is no table: write [[job]] tables into it.")
    for key in data:
        if key != "job":
            raise unknown(f"key of {path.name}", key, ["job"])
    tables = data.get("job", [])
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise RequestError(f"the sweep {str(path)!r} has no jobs: write at least one [[job]] table into it.")
    return tables


def _read_json(path: Path) -> Any:
    try:
        return json.loads(read_bytes(path))
    except OSError as error:
        raise RequestError(f"the sweep {str(path)!r} can't be read ({error.strerror}): give a file of jobs.") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the sweep {str(path)!r} is not JSON ({error}): mend it.") from None


def read_text(text: str) -> Said:
    """One table as words: a kind, then `key=value`, a key again for each further value."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise RequestError(f"--job {text!r} can't be read ({error}): close its quotes.") from None
    said: dict[str, Any] = {"kind": words[0] if words else ""}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key == "kind":
            raise RequestError(f"--job {text!r} has {word!r}: give a kind and then key=value, such as encoding=rope.")
        said.setdefault(key, []).append(value)
    return said


def plan(tables: Sequence[tuple[Said, Path]]) -> Plan:
    """The jobs of tables, each with the folder in which its files are looked for."""
    found, hashes = Plan(), Hashes()
    for said, folder in tables:
        found.add(_jobs(said, folder, hashes, found))
    if not found.jobs:
        raise RequestError("the sweep has no job that can be done: its forms refuse all that it asks for.")
    return found


def _jobs(said: Said, folder: Path, hashes: Hashes, found: Plan) -> Iterator[Job]:
    name = said.get("kind")
    if not isinstance(name, str) or not name:
        raise RequestError(f"a job says no kind: give one of {', '.join(KINDS)}.")
    if name not in KINDS:
        raise unknown("kind", name, KINDS)
    kind = KINDS[name]
    for key in said:
        if key not in ("kind", *kind.keys(), *PLACE):
            raise unknown(f"key of a {name} job", key, [*kind.keys(), *PLACE])
    needs = _needs(said, kind)
    axes = {key: _checked(key, said[key], kind) for key in kind.axes if key in said}
    axes = {**{key: list(names) for key, names in kind.whole.items()}, **axes}
    shared, files = _shared(said, kind, folder, hashes)
    artifacts: Sequence[Path | None] = _artifacts(said, folder) if kind.artifact else (None,)
    for path, values in product(artifacts, product(*axes.values())):
        chosen = dict(zip(axes, values, strict=True))
        why = kind.refused(chosen)
        if why is not None:
            found.refused.append((chosen, why))
            continue
        own = () if path is None else hashes.artifact(path)
        words = [*([] if path is None else [path.name]), *_options(chosen.items()), *shared]
        label = " ".join([name, *([] if path is None else [_shown(path, folder)]), *values])
        yield Job(kind=name, arguments=tuple(words), needs=needs, label=label, files=_together((*own, *files)))


def _shared(said: Said, kind: Kind, folder: Path, hashes: Hashes) -> tuple[list[str], list[File]]:
    """The words that all jobs of a table have in common, and the files that these words name."""
    words, files = [], []
    for key in kind.options:
        values = _checked(key, said[key], kind) if key in said else []
        if key not in kind.several:
            _once(key, values)
        words += _options((key, value) for value in values)
    for key in (*kind.flags, *kind.switches):
        if key not in said:
            continue
        value = said[key][0] if isinstance(said[key], list) and len(said[key]) == 1 else said[key]
        if value not in (True, False, "true", "false"):
            raise RequestError(f"{key} is {value!r}: it must be true or false.")
        if value in (True, "true"):
            words.append(f"--{key}")
        elif key in kind.switches:
            words.append(f"--no-{key}")
    for key in kind.files:
        paths = list(dict.fromkeys(_path(key, value) for value in _list(said.get(key, []))))
        _once(key, list(map(str, paths)))
        for path in paths:
            file = hashes.file(folder / path)
            _check_settings(file.path, kind.settings.get(key, ()))
            files.append(file)
            words += _options([(key, file.name)])
    return words, files


def _once(key: str, values: Sequence[str]) -> None:
    if len(values) > 1:
        raise RequestError(
            f"{key} is given {len(values)} times, {', '.join(values)[:200]}: a job takes one, so write a job for each."
        )


def _check_settings(path: Path, banned: Sequence[str]) -> None:
    """RequestError where a file of options names files that would not travel with the job, nor be part of its id."""
    if not banned:
        return
    held = read_toml(path, "config")
    for key in banned:
        if key in held:
            what = "say weights in the job itself" if key == "weights" else "leave it out"
            raise RequestError(f"config {str(path)!r} has {key!r}, which doesn't travel with a job: {what}.")


def _options(pairs: Any) -> list[str]:
    return [word for key, value in pairs for word in (f"--{key}", value)]


def _checked(key: str, value: Any, kind: Kind) -> list[str]:
    values = _list(value)
    if not values:
        raise RequestError(f"{key} is an empty list: leave it out, or give it a value.")
    check = {**kind.axes, **kind.options}[key]
    return list(dict.fromkeys(check(key, each) for each in values))


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _needs(said: Said, kind: Kind) -> JobResources:
    given = {key: said[key] for key in PLACE if key in said}
    given = {key: value[0] if isinstance(value, list) and len(value) == 1 else value for key, value in given.items()}
    cpus = given.get("cpus", kind.cpus)
    gpu, gpus = given.get("gpu"), given.get("gpus")
    if gpu is not None and (not isinstance(gpu, str) or not gpu):
        raise RequestError(f"gpu is {gpu!r}: give the name of a type, such as 'H100'.")
    if gpus is not None and gpu is None:
        raise RequestError(f"gpus is {gpus!r} without a type: say gpu = 'H100' too.")
    return JobResources(
        cpus=None if cpus in (None, "all") else int(whole("cpus", cpus)),
        gpu=gpu,
        gpus=0 if gpu is None else int(whole("gpus", 1 if gpus is None else gpus)),
    )


def _shown(path: Path, folder: Path) -> str:
    """An artifact as it was given: beside the table where it was looked for there."""
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def _path(key: str, value: Any) -> Path:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{key} is {value!r}: it must be the path of a file.")
    return Path(value)


def _artifacts(said: Said, folder: Path) -> list[Path]:
    """The artifacts of a table: files, all those in folders, and what patterns such as `models/*.onnx` find."""
    if "artifact" not in said:
        raise RequestError(f"a {said['kind']} job says no artifact: give artifact = ['model.onnx'].")
    found: dict[Path, None] = {}
    for value in _list(said["artifact"]):
        path = folder / _path("artifact", value)
        if path.is_dir():
            inside = [file for file in sorted(path.rglob("*")) if file.suffix in (".onnx", ".plan")]
        elif has_magic(str(value)) and not path.exists():
            found_here = sorted(glob(str(value), root_dir=folder, recursive=True))  # noqa: PTH207 (it may be absolute)
            inside = [file for file in map(folder.joinpath, found_here) if file.is_file()]
        else:
            inside = [path]
        if not inside:
            raise RequestError(f"artifact {value!r} finds no .onnx or .plan: give artifacts of posexport.")
        for file in inside:
            if file.suffix not in (".onnx", ".plan"):
                raise RequestError(f"artifact {str(file)!r} is neither .onnx nor .plan: give artifacts of posexport.")
            found.setdefault(file)
    return list(found)


def _together(files: Sequence[File]) -> tuple[File, ...]:
    """Files of one folder; two of one name must be the same."""
    found: dict[str, File] = {}
    for file in files:
        if found.setdefault(file.name, file) != file:
            raise RequestError(f"two files of one job have the name {file.name!r}: rename one of them.")
    return tuple(found.values())
