"""The search for the first wrong node rewrites the file without holding its weights in memory."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from small_graphs import Graph

from posexport.runtimes.pool import Answer
from posexport.verify.graph.locate import _Search

WEIGHTS = 8
SIDE = 4096
"""The file has 8 weights of 64 MiB."""

SCRIPT = """
import resource, sys
from pathlib import Path
from test_locate_memory import searched
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
searched(Path(sys.argv[1]), Path(sys.argv[2]), opens=False)
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


def written(folder: Path, side: int, *, outside: bool) -> Path:
    """Write a chain of products with large weights, inside the file or as external data (`outside`)."""
    g, x = Graph(), "x"
    for at in range(WEIGHTS):
        x = g.op("MatMul", x, g.weight(f"w{at}", np.full((side, side), 1 / side, np.float32)), name=f"y{at}")
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", side]) for name in ("x", x)]
    graph = helper.make_graph(g.nodes, "main", infos[:1], infos[1:], g.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, folder / "chain.onnx", save_as_external_data=outside, location="weights", size_threshold=1024)
    return folder / "chain.onnx"


def searched(path: Path, folder: Path, *, opens: bool = True) -> dict[str, Any]:
    """All values of the file that a runtime computes in the search. The search writes into `folder`. If `opens` is
    false, the runtime does not open the file."""

    def submit(row: Any, path: Path, arrays: list[Any], *given: Any, **named: Any) -> Any:
        names = [value.name for value in onnx.load(path, load_external_data=False).graph.output] if opens else []
        outputs = onnxruntime.InferenceSession(path).run(names, arrays[0]) if opens else []
        answer = Answer(outputs=(dict(zip(names, outputs, strict=True)),))
        future: Future[Answer] = Future()
        future.set_result(answer)
        return future

    job = SimpleNamespace(
        path=path,
        runs={"ort-cpu": SimpleNamespace(options={})},
        subject=SimpleNamespace(wide={}),
        pool=SimpleNamespace(submit=submit),
    )
    shape = onnx.load(path, load_external_data=False).graph.input[0].type.tensor_type.shape if opens else None
    side = 1 if shape is None else shape.dim[1].dim_value
    case = SimpleNamespace(arrays={"x": np.ones((2, side), np.float32)})
    search: Any = _Search(job, SimpleNamespace(name="ort-cpu"), case, folder)  # type: ignore[arg-type]
    have: dict[str, Any] = search._run([f"y{at}" for at in range(WEIGHTS)])
    return have


@pytest.mark.parametrize("outside", [False, True])
def test_all_values_are_outputs(outside: bool, tmp_path: Path) -> None:
    path, folder = written(tmp_path, 64, outside=outside), tmp_path / "search"
    folder.mkdir()
    have = searched(path, folder)
    assert have.keys() == {f"y{at}" for at in range(WEIGHTS)}
    assert all(np.allclose(value, 1.0) for value in have.values())
    assert [*folder.iterdir()] == []  # no copy of the weights stays


@pytest.mark.slow
@pytest.mark.parametrize("outside", [False, True])
def test_the_weights_are_not_held(outside: bool, tmp_path: Path) -> None:
    path, folder = written(tmp_path, SIDE, outside=outside), tmp_path / "search"
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}
    command = [sys.executable, "-c", SCRIPT, str(path), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert int(done.stdout) < SIDE**2 * 4 * WEIGHTS / 2
