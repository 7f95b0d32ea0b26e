"""What is held against what: the encodings, the scenarios, and every candidate of one encoding in one scenario."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import blocks
import numpy as np
import torch

from posexport.artifact.onnx_artifact import write_onnx
from posexport.bench import alternatives, lower_bound, statistics
from posexport.bench.shapes import Sizes, seeded_inputs
from posexport.errors import RequestError
from posexport.export import export
from posexport.models import ENCODINGS, read_spec
from posexport.models.block import build_block
from posexport.models.weights import seeded_weights
from posexport.runtimes import ort
from posexport.runtimes.base import Arrays
from posexport.runtimes.torch_eager import TorchRunner
from posexport.spec.contract import graph_inputs
from posexport.spec.spec import Spec

HIDDEN, HEADS, THREADS = 768, 12, 2
PAST, PLACES = 2048, 2560
GROWN, SHARED = "concat", "shared"
EVERYWHERE, SOME = ("prefill:1024", "decode:2048"), ("prefill:128", "batch:8")
"""The scenarios of every encoding, and those of the textbook's eight only, which keeps the whole in twenty minutes."""

SIZES: Mapping[str, tuple[int, int, int | None]] = {
    "prefill:128": (1, 128, None),
    "prefill:1024": (1, 1024, None),
    "batch:8": (8, 128, None),
    "decode:2048": (1, 1, PAST),
}
"""Prompts, new tokens of each, and tokens in the cache."""

PARAMETERS: Mapping[str, dict[str, Any]] = {
    "learned": {"max_positions": 4096},
    "swin": {"window_size": 32},
    "swinv2": {"window_size": 32},
}
"""What an encoding must be given to know so many positions; all else is its default."""

FORMS = (
    ("decomposed", "ort"),
    ("decomposed", "portable"),
    ("native", "ort"),
    ("native", "portable"),
    ("contrib", "ort"),
    ("contrib", "portable"),
)
EXPORTED = {18: "torch-onnx 18", 20: "torch-onnx 20", 24: "torch-onnx 24"}
OPTIMIZED = {"ort-optimizer": alternatives.write_optimized, "ort-fusions": alternatives.write_fused}
BUFFERED, OWN_GROWN = ", shared buffers", "posexport, grown caches"
LOWER_BOUND, TORCH, COMPILED = "lower_bound", "torch", "torch-compile"
PEERS = (TORCH, COMPILED, *EXPORTED.values(), *OPTIMIZED)


@attrs.frozen(kw_only=True)
class Entry:
    """One candidate: `ours` for a form of posexport. `load` gives a runner, `inputs` are what it is fed."""

    name: str
    ours: bool
    load: Callable[[], Any]
    inputs: Arrays


@attrs.frozen(kw_only=True)
class Cell:
    """One encoding in one scenario: what can be timed, and why the rest can't, by name."""

    encoding: str
    scenario: str
    entries: Mapping[str, Entry]
    missing: Mapping[str, str]


def encodings(quick: bool) -> list[str]:
    return ["rope"] if quick else list(ENCODINGS)


def decodes(encoding: str) -> bool:
    """Whether it is for decoders: those of a grid are encoders', but for M-RoPE's text."""
    return encoding == "mrope" or ENCODINGS[encoding].axes < 2


def scenarios(encoding: str) -> list[str]:
    found = [*EVERYWHERE, *(SOME if encoding in blocks.PLAIN else ())]
    return [each for each in SIZES if each in found and (decodes(encoding) or not each.startswith("decode"))]


def spec_of(encoding: str, cache: str | None) -> Spec:
    parameters = {"name": encoding, **PARAMETERS.get(encoding, {})}
    fields = {"hidden_size": HIDDEN, "num_heads": HEADS, "causal": decodes(encoding), "kv_cache": cache}
    return read_spec({"encoding": parameters, **fields})


