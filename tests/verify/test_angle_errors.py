"""Errors of angles: the measurement, a fault that it shows, runtimes with wrong answers, and the page in docs/."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from helpers import small_spec

from posexport.errors import RequestError
from posexport.runtimes import RUNTIMES
from posexport.runtimes.pool import Answer
from posexport.spec.spec import Spec
from posexport.verify import angle_reference, angles
from posexport.verify.angles import EXACT, POSITIONS, Angles, Measured, measure, rows

ROOT = Path(__file__).parents[2]
HERE = {name: RUNTIMES[name] for name in ("torch", "ort-cpu")}
TORCH = {"torch": RUNTIMES["torch"]}


def _script() -> ModuleType:
    found = importlib.util.spec_from_file_location("angle_page", ROOT / "scripts" / "angle_errors.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


SCRIPT = _script()
RESULTS = ROOT / "docs" / "results"
DATA = json.loads((RESULTS / "angles.json").read_bytes())


def rope(**over: Any) -> Spec:
    return small_spec("rope", **{"hidden_size": 128, "num_heads": 2, **over})


def apart(spec: Spec) -> float:
    """The largest difference of the truth from the encoding's own angles in float64, up to position 65,535."""
    positions = POSITIONS[:-1]
    with torch.no_grad():
        made = Angles(spec, torch.float64)(rows(spec, positions))
    truth = angle_reference.cos_sin(spec, positions)
    return max(float(np.abs(a[:, 0].numpy() - b).max()) for a, b in zip(made, truth, strict=True))


@pytest.mark.parametrize("case", SCRIPT.CASES)
def test_two_ways_to_the_same_angles(case: str) -> None:
    """The formulas of the truth share no code with the encodings. In float64 both agree."""
    assert apart(SCRIPT.spec_of(case, "parity", "fp32")) < 1e-9


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("rope", {"rotary_dim": 12, "theta": 500.0}),
    ("rope", {"scaling": "yarn", "factor": 4, "original_max_position_embeddings": 256, "truncate": False}),
    ("rope", {"scaling": "yarn", "factor": 4, "original_max_position_embeddings": 8, "beta_fast": 1.5}),
    (
        "rope",
        {"scaling": "yarn", "factor": 8, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 0.9},
    ),
    ("rope", {"scaling": "yarn", "factor": 8, "original_max_position_embeddings": 64, "attention_factor": 0.8}),
    ("rope", {"scaling": "dynamic", "factor": 4, "original_max_position_embeddings": 100_000}),
    ("rope2d", {"theta_y": 30.0, "order": "yx", "factor": 2.0}),
    ("rope2d", {"spacing": "alternate"}),
    ("rope3d", {"theta_t": 50.0, "order": "xty", "split": "8,4,4"}),
    ("mrope", {"mrope_section": "4,2,2", "mrope_interleaved": True, "scaling": "linear", "factor": 3}),
    ("rope-dinov3", {"grid": "70000,70000"}),
    ("rope-dinov3", {"grid": "70000,50000"}),
]


@pytest.mark.parametrize(("encoding", "given"), VARIANTS)
def test_parameters_count_in_the_truth_too(encoding: str, given: dict[str, Any]) -> None:
    assert apart(small_spec(encoding, hidden_size=64, **given)) < 1e-9


def off(by: float) -> Callable[[int, float, torch.dtype], torch.Tensor]:
    """A function that returns RoPE's frequencies times 1 + `by`."""
    from posexport.models.angles import inverse_frequencies

    return lambda dim, theta, dtype: inverse_frequencies(dim, theta, dtype) * (1 + by)


