"""Names in the contract of an artifact."""

from __future__ import annotations

import pytest

from posexport.models.whole import cached_layers
from posexport.spec.contract import split_layer


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("past_key.3", ("past_key", 3, "")),
        ("present.12.encoder.key", ("present", 12, "encoder.key")),
        ("past.1b.007", ("past.1b", 7, "")),
        ("a.1.2", ("a", 1, "2")),
        ("present.999999.key", ("present", 999_999, "key")),
        ("present.1000000.key", None),
        ("present.\N{ARABIC-INDIC DIGIT ONE}.key", None),
        ("present_key", None),
        ("present.-1.key", None),
    ],
)
def test_the_layer_of_a_cache(name: str, parts: tuple[str, int, str] | None) -> None:
    assert split_layer(name) == parts


def test_layers_are_those_of_caches_of_tokens_and_states() -> None:
    names = [
        f"past_key_values.{end}" for end in ("5.key", "0.value", "2.conv_state_1", "3.encoder.key", "4", "x.1.key")
    ]
    assert cached_layers([*names, "present.9.key", "past_key.8"]) == [0, 2, 5]
