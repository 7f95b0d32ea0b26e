"""Files to rewrite, and helpers that rewrite in the test's own process."""

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
    """A file with this graph; by default a decoder of one layer."""
    path = folder / name
    path.write_bytes((small_graphs.decoder() if model is None else model).SerializeToString())
    return path


def in_process(monkeypatch: Any) -> None:
    """Rewrites in this process, so that a test can plant faults."""
    monkeypatch.setattr(draft, "rewrite_in_child", rewrite_into)


def only_one_runtime(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Verifies rewritten files only on ONNX Runtime on the CPU, which is fast, and works in this folder."""
    verify = verify_rewritten.verify

    def fast(paths: Any, *, runtimes: Mapping[str, Runtime], **options: Any) -> Report:
        return verify(paths, runtimes={name: row for name, row in runtimes.items() if name == "ort-cpu"}, **options)

    monkeypatch.setattr(verify_rewritten, "verify", fast)
    monkeypatch.chdir(folder)


def numbers_hidden(text: str) -> str:
    """The text with `#` for each number like 1.2e-05, and without the lines of dashes, whose length depends on them."""
    text = re.sub(r"\d\.\d+e[+-]\d\d", "#", text)
    return "\n".join(line.rstrip() for line in text.splitlines() if not re.fullmatch(r" [─-]+", line))


def rewritten(path: Path, out: Path, **options: Any) -> RewriteResult:
    """Rewrites a file; `options` are those of RewriteOptions."""
    return rewrite_file(path, out, RewriteOptions(**options))


def rewritten_model(model: onnx.ModelProto, **options: Any) -> tuple[Rewritten, onnx.ModelProto]:
    """The result of rewriting a graph, and the new graph, checked by onnx; `options` are those of rewrite_model."""
    done = rewrite_model(ir.from_proto(model), **options)
    proto = ir.to_proto(done.model)
    onnx.checker.check_model(proto, full_check=True)
    return done, proto


def feeds(batch: int, seq: int, past: int, layers: int = 1, seed: int = 0) -> dict[str, Array]:
    """Inputs of a decoder of `small_graphs`; all rows but the first are padded on the left."""
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
    """The outputs of ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return list(session.run(outputs, arrays))


def names_of(folder: Path) -> list[str]:
    """The names of the files in a folder, sorted."""
    return sorted(entry.name for entry in folder.iterdir())
