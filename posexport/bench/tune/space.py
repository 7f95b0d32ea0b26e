"""What tuning chooses from: forms x targets x dtypes x opsets, and the options of the runtime. Imports no engine.

The name of a candidate describes it: `native/fp32/23` is a file, `native/fp32/23 threads=1` is that file run with an
option.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import attrs

from posexport.bench.scenarios import Scenario
from posexport.errors import FieldError, RequestError, check_known
from posexport.export.support import default_opset
from posexport.machine import usable
from posexport.spec.fields import choice
from posexport.spec.forms import FORMS, OPSETS, TARGETS, unsupported_opset
from posexport.spec.spec import DTYPES, POSITIONS, Spec

RUNTIMES = ("ort-cpu", "ort-cuda", "tensorrt", "tensorrt-rtx")
"""The runtimes that can be tuned for."""

ORIGINAL = "original"
"""Stands in place of a form for the tuned file itself, unchanged."""

OBJECTIVES = ("latency", "memory", "size")

Options = Mapping[str, Any]
"""Options of a runtime by name. One that is left out is the runtime's own choice."""

CONSECUTIVE, DENORMAL_AS_ZERO = ALLOWED = ("consecutive", "denormal-as-zero")
"""What a search tries only if the user allows it.

The first is a promise about positions. The second treats numbers below the smallest normal one as zeros.
"""

NARROW = "scenario"
"""A plan's profile that ends at the scenario's shape and is tuned for it, unlike that of `posexport compile`."""


@attrs.frozen(kw_only=True)
class Program:
    """One file that `posexport export` or `posexport rewrite` can write. With the form ORIGINAL, an existing file."""

    form: str
    dtype: str
    opset: int
    target: str = "portable"
    positions: str = "data"

    def __str__(self) -> str:
        further = [name for name in (self.target, self.positions) if name not in ("portable", "data")]
        return "/".join((self.form, self.dtype, str(self.opset), *further))

    @property
    def plainness(self) -> tuple[int, ...]:
        """The sort key for simplicity. Smaller is simpler and more portable.

        It compares positions, the target, the form in the order of FORMS, the opset and the dtype.
        """
        forms, dtype = (ORIGINAL, *FORMS), DTYPES.index(self.dtype) if self.dtype in DTYPES else len(DTYPES)
        promise, target = POSITIONS.index(self.positions), tuple(TARGETS).index(self.target)
        return (promise, target, forms.index(self.form), self.opset, dtype)


def _opsets(opsets: Sequence[int | str]) -> tuple[int, ...]:
    known = {str(opset): opset for opset in OPSETS}
    for opset in opsets:
        if str(opset) not in known:
            raise FieldError("opset", f"is {opset!r}: it must be a whole number from {OPSETS[0]} to {OPSETS[-1]}.")
    return tuple(known[str(opset)] for opset in opsets)


@attrs.frozen(kw_only=True)
class Limits:
    """What the search is limited to. Empty means everything. Opsets may be text.

    `allow` names what is tried in addition, from ALLOWED: `consecutive` promises such positions, and `denormal-as-zero`
    is an option of ONNX Runtime's sessions on a CPU.
    """

    forms: tuple[str, ...] = ()
    opsets: tuple[int, ...] = attrs.field(default=(), converter=_opsets)
    targets: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        names = (("form", self.forms, FORMS), ("target", self.targets, TARGETS), ("allow", self.allow, ALLOWED))
        for kind, given, allowed in names:
            for name in given:
                check_known(kind, name, allowed)


@attrs.frozen(kw_only=True)
class Request:
    """What to tune for: one of RUNTIMES, one scenario, and latency, memory or size."""

    scenario: Scenario
    runtime: str = "ort-cpu"
    objective: str = choice("latency", OBJECTIVES, "what is made small")
    limits: Limits = attrs.field(factory=Limits)
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        check_known("runtime in --for", self.runtime, RUNTIMES)
        if self.scenario.swept:
            raise RequestError(
                f"scenario {self.scenario.kind!r} is a whole sweep: tune for one point of it, such as {self.scenario}."
            )
        if DENORMAL_AS_ZERO in self.limits.allow and self.runtime != "ort-cpu":
            raise RequestError(
                f"--allow {DENORMAL_AS_ZERO} for {self.runtime}: it is an option of ONNX Runtime on a CPU, so drop "
                "it or tune for ort-cpu."
            )


def programs(runtime: str, specs: Mapping[str, Spec], limits: Limits) -> Iterator[Program]:
    """Every form for every target in every dtype, in the lowest opset that it takes, or in all given opsets.

    Positions are as in the specs. If that is allowed, consecutive ones are tried too.
    """
    targets = limits.targets or ("portable", "ort" if runtime.startswith("ort") else "tensorrt")
    for form, target, (dtype, spec) in product(limits.forms or FORMS, targets, specs.items()):
        further = CONSECUTIVE in limits.allow and spec.can_be_consecutive
        modes = dict.fromkeys((spec.positions, *((CONSECUTIVE,) if further else ())))
        for opset, positions in product(limits.opsets or (default_opset(form, spec),), modes):
            yield Program(form=form, dtype=dtype, opset=opset, target=target, positions=positions)


def other_opsets(program: Program, limits: Limits) -> list[Program]:
    """The same program in the opsets not yet tried. Empty if opsets were given."""
    if limits.opsets:
        return []
    return [
        attrs.evolve(program, opset=opset)
        for opset in OPSETS
        if opset > program.opset and unsupported_opset(program.form, program.target, opset) is None
    ]


def plain_options(runtime: str) -> Options:
    """The options under which programs are timed first: those of a careful deployment."""
    return {"io_binding": True} if runtime.startswith("ort") else {}


def options_of(runtime: str, gpu: bool, cpus: int | None = None, allow: Sequence[str] = ()) -> list[Options]:
    """Every combination of the runtime's options, with those of ALLOWED that `allow` names.

    The first of each list is the runtime's own choice, and is left out.
    """
    cpus = cpus or usable()
    fewer = sorted({max(cpus // 2, 1), 1} - {cpus}, reverse=True)
    axes: dict[str, dict[str, list[Any]]] = {
        "ort-cpu": {"graph_level": [None, "extended", "basic"], "threads": [None, *fewer], "io_binding": [None, True]},
        "ort-cuda": {"graph_level": [None, "extended", "basic"], "io_binding": [True], "cuda_graph": [None, True]},
    }
    plan: dict[str, list[Any]] = {"profile": [None, NARROW], **({"cuda_graph": [None, True]} if gpu else {})}
    choices: dict[str, list[Any]] = axes.get(runtime, plan)
    if DENORMAL_AS_ZERO in allow:
        choices["denormal_as_zero"] = [None, True]
    return [
        {name: value for name, value in zip(choices, values, strict=True) if value is not None}
        for values in product(*choices.values())
    ]
