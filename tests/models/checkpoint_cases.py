"""What a case of a checkpoint is: one of transformers' models, tiny and randomly initialised, and how it is run.

A case runs its model and says which positions of ours its tokens have; hooks on an attention layer's ends give what
entered and what left it, so that masks and positions are the model's own work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hf_helpers import BATCH, made, transformers
from torch import Tensor

SEQ, OFFSET = 7, 5

Run = Callable[[Any], Tensor]
"""Runs a model, and gives our position_ids of its tokens."""


def offset(model: Any) -> Tensor:
    """A decoder on tokens whose positions start late."""
    positions = (torch.arange(SEQ) + OFFSET).expand(BATCH, -1)
    model(inputs_embeds=_states(model.config.hidden_size), position_ids=positions)
    return positions


def counted(model: Any) -> Tensor:
    """A model that counts positions itself."""
    config = model.config
    model(inputs_embeds=_states(getattr(config, "hidden_size", None) or config.d_model))
    return torch.arange(SEQ).expand(BATCH, -1)


def tokens(model: Any) -> Tensor:
    """The same of a model that takes no embeddings."""
    model(input_ids=torch.arange(BATCH * SEQ).view(BATCH, SEQ) % 13 + 3)
    return torch.arange(SEQ).expand(BATCH, -1)


def three_axes(model: Any) -> Tensor:
    """Time, row and column, each of its own."""
    t, y, x = torch.randint(0, 9, (3, BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    model(inputs_embeds=_states(model.config.hidden_size), position_ids=torch.stack((t, y, x)))
    return torch.stack((x, y, t), -1)


def speech(model: Any) -> Tensor:
    """The encoder of a speech model on its own features."""
    model.encoder(_states(model.config.hidden_size))
    return torch.arange(SEQ).expand(BATCH, -1)


def image(height: int, width: int, cells: Callable[[int, int], Tensor], **more: Any) -> Run:
    """Random pixels; `cells` gives the positions [tokens, axes] of a grid of patches of 4 by 4."""

    def run(model: Any) -> Tensor:
        pixels = torch.randn(BATCH, 3, height, width, generator=torch.Generator().manual_seed(2))
        model(pixel_values=pixels, **more)
        return cells(height // 4, width // 4).expand(BATCH, -1, -1)

    return run


def grid(rows: int, columns: int) -> Tensor:
    """Columns and rows of a grid, row by row."""
    return torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1)


def registers(rows: int, columns: int) -> Tensor:
    """A class token and two registers in front, whose positions say nothing."""
    return torch.cat((torch.full((3, 2), 1), grid(rows, columns)))


def windows(model: Any) -> Tensor:
    """Swin's first stage: 8 by 8 patches in four windows of each image."""
    model(pixel_values=torch.randn(BATCH, 3, 32, 32, generator=torch.Generator().manual_seed(2)))
    return grid(4, 4).expand(4 * BATCH, -1, -1)


def batch_of_one(model: Any) -> Tensor:
    """Pixtral puts all images into one row: here one image of 3 by 5 patches."""
    model(pixel_values=torch.randn(1, 3, 12, 20, generator=torch.Generator().manual_seed(2)))
    return grid(3, 5)[None]


def video(model: Any) -> Tensor:
    """Two frames of 3 by 3 patches."""
    model(pixel_values_videos=torch.randn(BATCH, 4, 3, 12, 12), skip_predictor=True)
    frames = torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(3))
    return frames.flip(-1).expand(BATCH, -1, -1)


def memory(model: Any) -> Tensor:
    """SAM 2's memory attention, of which a session of a video would be needed: the layer alone."""
    attention, states = model.memory_attention, _states(32, 12)[None]
    turns = attention.rotary_emb(states, attention.position_ids)
    attention.layers[0].self_attn(query=states, key=states, value=states, position_embeddings=turns)
    return grid(3, 4).expand(BATCH, -1, -1)


def _states(width: int, seq: int = SEQ) -> Tensor:
    return torch.randn(BATCH, seq, width, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its config; the module `inside` it that is run; the path there of its attention layers (`{}` for the
    layer), and their first and last projections; which layers are held against ours; and edits of config.json (dots
    lead into tables) after which it says another function. `table` is the table of positions added at the input."""

    model: str
    config: str
    sizes: dict[str, Any]
    run: Run
    faults: tuple[dict[str, Any], ...]
    inside: str = ""
    path: str = "layers.{}.self_attn"
    ends: tuple[str, str] = ("q_proj", "o_proj")
    layers: tuple[int, ...] = (0,)
    attention: str = "eager"
    table: str = ""
    time_first: bool = False
    make: Callable[[Any], Any] | None = None
    """The model of a config, where it is not the one of its name."""

    def build(self) -> Any:
        config = getattr(transformers, f"{self.config}Config")(**self.sizes, attn_implementation=self.attention)
        return made((self.make or getattr(transformers, self.model))(config))
