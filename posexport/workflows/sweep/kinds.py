"""The kinds of jobs, one row each: which command runs, which options make several jobs, and what it takes.

The command line passes the options of the command as click knows them. A row adds only what click does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import attrs

from posexport.bench.candidates import CANDIDATES
from posexport.bench.options import BenchOptions
from posexport.bench.scenarios import read_scenario
from posexport.bench.tune.request import specs_of
from posexport.bench.tune.space import OBJECTIVES
from posexport.bench.tune.space import RUNTIMES as TUNED_FOR
from posexport.export.block_options import BlockOptions, merge_options
from posexport.export.layer_pattern import parameters_of
from posexport.models import ENCODINGS
from posexport.runtimes import RUNTIMES
from posexport.spec.forms import FORMS, TARGETS
from posexport.spec.presets import preset_names
from posexport.spec.spec import DTYPES, Spec
from posexport.verify.matrix.table import COLUMNS, MODES, Entry
from posexport.verify.result import VerifyOptions


class CommandOption(Protocol):
    """What is read of a `click.Option`.

    `multiple` is whether it can be repeated, and `is_flag` is whether it takes no value. `secondary_opts` has its
    opposite, such as `--no-NAME`.
    """

    multiple: bool
    is_flag: bool
    secondary_opts: list[str]


Options = Mapping[str, CommandOption]
"""The options of a command by their names without dashes."""

Values = Mapping[str, Sequence[str]]
"""The values that a job gives, by the names of its options."""


@attrs.frozen(kw_only=True)
class Kind:
    """One kind of job: `posexport <name>`.

    axes        options whose values each make a job
    whole       the axes that take all these values if none is given
    names       options whose values are names, with these names, in addition to NAMES
    files       options whose value is a file that travels with the job
    excluded    options of the command that a job can't have, because they name files that do not travel
    artifact    whether it is about an artifact, the key `artifact`: one job for each
    cpus        CPUs of each job, None for a whole machine
    always      further arguments of the command on the machine that runs it
    refusal     why a combination of axes is not a job, or None
    check       raises RequestError for values that can't work
    writes      whether the files that the command writes are results too
    parts       whether its results are parts of one file, which the sweep combines
    """

    axes: Sequence[str] = ()
    whole: Mapping[str, Sequence[str]] = attrs.field(factory=dict)
    names: Mapping[str, Collection[str]] = attrs.field(factory=dict)
    files: Sequence[str] = ()
    excluded: Sequence[str] = ()
    artifact: bool = False
    cpus: int | None = 1
    always: Sequence[str] = ("--json",)
    refusal: Callable[[Mapping[str, str]], str | None] = lambda values: None
    check: Callable[[Values], object] = lambda values: None
    writes: bool = False
    parts: bool = False


def _form_refusal(values: Mapping[str, str]) -> str | None:
    entry = Entry(**{key: values[key] for key in ("encoding", "form", "dtype", "mode")})
    return entry.refusal(values.get("target", "portable"))


def _check_bench(values: Values) -> None:
    for scenario in values.get("scenario", ()):
        read_scenario(scenario)
    _check_fields(BenchOptions, _first_values(values))


def _check_block(values: Values) -> None:
    """RequestError if the block of a tune job can't be built in a dtype that it names, or without names, in any."""
    for scenario in values.get("scenario", ()):
        read_scenario(scenario)
    stated = {name: value for name, value in _first_values(values).items() if name in _BLOCK_KEYS}
    (config, preset), texts = (values.get(name, [None])[0] for name in ("config", "preset")), values.get("set", ())
    given = {**stated, "dtype": tuple(values.get("dtype", ()))}
    options, parameters = merge_options(config, preset, parameters_of(tuple(texts)), given, _CONFIG_KEYS)
    _check_fields(BlockOptions, options)
    specs_of(options, parameters)


def _first_values(values: Values) -> dict[str, str]:
    return {name.replace("-", "_"): texts[0] for name, texts in values.items()}


def _check_fields(kind: type[Any], options: Mapping[str, Any]) -> None:
    """Raise what `kind` raises for those of the options that are its fields."""
    names = {field.name for field in attrs.fields(kind)}
    kind(**{name: value for name, value in options.items() if name in names})


_BLOCK_KEYS = [field.name for kind in (Spec, BlockOptions) for field in attrs.fields(kind)]
_CONFIG_KEYS = [*_BLOCK_KEYS, "for", "scenario", "objective", "form", "target", "opset", "from", "layer"]
_ENTRY = {"encoding": tuple(ENCODINGS), "form": tuple(FORMS), "dtype": DTYPES, "mode": tuple(MODES)}

NAMES: Mapping[str, Collection[str]] = {
    **_ENTRY,
    "target": TARGETS,
    "preset": preset_names(),
    "for": TUNED_FOR,
    "objective": OBJECTIVES,
}
"""Options whose values are the same names in all commands, with these names."""

CONFIG_EXCLUDES = ("weights", "from", "layer", "output")
"""Options that the config of a job can't have, because they name files that do not travel with it."""

KINDS: dict[str, Kind] = {
    "matrix": Kind(
        axes=(*_ENTRY, "target"),
        whole=_ENTRY,
        names={"runtime": COLUMNS},
        excluded=("jobs", "minutes", "output", "resume", "picture"),
        always=("--jobs", "1", "--no-picture", "--output", "out", "--json"),
        refusal=_form_refusal,
        parts=True,
    ),
    "verify": Kind(
        artifact=True,
        names={"runtime": RUNTIMES, "require": RUNTIMES},
        files=("inputs", "weights", "trust"),
        excluded=(
            "project",
            "allow-outside",
            "from",
            "layer",
            "prefix-tokens",
            "junit",
            "markdown",
            "against",
            "module",
        ),
        check=lambda values: _check_fields(VerifyOptions, _first_values(values)),
    ),
    "bench": Kind(
        artifact=True,
        axes=("scenario", "shape"),
        names={"runtime": CANDIDATES, "require": CANDIDATES},
        files=("baseline", "trust"),
        excluded=("project", "allow-outside", "save", "against", "module"),
        check=_check_bench,
        cpus=None,
    ),
    "tune": Kind(
        axes=("preset", "encoding", "for", "scenario", "objective"),
        files=("config", "weights"),
        excluded=("from", "layer", "output", "save", "cache", "resume", "sign"),
        check=_check_block,
        cpus=None,
        writes=True,
    ),
}
