"""`--from`: config.json and tensors of every architecture give a block that computes the same as transformers' layer.

With a fault in a weight or in a key of config.json, the block computes something else, so these tests notice faults.
"""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import checkpoint_decoders
import checkpoint_encoders
import pytest
import torch
from hf_helpers import BOUND, PLAIN, Watch, error
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from posexport.errors import RequestError
from posexport.models.block import build_block
from posexport.models.checkpoints import ARCHITECTURES, PARTS, read_checkpoint
from posexport.models.checkpoints.config import ignored_tensors
from posexport.models.checkpoints.tensors import Tensors
from posexport.models.weights import weight_shapes
from posexport.spec.spec import Spec

CASES = {**checkpoint_decoders.CASES, **checkpoint_encoders.CASES}
LAYERS = [(name, layer) for name, case in CASES.items() for layer in case.layers]

NO_MATTER = ("k_proj.bias", "pos_key_proj.bias")
"""Without a rotation of keys, these biases add the same number to all logits of a query."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint in a folder, and the inputs and outputs [B, S, D] of its layers at given positions."""

    folder: Path
    positions: Tensor
    seen: dict[int, tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def save(name: str) -> Saved:
        case, folder = CASES[name], tmp_path_factory.mktemp(name)
        model = case.build()
        model.save_pretrained(folder)
        running = model.get_submodule(case.inside)
        layers = {layer: running.get_submodule(case.path.format(layer)) for layer in case.layers}
        watches = {layer: Watch(*(at.get_submodule(end) for end in case.ends)) for layer, at in layers.items()}
        positions = case.run(running)
        seen = {}
        for layer, watch in watches.items():
            entered, left = (t.transpose(0, 1) if case.time_first else t for t in (watch.entered, watch.left))
            entered, left = (t.reshape(-1, *t.shape[-2:]) for t in (entered, left))
            if case.table and layer == 0:
                rows = running.get_parameter(case.table).reshape(-1, entered.shape[-1])
                entered = entered - rows[along(positions)]
            seen[layer] = (entered, left)
        return Saved(folder, positions, seen)

    return save


def along(positions: Tensor) -> Tensor:
    """Positions [B, S]; of positions [B, S, axes], those on the first axis."""
    return positions[..., 0] if positions.ndim == 3 else positions


def off(folder: Path, layer: int, checkpoint: Saved, wrong: str = "") -> float:
    """The error of a layer that is read from a folder; the rows of the weight `wrong` are reversed."""
    entered, left = checkpoint.seen[layer]
    found = read_checkpoint(folder, layer, 1, {})
    assert found.weights is not None
    given = {0: (), 1: (along(checkpoint.positions),)}.get(found.spec.position_axes, (checkpoint.positions,))
    weights = {name: tensor.flip(0) if name == wrong else tensor for name, tensor in found.weights.items()}
    return error(build_block(found.spec, weights)(entered, *given), left)


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_a_layer_is_theirs(name: str, layer: int, saved: Any) -> None:
    checkpoint: Saved = saved(name)
    assert off(checkpoint.folder, layer, checkpoint) < BOUND
    for weight in weight_shapes(read_checkpoint(checkpoint.folder, layer, 1, {}).spec):
        if not weight.endswith(NO_MATTER):
            assert off(checkpoint.folder, layer, checkpoint, wrong=weight) > PLAIN, weight


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_tensors_that_are_not_read_are_refused(
    name: str, saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unread tensors are refused in every architecture. Known ignored tensors, such as old buffers, are allowed."""
    folder, layer, modules, find = saved(name).folder, CASES[name].layers[0], [], Tensors.path
    monkeypatch.setattr(Tensors, "path", lambda self, paths: modules.append(find(self, paths)) or modules[-1])
    read_checkpoint(folder, layer, 1, {})
    data = json.loads((folder / "config.json").read_text())
    model_type = PARTS[data["model_type"]].model_type if data["model_type"] in PARTS else data["model_type"]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    held = load_file(folder / "model.safetensors")
    passed_over = {f"{modules[0]}.{pattern.replace('*', 'weight')}" for pattern in ignored_tensors(model_type)}
    save_file({**{one: torch.ones(2) for one in passed_over}, **held}, tmp_path / "model.safetensors")
    assert read_checkpoint(tmp_path, layer, 1, {}).weights is not None
    save_file({**held, f"{modules[0]}.twist": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(RequestError, match=rf"holds '{modules[0]}\.twist', which the attention of {model_type} does"):
        read_checkpoint(tmp_path, layer, 1, {})


@pytest.mark.parametrize("name", CASES)
def test_what_config_says_counts(name: str, saved: Any, tmp_path: Path) -> None:
    checkpoint: Saved = saved(name)
    for fault in CASES[name].faults:
        folder = edited(checkpoint.folder, tmp_path, fault)
        assert max(off_or_refused(folder, layer, checkpoint) for layer in CASES[name].layers) > PLAIN, fault


def off_or_refused(folder: Path, layer: int, checkpoint: Saved) -> float:
    """The error of a layer, or infinity if its tensors do not agree with config.json."""
    try:
        return off(folder, layer, checkpoint)
    except RequestError as refusal:
        said = ("by config.json it must have", "does not have by config.json")
        return float("inf") if any(text in str(refusal) for text in said) else 0.0


def edited(folder: Path, to: Path, changes: dict[str, Any]) -> Path:
    """A copy of a checkpoint with changes to its config.json; dots in keys lead into tables."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    data = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        *path, last = key.split(".")
        table = data
        for part in path:
            table = table[part]
        table[last] = value
    (to / "config.json").write_text(json.dumps(data))
    return to


def test_every_architecture_has_a_case(saved: Any) -> None:
    types = set()
    for name in CASES:
        data = json.loads((saved(name).folder / "config.json").read_text())
        types |= {data["model_type"], *(PARTS[key].model_type for key in [data["model_type"]] if key in PARTS)}
    assert types >= set(ARCHITECTURES) | set(PARTS) - {"mistral3"}  # It differs from llava only by its name.


def spec_of(folder: Path, data: dict[str, Any], layers: int = 1) -> Spec:
    """The spec from a config.json."""
    (folder / "config.json").write_text(json.dumps(data))
    return read_checkpoint(folder / "config.json", None, layers, {}).spec


TERMS = {"relative_attention": True, "position_biased_input": False, "pos_att_type": "c2p|p2c"}
NEEDED: dict[str, dict[str, Any]] = {"deberta": TERMS, "deberta-v2": TERMS}
"""Keys that an architecture needs, because posexport does not have the encoding of transformers' default."""

OLD: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 64}),
    (
        "llama",
        {
            "rope_theta": 5e5,
            "max_position_embeddings": 4096,
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        },
    ),
    ("llama", {"num_key_value_heads": None, "head_dim": None, "hidden_size": 64, "num_attention_heads": 4}),
    (
        "qwen3",
        {
            "max_position_embeddings": 512,
            "rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 128},
        },
    ),
    ("mistral", {"sliding_window": None, "rope_theta": 1e6}),
    (
        "phi3",
        {
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "sliding_window": 2047,
        },
    ),
    ("phi3", {"partial_rotary_factor": 0.75, "rope_theta": 500.0}),
    ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 500}),
    ("falcon", {"n_embed": 142, "rope_theta": 500.0}),
    ("bloom", {"n_embed": 128, "num_attention_heads": 4}),
    ("gpt_oss", {"rope_theta": 500.0, "rope_scaling": None}),
    (
        "gemma3_text",
        {
            "rope_theta": 500.0,
            "rope_local_base_freq": 50.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 2,
        },
    ),
    (
        "modernbert",
        {"global_rope_theta": 500.0, "local_rope_theta": 50.0, "global_attn_every_n_layers": 2, "local_attention": 9},
    ),
    ("smollm3", {"no_rope_layer_interval": 2, "rope_theta": 500.0}),
    ("llama4_text", {"no_rope_layers": [], "rope_theta": 500.0, "attention_chunk_size": 64}),
    (
        "qwen2_vl",
        {
            "hidden_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_theta": 500.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        },
    ),
    ("pixtral", {"rope_theta": 500.0}),
    ("sam2_video", {"memory_attention_rope_theta": 500.0}),
    ("dinov3_vit", {"rope_theta": 500.0, "key_bias": True}),
    ("deberta", {**TERMS, "pos_att_type": "p2c", "max_relative_positions": -1, "max_position_embeddings": 64}),
]
"""Keys of older versions, and values that mean other values."""


