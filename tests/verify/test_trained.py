"""Sets of inputs that reach the numbers of a checkpoint's configuration: its vocabulary, trained length and windows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import pytest
from helpers import cli
from onnx import numpy_helper

from posexport.graphs.cases import cases_of
from posexport.graphs.roles import Role
from posexport.verify.graph.cases import GraphCase, drawn_cases
from posexport.verify.graph.trained import LONG, Trained, trained

pytestmark = pytest.mark.few_bands

TOKENS = Role(
    name="input_ids",
    kind="token_ids",
    dtype="int64",
    shape=("b", "s"),
    axes=("batch", "seq"),
    stated=("b", "s"),
    rows=500,
)
PLACES = attrs.evolve(TOKENS, name="position_ids", kind="position_ids", rows=400)
CACHE = attrs.evolve(
    TOKENS,
    name="past_key_values.0.key",
    kind="past",
    dtype="fp32",
    shape=("b", 2, "p", 4),
    axes=("batch", 2, "past", 4),
    stated=("b", 2, "p", 4),
    rows=None,
)
ROLES = {role.name: role for role in (TOKENS, PLACES, CACHE)}

CONFIGS: list[tuple[dict[str, Any], Trained]] = [
    ({}, Trained()),
    ({"vocab_size": 90, "n_positions": 70}, Trained(vocabulary=90, length=70)),
    ({"vocab_size": 90, "text_config": {"vocab_size": 80, "sliding_window": 6}}, Trained(vocabulary=80, windows=(6,))),
    ({"vocab_size": 90, "decoder_vocab_size": 70}, Trained(vocabulary=90, decoder_vocabulary=70)),
    ({"src_vocab_size": 90, "tgt_vocab_size": 70}, Trained(decoder_vocabulary=70)),
    ({"vocab_size": 90, "decoder_vocab_size": 0}, Trained(vocabulary=90)),
    ({"sliding_window": 6, "use_sliding_window": False}, Trained()),
    ({"sliding_window": 6, "layer_types": ["full_attention"] * 2}, Trained()),
    ({"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}, Trained(windows=(6,))),
    ({"attention_chunk_size": 9, "sliding_window": None, "vocab_size": "x"}, Trained(windows=(9,))),
    ({"vocab_size": 9, "window_size": 6, "attention_layers": ["global"]}, Trained(vocabulary=9)),
    ({"vocab_size": 9, "window_size": 6, "attention_layers": ["global", "local"]}, Trained(vocabulary=9, windows=(6,))),
    ({"vocab_size": 9, "attention_window_size": 6}, Trained(vocabulary=9, windows=(6,))),
    ({"vocab_size": 9, "sliding_window_size": 6, "index_topk": 7}, Trained(vocabulary=9, windows=(6, 7))),
    ({"window_size": 7}, Trained()),
    (
        {"max_position_embeddings": 90, "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 40}},
        Trained(length=90, other_angles=40),
    ),
    (
        {"original_max_position_embeddings": 50, "rope_parameters": {"full_attention": {"rope_type": "longrope"}}},
        Trained(other_angles=50),
    ),
    ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 60}, Trained(other_angles=60)),
    ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 50}}, Trained()),
    ({"n_positions": 70, "rope_scaling": {"type": "dynamic", "factor": 4.0}}, Trained(length=140, other_angles=70)),
    (
        {"text_config": {"max_position_embeddings": 90, "rope_parameters": {"full": {"rope_type": "dynamic"}}}},
        Trained(length=180, other_angles=90),
    ),
    ({"rope_scaling": {"type": ["dynamic"]}, "rope_parameters": {"rope_type": "dynamic"}}, Trained()),
]


def not_shown(model: Trained, cases: list[GraphCase]) -> list[str]:
    """The notes on sizes that these cases did not reach."""
    return [*model.unread(model.tables(ROLES), cases).values(), *model.windows_not_shown(cases)]


@pytest.mark.parametrize(("config", "sizes"), CONFIGS)
def test_sizes_are_those_of_the_configuration(config: dict[str, Any], sizes: Trained, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert trained(tmp_path) == sizes


def test_rows_are_decoded_up_to_where_angles_change() -> None:
    """In transformers' cache, keys of a short row keep its angles when the row grows. A pass over a long row does not
    show this."""
    assert [Trained(length=90, other_angles=40).decodes, Trained(length=90).decodes, Trained().decodes] == [
        40,
        90,
        None,
    ]


@pytest.mark.parametrize("seed", range(3))
def test_whole_tables_windows_and_usual_lengths_are_reached(seed: int) -> None:
    model = Trained(vocabulary=3000, length=1024, windows=(300,))
    corners = list(model.corners(ROLES, 10_000, seed))
    cases = drawn_cases(model.roles(ROLES), seed, own=corners)
    assert {*np.concatenate([case.arrays["input_ids"].ravel() for case in cases]).tolist()} == {*range(3000)}
    assert {*np.concatenate([case.arrays["position_ids"].ravel() for case in cases]).tolist()} == {*range(1024)}
    assert not_shown(model, cases) == []
    lengths = [case.sizes["seq"] for case in cases if case.sizes["past"] == 0]
    assert LONG in lengths
    assert {case.keys - case.sizes["seq"] for case in cases} >= {298}
    assert any(case.keys > 302 and case.sizes["seq"] == 2 for case in cases)


def test_what_costs_too_much_is_said() -> None:
    model = Trained(vocabulary=128_000, length=4096, windows=(8000,))
    cases = drawn_cases(model.roles(ROLES), 0, own=list(model.corners(ROLES, 10**9, 0)))
    said = not_shown(model, cases)
    assert len(said) == 3
    assert said[0].endswith("of 128000 token ids were not read")
    assert said[1].endswith("of 4096 positions were not read")
    assert said[2] == "no query had more keys than the window of 8000"
    assert max(case.sizes["batch"] * case.sizes["seq"] for case in cases) < 200


def test_angles_that_change_are_reached_or_named() -> None:
    """Prompts and steps have positions at the end of those that are tried. Files without positions may need longer
    prompts."""
    roles = {"position_ids": attrs.evolve(PLACES, rows=None)}
    model = Trained(length=2048, other_angles=1024)
    cases = drawn_cases(model.roles(roles), 0, own=list(model.corners(roles, 10, 0)))
    assert list(model.angles_not_shown(cases)) == []
    assert sum((case.farthest or 0) >= 1024 for case in cases) >= 2
    unplaced = drawn_cases({"input_ids": TOKENS}, 0)
    said = ["no position was 1024 or more, from where on the model has other angles"]
    assert list(model.angles_not_shown(unplaced)) == said
    assert list(attrs.evolve(model, other_angles=9).angles_not_shown(unplaced)) == []
    assert list(Trained(length=90).angles_not_shown(cases)) == []


def test_positions_without_a_table_need_not_be_read() -> None:
    model, roles = Trained(length=1024), {"position_ids": attrs.evolve(PLACES, rows=None)}
    cases = drawn_cases(model.roles(roles), 0)
    assert model.unread(model.tables(roles), cases) == {}
    assert max(case.farthest or 0 for case in cases) < 1024


def test_a_graph_without_a_checkpoint_has_the_same_cases_as_before() -> None:
    names = [case.label for case in cases_of(ROLES, 0)]
    assert [case.label for case in cases_of(ROLES, 0, own=[*Trained().corners(ROLES, 10, 0)])][: len(names)] == names


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A whole model as a file, and its checkpoint."""
    from tiny_models import checkpoint

    folder, path = checkpoint("gpt2"), tmp_path_factory.mktemp("whole") / "model.onnx"
    assert cli("export", "--from", folder, "--model", "-o", path).exit_code == 0
    return path, folder


