"""What the timed parts share: blocks, the files of each form, and timed rounds of contenders in one process."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import torch
from onnx import helper

from posexport import temporary
from posexport.artifact.onnx_artifact import write_onnx
from posexport.bench import rounds, statistics
from posexport.errors import RequestError
from posexport.export import export
from posexport.models import ENCODINGS, read_spec
from posexport.models.block import Block, build_block
from posexport.models.weights import seeded_weights
from posexport.runtimes import ort
from posexport.runtimes.base import Arrays
from posexport.runtimes.torch_eager import TorchRunner
from posexport.spec.spec import Spec

THREADS, TORCH = 2, "torch"
COMMON = ("none", "learned", "sinusoidal", "relative", "t5", "rope", "rope2d", "alibi")
"""The encodings that most models use."""

PARAMETERS: Mapping[str, dict[str, Any]] = {
    "learned": {"max_positions": 4096},
    "swin": {"window_size": 32},
    "swinv2": {"window_size": 32},
}
"""The parameters that let an encoding take long prompts. All other parameters have their defaults."""

FLUSHED: Mapping[str, Any] = {"denormal_as_zero": True}
"""Session options that treat denormal numbers as zeros. All files that are compared with each other use them. With a
causal mask or alibi, the weights of distant keys are denormal numbers, and some CPUs are slow with those. ONNX Runtime
reads this option only for the first session of a process."""

Series = dict[str, list[list[float]]]
"""Seconds by name: a list of rounds for each session."""


def decodes(encoding: str) -> bool:
    """Whether an encoding is for decoders. Encodings of a grid are for encoders, except M-RoPE."""
    return encoding == "mrope" or ENCODINGS[encoding].axes < 2


def block_spec(name: str, hidden: int, heads: int, **fields: object) -> Spec:
    """The spec of a block named `encoding` or `encoding:parameter=value`."""
    encoding, _, parameter = name.partition(":")
    parameters = {**PARAMETERS.get(encoding, {}), **dict([parameter.split("=")] if parameter else ())}
    sizes = {"hidden_size": hidden, "num_heads": heads}
    return read_spec({"encoding": {"name": encoding, **parameters}, **sizes, **fields})


def write_block(spec: Spec, path: Path, **options: Any) -> None:
    write_onnx(export(spec, seeded_weights(spec, 0), **options), path)


def write_forms(spec: Spec, folder: Path, forms: Sequence[str]) -> tuple[dict[str, Path], dict[str, str]]:
    """Export each form for ONNX Runtime only and for all targets. Returns the distinct files, and why others are
    missing."""
    weights, files, missing = seeded_weights(spec, 0), {}, {}
    for form in forms:
        for target in ("ort", "portable"):
            name = f"{form} --target ort" if target == "ort" else form
            try:
                model = export(spec, weights, form=form, target=target)
            except RequestError as error:
                missing[name] = str(error)
                continue
            if target == "portable" or "posexport.target" in model.metadata_props:  # else both targets share a file
                files[name] = folder / f"{form}-{target}-{spec.kv_cache}.onnx"
                write_onnx(model, files[name])
    return files, missing


@attrs.frozen
class Contender:
    """One competitor. `load` opens it again for each session. The loaded object has `prepare`. It also needs `run` if
    outputs are compared here (posexport.runtimes.base.Runner)."""

    load: Callable[[], Any]
    inputs: Arrays


def of_file(path: Path, inputs: Arrays, **options: Any) -> Contender:
    """An ONNX file on ONNX Runtime's CPU provider, with options of posexport.runtimes.ort."""
    return Contender(lambda: ort.load(path, {"threads": THREADS, **options}), inputs)


def _number(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1])


def prepare_process() -> None:
    """Give torch as many threads as ONNX Runtime, and treat denormal numbers as zeros. Call it before this process
    opens any other session of ONNX Runtime."""
    torch.set_num_threads(THREADS)
    node = helper.make_node("Identity", ["x"], ["y"])
    graph = helper.make_graph([node], "identity", [_number("x")], [_number("y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    with temporary.folder() as folder:
        onnx.save(model, folder / "first.onnx")
        ort.load(folder / "first.onnx", {**FLUSHED})
    torch.set_flush_denormal(True)
    if np.float32(1e-30) * np.float32(1e-10) != 0:
        raise RuntimeError("denormal numbers aren't zeros here: measure this part in a process of its own")


def of_torch(block: Block, inputs: Arrays) -> Contender:
    runner = TorchRunner(block, torch.float32, torch.device("cpu"))
    return Contender(lambda: runner, inputs)


def seeded_block(spec: Spec) -> Block:
    return build_block(spec, seeded_weights(spec, 0))


def grown(shared: Arrays, past: int) -> Arrays:
    """The inputs for a growing cache: only the `past` places of the shared buffers that are written."""
    return {
        name: np.ascontiguousarray(array[:, :, :past]) if name.startswith("past_") else array
        for name, array in shared.items()
        if name != "write_indices"
    }


def error_of(contender: Contender, reference: Contender) -> float:
    """The largest difference between the output of a contender and that of the reference."""
    output, expected = (one.load().run(one.inputs)["output"] for one in (contender, reference))
    return float(np.abs(output - expected).max())


def check_equal(contenders: Mapping[str, Contender], what: str) -> None:
    """Raise RuntimeError if an output differs from that of the first contender: a wrong file must not compete."""
    first, *others = contenders
    for name in others:
        if not (error := error_of(contenders[name], contenders[first])) < 1e-3:
            raise RuntimeError(f"{what}: {name} differs from {first} by {error}")


def time_sessions(
    contenders: Mapping[str, Contender], sessions: int, count: Callable[[float], int], burst: int, seed: int = 0
) -> Series:
    """Time all contenders in alternation. Each session loads everything again, because memory placement biases a loaded
    model permanently.

    A turn is one untimed run, which wakes the threads, and the median of `burst` timed runs. `count` returns the number
    of rounds of a session, given the seconds of one round.
    """
    series: Series = {name: [] for name in contenders}
    for session in range(sessions):
        turns = {name: _turn(one.load().prepare(one.inputs), burst) for name, one in contenders.items()}
        seconds = sum((1 + burst) * turn() + rounds.PAUSE for turn in turns.values())
        for name, values in rounds.interleave(turns, count(seconds), seed=seed + session).items():
            series[name].append(values)
    return series


def _turn(call: Callable[[], float], burst: int) -> Callable[[], float]:
    def turn() -> float:
        call()
        return statistics.quantile([call() for _ in range(burst)], 0.5)

    turn()
    return turn


def merged(series: Series, first: int = 0) -> dict[str, list[float]]:
    """The rounds of all sessions together, starting with session number `first`."""
    return {name: list(itertools.chain(*sessions[first:])) for name, sessions in series.items()}


def cpu_seconds() -> float:
    """CPU seconds of this process and its children. The work of other processes does not count."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def ranking(series: Series, names: Sequence[str], reference: str) -> list[str]:
    """`names` from the fastest to the slowest in the first session, by their ratios to the reference."""
    return sorted(sorted(names), key=lambda name: statistics.ratio(series[name][0], series[reference][0]).median)