@pytest.mark.parametrize(
    ("model_type", "given"),
    [*((name, NEEDED.get(name, {})) for name in ARCHITECTURES), *OLD],
    ids=lambda value: str(value)[:30],
)
def test_keys_mean_what_transformers_reads(model_type: str, given: dict[str, Any], tmp_path: Path) -> None:
    """A short or old config.json gives the same specs as the full one that transformers' class makes of it."""
    theirs = json.loads(CONFIG_MAPPING[model_type](**deepcopy(given)).to_json_string(use_diff=False))
    for layers in (1, 2) if model_type in ("gemma3_text", "modernbert", "smollm3", "llama4_text") else (1,):
        ours = spec_of(tmp_path, {"model_type": model_type, **given}, layers)
        assert spec_of(tmp_path, theirs, layers) == ours
    assert given in ({}, TERMS) or ours != spec_of(tmp_path, {"model_type": model_type, **NEEDED.get(model_type, {})})


STACKS = [("gemma3_text", 4, 2), ("gemma3_text", 0, 6), ("llama4_text", 0, 4), ("smollm3", 0, 4), ("gpt_oss", 0, 2)]
STACKS += [("bert", 0, 2), ("t5", 0, 2), ("llama", 0, 2), ("modernbert", 0, 4)]


@pytest.mark.parametrize(("name", "first", "layers"), STACKS)
def test_a_stack_is_its_layers(name: str, first: int, layers: int, saved: Any) -> None:
    folder = saved(name).folder
    stack = read_checkpoint(folder, first, layers, {})
    assert stack.weights is not None and stack.spec.layers == layers
    for index in range(layers):
        alone = read_checkpoint(folder, first + index, 1, {})
        assert alone.weights is not None
        if not stack.spec.encoding.at_input:
            assert stack.spec.layer(index) == alone.spec
        for weight, tensor in alone.weights.items():
            at_input = weight == "encoding.weight" and stack.spec.encoding.at_input
            assert torch.equal(stack.weights[weight if at_input else f"layers.{index}.{weight}"], tensor)
    assert list(stack.weights) == list(weight_shapes(stack.spec))
    data = [stack.spec.layer(index).to_dict() for index in range(layers)]
    assert stack.spec.encoding.at_input or len({json.dumps(layer) for layer in data}) == KINDS.get((name, layers), 1)


