"""The tools of the mutation test: its faults are faults, its originals are sound, and its page matches its data."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import numpy as np
import onnx
import pytest
from mutation import page, sound_specs
from mutation.artifacts import ARTIFACTS, Artifact, make_spec, write_artifact
from mutation.corners import CLASSES, FAMILIES, corner_mutant
from mutation.corners.bands import draw_band
from mutation.inputs import REACH, Aim, broad_aims, draw
from mutation.oracle import EQUIVALENT, FAULT, Oracle
from mutation.random_faults import KINDS, random_mutant
from mutation.scoring import Plan, score
from mutation.sound_specs import Alarms, draw_specs, false_alarms
from mutation.surgery import copy_of
from result_pages import figures_of

from posexport.models import ENCODINGS
from posexport.spec.spec import Spec

pytestmark = pytest.mark.few_inputs

RESULTS = Path(__file__).parents[2] / "docs/results"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return write_artifact("rope-padded", tmp_path_factory.mktemp("mutation"))


@pytest.fixture(scope="module")
def oracle(artifact: Artifact) -> Oracle:
    return Oracle(artifact)


def test_artifacts_have_every_encoding_and_drawn_specs_too() -> None:
    assert {make_spec(**arguments).encoding.name for arguments, _ in ARTIFACTS.values()} == set(ENCODINGS)
    assert len(ARTIFACTS) >= 30
    assert {drawn.spec.encoding.name for drawn in draw_specs(len(ENCODINGS), 3)} == set(ENCODINGS)
    assert len(KINDS) == 20
    assert {kind for kind, _ in FAMILIES.values()} == set(CLASSES)


def test_sound_specs_go_on_where_a_run_before_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verified: list[int] = []

    def verify(drawn: object, start: int, runtimes: object) -> Alarms:
        verified.append(start)
        return Alarms(passed={"ort-cpu": 2}, failed=[f"of {start}"])

    monkeypatch.setattr(sound_specs, "_verified", verify)
    specs = draw_specs(4, 0)
    for drawn in (specs[:2], specs, specs):
        alarms = false_alarms(drawn, group=2, kept=tmp_path)
    assert verified == [0, 2]
    assert alarms == Alarms(passed={"ort-cpu": 4}, failed=["of 0", "of 2"])
    monkeypatch.setattr(sound_specs, "_sources", lambda: "changed")
    false_alarms(specs, ("onnx-reference",), group=2, kept=tmp_path)
    assert verified == [0, 2, 0, 2]


@pytest.mark.slow
def test_sound_specs_have_every_field_and_parameter() -> None:
    """Fields that are not drawn are not tested for false alarms."""
    specs = [drawn.spec for drawn in draw_specs(600 * len(ENCODINGS), 0)]
    of_spec = {field.name for field in attrs.fields(Spec)}
    constant = {name for name in of_spec if len({repr(getattr(spec, name)) for spec in specs}) == 1}
    for encoding, kind in ENCODINGS.items():
        drawn = [spec.encoding for spec in specs if spec.encoding.name == encoding]
        for field in attrs.fields(kind):
            if len({repr(getattr(each, field.name)) for each in drawn}) == 1:
                constant.add(f"{encoding}.{field.name}")
    assert not constant


def test_the_original_is_equivalent_to_itself_and_to_other_names(artifact: Artifact, oracle: Oracle) -> None:
    same = copy_of(artifact.model)
    same.graph.doc_string = "the same"
    assert oracle.judge(same, broad_aims(artifact.spec), 1, (0,)).state == EQUIVALENT


@pytest.mark.slow
def test_every_family_that_an_artifact_has_makes_another_graph_with_the_same_weights(artifact: Artifact) -> None:
    random, made = np.random.default_rng(0), 0
    for name in FAMILIES:
        mutated = corner_mutant(artifact, name, random)
        if mutated is not None:
            model, made = mutated[0], made + 1
            onnx.checker.check_model(model)
            kept = {
                tensor.name: tensor.raw_data for tensor in model.graph.initializer if tensor.name in artifact.weights
            }
            assert kept == {
                tensor.name: tensor.raw_data
                for tensor in artifact.model.graph.initializer
                if tensor.name in artifact.weights
            }, name
            assert model.graph != artifact.model.graph, name
    assert made > 25


@pytest.mark.parametrize(
    "name",
    [
        "mask ignored from a column on",
        "causality lost in a chunk over many keys",
        "outputs off between two lengths",
        "padding ignored in chunks over a band",
        "zero rows of a cache give NaN",
        "softmax without its maximum in long rows",
    ],
)
def test_a_corner_shows_there_and_nowhere_else(artifact: Artifact, oracle: Oracle, name: str) -> None:
    mutated = corner_mutant(artifact, name, np.random.default_rng(1))
    assert mutated is not None
    model, fault = mutated
    assert oracle.judge(model, fault.aims, 3, (0,)).state == FAULT
    elsewhere = Aim(batch=(1, 2), seq=(1, 4), past=(0, 4))
    assert oracle.judge(model, [elsewhere], 5, (0,)).state == EQUIVALENT


def test_bands_are_wide_and_differ_from_seed_to_seed() -> None:
    for low, high, least, width in ((17, REACH.row, 1.5, 0), (65, REACH.row, 1.9, 0), (1, REACH.keys, 1.9, 31)):
        bands = {draw_band(np.random.default_rng(seed), low, high, least=least, width=width) for seed in range(200)}
        assert all(low <= first < last <= high for first, last in bands)
        assert all(last >= least * first - 1 and last - first >= width for first, last in bands)
        assert len(bands) > 100


def test_random_mutants_are_the_same_for_the_same_numbers(artifact: Artifact) -> None:
    for kind in KINDS:
        first, second = (random_mutant(artifact, kind, np.random.default_rng(5)) for _ in range(2))
        assert (first is None) == (second is None)
        if first is not None and second is not None:
            assert first[1] == second[1]


def test_inputs_stay_within_reach() -> None:
    wide = Aim(batch=(1, 99), seq=(1, 9999), past=(0, 9999), encoder=(1, 9999), start=(0, 2**30))
    random = np.random.default_rng(0)
    for name in ("llama", "none-cross", "rope-shared", "swin", "rope-exact"):
        spec = make_spec(**ARTIFACTS[name][0])
        arrays = draw(spec, wide, random)
        assert len(next(iter(arrays.values()))) <= REACH.crowd
        keys = arrays["past_key"].shape[2] if "past_key" in arrays else 0
        assert keys <= REACH.keys + 5
        if "position_ids" in arrays:
            assert arrays["position_ids"].max() <= REACH.exact_position
        longest = attrs.evolve(wide, batch=(1, 1), seq=(9999, 9999), past=(0, 0))
        assert next(iter(draw(spec, longest, random).values())).shape[1] == REACH.row
    assert draw(make_spec("swin", window_size=7), wide, random)["position_ids"].max() == 6


@pytest.mark.slow
def test_a_score_counts_what_verify_catches() -> None:
    made = score(["swin"], Plan(random_count=3, corner_share=0.1))
    assert made.alarms == []
    row = page.counts(made.mutants)
    assert row["made"] == len(made.mutants) > 0
    assert 0 < row["caught"] <= row["faults"]


def test_the_page_is_of_the_committed_data_and_reaches_the_targets() -> None:
    data = json.loads((RESULTS / "mutation.json").read_bytes())
    assert figures_of(RESULTS / "mutation.md") == "\n".join(page.figures(data)) + "\n"
    for name, target in page.TARGETS.items():
        assert page.share(data["score"][name]) >= target, name
    assert data["score"]["artifacts"] == len(ARTIFACTS)
    assert data["score"]["failed_originals"] == []
    assert data["score"]["random"]["faults"] >= 500
    assert data["score"]["corner"]["faults"] >= 300
    assert [part["specs"] for part in data["sound"]] == [500, 50]
    assert all(part["failed"] == [] for part in data["sound"])
