"""RoPE with the scaling `dynamic`: transformers keeps its frequencies from one call to the next.

A file does not have this state, so it is compared with fresh models of transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import error, session, transformers

from posexport.artifact.onnx_artifact import write_onnx
from posexport.export.whole_model import HowToExport, export_whole
from posexport.models.pretrained import open_pretrained
from posexport.models.pretrained_angles import stateless_angles

TRAINED = 16
LONG_AND_SHORT = (40, 12, 30)
"""Lengths of consecutive texts: for the last, transformers keeps frequencies of the first."""


def config() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    return transformers.LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=TRAINED, rope_parameters=rope)


def test_what_was_read_before_does_not_count() -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    module = LlamaRotaryEmbedding(config())
    stateless_angles(module)
    for length in LONG_AND_SHORT:
        given = torch.zeros(1), torch.arange(length)[None]
        for made, fresh in zip(module(*given), LlamaRotaryEmbedding(config())(*given), strict=True):
            assert torch.equal(made, fresh)


def test_types_of_layers_have_their_own() -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    kinds = {
        "full_attention": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    gemma = transformers.Gemma3TextConfig(
        head_dim=16, num_hidden_layers=2, layer_types=[*kinds], max_position_embeddings=TRAINED, rope_parameters=kinds
    )
    module = Gemma3RotaryEmbedding(gemma)
    stateless_angles(module)
    for length in LONG_AND_SHORT:
        for kind in kinds:
            given = torch.zeros(1), torch.arange(length)[None], kind
            for made, fresh in zip(module(*given), Gemma3RotaryEmbedding(gemma)(*given), strict=True):
                assert torch.equal(made, fresh)


@pytest.mark.slow
def test_a_file_computes_them_by_the_largest_position(tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = tmp_path / "checkpoint"
    transformers.LlamaForCausalLM(config()).save_pretrained(folder)
    (made,) = export_whole(open_pretrained(folder), HowToExport(form="native", kv_cache="none"))
    assert [one["encoding"]["scaling"] for one in made.attentions] == ["dynamic", "dynamic"]
    write_onnx(made.model, tmp_path / "model.onnx", attentions=made.attentions)
    run = session(tmp_path / "model.onnx")
    for length in LONG_AND_SHORT:
        ids = np.arange(length)[None] % 64
        given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": np.arange(length)[None]}
        fresh = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            wanted = fresh(**{name: torch.from_numpy(value) for name, value in given.items()}).logits.numpy()
        assert error(run.run(["logits"], given)[0], wanted) < 2e-5
