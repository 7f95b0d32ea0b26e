"""From a person's request to jobs: tables `[[job]]` of a TOML or JSON file, or `--job "matrix encoding=rope"`.

kind         a row of KINDS
other keys   options of that command; several values of an axis make several jobs
cpus         how many CPUs of a machine one job takes, or "all"
gpu, gpus    the type of GPU that it needs ("H100"), and how many
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from glob import has_magic
from itertools import product
from pathlib import Path
from typing import Any

import attrs

from posexport.artifact.folders import files_below
from posexport.artifact.paths import SUFFIXES
from posexport.errors import RequestError, check_known, located, shown, unknown
from posexport.jsondata import DataError, read_json
from posexport.spec.fields import integer
from posexport.spec.toml_file import read_toml
from posexport.workflows.sweep.job_files import Hashes
from posexport.workflows.sweep.jobs import File, Job, JobResources
from posexport.workflows.sweep.kinds import CONFIG_EXCLUDES, KINDS, NAMES, Kind, Options
from posexport.workflows.sweep.patterns import matching

RESOURCES = ("cpus", "gpu", "gpus")  # keys that every kind of job takes

MOST_JOBS = 100_000
"""The most combinations that all tables of a sweep may ask for together. Their list takes 60 MB."""


@attrs.frozen
class JobTable:
    """The keys of one or several jobs. Files are relative to `folder`. `place` says where the table was written."""

    keys: Mapping[str, Any]
    folder: Path = attrs.field(factory=Path)
    place: str = "job"


Refused = tuple[Mapping[str, str], str]
"""A combination that a form refuses, and the reason."""


@attrs.frozen
class Plan:
    """Jobs in order, each once, and the combinations that are not jobs."""

    jobs: Sequence[Job]
    refused: Sequence[Refused] = ()

    def refusals(self) -> list[dict[str, str]]:
        """The refused combinations as plain data."""
        return [{**values, "reason": reason} for values, reason in self.refused]


def read_tables(path: Path) -> list[JobTable]:
    """The tables of a file. RequestError if it can't be read or contains something else."""
    try:
        data: Any = read_json(path) if path.suffix == ".json" else read_toml(path, "the sweep")
    except OSError as error:
        raise RequestError(f"the sweep {str(path)!r} can't be read ({error.strerror}): give a file of jobs.") from None
    except DataError as error:
        raise RequestError(f"the sweep {str(path)!r} can't be used, {error}: fix it.") from None
    if not isinstance(data, dict):
        raise RequestError(f"the sweep {str(path)!r} is no table: write [[job]] tables into it.")
    for key in data:
        if key != "job":
            raise unknown(f"key of {path.name}", key, ["job"])
    tables = data.get("job", [])
    if isinstance(tables, dict):
        raise RequestError(
            f"the sweep {str(path)!r} has one table [job]: write [[job]], with two brackets, above each job."
        )
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise RequestError(f"the sweep {str(path)!r} has no jobs: write at least one [[job]] table into it.")
    return [JobTable(table, path.parent, f"{path.name}, job {number}") for number, table in enumerate(tables, 1)]


