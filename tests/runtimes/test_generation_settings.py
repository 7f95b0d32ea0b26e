"""Settings of generation_config.json and config.json, as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posexport.errors import RequestError
from posexport.runtimes.generation_settings import generation_settings
from posexport.runtimes.tokens import stop_tokens

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_a_file_that_cannot_be_read_is_refused(name: str, tmp_path: Path) -> None:
    """Also where nothing asks what ends a text; what it says isn't looked for elsewhere."""
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
