"""Models in which padding of one row changes another. They are refused.

If no row is padded, transformers leaves out the mask of some kernels, and the language model inside a model such as
ColPali then makes another one: its tokens see later ones, but only in batches without padding. A file has one graph for
both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from posexport.errors import RequestError
from posexport.models.pretrained import text_config
from posexport.models.whole import unchanged
from posexport.models.whole_outputs import outputs_by_name

_TOKENS = 4

_ROUNDING = {torch.float32: 0.01, torch.float64: 0.01}
"""The part of the root mean square by which rounding alone may change outputs; `_COARSE` in other dtypes."""

_COARSE = 0.1


def check_rows(model: nn.Module) -> None:
    """RequestError if an output of a row of text depends on whether the other row is padded.

    Only models are tried in which another model reads the text. The model needs its weights.
    """
    configuration: Any = model.config
    if text_config(configuration) is configuration:
        return
    mask = torch.ones(2, _TOKENS, dtype=torch.int64)
    padded = mask.clone()
    padded[0, -1] = 0
    try:
        alone, beside = _run(model, mask), _run(model, padded)
    except Exception:  # a model that reads something else, more tokens, or particular ones
        return
    for name, output in alone.items():
        if not output.is_floating_point() or not output.dim() or len(output) != len(mask) or name not in beside:
            continue
        row, other = output[1].double(), beside[name][1].double()
        if row.shape == other.shape and _differ(row, other, _ROUNDING.get(output.dtype, _COARSE)):
            raise RequestError(
                f"transformers itself gives another {name!r} of a text in {type(model).__name__} if another text "
                "beside it is padded, so no file computes what it computes: it is not exported."
            )


def _run(model: nn.Module, mask: Tensor) -> dict[str, Tensor]:
    ids = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1]])
    with torch.no_grad(), unchanged(model):
        made = model(input_ids=ids, attention_mask=mask)
    return outputs_by_name(made if isinstance(made, Mapping) else {})


def _differ(row: Tensor, other: Tensor, part: float) -> bool:
    return bool((row - other).square().mean().sqrt() > part * row.square().mean().sqrt())
