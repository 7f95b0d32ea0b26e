"""Files to rewrite, and rewriting without a process of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import small_graphs

from posexport.rewrite import draft
from posexport.rewrite.draft import rewrite_file
from posexport.rewrite.files import rewrite_into
from posexport.rewrite.request import RewriteOptions
from posexport.rewrite.result import RewriteResult
from posexport.rewrite.rewriter import Rewritten, rewrite_model
from posexport.runtimes import Runtime
from posexport.verify import rewritten as verify_rewritten
from posexport.verify.result import Report

Array = np.ndarray[Any, Any]


def saved(folder: Path, model: onnx.ModelProto | None = None, name: str = "in.onnx") -> Path:
    """A file with this graph, by default that of one layer of a decoder."""
    path = folder / name
    path.write_bytes((small_graphs.decoder() if model is None else model).SerializeToString())
    return path


def in_process(monkeypatch: Any) -> None:
    """Rewrite in this process, where a test can plant faults."""
    monkeypatch.setattr(draft, "rewrite_in_child", rewrite_into)


def only_one_runtime(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Verify rewritten files on ONNX Runtime on the CPU alone, which is fast, and work in this folder."""
    verify = verify_rewritten.verify

    def fast(paths: Any, *, runtimes: Mapping[str, Runtime], **options: Any) -> Report:
        return verify(paths, runtimes={name: row for name, row in runtimes.items() if name == "ort-cpu"}, **options)

    monkeypatch.setattr(verify_rewritten, "verify", fast)
    monkeypatch.chdir(folder)


def numbers_hidden(text: str) -> str:
    """Output with `#` for each error, and without the rule whose length follows from them."""
    text = re.sub(r"\d\.\d+e[+-]\d\d", "#", text)
    return "\n".join(line.rstrip() for line in text.splitlines() if not re.fullmatch(r" [─-]+", line))


def rewritten(path: Path, out: Path, **options: Any) -> RewriteResult:
    """Rewrite a file; `options` are those of RewriteOptions."""
    return rewrite_file(path, out, RewriteOptions(**options))


def rewritten_model(model: onnx.ModelProto, **options: Any) -> tuple[Rewritten, onnx.ModelProto]:
    """What becomes of a graph, and the new one, which onnx's checker takes; `options` are those of rewrite_model."""
    done = rewrite_model(ir.from_proto(model), **options)
    proto = ir.to_proto(done.model)
    onnx.checker.check_model(proto, full_check=True)
    return done, proto


def feeds(batch: int, seq: int, past: int, layers: int = 1, seed: int = 0) -> dict[str, Array]:
    """Inputs of a decoder of `small_graphs`, the second row padded on the left."""
    rng = np.random.default_rng(seed)
    mask = np.ones((batch, past + seq), np.int64)
    mask[1:, : (past + seq) // 3] = 0
    places = np.maximum(mask.cumsum(1) - 1, 0)[:, past:]
    shape = (batch, small_graphs.KV_HEADS, past, small_graphs.SIZE)
    pasts = {
        f"past_key_values.{layer}.{kind}": rng.standard_normal(shape).astype(np.float32)
        for layer in range(layers)
        for kind in ("key", "value")
    }
    ids = rng.integers(0, small_graphs.VOCABULARY, (batch, seq))
    return {"input_ids": ids, "attention_mask": mask, "position_ids": places, **pasts}


def ran(path: Path, arrays: dict[str, Array], outputs: Sequence[str] | None = None) -> list[Array]:
    """What ONNX Runtime computes."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return list(session.run(outputs, arrays))


def names_of(folder: Path) -> list[str]:
    """The files of a folder."""
    return sorted(entry.name for entry in folder.iterdir())
