"""Cases of checkpoints: tiny, randomly initialised models of transformers, and how to run them.

A case runs its model and returns the position_ids that posexport needs for its tokens. Hooks on the first and last
projection of an attention layer record its input and output, so that the model computes its own masks and positions.
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
"""Runs a model and returns the position_ids that posexport needs for its tokens."""


def offset(model: Any) -> Tensor:
    """Runs a decoder on tokens whose positions start at OFFSET."""
    positions = (torch.arange(SEQ) + OFFSET).expand(BATCH, -1)
    model(inputs_embeds=_states(model.config.hidden_size), position_ids=positions)
    return positions


def counted(model: Any) -> Tensor:
    """Runs a model that counts positions itself."""
    config = model.config
    model(inputs_embeds=_states(getattr(config, "hidden_size", None) or config.d_model))
    return torch.arange(SEQ).expand(BATCH, -1)


def tokens(model: Any) -> Tensor:
    """Like `counted`, for a model that takes no embeddings."""
    model(input_ids=torch.arange(BATCH * SEQ).view(BATCH, SEQ) % 13 + 3)
    return torch.arange(SEQ).expand(BATCH, -1)


def three_axes(model: Any) -> Tensor:
    """Runs a decoder with random positions on the axes time, row and column."""
    t, y, x = torch.randint(0, 9, (3, BATCH, SEQ), generator=torch.Generator().manual_seed(1))
    model(inputs_embeds=_states(model.config.hidden_size), position_ids=torch.stack((t, y, x)))
    return torch.stack((x, y, t), -1)


def speech(model: Any) -> Tensor:
    """Runs the encoder of a speech model on random features."""
    model.encoder(_states(model.config.hidden_size))
    return torch.arange(SEQ).expand(BATCH, -1)


def image(height: int, width: int, cells: Callable[[int, int], Tensor], **more: Any) -> Run:
    """Runs a model on random pixels.

    `cells` returns the positions [tokens, axes] for the rows and columns of a grid of patches; a patch is 4 by 4.
    """

    def run(model: Any) -> Tensor:
        pixels = torch.randn(BATCH, 3, height, width, generator=torch.Generator().manual_seed(2))
        model(pixel_values=pixels, **more)
        return cells(height // 4, width // 4).expand(BATCH, -1, -1)

    return run


def grid(rows: int, columns: int) -> Tensor:
    """The column and row of each cell of a grid, [rows * columns, 2], row by row."""
    return torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1)


def registers(rows: int, columns: int) -> Tensor:
    """Like `grid`, after a class token and two registers, whose positions have no meaning."""
    return torch.cat((torch.full((3, 2), 1), grid(rows, columns)))


def windows(model: Any) -> Tensor:
    """Runs Swin; in its first stage, each image has 8 by 8 patches in four windows."""
    model(pixel_values=torch.randn(BATCH, 3, 32, 32, generator=torch.Generator().manual_seed(2)))
    return grid(4, 4).expand(4 * BATCH, -1, -1)


def batch_of_one(model: Any) -> Tensor:
    """Runs Pixtral, which puts all images into one row, on one image of 3 by 5 patches."""
    model(pixel_values=torch.randn(1, 3, 12, 20, generator=torch.Generator().manual_seed(2)))
    return grid(3, 5)[None]


def video(model: Any) -> Tensor:
    """Runs a video model on two frames of 3 by 3 patches."""
    model(pixel_values_videos=torch.randn(BATCH, 4, 3, 12, 12), skip_predictor=True)
    frames = torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(3))
    return frames.flip(-1).expand(BATCH, -1, -1)


def memory(model: Any) -> Tensor:
    """Runs only one layer of SAM 2's memory attention. The whole model would need a video session."""
    attention, states = model.memory_attention, _states(32, 12)[None]
    turns = attention.rotary_emb(states, attention.position_ids)
    attention.layers[0].self_attn(query=states, key=states, value=states, position_embeddings=turns)
    return grid(3, 4).expand(BATCH, -1, -1)


def _states(width: int, seq: int = SEQ) -> Tensor:
    return torch.randn(BATCH, seq, width, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with its config, and how to run and compare it.

    - `inside`: the submodule that is run.
    - `path`: the path in it to an attention layer (`{}` is the index of the layer).
    - `ends`: the first and the last projection of a layer.
    - `layers`: the layers that are compared.
    - `faults`: edits of config.json that change the function. Dots lead into tables.
    - `table`: the table of positions that is added at the input.
    """

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
    """Makes the model from a config, if it is not the class called `model`."""

    def build(self) -> Any:
        config = getattr(transformers, f"{self.config}Config")(**self.sizes, attn_implementation=self.attention)
        return made((self.make or getattr(transformers, self.model))(config))
