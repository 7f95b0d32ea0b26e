"""`posexport generate` with a generation_config.json: suppressed and forced tokens, settings that are not applied, the
end of texts, and lengths at which angles change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import cli, refused
from small_decoders import NATIVE, VOCABULARY, exported_model, save_randomised, small_checkpoint

from posexport.runtimes.tokens import length_of_short_frequencies, stop_tokens

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

PROMPT, COUNT = (5, 17, 3, 44, 21, 8, 30), 16


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The file of a model, and the model in transformers."""
    folder = tmp_path_factory.mktemp("model")
    model = small_checkpoint(folder / "checkpoint")
    (folder / "out").mkdir()
    return exported_model(folder / "checkpoint", folder / "out" / "model.onnx", *NATIVE), model


@pytest.fixture(autouse=True)
def _settings_of_its_own(made: tuple[Path, Any]) -> Any:
    file = made[0].with_name("generation_config.json")
    before = file.read_bytes()
    yield
    file.write_bytes(before)


def asked(path: Path, *options: str, **settings: Any) -> Any:
    """The result of the command with these settings beside the file."""
    path.with_name("generation_config.json").write_text(json.dumps(settings))
    ids = ",".join(map(str, PROMPT))
    return cli("generate", path, "--prompt-ids", ids, "--max-new-tokens", str(COUNT), "--json", *options)


def row(result: Any) -> list[int]:
    assert result.exit_code == 0, result.output
    (made,) = json.loads(result.stdout)["rows"]
    return list(made["tokens"])


def greedy(model: Any, **settings: Any) -> list[int]:
    """The tokens of transformers with these settings."""
    config = transformers.GenerationConfig(max_new_tokens=COUNT, do_sample=False, pad_token_id=0, **settings)
    ids = torch.tensor([PROMPT])
    tokens = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return [int(token) for token in tokens[0, len(PROMPT) :]]


def test_suppressed_tokens_are_those_of_transformers(made: tuple[Path, Any]) -> None:
    path, model = made
    plain = greedy(model)
    assert row(asked(path)) == plain
    first, later = plain[0], next(token for token in plain if token != plain[0])
    cases: list[dict[str, Any]] = [
        {"suppress_tokens": [first, later]},
        {"begin_suppress_tokens": [first]},
        {"bad_words_ids": [[first], [later]]},
        {"bad_words_ids": [[first], [later]], "eos_token_id": later},  # the token that ends a text is not suppressed
        {"suppress_tokens": [first], "begin_suppress_tokens": [later], "bad_words_ids": [[plain[-1]]]},
    ]
    for settings in cases:
        result = asked(path, **settings)
        assert row(result) == greedy(model, **settings) != plain
        assert result.stderr == ""


def test_a_token_that_is_suppressed_at_the_beginning_comes_later(made: tuple[Path, Any]) -> None:
    path, model = made
    later = greedy(model)[1]
    tokens = row(asked(path, begin_suppress_tokens=[token for token in range(VOCABULARY) if token != later]))
    assert tokens[0] == later and set(tokens[1:]) != {later}


def test_the_last_token_is_the_forced_one(made: tuple[Path, Any]) -> None:
    path, model = made
    plain = greedy(model)
    first = next(token for token in range(VOCABULARY) if token not in plain)
    cases: list[dict[str, Any]] = [
        {"forced_eos_token_id": first},
        {"forced_eos_token_id": 0},
        {"forced_eos_token_id": [first + 1, first]},
        {"forced_eos_token_id": first, "eos_token_id": plain[3]},  # a row that ends earlier does not get it
        {"forced_eos_token_id": first, "bad_words_ids": [[first]], "eos_token_id": plain[-1]},
    ]
    for settings in cases:
        result = asked(path, **settings)
        assert row(result) == greedy(model, **settings)
        assert result.stderr == ""
    assert row(asked(path, forced_eos_token_id=0)) == [*plain[:-1], 0] != plain
    assert row(asked(path, forced_eos_token_id=-1)) == plain
    drawn = row(asked(path, "--temperature", "100", "--seed", "3", forced_eos_token_id=[first, 0]))
    assert drawn[-1] in (first, 0)


def test_suppressed_tokens_are_not_drawn(made: tuple[Path, Any]) -> None:
    kept = [3, 9, 12]
    hidden = [token for token in range(VOCABULARY) if token not in kept] + [10**6, -1]
    options = ("--temperature", "100", "--top-k", "30", "--seed", "3")
    assert set(row(asked(made[0], *options, suppress_tokens=hidden))) == {*kept}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_beams": 4, "min_length": 3}, "min_length 3, num_beams 4"),
        ({"repetition_penalty": 1.2}, "repetition_penalty 1.2"),
        ({"guidance_scale": 0}, "guidance_scale 0"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size 3"),
        ({"bad_words_ids": [[1, 2]]}, "bad_words_ids of several tokens"),
    ],
)
def test_what_is_not_applied_is_a_warning(settings: dict[str, Any], said: str, made: tuple[Path, Any]) -> None:
    wanted = f"Warning: generation_config.json asks for {said}, which is not applied: tokens may be others than those"
    result = asked(made[0], **settings)
    assert row(result) == greedy(made[1])
    assert result.stderr.startswith(wanted) and result.stderr.count("\n") == 1


