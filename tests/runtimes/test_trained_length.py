"""The number of positions that a model was trained for, as read from its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posexport.runtimes.tokens import trained_length

LENGTHS: dict[str, tuple[dict[str, Any], int | None]] = {
    "a decoder": ({"max_position_embeddings": 64}, 64),
    "Whisper": ({"max_source_positions": 1500, "max_target_positions": 448}, 448),
    "SpeechT5": ({"max_speech_positions": 4000, "max_text_positions": 450}, 450),
    "LED": ({"max_encoder_position_embeddings": 16384, "max_decoder_position_embeddings": 1024}, 1024),
    "of a part": ({"text_config": {"max_position_embeddings": 32}}, 32),
    "no number": ({"n_positions": "64"}, None),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_the_length_is_that_of_the_tokens(name: str, tmp_path: Path) -> None:
    data, wanted = LENGTHS[name]
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert trained_length(tmp_path) == wanted
