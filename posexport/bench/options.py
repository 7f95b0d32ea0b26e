"""The options of a benchmark: what is timed, at which sizes, and for how long. Imports no engine."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from posexport.artifact.signing import TrustedKey
from posexport.spec.fields import integer, positive

ROUNDS, ROUNDS_OF_SEVERAL = 20, 10
"""Rounds of one process, and of each process if there are several."""


@attrs.frozen(kw_only=True)
class BenchOptions:
    """The options of `posexport bench`. None is the default of the stage, or for `threads`, of each runtime.

    `required` names candidates in addition to `runtimes` or to the default ones. `shapes` are texts like
    `batch=1,seq=128`, `scenarios` like `decode:2048`. With neither, the artifact's default sizes are timed.
    `alternatives` adds torch's own export and ONNX Runtime's optimizer. `torch_compile` times torch.compile in several
    processes too. Without it, several processes leave torch.compile out, because it starts slowly. `seconds` limits the
    rounds of one shape. One of the `trusted` keys must have signed what is timed. `roles` are roles of inputs by name,
    in files without a spec (posexport.graphs.roles). `module`, FILE.py:NAME, is the torch module from which such a file
    was made.
    """

    runtimes: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    scenarios: tuple[str, ...] = ()
    alternatives: bool = False
    torch_compile: bool = False
    cuda_graph: bool = False
    rounds: int | None = integer(None, "rounds")
    warmup: int = integer(3, "runs before the first round")
    threads: int | None = integer(None, "threads of each runtime")
    seed: int = integer(0, "seed of the inputs and of the order within rounds", at_least=0)
    seconds: float = positive(60.0, "seconds for the rounds of one shape")
    processes: int | None = integer(None, "processes of each runtime", at_most=100)
    trusted: tuple[TrustedKey, ...] = ()
    roles: Mapping[str, str] = attrs.field(factory=dict)
    module: str | None = None


DEFAULTS = BenchOptions()
