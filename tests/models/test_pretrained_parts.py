"""Language models inside models that read images first, and models that can't read tokens alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

transformers: Any = pytest.importorskip("transformers")

from posexport.errors import RequestError  # noqa: E402
from posexport.export.whole_model import HowToExport, export_whole  # noqa: E402
from posexport.models.pretrained import DECODER, ENCODER, TRANSLATOR, open_pretrained  # noqa: E402

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGES = {**SIZES, "image_size": 16, "patch_size": 8}
OPT = {"model_type": "opt", **SIZES, "ffn_dim": 16, "word_embed_proj_dim": 16, "vocab_size": 32}
T5 = {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 32}
QUERIES = {**SIZES, "encoder_hidden_size": 16, "vocab_size": 32}
KOSMOS = {"embed_dim": 16, "layers": 2, "ffn_dim": 16, "attention_heads": 2, "vocab_size": 32}
BLIP = {
    **SIZES,
    "encoder_hidden_size": 16,
    "projection_dim": 16,
    "vocab_size": 32,
    "bos_token_id": 1,
    "sep_token_id": 2,
}


def saved(folder: Path, name: str, **parts: Any) -> Path:
    """A checkpoint of this class."""
    kind = getattr(transformers, name)
    kind(kind.config_class(**parts)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "parts", "inside", "kind", "left"),
    [
        (
            "Blip2ForConditionalGeneration",
            {"vision_config": IMAGES, "qformer_config": QUERIES, "text_config": OPT},
            "OPTForCausalLM",
            DECODER,
            ("qformer", "vision"),
        ),
        (
            "InstructBlipForConditionalGeneration",
            {"vision_config": IMAGES, "qformer_config": QUERIES, "text_config": T5},
            "T5ForConditionalGeneration",
            TRANSLATOR,
            ("qformer", "vision"),
        ),
        (
            "Kosmos2ForConditionalGeneration",
            {"vision_config": IMAGES, "text_config": KOSMOS, "latent_query_num": 2},
            "Kosmos2TextForCausalLM",
            DECODER,
            ("vision",),
        ),
    ],
)
def test_the_language_model_inside(
    name: str, parts: Any, inside: str, kind: str, left: tuple[str, ...], tmp_path: Path
) -> None:
    made = open_pretrained(saved(tmp_path, name, **parts))
    assert (made.architecture, made.checkpoint_class, made.kind, made.left_out) == (inside, name, kind, left)
    assert {*made.weights} == {name for name, _ in made.model.named_parameters(remove_duplicate=False)}


def test_a_decoder_that_reads_an_image_in_each_layer_is_none(tmp_path: Path) -> None:
    folder = saved(tmp_path, "BlipForConditionalGeneration", vision_config=IMAGES, text_config=BLIP)
    made = open_pretrained(folder)
    assert (made.architecture, made.kind) == ("BlipForConditionalGeneration", ENCODER)
    with pytest.raises(RequestError, match="reads text and vision together"):
        export_whole(made, HowToExport())


def test_a_decoder_that_needs_an_image_is_refused(tmp_path: Path) -> None:
    vision = {"embed_dim": 16, "image_size": 16, "patch_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    folder = saved(tmp_path, "IdeficsForVisionText2Text", **SIZES, vocab_size=32, vision_config=vision)
    said = r"^IdeficsForVisionText2Text can't read tokens alone .*a file has no input for pixel_values"
    with pytest.raises(RequestError, match=said):
        export_whole(open_pretrained(folder), HowToExport())
