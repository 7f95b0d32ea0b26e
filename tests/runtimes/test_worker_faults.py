"""If an engine ends or answers wrongly, the verdict fails and says so, and the next request is answered."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from helpers import CHILD_PATH, case
from verify_helpers import write

from posexport.errors import Reason, RequestError
from posexport.runtimes import RUNTIMES, Runtime
from posexport.runtimes.pool import Answer, Pool, result
from posexport.verify import verify
from posexport.verify.result import FAILED, NOT_RUN, PASSED

HIDDEN = {"hidden_states": np.ones((2, 3, 4), np.float32)}

ENDS = {
    "exit": "crashed: the process ended with exit code 3",
    "system-exit": "crashed: the process ended with exit code 1 (gave up)",
    "abort": "crashed: the process was killed by SIGABRT",
    "thread": "crashed: the process ended with exit code 5",
    "cut-answer": "crashed: the process ended with exit code 3",
}
"""Ways to end the process, and the text of the failure."""

ANSWERS = {
    "none": "AttributeError: 'NoneType' object has no attribute 'items'",
    "list": "AttributeError: 'list' object has no attribute 'items'",
    "no-array": "TypeError: 'output' is list: tensors are numpy arrays by name",
    "number-name": "TypeError: 1 is ndarray: tensors are numpy arrays by name",
    "objects": "is object: tensors are numbers or booleans",
    "raise": "KeyError: 'no such key'",
    "memory": "Unable to allocate",
    "recursion": "RecursionError: maximum recursion depth exceeded",
}
"""Wrong answers that are errors but do not end the process."""

OUTPUTS = {
    "text": "is <U1: tensors are numbers or booleans",
    "shape": "has shape [2, 9, 1], it must be [2, 9, 32]",
    "nan": "values not finite",
    "nothing": "is missing: the runtime gave none",
    "two": "output 'more' is not one of the block's",
    "wide": "is fp64, it must be fp32",
    "echo": "output 'output' is missing: the runtime gave hidden_states",
}
"""Outputs that are not valid outputs of the block, and the text of the failure."""

pytestmark = [pytest.mark.usefixtures("real_processes"), pytest.mark.few_inputs]


def wrong(how: str, **options: Any) -> Runtime:
    return Runtime(
        name=f"wrong-{how}",
        summary="",
        module="engines.wrong",
        package="os",
        install="",
        options={"how": how, **options},
    )


@pytest.fixture(autouse=True, scope="module")
def _findable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", CHILD_PATH)
        yield


@pytest.fixture(scope="module")
def pool(_findable: None) -> Iterator[Pool]:
    with Pool(time_limit=30) as made:
        yield made


def ask(pool: Pool, how: str, **options: Any) -> Answer:
    return result(pool.submit(wrong(how, **options), Path("x.onnx"), [HIDDEN], key="one"))


def answers(pool: Pool) -> None:
    """Check that the next request is answered normally."""
    found = ask(pool, "echo")
    assert found.failure is None
    np.testing.assert_array_equal(found.outputs[0]["hidden_states"], HIDDEN["hidden_states"])


@pytest.mark.parametrize("how", ENDS)
def test_an_engine_that_ends_its_process(pool: Pool, how: str) -> None:
    found = ask(pool, how)
    assert found.outputs == ()
    assert found.failure is not None
    assert found.failure.code == ("crashed" if how == "abort" else "exited")
    assert found.failure.text.startswith(ENDS[how])
    answers(pool)


@pytest.mark.parametrize("how", ANSWERS)
def test_an_engine_that_raises_or_answers_with_what_no_tensor_is(pool: Pool, how: str) -> None:
    found = ask(pool, how)
    assert found.outputs == ()
    assert str(found.failure).startswith(ANSWERS[how]) or ANSWERS[how] in str(found.failure)
    assert "\n" not in str(found.failure)
    assert found.failure is not None
    assert found.failure.code == ("memory" if how == "memory" else "failed")
    answers(pool)


def test_a_description_that_is_no_text_is_told(pool: Pool) -> None:
    assert "not JSON serializable" in str(ask(pool, "echo", bad_describe=True).failure)
    answers(pool)


def test_megabytes_of_noise_neither_block_nor_reach_the_answer(pool: Pool) -> None:
    found = ask(pool, "shout")
    assert found.failure is None
    assert list(found.outputs[0]) == ["hidden_states"]
    ended = str(ask(pool, "exit").failure)
    assert ended.startswith(ENDS["exit"])
    assert len(ended) < 300
    answers(pool)


def test_a_module_that_is_not_there_is_an_error(pool: Pool) -> None:
    row = Runtime(name="gone", summary="", module="engines.gone", package="os", install="")
    assert "ModuleNotFoundError" in str(result(pool.submit(row, Path("x"), [HIDDEN], key="one")).failure)
    answers(pool)


def test_tensors_leave_no_files_behind(pool: Pool) -> None:
    for how in ("echo", "raise", "exit"):
        ask(pool, how)
    assert list(pool.folder.iterdir()) == []


def test_a_full_disk_is_one_sentence(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, arrays: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("posexport.runtimes.tensors.save_arrays", full)
    with pytest.raises(RequestError, match="No space left on device"):
        ask(pool, "echo")
    monkeypatch.undo()
    answers(pool)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_child_of_the_engines_own_that_outlives_it_does_not_block() -> None:
    with Pool(time_limit=20) as pool:
        assert ask(pool, "grandchild").failure == Reason("killed", "crashed: the process was killed by SIGKILL")
        answers(pool)


def test_a_process_that_ends_between_two_requests_is_replaced(pool: Pool) -> None:
    answers(pool)
    process = pool._workers["one"][0]._process
    assert process is not None
    process.kill()
    process.wait()
    answers(pool)
    assert process.stdin is not None
    assert process.stdin.closed
    assert process.stdout is not None
    assert process.stdout.closed


@pytest.mark.slow
def test_nothing_is_left_when_the_pool_closes() -> None:
    threads, children = set(threading.enumerate()), _children()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # collecting an open file warns
        with Pool(time_limit=30) as made:
            for how in ("echo", "exit", "echo", "raise"):
                ask(made, how)
            result(made.submit(wrong("echo"), Path("x"), [HIDDEN], key="two"))
            made.start(wrong("three"))
            assert len(_children() - children) == 3
        gc.collect()
    assert set(threading.enumerate()) <= threads
    assert _children() == children  # zombies count
    assert not made.folder.exists()


def test_a_pool_that_an_error_leaves_is_closed_all_the_same() -> None:
    children = _children()
    with contextlib.suppress(KeyboardInterrupt), Pool(time_limit=30) as made:
        ask(made, "echo")
        made.submit(wrong("echo"), Path("x"), [HIDDEN])
        raise KeyboardInterrupt
    assert _children() == children


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_verify_fails_each_wrong_engine_and_judges_the_others_as_ever(tmp_path: Path) -> None:
    path = write(tmp_path, "rope", case("rope"))
    bad = {**OUTPUTS, "exit": ENDS["exit"], "objects": "is object: tensors are numbers or booleans"}
    rows = {f"wrong-{how}": wrong(how) for how in bad}
    absent = {"absent": Runtime(name="absent", summary="", module="engines.wrong", package="no_such", install="it")}
    sound = {name: RUNTIMES[name] for name in ("torch", "ort-cpu")}
    report = verify([path], runtimes={**rows, **absent, **sound}, reach={"seq": 20})
    found = {verdict.runtime: verdict for verdict in report.verdicts}
    assert list(found) == [*rows, "absent", "torch", "ort-cpu"]
    assert {name: found[name].state for name in ("absent", "torch", "ort-cpu")} == {
        "absent": NOT_RUN, "torch": PASSED, "ort-cpu": PASSED,
    }  # fmt: skip
    for how, said in bad.items():
        verdict = found[f"wrong-{how}"]
        assert (how, verdict.state) == (how, FAILED)
        assert said in str(verdict.reason), how
    assert found["absent"].reason == "not installed: pip install 'it'"
    assert report.exit_code() == 1
    assert report.unreadable == ()


def test_a_worker_that_cannot_start_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*arguments: object, **more: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    with Pool(time_limit=5) as made:
        monkeypatch.setattr(subprocess, "Popen", none)
        with pytest.raises(RequestError, match="Cannot allocate memory"):
            ask(made, "echo")
