"""Drawn config.json files: posexport reads what transformers computes, or refuses the file in a sentence.

There are two comparisons. transformers reads a config and saves it again, and both files must give the same specs.
transformers' model of the config must give the same results as posexport's block with the model's weights. A refusal
must be one of REFUSALS, unless transformers refuses too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import attrs
import checkpoint_decoders
import checkpoint_encoders
import pytest
from checkpoint_cases import counted, offset
from drawn_configs import DRAWN, SIMPLE, Data, drawn
from hf_helpers import BOUND, Watch, error, made, transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from posexport.errors import RequestError
from posexport.models import read_spec
from posexport.models.block import build_block
from posexport.models.checkpoints import ARCHITECTURES, read_checkpoint, rope
from posexport.models.checkpoints.config import part_of
from posexport.spec.spec import Spec

REFUSALS = {
    r"with 0 no query sees a key": "transformers computes a mean over all keys there: no model means that",
    r"sliding_attention without use_sliding_window": "transformers finds no window for the mask and raises",
    r"with rope_type, because transformers ignores type": "which of the two was meant is not known",
    r"truncate is false: it must be true or left out": "transformers ignores it in a table of a kind of layers",
    r"is_causal is false: it must be true, because": "transformers' ALiBi is none where later keys are seen",
    r"factor is 0?\.\d+: a scaling extends": "transformers warns that it must be 1 or more",
    r"features that turn: it needs 4": "transformers divides by zero",
    r"(short|long)_factor has \d+ numbers": "transformers warns, and its shapes don't fit",
    r"shifts its windows": "a block has no input for the mask that borders need",
    r"windows of stage \d+ are larger than its grid": "transformers pads the grid, and a block has no such mask",
    r"such that its grid of .* halves": "transformers pads the grid",
    r"position_buckets is .* half of the buckets are exact": "transformers takes the logarithm of a number up to 1",
    r"scaling dynamic was given with mrope": "not supported: mrope's frequencies don't depend on the length",
    r"beta_slow is .* must not be larger": "transformers warns that beta_fast must be larger",
}
"""Messages of configs that posexport refuses and transformers accepts, with the reason."""

ROTARY = [name for name in DRAWN if name not in SIMPLE]
"""The model types whose drawn configs are run as models."""

CASES = {**checkpoint_decoders.CASES, **checkpoint_encoders.CASES}
CASES["falcon"] = CASES["falcon-one-key-head"]


def readings(data: Data) -> list[Spec | RequestError]:
    """The spec of each layer, or the error that refuses it."""
    model_type, config = part_of(data, "config.json")
    architecture = ARCHITECTURES[model_type]
    found: list[Spec | RequestError] = []
    for layer in range(architecture.layers(config)):
        try:
            found.append(read_spec(architecture.spec(config, layer)))
        except RequestError as refusal:
            found.append(refusal)
    if not refusals(found):
        config.refuse_unread(model_type)
    return found


def refusals(found: list[Spec | RequestError]) -> list[RequestError]:
    return [each for each in found if isinstance(each, RequestError)]


def specs(data: Data) -> list[Spec]:
    """The spec of every layer. Raises RequestError if one is refused."""
    found = readings(data)
    for refusal in refusals(found):
        raise refusal
    return [each for each in found if isinstance(each, Spec)]


def config_of(data: Data, **more: Any) -> Any:
    """transformers' config of these data, or None if transformers refuses them."""
    keys = {key: deepcopy(value) for key, value in data.items() if key != "model_type"}
    try:
        return CONFIG_MAPPING[data["model_type"]](**keys, **more)
    except Exception:  # transformers raises errors of many classes.
        return None


def justified(refusal: RequestError) -> bool:
    return any(re.search(pattern, str(refusal)) for pattern in REFUSALS)


def saved_again(data: Data) -> str | None:
    """The difference between the specs of a config and of the config that transformers saves again, or None."""
    config = config_of(data)
    if config is None:
        return None
    ours = readings(data)
    for refusal in refusals(ours):
        if not justified(refusal):
            return f"refused: {refusal}"
    if len(refusals(ours)) == len(ours):
        return None
    again = readings(json.loads(config.to_json_string(use_diff=False)))
    pairs = ((one, two) for one, two in zip(ours, again, strict=True) if isinstance(one, Spec))
    return next((f"{one} is not {two}" for one, two in pairs if one != two), None)


def off(data: Data, folder: Path) -> float | None:
    """The largest error of posexport's layers against transformers' model, or None if either refuses the config."""
    case, model_type = CASES[data["model_type"]], data["model_type"]
    attention = "sdpa" if data.get("alibi") else "eager"  # In eager mode, transformers 5.23 adds Falcon's bias twice.
    config = config_of(data, attn_implementation=attention)
    if config is None:
        return None
    found = readings(data)
    if refusals(found):
        assert all(map(justified, refusals(found))), data
        return None
    model = made((case.make or getattr(transformers, case.model))(config))
    running = model.get_submodule(case.inside)
    watches = [
        Watch(*(running.get_submodule(case.path.format(i)).get_submodule(end) for end in case.ends))
        for i in range(len(found))
    ]
    run: Callable[[Any], Any] = (
        counted if model_type == "llama4_text" else offset
    )  # Its temperature counts positions itself.
    try:
        positions = run(running)
    except RuntimeError:  # The config class accepts sizes that do not fit together.
        return None
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(data))
    errors = []
    for layer, watch in enumerate(watches):
        block = read_checkpoint(folder, layer, 1, {})
        assert block.weights is not None
        given = (positions,) if block.spec.position_axes else ()
        out = build_block(block.spec, dict(block.weights))(watch.entered, *given)
        errors.append(error(out, watch.left))
    return max(errors)


