"""Transformer-XL's attention with its shift (Dai et al. 2019, arXiv:1901.02860, appendix B), in plain torch.

What a user writes from the paper for consecutive positions and hands to torch.onnx.export: no operator of posexport.
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


class TransformerXL(nn.Module):
    """One causal block [B, S, D] to [B, S, D], weights named as in a file of posexport."""

    def __init__(self, spec: Spec, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.heads, self.scale = spec.num_heads, spec.scale
        self.weights = nn.ParameterDict({name.replace(".", "/"): value for name, value in weights.items()})
        self.frequencies = nn.Buffer(10000.0 ** -(torch.arange(0, spec.hidden_size, 2) / spec.hidden_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        batch, seq, _ = hidden_states.shape

        def heads(name: str, x: Tensor) -> Tensor:
            made: Tensor = (x @ self.weights[name].T).reshape(x.shape[0], -1, self.heads, x.shape[-1] // self.heads)
            return made

        q, k, v = (heads(f"{name}_proj/weight", hidden_states) for name in "qkv")
        distances = torch.arange(seq - 1, -1, -1, device=q.device)
        angles = distances.unsqueeze(1) * self.frequencies
        r = heads("encoding/r_proj/weight", torch.cat([angles.sin(), angles.cos()], -1).unsqueeze(0))
        content = (q + self.weights["encoding/content_bias"]).transpose(1, 2) @ k.permute(0, 2, 3, 1)
        position = (q + self.weights["encoding/position_bias"]).transpose(1, 2) @ r.permute(0, 2, 3, 1)
        padded = nn.functional.pad(position, (1, 0)).reshape(batch, self.heads, seq + 1, seq)
        shifted = padded[:, :, 1:].reshape(batch, self.heads, seq, seq)
        logits = (content + shifted) * self.scale
        ahead = torch.ones(seq, seq, dtype=torch.bool, device=q.device).triu(1)
        probabilities = logits.masked_fill(ahead, -torch.inf).softmax(-1)
        mixed = (probabilities @ v.transpose(1, 2)).transpose(1, 2).reshape(batch, seq, -1)
        output: Tensor = mixed @ self.weights["o_proj/weight"].T
        return output


def contender(path: Path, spec: Spec, inputs: Mapping[str, np.ndarray], **options: Any) -> Contender:
    """The block with the spec's seeded weights, as torch exports it for any length, in a session with `options`."""
    x = torch.from_numpy(inputs["hidden_states"])
    shapes = {"hidden_states": {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}}
    block = TransformerXL(spec, seeded_weights(spec, 0)).eval()
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
    assert program is not None  # as torch gives it with dynamo
    program.save(path)
    return of_file(path, {"hidden_states": inputs["hidden_states"]}, **options)