def _changed(path: Path, out: Path, fault: str) -> None:
    """Write the file without a manifest and with a fault that only many tokens show."""
    model = onnx.load(path)
    tables = {node.input[0] for node in model.graph.node if node.op_type == "Gather"}
    held = [tensor for tensor in model.graph.initializer if tensor.name in tables and len(tensor.dims) == 2]
    [positions] = [tensor for tensor in held if "wpe" in tensor.name]
    array = numpy_helper.to_array(positions).copy()
    if fault == "one row":
        array[57] = array[3]
    elif fault == "fewer rows":
        array = array[: len(array) // 2]
    positions.CopyFrom(numpy_helper.from_array(array, positions.name))
    onnx.save(model, out)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "said"), [("one row", "is off by"), ("fewer rows", "that the module takes")])
def test_tables_that_are_wrong_far_out_fail(fault: str, said: str, whole: tuple[Path, Path], tmp_path: Path) -> None:
    path, folder = whole
    _changed(path, tmp_path / "model.onnx", fault)
    done = cli("verify", tmp_path / "model.onnx", "--from", folder, "--runtime", "ort-cpu", "--json")
    assert done.exit_code == 1, done.output
    parity = json.loads(done.stdout)["verdicts"][0]
    assert parity["state"] == "failed"
    assert said in parity["reason"]


@pytest.mark.slow
def test_a_lost_scaling_beyond_the_trained_length_fails(tmp_path: Path) -> None:
    """The scaling `dynamic` changes angles only there. Without it, the file is that of another checkpoint."""
    from small_decoders import exported_model, small_checkpoint

    scaling = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10_000.0}
    for name, rope in (("dynamic", scaling), ("plain", {**scaling, "rope_type": "default"})):
        small_checkpoint(tmp_path / name, rope_parameters=rope)
        exported_model(tmp_path / name, tmp_path / f"{name}.onnx", "--kv-cache", "none")
        (tmp_path / f"{name}.onnx.json").unlink()
    for name, state in (("dynamic", "passed"), ("plain", "failed")):
        path = tmp_path / f"{name}.onnx"
        done = cli("verify", path, "--from", tmp_path / "dynamic", "--runtime", "ort-cpu", "--json")
        parity = json.loads(done.stdout)["verdicts"][0]
        assert (parity["state"], done.exit_code) == (state, int(state == "failed")), parity


def test_a_decoder_with_fewer_tokens_than_its_encoder() -> None:
    """Marian may have two vocabularies. Tokens of the larger one are outside the decoder's table."""
    model, name = Trained(vocabulary=500, decoder_vocabulary=300), "past_key_values.0.encoder.key"
    decoder = {**ROLES, name: attrs.evolve(CACHE, name=name)}
    assert (model.roles(decoder)["input_ids"].rows, model.roles(ROLES)["input_ids"].rows) == (300, 500)
