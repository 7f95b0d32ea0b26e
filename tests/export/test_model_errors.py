"""Errors of a model of transformers that cannot be exported are told from errors of torch's exporter."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

transformers: Any = pytest.importorskip("transformers")

from posexport.errors import RequestError  # noqa: E402
from posexport.export import exporter, whole_model  # noqa: E402
from posexport.export.model_errors import exporting  # noqa: E402
from posexport.export.whole_model import HowToExport, export_whole  # noqa: E402
from posexport.models.pretrained import Pretrained, open_pretrained  # noqa: E402

SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
FAILS_ITSELF = r"^transformers itself can't run {} on the few tokens, .*\(RuntimeError: {}.*\): either config.json or"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Pretrained:
    folder = tmp_path_factory.mktemp("bert")
    config = transformers.BertConfig(**SIZES, intermediate_size=8, vocab_size=16)
    transformers.BertModel(config).save_pretrained(folder)
    return open_pretrained(folder)


def _fails(*_: object, **__: object) -> None:
    raise RuntimeError("no such size")


def test_images_of_a_size_that_transformers_does_not_take(tmp_path: Any) -> None:
    """DINOv2 in transformers confuses rows and columns of patches."""
    config = transformers.Dinov2Config(**SIZES, image_size=[28, 56], patch_size=14)
    model = transformers.Dinov2Model(config).eval()
    with pytest.raises(RuntimeError):
        model(torch.zeros(1, 3, 28, 56))
    model.save_pretrained(tmp_path)
    with pytest.raises(RequestError, match=FAILS_ITSELF.format("Dinov2Model", "")) as refused:
        export_whole(open_pretrained(tmp_path), HowToExport())
    assert "of modeling_dinov2.py): either" in str(refused.value)


def test_a_model_that_fails_while_its_layers_are_compared(small: Pretrained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_model, "check_alike", _fails)
    with pytest.raises(RequestError, match=FAILS_ITSELF.format("BertModel", "no such size")):
        export_whole(small, HowToExport())


def test_a_model_that_runs_and_is_not_traced(small: Pretrained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.export, "export", _fails)
    with pytest.raises(
        RequestError, match=r"^torch can't export BertModel as a whole \(RuntimeError: no such size\): "
    ):
        export_whole(small, HowToExport())


@pytest.mark.parametrize("cached", [False, True])
def test_a_decoder_may_be_exported_without_caches(cached: bool) -> None:
    """ProphetNet's decoder is; the message named only single layers."""
    advice = "give --kv-cache none, or --layer in place" if cached else "give --layer in place"
    with pytest.raises(RequestError, match=rf"can't export X as a whole .*\): {advice}"), exporting("X", cached):
        _fails()


@pytest.mark.parametrize("cached", ["none", "concat"])
def test_a_decoder_that_cannot_run(cached: str, tmp_path: Any) -> None:
    """A single layer is not compared with others, and without caches nothing else runs the model before it is traced.

    The output matrix of Helium has the size of the model, whatever size the heads have.
    """
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 8, "vocab_size": 16, "pad_token_id": 0}
    config = transformers.HeliumConfig(**SIZES | sizes | {"num_hidden_layers": 1})
    transformers.HeliumForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(RequestError, match=FAILS_ITSELF.format("HeliumForCausalLM", "")):
        export_whole(open_pretrained(tmp_path), HowToExport(kv_cache=cached))


def test_a_cache_class_of_its_own_in_a_model_whose_layers_are_all_attention(tmp_path: Any) -> None:
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 8, "vocab_size": 16, "num_local_experts": 2}
    config = transformers.MiniMaxConfig(**SIZES, **sizes, layer_types=["full_attention"] * 2)
    transformers.MiniMaxForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(RequestError, match=r"^MiniMaxForCausalLM has no attention with caches.* give --kv-cache none"):
        export_whole(open_pretrained(tmp_path), HowToExport())


def test_errors_that_torch_logs_before_it_raises_them_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with exporter.quiet():
        logging.getLogger("torch.export").error("Traceback (most recent call last):")
    assert capsys.readouterr().err == ""