KINDS = {("gemma3_text", 2): 2, ("gemma3_text", 6): 2, ("llama4_text", 4): 2, ("smollm3", 4): 2, ("gpt_oss", 2): 2}
KINDS |= {("modernbert", 4): 2}
"""The number of kinds of layers of a stack, if it is not one."""


def test_shards_are_read_where_they_are_needed(saved: Any, tmp_path: Path) -> None:
    """Each layer has its own shards. Shards of other layers may be broken or missing."""
    whole: Saved = saved("llama")
    everything = load_file(whole.folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in everything.items() if "self_attn" in name}
    shutil.copy(whole.folder / "config.json", tmp_path)
    files = {name: f"shard-{'-'.join(name.split('.')[2:])}.safetensors" for name in tensors}
    for name, file in files.items():
        save_file({name: tensors[name]}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (tmp_path / "shard-0-self_attn-q_proj-weight.safetensors").write_bytes(b"broken")
    (tmp_path / "shard-0-self_attn-k_proj-weight.safetensors").unlink()
    assert off(tmp_path, 1, whole) < BOUND
    with pytest.raises(
        RequestError, match=r"shard-0-self_attn-q_proj-weight.safetensors' can't be read as .safetensors"
    ):
        read_checkpoint(tmp_path, 0, 1, {})
