"""Large files: weights stay on disk until they are read, and only one worker at a time has a file open."""

from __future__ import annotations

import mmap
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from posexport import machine
from posexport.artifact.weights_on_disk import around_weights
from posexport.graphs.evaluate import Evaluator
from posexport.runtimes import RUNTIMES, onnx_reference, ort, pool
from posexport.runtimes.pool import Pool, result
from posexport.verify.graph.job import GraphJob
from posexport.verify.graph.subject import LARGE, GraphSubject
from posexport.verify.result import VerifyOverrides

SIZE = 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A product whose weight is external data."""
    weight = np.arange(SIZE * SIZE, dtype=np.float32).reshape(SIZE, SIZE) / SIZE
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weight"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", SIZE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", SIZE])],
        [numpy_helper.from_array(weight, "weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="model.data", size_threshold=0)
    return tmp_path / "model.onnx"


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are told anew on Linux only")
def test_a_session_holds_weights_inside_a_large_file_once(tmp_path: Path) -> None:
    count, width = 20, 1024
    weights = [np.diag(np.full(width, number, np.float32)) for number in np.exp2(np.arange(count) % 3 - 1)]
    nodes = [helper.make_node("MatMul", [f"h{at}", f"weight{at}"], [f"h{at + 1}"]) for at in range(count)]
    values = [helper.make_tensor_value_info(f"h{at}", TensorProto.FLOAT, ["rows", width]) for at in (0, count)]
    inside = [numpy_helper.from_array(weight, f"weight{at}") for at, weight in enumerate(weights)]
    graph = helper.make_graph(nodes, "graph", values[:1], values[1:], inside)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, tmp_path / "a.onnx")
    assert (tmp_path / "a.onnx").stat().st_size > ort.LARGE
    del model, graph, inside
    before = machine.forget_peak()
    runner = ort.load(tmp_path / "a.onnx", {"threads": 1})
    assert machine.peak() - before < 1.25 * sum(weight.nbytes for weight in weights)
    product = float(np.prod([weight[0, 0] for weight in weights]))
    assert (runner.run({"h0": np.ones((1, width), np.float32)})[f"h{count}"] == product).all()


def test_a_large_file_of_two_names_is_opened_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "LARGE", 0)
    x = np.random.default_rng(0).standard_normal((3, SIZE)).astype(np.float32)
    (path.parent / "other.onnx").hardlink_to(path)
    np.testing.assert_allclose(ort.load(path, {}).run({"x": x})["y"], expected(x), rtol=1e-4)
    assert around_weights(path) is None


def expected(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return x @ (np.arange(SIZE * SIZE, dtype=np.float32).reshape(SIZE, SIZE) / SIZE)


def test_the_evaluator_gives_the_pages_of_a_weight_back(path: Path) -> None:
    model = ir.load(path)
    x = np.random.default_rng(0).standard_normal((3, SIZE)).astype(np.float32)
    evaluator = Evaluator(model)
    weight = model.graph.initializers["weight"].const_value
    assert isinstance(weight, ir.ExternalTensor)
    for _ in range(2):
        found = evaluator.run({"x": torch.from_numpy(x)})["y"]
        np.testing.assert_allclose(found, expected(x.astype(np.float64)), rtol=1e-12)
        assert weight.raw is None
    weight.numpy()
    assert weight.raw is not None  # a plain read keeps the weight in memory


def test_a_weight_that_another_reads_stays_open(path: Path) -> None:
    model = ir.load(path)
    weight = model.graph.initializers["weight"].const_value
    assert isinstance(weight, ir.ExternalTensor)
    held = weight.numpy()
    x = np.ones((2, SIZE), np.float32)
    found = Evaluator(model).run({"x": torch.from_numpy(x)})["y"]
    np.testing.assert_allclose(found, expected(x.astype(np.float64)), rtol=1e-12)
    assert held[-1, -1] == (SIZE * SIZE - 1) / SIZE


def test_onnx_reference_maps_weights(path: Path) -> None:
    runner = onnx_reference.load(path, {})
    x = np.random.default_rng(0).standard_normal((3, SIZE)).astype(np.float32)
    np.testing.assert_allclose(runner.run({"x": x})["y"], expected(x), rtol=1e-5, atol=1e-4)
    base: Any = runner._evaluator.rt_inits_["weight"]
    while isinstance(base, np.ndarray):
        base = base.base
    assert isinstance(base.obj if isinstance(base, memoryview) else base, mmap.mmap)


@pytest.mark.parametrize("alone", [False, True])
def test_one_worker_at_a_time(alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, busy, most = threading.Lock(), 0, 0

    class Slow:
        def __init__(self, *modules: str, environment: Mapping[str, str]) -> None:
            pass

        def ask(self, request: dict[str, Any], time_limit: float) -> dict[str, Any]:
            nonlocal busy, most
            with lock:
                busy += 1
                most = max(most, busy)
            time.sleep(0.3)
            with lock:
                busy -= 1
            return {"ok": True, "describe": {}}

        def close(self) -> None:
            pass

        def stop(self) -> None:
            stopped.append(self)

    stopped: list[Slow] = []
    monkeypatch.setattr(pool, "Worker", Slow)
    with Pool(60, busy=3) as workers:
        if alone:
            workers.one_at_a_time()
        names = ("ort-cpu", "onnx-reference", "torch")
        answers = [workers.submit(RUNTIMES[name], tmp_path / "model.onnx", []) for name in names]
        assert all(result(answer).failure is None for answer in answers)
    assert (most == 1) is alone
    assert bool(stopped) is alone  # a worker is stopped before another one opens the file


@pytest.mark.parametrize("more", [0, 1])
def test_files_from_a_size_on_are_large(more: int) -> None:
    asked, size = [], LARGE + more
    is_large = GraphSubject.is_large.fget(SimpleNamespace(weight_bytes=size))  # type: ignore[attr-defined]
    subject = SimpleNamespace(weight_bytes=size, is_large=is_large, path=Path("model.onnx"), wide={})
    job_of_file = GraphJob(
        subject=subject,  # type: ignore[arg-type]
        pool=SimpleNamespace(one_at_a_time=lambda: asked.append(True), folder=Path()),  # type: ignore[arg-type]
        runtimes={},
        overrides=VerifyOverrides(),
        cases=[],
    )
    job_of_file.submit({})
    assert len(asked) == more
