"""`--from`: every architecture's config.json and tensors give the block that transformers' own layer computes.

Each weight that is read, and keys of config.json, are shown to count: with a fault in them the block is another.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import checkpoint_decoders
import checkpoint_encoders
import pytest
import torch
from hf_helpers import BOUND, PLAIN, Watch, error
from torch import Tensor

from posexport.checkpoints import read_checkpoint
from posexport.errors import RequestError
from posexport.models.block import build_block
from posexport.spec import Spec

CASES = {**checkpoint_decoders.CASES, **checkpoint_encoders.CASES}
LAYERS = [(name, layer) for name, case in CASES.items() for layer in case.layers]

NO_MATTER = ("k_proj.bias", "pos_key_proj.bias")
"""Where keys don't rotate, this adds the same to all logits of a query."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint in a folder, and what entered and left its layers [B, S, D] at positions of ours."""

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
        with torch.no_grad():
            positions = case.run(running)
        seen = {}
        for layer, watch in watches.items():
            entered, left = watch.entered, watch.left
            if case.time_first:
                entered, left = entered.transpose(0, 1), left.transpose(0, 1)
            entered, left = (states.reshape(-1, *states.shape[-2:]) for states in (entered, left))
            if case.table and layer == 0:
                entered = entered - running.get_parameter(case.table).reshape(-1, entered.shape[-1])[_flat(positions)]
            seen[layer] = (entered, left)
        return Saved(folder, positions, seen)

    return save


def _flat(positions: Tensor) -> Tensor:
    return positions[..., 0] if positions.ndim == 3 else positions


def output(spec: Spec, weights: dict[str, Tensor], entered: Tensor, positions: Tensor) -> Tensor:
    """Our block's output in fp32."""
    axes = spec.position_axes
    given = {0: (), 1: (_flat(positions),)}.get(axes, (positions,))
    made: Tensor = build_block(spec, weights)(entered, *given)
    return made


@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_a_layer_is_theirs(name: str, layer: int, saved: Any) -> None:
    checkpoint: Saved = saved(name)
    entered, left = checkpoint.seen[layer]
    found = read_checkpoint(checkpoint.folder, layer, 1, {})
    assert found.weights is not None
    assert error(output(found.spec, found.weights, entered, checkpoint.positions), left) < BOUND
    for weight, tensor in found.weights.items():
        if not weight.endswith(NO_MATTER):
            wrong = {**found.weights, weight: tensor.flip(0)}
            assert error(output(found.spec, wrong, entered, checkpoint.positions), left) > PLAIN, weight


@pytest.mark.parametrize("name", CASES)
def test_what_config_says_counts(name: str, saved: Any, tmp_path: Path) -> None:
    checkpoint: Saved = saved(name)
    for fault in CASES[name].faults:
        folder = edited(checkpoint.folder, tmp_path, fault)
        off = [off_by(folder, layer, checkpoint) for layer in CASES[name].layers]
        assert max(off) > PLAIN, fault


def off_by(folder: Path, layer: int, checkpoint: Saved) -> float:
    """The error of a checkpoint's layer; infinite where the checkpoint is refused."""
    entered, left = checkpoint.seen[layer]
    try:
        found = read_checkpoint(folder, layer, 1, {})
    except RequestError:
        return float("inf")
    assert found.weights is not None
    return error(output(found.spec, found.weights, entered, checkpoint.positions), left)


def edited(folder: Path, to: Path, changes: dict[str, Any]) -> Path:
    """A copy of a checkpoint with changes to its config.json; the weights are linked."""
    data = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        *path, last = key.split(".")
        table = data
        for part in path:
            table = table[part]
        table[last] = value
    (to / "config.json").write_text(json.dumps(data))
    for file in folder.glob("*.safetensors*"):
        (to / file.name).unlink(missing_ok=True)
        (to / file.name).symlink_to(file)
    return to