@pytest.mark.parametrize("angles", ["parity", "exact"])
def test_frequencies_off_by_a_millionth_show(angles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = rope(angles=angles)
    (sound,) = measure([spec], TORCH)
    monkeypatch.setattr("posexport.models.scaling.inverse_frequencies", off(1e-6))
    (spoilt,) = measure([spec], TORCH)
    assert sound.errors[1] < EXACT < spoilt.errors[1]
    assert all(fault > 10 * was for was, fault in zip(sound.errors[1:5], spoilt.errors[1:5], strict=True))
    assert apart(spec) > 1e-6


def test_exact_angles_stay_exact_and_parity_drifts_in_the_artifact() -> None:
    found = list(measure([rope(), rope(angles="exact")], HERE))
    assert [(each.spec.angles, each.runtime) for each in found] == [
        ("parity", "torch"), ("parity", "ort-cpu"), ("exact", "torch"), ("exact", "ort-cpu")
    ]  # fmt: skip
    for each in found:
        far = each.errors[-1]
        assert each.engine is not None
        assert each.engine.split()[0] == ("torch" if each.runtime == "torch" else "onnxruntime")
        assert max(each.errors) < EXACT if each.spec.angles == "exact" else 1e-3 < far < 0.1


def test_runtimes_that_are_not_there_say_why() -> None:
    gone = attrs.evolve(RUNTIMES["ort-cuda"], package="no_such_package")
    runtimes = {"ort-cuda": gone, "tensorrt-import": RUNTIMES["tensorrt-import"]}
    first, second = measure([rope()], runtimes)
    assert (first.reason, first.failed) == ("not installed: pip install 'onnxruntime-gpu'", False)
    assert second.reason in (
        "it evaluates everything in float64, so no rounding shows",
        str(RUNTIMES["tensorrt-import"].missing()),
    )
    assert not second.failed


def test_a_runtime_that_fails_is_told_from_one_that_is_not_there() -> None:
    broken = attrs.evolve(RUNTIMES["ort-cpu"], options={"provider": "XPU"})
    (found,) = measure([rope()], {"ort-cpu": broken})
    assert (found.errors, found.failed) == ((), True)
    assert "provider" in str(found.reason)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda cos: cos[:, :, :-1], "has the shape [7, 1, 31]"),
        (lambda cos: np.where(cos > 0.99, np.nan, cos), "not finite"),
    ],
)
def test_a_wrong_answer_is_no_error_of_zero(spoil: Callable[[Any], Any], said: str) -> None:
    spec = rope()
    truth = angle_reference.cos_sin(spec, POSITIONS)
    outputs = {name: values[:, None] for name, values in zip(("cos", "sin"), truth, strict=True)}
    answer = Answer(outputs=({**outputs, "cos": spoil(outputs["cos"])},), describe={"engine": "x", "version": "1"})
    found = angles._judge(spec, "ort-cpu", answer, truth)
    assert (found.errors, found.failed) == ((), True)
    assert said in str(found.reason)


@pytest.mark.parametrize(("encoding", "over"), [("alibi", {}), ("relative", {"table": "learned"})])
def test_without_angles_there_is_nothing_to_measure(encoding: str, over: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=rf"angles were asked for with {encoding}, .* has no angles"):
        list(measure([small_spec(encoding, **over)], TORCH))


SAMPLE = [("sinusoidal", "exact", "fp32"), ("rope yarn", "parity", "fp32"), ("rope3d", "parity", "fp16")]


def departures(data: dict[str, Any], found: list[Measured]) -> list[str]:
    """The rows of the page that differ from the measurement by more than noise: processors differ in the last bit of a
    cosine."""
    case_of, _ = SCRIPT.specs()
    noise = {"fp32": 1e-7, "fp16": 5e-4, "bf16": 4e-3}
    wrong = []
    for each in found:
        name = (case_of[each.spec], each.spec.angles, each.spec.dtype, each.runtime)
        (row,) = [row for row in data["rows"] if tuple(list(row.values())[:4]) == name]
        if not np.allclose(row["errors"], each.errors, rtol=0.1, atol=noise[each.spec.dtype]):
            wrong.append(" ".join(name))
    return wrong


def test_the_page_holds_what_is_measured_and_a_wrong_number_shows() -> None:
    found = list(measure([SCRIPT.spec_of(*each) for each in SAMPLE], HERE))
    assert departures(DATA, found) == []
    wrong = [{**row, "errors": [*row["errors"][:-1], row["errors"][-1] * 1.2 + 1e-6]} for row in DATA["rows"]]
    assert len(departures({**DATA, "rows": wrong}, found)) == len(found)


def test_the_page_is_made_of_its_data_and_complete() -> None:
    page = (RESULTS / "angles.md").read_text(encoding="utf-8")
    assert page.partition("<!-- figures -->\n")[2] == "\n".join([*SCRIPT.figures(DATA), "<!-- end of figures -->\n"])
    assert f"below {EXACT:g} at any position" in page and f"those for {POSITIONS[-1] + 1:,} tokens" in page
    specs, refused = SCRIPT.specs()
    rows = {tuple(list(row.values())[:4]) for row in DATA["rows"]}
    for spec, case in specs.items():
        assert {(case, spec.angles, spec.dtype, name) for name in ("torch", "onnx-reference", "ort-cpu")} <= rows
    assert DATA["refused"] == refused
    assert tuple(DATA["positions"]) == POSITIONS
    assert set(DATA["not_run"]) | {row[3] for row in rows} == set(RUNTIMES)


def test_exact_angles_keep_their_promise_on_the_page() -> None:
    exact = [row for row in DATA["rows"] if (row["angles"], row["dtype"]) == ("exact", "fp32")]
    assert len({row["encoding"] for row in exact}) == 14
    assert all(max(row["errors"]) < EXACT for row in exact)
