"""Settings of generation_config.json and config.json, as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_decoders import small_checkpoint

from posexport.errors import RequestError
from posexport.runtimes.generation_settings import generation_settings
from posexport.runtimes.tokens import stop_tokens

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_a_file_that_cannot_be_read_is_refused(name: str, tmp_path: Path) -> None:
    """This also holds if the end of a text is not needed. The settings are not read from another file instead."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text('{"suppress_tokens": [1, 2')
    with pytest.raises(RequestError, match="can't be read as a JSON object"):
        generation_settings(tmp_path)


CONFIGS: tuple[dict[str, Any], ...] = (
    {"text_config": {"suppress_tokens": [7], "eos_token_id": 3}},
    {"decoder": {"suppress_tokens": [8], "eos_token_id": 4}, "text_config": {"suppress_tokens": [7]}},
    {"generator": {"begin_suppress_tokens": [9], "eos_token_id": 5}},
    {"suppress_tokens": None, "text_config": {"suppress_tokens": [7]}},
    {"suppress_tokens": [6], "text_config": {"suppress_tokens": [7], "begin_suppress_tokens": [8]}},
    {"eos_token_id": None, "text_config": {"eos_token_id": 3}},
)


@pytest.mark.parametrize("config", CONFIGS)
def test_the_part_for_text_fills_what_a_config_leaves_open(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings, wanted = generation_settings(tmp_path), transformers.GenerationConfig.from_model_config({**config})
    assert settings.suppressed == tuple(wanted.suppress_tokens or ())
    assert settings.suppressed_first == tuple(wanted.begin_suppress_tokens or ())
    assert stop_tokens(tmp_path) == (() if wanted.eos_token_id is None else (wanted.eos_token_id,))


def test_a_part_for_text_in_generation_config_is_none(tmp_path: Path) -> None:
    data = {"text_config": {"suppress_tokens": [7]}}
    (tmp_path / "generation_config.json").write_text(json.dumps(data))
    assert generation_settings(tmp_path).suppressed == ()


def test_what_ends_a_text_is_said_where_transformers_reads_it(tmp_path: Path) -> None:
    """A bug: a token of config.json ended texts although generation_config.json had none."""
    small_checkpoint(tmp_path, eos_token_id=2)
    for said, ends in ((None, (2,)), ({}, ()), ({"eos_token_id": None}, ()), ({"eos_token_id": [4, 5]}, (4, 5))):
        (tmp_path / "generation_config.json").unlink(missing_ok=True)
        if said is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(said))
        wanted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id
        assert stop_tokens(tmp_path) == (() if wanted is None else (wanted,) if isinstance(wanted, int) else (*wanted,))
        assert stop_tokens(tmp_path) == ends
