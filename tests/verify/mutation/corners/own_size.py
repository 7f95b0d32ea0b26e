"""Corners of a block's own sizes: wrong only at one length, the one that the block gets in production."""

from __future__ import annotations

import attrs
import numpy as np

from mutation.artifacts import Artifact
from mutation.corners.bands import aim_at, input_off, output_off, sizes_within
from mutation.corners.family import Fault, Random, family
from mutation.inputs import REACH, Aim, Arrays
from mutation.surgery import Nodes


def full_grid(artifact: Artifact) -> int | None:
    """The number of tokens of a whole window or grid, with prefix tokens. None if the encoding has neither."""
    encoding = artifact.spec.encoding
    window, grid = getattr(encoding, "window_size", None), getattr(encoding, "grid", None)
    if window is not None:
        return int(window) ** 2
    return int(np.prod(grid)) + artifact.spec.prefix_tokens if grid is not None else None


def _grid_aim(artifact: Artifact, tokens: int) -> Aim:
    """Inputs whose cells come row by row after the prefix tokens, as in an image."""
    limit = artifact.spec.position_limit()
    assert limit is not None
    cells = np.arange(tokens - artifact.spec.prefix_tokens)
    places = np.stack([cells % limit, cells // limit], -1)

    def in_order(arrays: Arrays, random: Random) -> None:
        arrays["position_ids"][:, artifact.spec.prefix_tokens :] = places

    return attrs.evolve(aim_at(rows=(1, 2), seq=(tokens, tokens)), edit=in_order)


@family("own_size", "axes exchanged where the grid is full")
def _axes(artifact: Artifact, random: Random) -> Fault | None:
    tokens = full_grid(artifact)
    if tokens is None:
        return None

    def exchanged(nodes: Nodes, value: str) -> str:
        return nodes.op("Gather", value, nodes.const([1, 0]), axis=-1)

    apply = input_off("position_ids", sizes_within(artifact, seq=(tokens, tokens)), exchanged)
    return Fault(f"{tokens} tokens", apply, (_grid_aim(artifact, tokens),))


@family("own_size", "one cell misread where the grid is full")
def _cell(artifact: Artifact, random: Random) -> Fault | None:
    tokens = full_grid(artifact)
    if tokens is None:
        return None
    prefix = artifact.spec.prefix_tokens
    cell, other = (int(index) + prefix for index in random.choice(tokens - prefix, 2, replace=False))
    order = np.arange(tokens)
    order[cell] = other

    def misread(nodes: Nodes, value: str) -> str:
        """This branch is also computed for inputs of other lengths, so indices must stay below the length."""
        length = nodes.size(value, 1)
        full = nodes.op("Equal", length, nodes.const(tokens))
        steps = nodes.steps(length)
        chosen = nodes.op("And", full, nodes.op("Equal", steps, nodes.const(cell)))
        return nodes.op("Gather", value, nodes.op("Where", chosen, nodes.const(other), steps), axis=1)

    apply = input_off("position_ids", sizes_within(artifact, seq=(tokens, tokens)), misread)
    return Fault(f"token {cell} as {other} of {tokens}", apply, (_grid_aim(artifact, tokens),))


@family("own_size", "outputs off where the grid is full")
def _grid_output(artifact: Artifact, random: Random) -> Fault | None:
    tokens = full_grid(artifact)
    if tokens is None:
        return None
    apply = output_off(sizes_within(artifact, seq=(tokens, tokens)))
    return Fault(f"{tokens} tokens", apply, (_grid_aim(artifact, tokens),))


def _rows_of_table(artifact: Artifact) -> int | None:
    """The number of rows of a table that is read by position or by distance. None without such a table."""
    spec = artifact.spec
    if spec.position_axes == 1 and spec.position_limit() and not spec.ordered:
        return spec.position_limit()
    rows = getattr(spec.encoding, "npos_max", None) or getattr(spec.encoding, "max_distance", None)
    return int(rows) if rows else None


@family("own_size", "outputs off where a table is read whole")
def _table_output(artifact: Artifact, random: Random) -> Fault | None:
    """The prompt has as many tokens as a table of positions or distances has rows."""
    rows = _rows_of_table(artifact)
    if rows is None or rows > REACH.row:
        return None
    apply = output_off(sizes_within(artifact, seq=(rows, rows), past=(0, 0)))
    return Fault(f"{rows} tokens", apply, (aim_at(rows=(1, 1), seq=(rows, rows)),))


@family("own_size", "outputs off where keys are as many as the window")
def _window_output(artifact: Artifact, random: Random) -> Fault | None:
    """A prompt or a step just fills the window or the attention chunk."""
    layers = artifact.spec.distinct_layers()
    sizes = sorted({size for layer in layers for size in (layer.window, layer.attention_chunk_size) if size})
    if not sizes:
        return None
    size, prompt = int(random.choice(sizes)), bool(random.integers(2)) or not artifact.spec.kv_cache
    seq, past = (size, 0) if prompt else (1, size - 1)
    apply = output_off(sizes_within(artifact, seq=(seq, seq), past=(past, past)))
    return Fault(f"{seq} tokens after {past}", apply, (aim_at(rows=(1, 1), seq=(seq, seq), past=(past, past)),))
