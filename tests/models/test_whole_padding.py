"""Models in which padding of one text changes another one are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import cli, refused
from small_decoders import TRAINED, VOCABULARY, save_randomised

from posexport.errors import RequestError
from posexport.models.whole_padding import check_rows

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": TRAINED, "vocab_size": VOCABULARY}


def colpali(bidirectional: bool) -> Any:
    """A model for retrieval, whose inner model makes masks of another kind if it gets none."""
    config = transformers.PaliGemmaConfig(
        text_config={**TEXT, "model_type": "gemma", "pad_token_id": 0},
        vision_config={**SIZES, "image_size": 16, "patch_size": 8, "model_type": "siglip_vision_model"},
        image_token_index=VOCABULARY - 1,
        projection_dim=32,
    )
    config.text_config.use_bidirectional_attention = bidirectional
    torch.manual_seed(0)
    return transformers.ColPaliForRetrieval(transformers.ColPaliConfig(vlm_config=config, embedding_dim=16)).eval()


def test_padding_beside_a_text_changes_it() -> None:
    model = colpali(bidirectional=True)
    ids = torch.tensor([[5, 17, 3, 44], [9, 4, 21, 7]])
    mask = torch.ones_like(ids)
    with torch.no_grad():
        alone = model(input_ids=ids, attention_mask=mask).embeddings[1]
        mask[0, -1] = 0
        beside = model(input_ids=ids, attention_mask=mask).embeddings[1]
    assert (alone - beside).abs().max() > 0.03 * alone.abs().max()
    with pytest.raises(RequestError, match="gives another 'embeddings' of a text in ColPaliForRetrieval if another"):
        check_rows(model)


def test_a_causal_one_is_not_refused() -> None:
    check_rows(colpali(bidirectional=False))


def test_it_is_not_exported(tmp_path: Path) -> None:
    """The exporter itself runs models without the values of their weights, which would show nothing."""
    save_randomised(colpali(bidirectional=True), tmp_path / "model")
    refused(
        cli("export", "--from", tmp_path / "model", "--model", "-o", tmp_path / "model.onnx"),
        "transformers itself gives another 'embeddings' of a text in ColPaliForRetrieval",
    )
