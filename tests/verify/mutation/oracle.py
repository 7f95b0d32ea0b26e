"""The oracle: it decides whether a mutant is a fault, without verify.

ONNX Runtime runs the original and the mutant on the oracle's own inputs. A difference counts as a fault if it is at
least REAL times the rounding error of the original on the same inputs. The rounding error is the original's distance
from the block in float64, and at least one unit in the last place of the output's root mean square.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import time
import warnings
from collections.abc import Iterable, Sequence

import attrs
import numpy as np
import onnx
import onnxruntime
import torch

from mutation.artifacts import Artifact
from mutation.inputs import Aim, Array, Arrays, draw
from posexport.models.block import build_block
from posexport.spec.contract import graph_outputs

REAL, BORDERLINE = 50.0, 5.0
"""Multiples of the rounding error. A difference of at least REAL is a fault, and one below BORDERLINE is not."""

UNIT = {"fp32": 2.0**-22, "fp16": 2.0**-10}

LONGEST, MEMORY = 120, 24 * 2**30
"""Seconds and bytes of address space that one mutant may take."""

EQUIVALENT, DOUBTFUL, FAULT, BROKEN = "equivalent", "borderline", "fault", "does not run"


@attrs.frozen
class Shown:
    """The oracle's decision, the largest ratio of difference to rounding error, and the sizes of those inputs."""

    state: str
    ratio: float
    sizes: str = ""


def open_session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """A session on the CPU with one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _limit() -> None:
    """Limit this process's time and memory, and silence its stderr."""
    signal.alarm(LONGEST)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)


class Oracle:
    """Judges the mutants of one artifact, the original."""

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self.seconds = 0.0
        torch.set_num_threads(1)  # a forked child process would lack torch's threads
        self._session = open_session(artifact.model)
        self._block = build_block(artifact.spec, artifact.weights, torch.float64)
        self._names = list(graph_outputs(artifact.spec))

    def judge(self, mutant: onnx.ModelProto, aims: Iterable[Aim], tries: int, seed: Sequence[int]) -> Shown:
        """Draw `tries` inputs for each aim until one shows a fault."""
        started = time.perf_counter()
        try:
            return self._judge(mutant, aims, tries, seed)
        finally:
            self.seconds += time.perf_counter() - started

    def judge_apart(self, mutant: onnx.ModelProto, aims: Iterable[Aim], tries: int, seed: Sequence[int]) -> Shown:
        """Like `judge`, but in a separate process: some broken graphs abort ONNX Runtime or take all memory."""
        started = time.perf_counter()
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fork warns that it does not copy threads; ONNX Runtime's are idle
            child = os.fork()
        if child == 0:
            try:
                _limit()
                os.write(writing, pickle.dumps(self._judge(mutant, aims, tries, seed)))
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as file:
            answer = file.read()
        os.waitpid(child, 0)
        self.seconds += time.perf_counter() - started
        shown: Shown = pickle.loads(answer) if answer else Shown(BROKEN, np.inf)
        return shown

    def _judge(self, mutant: onnx.ModelProto, aims: Iterable[Aim], tries: int, seed: Sequence[int]) -> Shown:
        random = np.random.default_rng(seed)
        try:
            session = open_session(mutant)
        except Exception:  # ONNX Runtime refuses the graph, with any kind of exception
            return Shown(BROKEN, np.inf)
        worst, ran, refused = Shown(EQUIVALENT, 0.0), 0, ""
        for aim in aims:
            for _ in range(tries):
                arrays = draw(self.artifact.spec, aim, random)
                expected = self._original(arrays)
                if expected is None:
                    continue
                sizes = " ".join(f"{name}{list(array.shape)}" for name, array in arrays.items())
                try:
                    actual = dict(zip(self._names, session.run(self._names, arrays), strict=True))
                except Exception:
                    refused = sizes
                    continue
                ran += 1
                ratio = self._ratio(expected, actual, arrays)
                if ratio > worst.ratio:
                    state = FAULT if ratio >= REAL else DOUBTFUL if ratio >= BORDERLINE else EQUIVALENT
                    worst = Shown(state, ratio, sizes)
                if worst.state == FAULT:
                    return worst
        if refused:  # if the mutant runs on other inputs, its failure on these is a fault that inputs can show
            return Shown(FAULT, np.inf, refused) if ran else Shown(BROKEN, np.inf, refused)
        return worst

    def _original(self, arrays: Arrays) -> dict[str, Array] | None:
        """The original's outputs. None if it refuses these inputs or if its outputs are not all finite."""
        try:
            outputs = dict(zip(self._names, self._session.run(self._names, arrays), strict=True))
        except Exception:
            return None
        return outputs if all(np.isfinite(values).all() for values in outputs.values()) else None

    def _ratio(self, expected: dict[str, Array], actual: dict[str, Array], arrays: Arrays) -> float:
        """The largest difference of an output as a multiple of its rounding error."""
        exact: dict[str, Array] | None = None
        worst = 0.0
        for name, values in expected.items():
            if actual[name].shape != values.shape or not np.isfinite(actual[name]).all():
                return np.inf
            wide = values.astype(np.float64)
            difference = float(np.abs(actual[name].astype(np.float64) - wide).max(initial=0.0))
            if difference == 0.0:
                continue
            exact = exact or self._exact(arrays)
            rounding = float(np.abs(wide - exact[name]).max())
            unit = UNIT[self.artifact.spec.dtype] * float(np.sqrt((wide**2).mean()))
            worst = max(worst, difference / max(rounding, unit, 1e-30))
        return worst

    def _exact(self, arrays: Arrays) -> dict[str, Array]:
        tensors = [torch.from_numpy(array) for array in arrays.values()]
        tensors = [tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors]
        with torch.inference_mode():
            made = self._block(*tensors)
        values = made if isinstance(made, tuple) else (made,)
        return {name: tensor.numpy() for name, tensor in zip(self._names, values, strict=True)}