def read_text(text: str) -> JobTable:
    """One table as words: a kind, then `key=value`. The key is repeated for each further value."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise RequestError(f"--job {text!r} can't be read ({error}): close its quotes.") from None
    keys: dict[str, Any] = {"kind": words[0] if words else ""}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key == "kind":
            raise RequestError(f"--job {text!r} has {word!r}: give a kind and then key=value, such as encoding=rope.")
        keys.setdefault(key, []).append(value)
    return JobTable(keys, place=f"--job {text!r}")


def plan(tables: Sequence[JobTable], commands: Callable[[str], Options]) -> Plan:
    """The jobs of tables. `commands` gives the options of a command by its name.

    RequestError names the table. It is also raised if the tables ask for more than MOST_JOBS combinations.
    """
    jobs: dict[str, Job] = {}
    refused: list[Refused] = []
    hashes, made = Hashes(), 0
    for table in tables:
        with located(table.place, lambda field: field.replace("_", "-")):
            for job in _jobs(table, commands, hashes, refused, MOST_JOBS - made - len(refused)):
                jobs.setdefault(job.id, job)
                made += 1
    if not jobs:
        raise RequestError("the sweep has no job that can run: its forms refuse every combination.")
    return Plan(list(jobs.values()), refused)


def _jobs(
    table: JobTable, commands: Callable[[str], Options], hashes: Hashes, refused: list[Refused], most: int
) -> Iterator[Job]:
    """The jobs of a table. Combinations that are not jobs are added to `refused`. RequestError for more than `most`."""
    keys = table.keys
    name = keys.get("kind")
    if not isinstance(name, str) or not name:
        raise RequestError(f"it has no kind: give one of {', '.join(KINDS)}.")
    check_known("kind", name, KINDS)
    kind = KINDS[name]
    options = {key: option for key, option in commands(name).items() if key not in ("json", *kind.excluded)}
    known = [*(["artifact"] * kind.artifact), *options, *RESOURCES]
    for key in keys:
        if key not in ("kind", *known):
            raise unknown(f"key of a {name} job", key, known)
    needs = _resources(keys, kind)
    axes = {**kind.whole, **{key: _values(key, keys[key], kind) for key in kind.axes if key in keys}}
    stated = _stated(keys, kind, options)
    files = _files(keys, kind, table.folder, hashes)
    artifacts: Sequence[Path | None] = _artifacts(keys, table.folder) if kind.artifact else (None,)
    if (asked := len(artifacts) * math.prod(map(len, axes.values()))) > most:
        raise RequestError(
            f"it asks for {asked:,} jobs, and a sweep has {MOST_JOBS:,} at most, those of other tables included: "
            "name fewer values, or split the sweep."
        )
    paths = {key: [str(file.path)] for key, file in files.items()}
    names = {key: [file.name] for key, file in files.items()}
    for path, values in product(artifacts, product(*axes.values())):
        chosen = dict(zip(axes, values, strict=True))
        if (reason := kind.refusal(chosen)) is not None:
            refused.append((chosen, reason))
            continue
        one_each = {key: [value] for key, value in chosen.items()}
        kind.check({**one_each, **stated, **paths})
        artifact_files = () if path is None else hashes.artifact(path)
        yield Job(
            kind=name,
            arguments=(*([] if path is None else [path.name]), *_words({**one_each, **stated, **names}, options)),
            needs=needs,
            label=" ".join([name, *([] if path is None else [_shown(path, table.folder)]), *values]),
            files=_one_folder((*artifact_files, *files.values())),
        )


def _stated(keys: Mapping[str, Any], kind: Kind, options: Options) -> dict[str, list[str]]:
    """The values of options that all jobs of a table share, without axes and files.

    Flags come last, each as "true" or "false". A false flag without --no-NAME is left out.
    """
    stated, flags = {}, {}
    for key, option in options.items():
        if key not in keys or key in (*kind.axes, *kind.files):
            continue
        if not option.is_flag:
            stated[key] = _values(key, keys[key], kind)
            if not option.multiple:
                _check_one(key, stated[key])
            continue
        value = _single(keys[key])
        if value not in (True, False, "true", "false"):
            raise RequestError(f"{key} is {shown(value)}: it must be true or false.")
        if value in (True, "true") or option.secondary_opts:
            flags[key] = [str(value).lower()]
    return {**stated, **flags}


def _files(keys: Mapping[str, Any], kind: Kind, folder: Path, hashes: Hashes) -> dict[str, File]:
    files = {}
    for key in kind.files:
        paths = list(dict.fromkeys(_path(key, value) for value in _list(keys.get(key, []))))
        _check_one(key, list(map(str, paths)))
        for path in paths:
            files[key] = hashes.file(folder / path)
            if key == "config":
                _check_config(files[key].path)
    return files


def _check_one(key: str, values: Sequence[str]) -> None:
    if len(values) > 1:
        raise RequestError(
            f"{key} has {len(values)} values, {', '.join(values)[:200]}: a job takes one, so write a job for each."
        )


def _check_config(path: Path) -> None:
    """RequestError if a file of options names files: they would not travel with the job, nor be part of its id."""
    config = read_toml(path, "config")
    for key in CONFIG_EXCLUDES:
        if key in config:
            action = "give weights in the job itself" if key == "weights" else "leave it out"
            raise RequestError(f"config {str(path)!r} has {key!r}, which doesn't travel with a job: {action}.")


def _words(values: Mapping[str, Sequence[str]], options: Options) -> Iterator[str]:
    """The values as arguments of a command."""
    for key, texts in values.items():
        for text in texts:
            if options[key].is_flag:
                yield f"--{key}" if text == "true" else f"--no-{key}"
            else:
                yield from (f"--{key}", text)


def _values(key: str, value: Any, kind: Kind) -> list[str]:
    """The values of a key as text, each once. RequestError for one that is not text, a number or a known name."""
    values = _list(value)
    if not values:
        raise RequestError(f"{key} is an empty list: leave it out, or give it a value.")
    names = kind.names.get(key) or NAMES.get(key) or values
    for item in values:
        if isinstance(item, bool) or not isinstance(item, str | int | float) or item == "":
            raise RequestError(f"{key} is {item!r}: it must be text or a number.")
        check_known(key, item, names)
    return list(dict.fromkeys(map(str, values)))


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _single(value: Any) -> Any:
    """The only item of a list of one. Other values stay as they are."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