class Programs:
    """The files and the torch blocks of one encoding, made once and used in all its scenarios."""

    def __init__(self, encoding: str, folder: Path) -> None:
        self.encoding, self._folder = encoding, folder
        self._blocks: dict[str | None, torch.nn.Module] = {}
        self._files: dict[str | None, tuple[dict[str, Path], dict[str, Path], dict[str, str]]] = {}

    def cell(self, scenario: str, compiled: bool) -> Cell:
        """Every candidate in `scenario`; torch.compile is one where asked for."""
        batch, seq, past = SIZES[scenario]
        cache = None if past is None else GROWN
        sizes = Sizes(batch=batch, seq=seq, past_seq=past)
        spec = spec_of(self.encoding, cache)
        inputs = seeded_inputs(spec, sizes, 0)
        block = self._block(cache)
        found = {
            LOWER_BOUND: Entry(
                name=LOWER_BOUND,
                ours=False,
                load=lambda: lower_bound.LowerBoundRunner(spec, "cpu", THREADS),
                inputs=inputs,
            ),
            TORCH: Entry(name=TORCH, ours=False, load=lambda: _torch(block), inputs=inputs),
        }
        if compiled:
            runner = _compiled(block)  # one for all sessions: each compiles anew
            found[COMPILED] = Entry(name=COMPILED, ours=False, load=lambda: runner, inputs=inputs)
        own, theirs, missing = self._made(cache)
        for name, file in theirs.items():
            found[name] = _of_file(name, False, file, inputs)
        for name, file in own.items():
            found[name] = _of_file(name, True, file, inputs)
        if cache is not None:
            own, _, more = self._made(SHARED)
            missing = {**missing, **more}
            buffers = _buffers(spec_of(self.encoding, SHARED), inputs, past or 0)
            for name, file in own.items():
                found[name] = _of_file(name, True, file, buffers)
        return Cell(encoding=self.encoding, scenario=scenario, entries=found, missing=missing)

    def _block(self, cache: str | None) -> torch.nn.Module:
        if cache not in self._blocks:
            spec = spec_of(self.encoding, cache)
            self._blocks[cache] = build_block(spec, seeded_weights(spec, 0))
        return self._blocks[cache]

    def _made(self, cache: str | None) -> tuple[dict[str, Path], dict[str, Path], dict[str, str]]:
        """(posexport's files, the peers' files, what couldn't be made and why), by name."""
        if cache in self._files:
            return self._files[cache]
        spec, missing = spec_of(self.encoding, cache), {}
        weights = seeded_weights(spec, 0)
        own: dict[str, Path] = {}
        alone: set[str] = set()
        for form, target in FORMS:
            name = _own_name(form, target, cache)
            if target == "portable" and (cache is not None or form not in alone):
                continue  # with caches slower; else the same file, where that for ONNX Runtime isn't marked
            try:
                model = export(spec, weights, form=form, target=target)
            except RequestError as error:
                missing[name] = str(error)
                alone.add(form)
                continue
            if "posexport.target" in model.metadata_props:
                alone.add(form)
            own[name] = self._folder / f"{form}-{target}-{cache}.onnx"
            write_onnx(model, own[name])
        theirs = {} if cache == SHARED else self._peers(spec, next(iter(own.values())), missing)
        self._files[cache] = (own, theirs, missing)
        return self._files[cache]

    def _peers(self, spec: Spec, source: Path, missing: dict[str, str]) -> dict[str, Path]:
        made: dict[str, Path] = {}
        for opset, name in EXPORTED.items():
            if opset == 18 and self.encoding not in blocks.PLAIN:
                missing[name] = "written for the textbook's eight encodings only"
                continue
            path = self._folder / f"torch-{opset}-{spec.kv_cache}.onnx"
            try:
                alternatives.write_plain(source, path, opset)
            except RequestError as error:
                missing[name] = str(error)
                continue
            made[name] = path
        plain = made.get(EXPORTED[20])
        for name, write in OPTIMIZED.items() if plain is not None else ():
            assert plain is not None
            path = self._folder / f"{name}-{spec.kv_cache}.onnx"
            try:
                fused = write(plain, path, spec)
            except RequestError as error:
                missing[name] = str(error)
                continue
            if fused:
                made[name] = path
            else:
                missing[name] = f"it fuses nothing of {EXPORTED[20]}, so it is that file"
        return made


def _own_name(form: str, target: str, cache: str | None) -> str:
    return form + (" --target ort" if target == "ort" else "") + (BUFFERED if cache == SHARED else "")


def _of_file(name: str, ours: bool, file: Path, inputs: Arrays) -> Entry:
    return Entry(name=name, ours=ours, load=lambda: ort.load(file, {"threads": THREADS}), inputs=inputs)


def _torch(block: torch.nn.Module) -> TorchRunner:
    return TorchRunner(block, torch.float32, torch.device("cpu"))  # type: ignore[arg-type]


def _compiled(block: torch.nn.Module) -> TorchRunner:
    """Specialised for its shapes, as a deployment would be."""
    torch.compiler.reset()  # else what other blocks left counts against the limit of recompilations
    runner = _torch(block)
    made = torch.compile(block, dynamic=False)
    runner._block = made
    return runner


def _buffers(spec: Spec, grown: Arrays, past: int) -> Arrays:
    """The same tokens in buffers of PLACES places, of which `past` are written."""
    found = dict(grown)
    for name, array in grown.items():
        if name.startswith("past_"):
            found[name] = np.zeros((*array.shape[:2], PLACES, array.shape[3]), array.dtype)
            found[name][:, :, :past] = array
    found["write_indices"] = np.full((1,), past, np.int64)
    return {name: found[name] for name in graph_inputs(spec)}


def check(cell: Cell) -> dict[str, float]:
    """How far each candidate's output is from torch eager's; whoever is far off is no candidate."""
    want = cell.entries[TORCH].load().run(cell.entries[TORCH].inputs)["output"]
    found = {}
    for name, entry in cell.entries.items():
        if name == LOWER_BOUND:
            continue
        found[name] = float(np.abs(entry.load().run(entry.inputs)["output"] - want).max())
    return found


def turns(cell: Cell, burst: int, only: set[str] | None = None) -> dict[str, Callable[[], float]]:
    """A turn of each candidate on fresh sessions: one untimed run, which wakes threads, then the median of `burst`."""
    return {
        name: _turn(entry.load().prepare(entry.inputs), burst)
        for name, entry in cell.entries.items()
        if only is None or name in only
    }


def _turn(call: Callable[[], float], burst: int) -> Callable[[], float]:
    call()

    def turn() -> float:
        call()
        return statistics.quantile([call() for _ in range(burst)], 0.5)

    return turn