def test_settings_that_change_nothing_are_not_named(made: tuple[Path, Any]) -> None:
    neutral = {"num_beams": 1, "repetition_penalty": 1.0, "min_length": 0, "bad_words_ids": [], "suppress_tokens": None}
    result = asked(made[0], **neutral, do_sample=True, length_penalty=2.0)
    assert (row(result), result.stderr) == (greedy(made[1]), "")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"suppress_tokens": [*range(VOCABULARY)]}, "suppresses all tokens that the model has: take some out of"),
        ({"suppress_tokens": 5}, "has the suppress_tokens 5: give a list of ids of tokens, or none"),
        ({"begin_suppress_tokens": ["a"]}, "has the begin_suppress_tokens ['a']: give a list"),
        ({"suppress_tokens": [2**40]}, "has the suppress_tokens [1099511627776]: give a list"),
        ({"forced_eos_token_id": "a"}, "has the forced_eos_token_id 'a': give a list of ids of tokens, or none"),
        ({"forced_eos_token_id": VOCABULARY}, f"has the forced_eos_token_id {VOCABULARY}, which is none of the model"),
        ({"bad_words_ids": [5]}, "has the bad_words_ids [5]: give a list of lists of ids, or none"),
        ({"bad_words_ids": [[None]]}, "has the bad_words_ids [None]: give a list"),
    ],
)
def test_settings_that_are_wrong(settings: dict[str, Any], said: str, made: tuple[Path, Any]) -> None:
    refused(asked(made[0], **settings), said)


def test_tokens_that_end_a_text_are_also_those_of_the_part_for_text(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    for data, wanted in (
        ({"text_config": {"eos_token_id": [7, 8]}}, (7, 8)),
        ({"eos_token_id": 5, "text_config": {"eos_token_id": 7}}, (5,)),
        ({"eos_token_id": -1, "text_config": {"eos_token_id": 7}}, ()),
        ({"text_config": []}, ()),
    ):
        config.write_text(json.dumps(data))
        assert stop_tokens(tmp_path) == wanted


def test_a_model_with_a_part_for_text_is_packaged(made: tuple[Path, Any], tmp_path: Path) -> None:
    """A bug: posexport found no eos_token_id in it. onnxruntime-genai needs one even if transformers would go on."""
    path = made[0]
    config = path.with_name("config.json")
    before = config.read_bytes()
    data = {**json.loads(before), "eos_token_id": 7}
    config.write_text(json.dumps({"model_type": "own", "text_config": data}))
    path.with_name("generation_config.json").write_text("{}")
    try:
        assert cli("package", path, "--genai", "-o", tmp_path / "genai").exit_code == 0
    finally:
        config.write_bytes(before)
    written = json.loads((tmp_path / "genai" / "genai_config.json").read_text())
    assert written["model"]["eos_token_id"] == 7


@pytest.mark.slow
def test_angles_that_change_at_a_length(tmp_path: Path) -> None:
    """At this length transformers computes all keys again, but a file with caches keeps the old keys."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 9, **factors}
    config = transformers.Phi3Config(
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"vocab_size": VOCABULARY, "max_position_embeddings": 96, "rope_parameters": rope},
        **{"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "original_max_position_embeddings": 9},
    )
    model = transformers.Phi3ForCausalLM(config)
    save_randomised(model, tmp_path / "phi3")
    said = "the tokens went beyond 9, where the model takes other angles (longrope): transformers computes the keys"
    files = {}
    for caches in ("concat", "none"):
        (tmp_path / caches).mkdir()
        files[caches] = exported_model(tmp_path / "phi3", tmp_path / caches / "model.onnx", "--kv-cache", caches)
    ids = ("--prompt-ids", ",".join(map(str, PROMPT)))
    crossing = cli("generate", files["concat"], *ids, "--max-new-tokens", str(COUNT), "--json")
    assert said in crossing.stderr
    assert said not in cli("generate", files["concat"], *ids, "--max-new-tokens", "3").stderr  # 9 tokens are read
    beyond = ("--prompt-ids", ",".join(["5"] * 10))
    assert said not in cli("generate", files["concat"], *beyond, "--max-new-tokens", "3").stderr
    again = cli("generate", files["none"], *ids, "--max-new-tokens", str(COUNT), "--json")
    assert said not in again.stderr
    assert row(again) == greedy(model)


def test_the_length_at_which_angles_change(tmp_path: Path) -> None:
    table = {"type": "longrope", "original_max_position_embeddings": 8}
    for data, wanted in (
        ({"rope_scaling": table}, 8),
        ({"rope_parameters": {"rope_type": "longrope"}, "original_max_position_embeddings": 9}, 9),
        ({"text_config": {"rope_scaling": table}}, 8),
        ({"rope_scaling": {**table, "type": "su"}}, 8),
        ({"rope_scaling": {**table, "type": "yarn"}}, None),
        ({"rope_scaling": {**table, "type": ["su"]}}, None),
        ({"rope_scaling": None, "original_max_position_embeddings": 9}, None),
    ):
        (tmp_path / "config.json").write_text(json.dumps(data))
        assert length_of_short_frequencies(tmp_path) == wanted
