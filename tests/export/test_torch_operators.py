"""torch's table of operators is read once in a process, changes no graph, and torch is left as it was."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import onnx_ir as ir
import pytest
from helpers import case, weights_for
from torch.onnx._internal.exporter import _registration

from posexport.export import exporter, torchlib_cache


def _bytes() -> bytes:
    spec = case("rope")
    return ir.to_proto(exporter.export(spec, weights_for(spec))).SerializeToString()


def test_the_second_export_reads_no_source_and_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    first = _bytes()
    read = []
    monkeypatch.setattr("onnxscript._internal.ast_utils.get_src_and_ast", lambda function: read.append(function))
    assert _bytes() == first
    assert read == []
    monkeypatch.undo()
    monkeypatch.setattr(torchlib_cache, "read_once", contextlib.nullcontext)
    assert _bytes() == first
    assert torchlib_cache.NAME not in vars(_registration.onnxscript_apis)


def test_what_was_there_is_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def own() -> list[str]:
        return ["an operator"]

    holder = SimpleNamespace(get_torchlib_ops=own)
    monkeypatch.setattr(torchlib_cache, "_operators", lambda apis: apis.get_torchlib_ops())
    monkeypatch.setattr(_registration, "onnxscript_apis", holder)
    with torchlib_cache.read_once():
        assert holder.get_torchlib_ops is not own
        assert holder.get_torchlib_ops() == ["an operator"]
    assert holder.get_torchlib_ops is own


def test_another_torch_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_registration, "onnxscript_apis")
    with torchlib_cache.read_once():
        pass
