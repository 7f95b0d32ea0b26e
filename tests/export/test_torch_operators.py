"""torch's table of translations is built once in a process; graphs do not change, and torch is restored."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest
from helpers import case, weights_for
from torch.onnx._internal.exporter import _registration, _schemas

from posexport.export import exporter, torchlib_cache


def _bytes() -> bytes:
    spec = case("rope")
    return ir.to_proto(exporter.export(spec, weights_for(spec))).SerializeToString()


@pytest.mark.slow
@pytest.mark.usefixtures("traced_anew")
def test_the_second_export_builds_no_table_and_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    first, classmethod_before = _bytes(), vars(_registration.ONNXRegistry)[torchlib_cache.REGISTRY]
    read: list[object] = []

    def signature(function: Any, *args: Any, **fields: Any) -> object:
        if not function.__module__.startswith("posexport"):
            read.append(function)
        return original(function, *args, **fields)

    original = _schemas.op_signature_from_function
    monkeypatch.setattr("onnxscript._internal.ast_utils.get_src_and_ast", read.append)
    monkeypatch.setattr(_schemas, "op_signature_from_function", signature)
    assert _bytes() == first
    assert read == []
    monkeypatch.undo()
    monkeypatch.setattr(_schemas, "op_signature_from_function", signature)
    monkeypatch.setattr(torchlib_cache, "built_once", contextlib.nullcontext)
    assert _bytes() == first
    assert len(read) > 100, "without the cache the table is built"
    assert torchlib_cache.OPERATORS not in vars(_registration.onnxscript_apis)
    assert vars(_registration.ONNXRegistry)[torchlib_cache.REGISTRY] is classmethod_before


def test_what_was_there_is_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def own() -> list[str]:
        return ["an operator"]

    holder = SimpleNamespace(get_torchlib_ops=own)
    monkeypatch.setattr(torchlib_cache, "_operators", lambda apis: apis.get_torchlib_ops())
    monkeypatch.setattr(_registration, "onnxscript_apis", holder)
    with torchlib_cache.built_once():
        assert holder.get_torchlib_ops is not own
        assert holder.get_torchlib_ops() == ["an operator"]
    assert holder.get_torchlib_ops is own


def test_another_torch_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_registration, "onnxscript_apis")
    with torchlib_cache.built_once():
        pass