def test_every_model_type_is_drawn() -> None:
    assert DRAWN.keys() == ARCHITECTURES.keys()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Silences transformers, which warns about drawn values."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(level)
    transformers.logging.enable_progress_bar()


@pytest.mark.parametrize("model_type", DRAWN)
def test_configs_that_are_saved_again_say_the_same(model_type: str) -> None:
    for seed in range(15):
        assert saved_again(drawn(model_type, seed)) is None, drawn(model_type, seed)


@pytest.mark.parametrize("model_type", [name for name in DRAWN if "swin" not in name])  # Swin's layers differ in width.
def test_a_stack_of_a_drawn_config_is_its_layers(model_type: str, tmp_path: Path) -> None:
    for seed in range(10):
        data = drawn(model_type, seed)
        layers = readings(data)
        if refusals(layers):
            continue
        (tmp_path / "config.json").write_text(json.dumps(data))
        stack = read_checkpoint(tmp_path / "config.json", None, len(layers), {}).spec
        assert stack.encoding.at_input or [stack.layer(index) for index in range(len(layers))] == layers, data


def test_a_stack_of_llama_4_may_begin_without_rope(tmp_path: Path) -> None:
    data = {"model_type": "llama4_text", "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps({**data, "no_rope_layers": [0, 1, 1, 1]}))
    stack = read_checkpoint(tmp_path / "config.json", None, 4, {}).spec
    assert [layer.encoding.name for layer in stack.distinct_layers()] == ["temperature", "rope", "rope", "rope"]
    assert [layer.qk_norm_type for layer in stack.distinct_layers()] == [None, "l2", "l2", "l2"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", DRAWN)
def test_thousands_of_configs_that_are_saved_again_say_the_same(model_type: str) -> None:
    for seed in range(400):
        assert saved_again(drawn(model_type, seed)) is None, drawn(model_type, seed)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ROTARY)
def test_layers_of_drawn_configs_are_theirs(model_type: str, tmp_path: Path) -> None:
    compared = 0
    for seed in range(60):
        data = drawn(model_type, seed)
        found = off(data, tmp_path)
        assert found is None or found < BOUND, data
        compared += found is not None
    assert compared > 30


def test_a_layer_of_each_drawn_kind_is_theirs(tmp_path: Path) -> None:
    for model_type in ROTARY:
        found = off(drawn(model_type, 1), tmp_path)
        assert found is None or found < BOUND, drawn(model_type, 1)


def test_a_wrong_default_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a fault: another default of the trained length."""
    data = {"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    assert saved_again(data) is None
    sound = rope.Rotary.read
    monkeypatch.setattr(
        rope.Rotary, "read", lambda self, *rest: sound(attrs.evolve(self, length=self.length + 1), *rest)
    )
    assert "is not" in str(saved_again(data))


SAME_AS: list[tuple[Data, Data]] = [
    ({"model_type": "gpt_neox", "rope_theta": 7.0}, {"model_type": "gpt_neox"}),
    ({"model_type": "gpt_neox", "partial_rotary_factor": 0.5}, {"model_type": "gpt_neox", "rotary_pct": 0.25}),
    (
        {"model_type": "gpt_neox", "rope_parameters": {"rope_type": "proportional"}},
        {"model_type": "gpt_neox", "rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.25}},
    ),
    (
        {"model_type": "llama", "rope_parameters": {"rope_type": "proportional"}, "partial_rotary_factor": 0.5},
        {"model_type": "llama", "rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5}},
    ),
    (
        {"model_type": "qwen3", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {
            "model_type": "qwen3",
            "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
            "max_position_embeddings": 32768,
        },
    ),
    (
        {"model_type": "gpt_oss", "rope_parameters": {}},
        {"model_type": "gpt_oss", "rope_parameters": {"rope_type": "default"}},
    ),
    ({"model_type": "qwen2", "sliding_window": 0}, {"model_type": "qwen2"}),
    ({"model_type": "modernbert", "local_attention": 1}, {"model_type": "modernbert", "local_attention": 0}),
]


@pytest.mark.parametrize(("given", "same"), SAME_AS, ids=str)
def test_configs_that_transformers_reads_alike(given: Data, same: Data) -> None:
    assert saved_again(given) is None
    assert specs(given) == specs(same)


def test_the_ratio_of_longrope_may_be_below_one() -> None:
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64, "original_max_position_embeddings": 8192}
    data = {
        "model_type": "llama",
        "max_position_embeddings": 4096,
        "rope_scaling": {"rope_type": "longrope", **factors},
    }
    assert saved_again(data) is None
    encoding: Any = specs(data)[0].encoding
    assert (encoding.factor, encoding.original_max_position_embeddings) == (1.0, 8192)


@pytest.mark.parametrize(("width", "window"), [(None, None), (1, 1), (2, 2)])
def test_narrow_windows(width: int | None, window: int | None) -> None:
    assert specs({"model_type": "mistral", "sliding_window": width, "num_hidden_layers": 1})[0].window == window
    with pytest.raises(RequestError, match="with 0 no query sees a key"):
        specs({"model_type": "mistral", "sliding_window": 0})