@attrs.frozen(kw_only=True)
class _Counts:
    cpus: int | None = integer(None, "CPUs of one job")
    gpus: int | None = integer(None, "GPUs of one job")


def _resources(keys: Mapping[str, Any], kind: Kind) -> JobResources:
    given = {key: _single(keys[key]) for key in RESOURCES if key in keys}
    cpus, gpu, gpus = given.get("cpus", kind.cpus), given.get("gpu"), given.get("gpus")
    if gpu is not None and (not isinstance(gpu, str) or not gpu):
        raise RequestError(f"gpu is {gpu!r}: give the name of a type, such as 'H100'.")
    if gpus is not None and gpu is None:
        raise RequestError(f"gpus is {gpus!r} without a type: add gpu = 'H100'.")
    counts = _Counts(cpus=None if cpus == "all" else cpus, gpus=gpus)
    return JobResources(cpus=counts.cpus, gpu=gpu, gpus=0 if gpu is None else counts.gpus or 1)


def _shown(path: Path, folder: Path) -> str:
    """An artifact as it was given: relative to the table's folder if it is inside."""
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def _path(key: str, value: Any) -> Path:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{key} is {shown(value)}: it must be the path of a file.")
    return Path(value)


def _artifacts(keys: Mapping[str, Any], folder: Path) -> list[Path]:
    """The artifacts of a table: files, those in folders, and those that match patterns such as `models/*.onnx`."""
    if "artifact" not in keys:
        raise RequestError(f"a {keys['kind']} job needs an artifact: give artifact = ['model.onnx'].")
    artifacts: dict[Path, None] = {}
    for value in _list(keys["artifact"]):
        path = folder / _path("artifact", value)
        if path.is_dir():
            matches = [file for file in files_below(path) if file.suffix in SUFFIXES]
        elif has_magic(str(value)) and not path.exists():
            matches = matching(folder, str(value))
        else:
            matches = [path]
        if not matches:
            raise RequestError(f"artifact {shown(value)} matches no .onnx or .plan: give artifacts of posexport.")
        for file in matches:
            if file.suffix not in SUFFIXES:
                raise RequestError(f"artifact {str(file)!r} is neither .onnx nor .plan: give artifacts of posexport.")
            artifacts.setdefault(file)
    return list(artifacts)


def _one_folder(files: Sequence[File]) -> tuple[File, ...]:
    """The files of a job's folder, each once. RequestError if two with the same name differ."""
    by_name: dict[str, File] = {}
    for file in files:
        if by_name.setdefault(file.name, file) != file:
            raise RequestError(f"two files of one job have the name {file.name!r}: rename one of them.")
    return tuple(by_name.values())
