"""Constants that transformers computes for a dtype, if a file has another dtype than its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import checkpoint
from torch import nn

transformers = pytest.importorskip("transformers")

from posexport.models.pretrained import open_pretrained, without_values  # noqa: E402
from posexport.models.pretrained_buffers import computed_again  # noqa: E402


def gemma(folder: Path) -> Path:
    """A Gemma in bf16 whose embedding factor is the root of 40, which bf16 cannot represent."""
    sizes = {"vocab_size": 16, "hidden_size": 40, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8}
    config = transformers.GemmaConfig(**sizes, num_key_value_heads=1, intermediate_size=8)
    transformers.GemmaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["gemma", "m2m_100"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_checkpoint_in_bf16_has_the_constants_of_the_files_dtype(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = gemma(tmp_path) if name == "gemma" else checkpoint(name, "bfloat16")
    pretrained = open_pretrained(folder)
    wanted = dict(type(pretrained.model).from_pretrained(folder, dtype=dtype).named_buffers())
    before = {name: buffer.clone() for name, buffer in pretrained.model.named_buffers()}
    with without_values(pretrained, dtype):
        found = dict(pretrained.model.named_buffers())
        followed = [name for name in found if before[name].dtype == torch.bfloat16]
        assert followed, "no constant of this model follows the dtype"
        for each in followed:
            torch.testing.assert_close(found[each], wanted[each], rtol=0, atol=0)
            assert not torch.equal(found[each], before[each].to(dtype))  # not the number that was rounded to bf16
    assert all(torch.equal(buffer, before[name]) for name, buffer in pretrained.model.named_buffers())


class _Stored(nn.Module):
    """A model with a buffer that its checkpoint contains."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("stored", torch.tensor([0.1]).bfloat16())
        self.register_buffer("changed", torch.tensor([0.7]).bfloat16(), persistent=False)

    def _init_weights(self, module: Any) -> None:
        module.stored.fill_(0.1)
        module.changed.fill_(0.1)


def test_buffers_of_the_checkpoint_and_others_than_are_computed_are_converted() -> None:
    found = computed_again(_Stored(), ["stored", "changed"], torch.float32)
    assert found["stored"].item() == torch.tensor(0.1).bfloat16().item()
    assert found["changed"].item() == torch.tensor(0.7).bfloat16().item()
