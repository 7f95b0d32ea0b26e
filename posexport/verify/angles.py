"""Measures the errors of cosines and sines by position, in the artifact, on every runtime that is installed.

The constants of the encoding (posexport.models.attention.EncodingState) and the operators that compute cosines and
sines from them are measured. They are exported by themselves with `export_module`, and cast to the block's dtype last,
as `rotate` does. The reference is posexport.verify.angle_reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from posexport.artifact import onnx_file
from posexport.errors import RequestError
from posexport.export.modules import export_module
from posexport.files import staged
from posexport.models.angles import cos_sin
from posexport.models.attention import EncodingState
from posexport.models.rotary import Rotary
from posexport.models.weights import TORCH_DTYPES
from posexport.processes import NOTHING_SHOWN
from posexport.runtimes import INTERPRETER, ORT, REFERENCE, TORCH, Runtime
from posexport.runtimes.pool import Answer, Pool, result
from posexport.runtimes.tensors import to_numpy
from posexport.spec.arrays import Array
from posexport.spec.spec import Spec
from posexport.verify import angle_reference
from posexport.verify.positions import LANDMARKS

POSITIONS = LANDMARKS
"""The positions of the table of errors. `verify` tries them too."""

EXACT = 2.5e-7
"""The error that `--angles exact` promises up to position 2^24."""

TIME_LIMIT = 120.0  # seconds for a graph of a few nodes: an engine that takes longer hangs
_OUTPUTS = ("cos", "sin")


def spaced(last: int) -> list[int]:
    """Positions from 0 to `last`: those of the table of errors, and two for every doubling."""
    between = (round(2 ** (step / 2)) for step in range(2 * last.bit_length()))
    return sorted(place for place in {0, last, *POSITIONS, *between} if place <= last)


def why_none(spec: Spec) -> str | None:
    """Why a block has no angles to measure, as the end of a sentence; None if it has angles."""
    if spec.encoding.name not in angle_reference.FREQUENCIES:
        return "which has no angles of positions"
    if getattr(spec.encoding, "table", None) == "learned":
        return "whose learned table has no angles"
    return None


class Angles(nn.Module):
    """Maps positions [B, S] or [B, S, axes] to cosines and sines [B, S, P] as the encoding computes them.

    They are in the spec's dtype; with `wide` float64, everything is in double precision.
    """

    def __init__(self, spec: Spec, wide: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype = wide if wide == torch.float64 else getattr(torch, TORCH_DTYPES[spec.dtype])
        self.state = EncodingState(attrs.evolve(spec, prefix_tokens=0), wide)  # each row has one token
        for module in self.state.modules():  # angles don't depend on weights, which have no values here
            module._parameters.clear()

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        state, encoding = self.state, self.state.encoding
        if isinstance(encoding, Rotary):
            cos, sin = encoding.cos_sin(state, positions)
        else:
            cos, sin = cos_sin(positions, state["frequencies"])
        return cos.to(self.dtype), sin.to(self.dtype)


def rows(spec: Spec, positions: Iterable[int]) -> Tensor:
    """Positions as a batch of sequences of one token, the same along every axis: so no row depends on another row."""
    column = torch.tensor(list(positions), dtype=torch.int64)[:, None]
    return column if spec.encoding.axes == 1 else column[..., None].repeat(1, 1, spec.encoding.axes)


@attrs.frozen(kw_only=True)
class Measured:
    """The largest error of cosine and sine at each position, for one spec on one runtime; or why there is none.

    `failed` is true for a runtime that gave no answer, or a wrong one, and false for one that isn't run. `engine` is
    what ran.
    """

    spec: Spec
    runtime: str
    errors: tuple[float, ...] = ()
    engine: str | None = None
    reason: str | None = None
    failed: bool = False


def measure(
    specs: Iterable[Spec],
    runtimes: Mapping[str, Runtime],
    positions: tuple[int, ...] = POSITIONS,
    advance: Callable[[str], object] = lambda _: None,
) -> Iterator[Measured]:
    """Every spec on every runtime at `positions`, in order; RequestError for a spec without angles."""
    missing = {name: _missing(row) for name, row in runtimes.items()}
    engines = {name: row for name, row in runtimes.items() if missing[name] is None and row.module != TORCH}
    with Pool(TIME_LIMIT) as pool:
        for row in engines.values():
            pool.start(row)
        for spec in specs:
            if (why := why_none(spec)) is not None:
                raise RequestError(f"angles were asked for with {spec.encoding.name}, {why}: give another encoding.")
            advance(f"{spec.encoding.name}, angles {spec.angles}, {spec.dtype}")
            reference = angle_reference.cos_sin(spec, positions)
            module, inputs = Angles(spec), rows(spec, positions)
            path = pool.folder / "angles.onnx"
            if engines:
                _write(module, spec, path)
            answers = {name: pool.submit(row, path, [{"positions": inputs.numpy()}]) for name, row in engines.items()}
            for name, row in runtimes.items():
                if (reason := missing[name]) is not None:
                    yield Measured(spec=spec, runtime=name, reason=reason)
                    continue
                answer = result(answers[name]) if name in answers else _eager(module, inputs, row.options["device"])
                yield _judge(spec, name, answer, reference)


def _missing(row: Runtime) -> str | None:
    """Why a runtime isn't run. Engines that open only whole blocks can't run a function by itself."""
    if (missing := row.missing()) is not None:
        return missing.text
    if row.module == INTERPRETER:
        return "it evaluates everything in float64, so no rounding shows"
    return None if row.module in (TORCH, REFERENCE, ORT) else "it opens whole blocks only"


def _write(module: Angles, spec: Spec, path: Path) -> None:
    example = rows(spec, (0, 1)).repeat(1, 3, *(1,) * (spec.encoding.axes > 1))
    dynamic = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq")}
    model = export_module(module, (example,), (dynamic,), input_names=("positions",), output_names=_OUTPUTS)
    with staged() as files:
        files.write(path, lambda file: onnx_file.write_inline(model, file))


def _eager(module: Angles, inputs: Tensor, device: str) -> Answer:
    with torch.inference_mode():
        values = module.to(device)(inputs.to(device))
    outputs = {name: to_numpy(value) for name, value in zip(_OUTPUTS, values, strict=True)}
    return Answer(outputs=(outputs,), describe={"engine": "torch", "version": str(torch.__version__)})


def _judge(spec: Spec, runtime: str, answer: Answer, reference: tuple[Array, Array]) -> Measured:
    """The errors of an answer, or why there are none."""
    if answer.failure is not None:
        failed = answer.failure.code not in NOTHING_SHOWN
        return Measured(spec=spec, runtime=runtime, reason=answer.failure.text.rstrip("."), failed=failed)
    errors = np.zeros(len(reference[0]))
    for name, exact in zip(_OUTPUTS, reference, strict=True):
        values = np.asarray(answer.outputs[0][name], np.float64)
        if values.shape != (len(exact), 1, exact.shape[1]):
            text = f"{name} has the shape {list(values.shape)}"
            return Measured(spec=spec, runtime=runtime, reason=text, failed=True)
        errors = np.maximum(errors, np.abs(values[:, 0] - exact).max(-1))
    if not np.isfinite(errors).all():
        return Measured(spec=spec, runtime=runtime, reason="a cosine or sine is not finite", failed=True)
    engine = f"{answer.describe['engine']} {answer.describe['version']}"
    return Measured(spec=spec, runtime=runtime, errors=tuple(errors.tolist()), engine=engine)
