"""Attention with the shift of Transformer-XL (Dai et al. 2019, arXiv:1901.02860, appendix B), in plain torch.

A user would write these blocks from the paper, for consecutive positions, and export them with torch.onnx.export. They
use no operator of posexport.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import Contender, of_file
from torch import Tensor, nn

from posexport.models.weights import seeded_weights
from posexport.spec.spec import Spec


def shifted(rows: Tensor) -> Tensor:
    """Turns [..., S, S] by distance, from S - 1 to 0, into [..., S, S] by key (appendix B). Only keys at or before
    their query get the right value."""
    seq = rows.shape[-1]
    return nn.functional.pad(rows, (1, 0)).reshape(*rows.shape[:2], seq + 1, seq)[:, :, 1:]


class Textbook(nn.Module):
    """One causal block from [B, S, D] to [B, S, D]. The weights have the names of a file of posexport."""

    def __init__(self, spec: Spec, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.heads, self.scale = spec.num_heads, spec.scale
        self.weights = nn.ParameterDict({name.replace(".", "/"): value for name, value in weights.items()})
        self.frequencies = nn.Buffer(10000.0 ** -(torch.arange(0, spec.hidden_size, 2) / spec.hidden_size))

    def weight(self, name: str) -> Tensor:
        """A weight of the encoding."""
        made: Tensor = self.weights[f"encoding/{name}"]
        return made

    def by_head(self, x: Tensor) -> Tensor:
        """Reshapes [B, S, D] to [B, N, S, head_dim]."""
        return x.reshape(x.shape[0], -1, self.heads, x.shape[-1] // self.heads).transpose(1, 2)

    def logits(self, q: Tensor, k: Tensor, distances: Tensor) -> Tensor:
        """The unscaled logits [B, N, S, S] of keys at or before their query. `distances` runs from S - 1 to 0."""
        raise NotImplementedError

    def values(self, probabilities: Tensor, v: Tensor, distances: Tensor) -> Tensor:
        """The weighted sum of the values, [B, N, S, head_dim]."""
        return probabilities @ v

    def forward(self, hidden_states: Tensor) -> Tensor:
        batch, seq, _ = hidden_states.shape
        q, k, v = (self.by_head(hidden_states @ self.weights[f"{name}_proj/weight"].T) for name in "qkv")
        distances = torch.arange(seq - 1, -1, -1, device=q.device)
        logits = self.logits(q, k, distances) * self.scale
        ahead = torch.ones(seq, seq, dtype=torch.bool, device=q.device).triu(1)
        probabilities = logits.masked_fill(ahead, -torch.inf).softmax(-1)
        mixed = self.values(probabilities, v, distances).transpose(1, 2).reshape(batch, seq, -1)
        output: Tensor = mixed @ self.weights["o_proj/weight"].T
        return output


class TransformerXL(Textbook):
    """Dai et al. 2019, arXiv:1901.02860, section 3.3."""

    def logits(self, q: Tensor, k: Tensor, distances: Tensor) -> Tensor:
        angles = distances.unsqueeze(1) * self.frequencies
        r = self.by_head((torch.cat([angles.sin(), angles.cos()], -1) @ self.weight("r_proj/weight").T).unsqueeze(0))
        content = (q + self.weight("content_bias").unsqueeze(1)) @ k.transpose(2, 3)
        return content + shifted((q + self.weight("position_bias").unsqueeze(1)) @ r.transpose(2, 3))


class Shaw(Textbook):
    """Shaw et al. 2018, arXiv:1803.02155, with the shift. The term of the values uses the inverse shift."""

    def rows(self, name: str, distances: Tensor) -> Tensor:
        """Rows [S, head_dim] of a table. The middle row of the table belongs to distance 0."""
        table = self.weight(f"{name}/weight")
        return table[table.shape[0] // 2 - distances.clamp(max=table.shape[0] // 2)]

    def logits(self, q: Tensor, k: Tensor, distances: Tensor) -> Tensor:
        return q @ k.transpose(2, 3) + shifted(q @ self.rows("keys", distances).T)

    def values(self, probabilities: Tensor, v: Tensor, distances: Tensor) -> Tensor:
        batch, heads, seq, _ = probabilities.shape
        flat = nn.functional.pad(probabilities.reshape(batch, heads, -1), (seq, 0))
        by_distance = flat.reshape(batch, heads, seq, seq + 1)[..., 1:]
        return probabilities @ v + by_distance @ self.rows("values", distances)


class Deberta(Textbook):
    """He et al. 2021, arXiv:2006.03654, section 3.1. Both terms use the shift; the second uses it by key and transposes
    it."""

    def logits(self, q: Tensor, k: Tensor, distances: Tensor) -> Tensor:
        table = self.weight("weight")
        rows = table[(distances + table.shape[0] // 2).clamp(max=table.shape[0] - 1)]
        keys, queries = (
            self.by_head((rows @ self.weight(f"pos_{name}_proj/weight").T).unsqueeze(0)).transpose(2, 3)
            for name in ("key", "query")
        )
        # in reverse order, the later queries of a key become earlier ones, so the same shift applies
        second = shifted((k @ queries).flip(2)).flip(2, 3).transpose(2, 3)
        return q @ k.transpose(2, 3) + shifted(q @ keys) + second


TEXTBOOKS = {"relative": TransformerXL, "shaw": Shaw, "deberta": Deberta}


def contender(path: Path, spec: Spec, inputs: Mapping[str, np.ndarray], **options: Any) -> Contender:
    """The block with the spec's seeded weights, exported by torch for any length, in a session with `options`."""
    x = torch.from_numpy(inputs["hidden_states"])
    shapes = {"hidden_states": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}}
    block = TEXTBOOKS[spec.encoding.name](spec, seeded_weights(spec, 0)).eval()
    program = torch.onnx.export(
        block,
        (torch.cat([x[:, :64]] * 2),),
        input_names=["hidden_states"],
        output_names=["output"],
        opset_version=20,
        dynamo=True,
        dynamic_shapes=shapes,
        verbose=False,
    )
    assert program is not None  # torch returns a program with dynamo=True
    program.save(path)
    return of_file(path, {"hidden_states": inputs["hidden_states"]}, **options)
