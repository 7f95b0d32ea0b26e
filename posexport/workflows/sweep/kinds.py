"""The kinds of jobs, one row each: which command it is, what may be said of it, and what it takes of a machine.

Keys are the command's own options. An `axis` with several values makes several jobs, all combinations of them; an
`option` with several values is given to each job several times, where the command takes it several times. A new kind is
one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from posexport.bench.scenarios import read_scenario
from posexport.bench.tune.space import OBJECTIVES
from posexport.bench.tune.space import RUNTIMES as TUNED_FOR
from posexport.errors import RequestError, unknown
from posexport.models import ENCODINGS
from posexport.runtimes import RUNTIMES
from posexport.spec.forms import FORMS, TARGETS
from posexport.spec.presets import preset_names
from posexport.spec.spec import DTYPES
from posexport.verify.matrix.table import COLUMNS, MODES, Entry

_DIGITS = 4000  # beyond, Python reads no whole number

Check = Callable[[str, Any], str]
"""Takes the name of a key and one value of it; gives the value as text, or raises RequestError."""


def _one_of(names: Iterable[str]) -> Check:
    allowed = list(names)

    def check(key: str, value: Any) -> str:
        if value not in allowed:
            raise unknown(key, str(value), allowed)
        return str(value)

    return check


def whole(key: str, value: Any, least: int = 1) -> str:
    """A whole number of at least `least`, as text."""
    if len(str(value) if isinstance(value, str) else "") > _DIGITS:
        raise RequestError(f"{key} has {len(value)} characters: it must be a whole number below 2**63.")
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    if type(number) is int and number >= 2**63:
        raise RequestError(f"{key} is too large: it must be a whole number below 2**63.")
    if type(number) is not int or number < least:
        raise RequestError(f"{key} is {value!r}: it must be a whole number from {least}.")
    return str(number)


_FROM_0 = partial(whole, least=0)


def _said(key: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        raise RequestError(f"{key} is {value!r}: it must be text or a number.")
    return str(value)


def _scenario(key: str, value: Any) -> str:
    read_scenario(text := _said(key, value))
    return text


@attrs.frozen(kw_only=True)
class Kind:
    """One kind of job: `posexport <name>`.

    axes       a job for each value: key to check; those of `whole` stand for all their values where none is given
    options    given as they are; those of `several` as often as there are values, the others once
    flags      true or false
    switches   true or false, of which the command can be told either
    files      options whose value is a file that travels with the job
    settings   one of `files` that is a TOML file of options, to the options that it may not have: they name more files
    artifact   whether it is about an artifact, the key `artifact`: one job for each
    cpus       CPUs of each job, None for a whole machine
    always     what else the command is told, at the place where it runs
    refused    why a combination of axes is no job at all, or None
    writes     whether the files that it writes are brought home
    parts      whether its results are parts, which are put together in one file
    """

    axes: Mapping[str, Check] = attrs.field(factory=dict)
    whole: Mapping[str, Sequence[str]] = attrs.field(factory=dict)
    options: Mapping[str, Check] = attrs.field(factory=dict)
    several: Sequence[str] = ()
    flags: Sequence[str] = ()
    switches: Sequence[str] = ()
    files: Sequence[str] = ()
    settings: Mapping[str, Sequence[str]] = attrs.field(factory=dict)
    artifact: bool = False
    cpus: int | None = 1
    always: Sequence[str] = ("--json",)
    refused: Callable[[Mapping[str, str]], str | None] = lambda said: None
    writes: bool = False
    parts: bool = False

    def keys(self) -> list[str]:
        """All that may be said of a job, what goes for every kind left out."""
        return [*(["artifact"] * self.artifact), *self.axes, *self.options, *self.flags, *self.switches, *self.files]


def _form_refuses(said: Mapping[str, str]) -> str | None:
    entry = Entry(**{key: said[key] for key in ("encoding", "form", "dtype", "mode")})
    return entry.refusal(said.get("target", "portable"))


_ENTRY: dict[str, Sequence[str]] = {
    "encoding": list(ENCODINGS),
    "form": list(FORMS),
    "dtype": DTYPES,
    "mode": list(MODES),
}

KINDS: dict[str, Kind] = {
    "matrix": Kind(
        axes={
            **{key: _one_of(names) for key, names in _ENTRY.items()},
            "target": _one_of(TARGETS),
        },
        whole=_ENTRY,
        options={"runtime": _one_of(COLUMNS)},
        several=("runtime",),
        always=("--jobs", "1", "--no-picture", "--output", "out", "--json"),
        refused=_form_refuses,
        parts=True,
    ),
    "verify": Kind(
        artifact=True,
        options={"runtime": _one_of(RUNTIMES), "require": _one_of(RUNTIMES), "seed": _FROM_0, "time-limit": _said},
        several=("runtime", "require"),
        flags=("properties",),
        files=("inputs",),
    ),
    "bench": Kind(
        artifact=True,
        axes={"scenario": _scenario, "shape": _said},
        options={
            **dict.fromkeys(("runtime", "require", "seconds", "max-regression"), _said),
            **dict.fromkeys(("rounds", "warmup", "threads", "processes"), whole),
            "seed": _FROM_0,
        },
        several=("runtime", "require"),
        flags=("peers", "cuda-graph", "strict"),
        files=("baseline",),
        cpus=None,
    ),
    "tune": Kind(
        axes={
            "preset": _one_of(preset_names()),
            "encoding": _one_of(ENCODINGS),
            "for": _one_of(TUNED_FOR),
            "scenario": _scenario,
            "objective": _one_of(OBJECTIVES),
        },
        options={
            "form": _one_of(FORMS),
            "dtype": _one_of(DTYPES),
            "target": _one_of(TARGETS),
            **dict.fromkeys(("hidden-size", "num-heads", "num-kv-heads", "head-dim", "window", "opset"), whole),
            **dict.fromkeys(("batch", "seq", "max-seq"), whole),
            "kv-cache": _said,
            "set": _said,
            "seed": _FROM_0,
        },
        several=("form", "dtype", "target", "opset", "set"),
        switches=("causal", "bias", "padding-mask"),
        files=("config", "weights"),
        settings={"config": ("weights", "from", "layer", "output")},
        cpus=None,
        writes=True,
    ),
}
"""All kinds, by name."""
