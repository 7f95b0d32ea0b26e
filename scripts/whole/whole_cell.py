"""One cell of the matrix in its own process. A random checkpoint is exported, verified and run to generate, with the
commands that a user would type."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from building import build
from click.testing import CliRunner
from onnx import numpy_helper
from whole_rows import ROWS

from posexport.verify.result import INCONCLUSIVE

EQUAL, DIFFERENT, NOT_VERIFIED, REFUSED, CRASHED = "equal", "different", "not verified", "refused", "crashed"
"""The results of a cell: the file computes the model; it computes something else; there is no verdict; a command
refused with one sentence; a command ended with a traceback."""

Command = tuple[int, str, str]


class FailedError(Exception):
    """A command gave no result. The arguments are the state and the reason."""


def cell(name: str, form: str, dtype: str, caches: str, work: str, fault: bool = False) -> dict[str, Any]:
    """The record of a cell. `caches` is "" for a model without caches. `fault` changes a weight of the file before it
    is verified."""
    start = _cpu_seconds()
    try:
        record = _tried(name, form, dtype, caches, Path(work), fault)
    except FailedError as failed:
        state, reason = failed.args
        record = {"state": state, "reason": reason}
    return {**record, "seconds": round(_cpu_seconds() - start, 1)}


def checkpoint(name: str, work: Path) -> Path:
    """The folder of the random checkpoint of an architecture. Creates it if it is missing."""
    folder = work / "checkpoints" / name
    if not (folder / "config.json").exists():
        part = folder.with_name(f"{name}.{os.getpid()}")
        model: Any = build(ROWS[name])
        model.save_pretrained(part)
        part.rename(folder)
    return folder


def _tried(name: str, form: str, dtype: str, caches: str, work: Path, fault: bool) -> dict[str, Any]:
    from posexport import temporary

    folder = checkpoint(name, work)
    with temporary.folder() as out:
        options = ["--form", form, "--dtype", dtype]
        options += ["--target", "ort"] if form == "contrib" else []
        options += ["--kv-cache", caches] if caches else []
        exported = _json("export", "--from", folder, "--model", *options, "-o", out / "model.onnx", "--json")
        attentions = exported["attentions"]
        kept = [one["reason"]["text"] for one in attentions if one["state"] == "kept" and not _is_there(one)]
        record: dict[str, Any] = {"attentions": len(attentions), "in_form": len(attentions) - len(kept)}
        record |= {"kept": sorted(set(kept))} if kept else {}
        files = sorted(out.glob("*.onnx"))
        if fault:
            for path in files:
                spoil(path)
        record |= _verdict(folder, files)
        return record | _generated(files) if record["state"] == EQUAL else record


def _is_there(attention: dict[str, Any]) -> bool:
    from posexport.rewrite.result import ALREADY

    return bool(attention["reason"]["code"] == ALREADY)


def _verdict(folder: Path, files: Sequence[Path]) -> dict[str, Any]:
    made = _json("verify", *files, "--from", folder, "--runtime", "ort-cpu", "--json", fine=(0, 1, 3))
    verdicts, shares = made["verdicts"], []
    for one in verdicts:
        worst = one["worst"]
        if one["state"] == "passed" and worst is not None and worst["limit"]:
            shares.append(worst["max_error"] / worst["limit"])
    bad = next((one for one in verdicts if one["state"] == "failed"), None)
    bad = bad or next((one for one in verdicts if one["state"] != "passed"), None)
    if made["unreadable"] or not verdicts:
        raise FailedError(REFUSED, str(made["unreadable"] or "no verdict"))
    if bad is not None:
        what = f"{Path(bad['artifact']).stem} on {bad['worst']['case']}: " if bad["worst"] else ""
        if bad["reason_code"] == INCONCLUSIVE:  # torch's own error exceeds the limit of the runtime
            return {"state": NOT_VERIFIED, "reason": f"{what}{bad['where'] or bad['reason']}"}
        state = DIFFERENT if bad["state"] == "failed" else NOT_VERIFIED
        return {"state": state, "reason": f"{what}{bad['reason']}"}
    return {"state": EQUAL, "of_limit": max(shares, default=0.0)}


def _generated(files: Sequence[Path]) -> dict[str, Any]:
    """Generate tokens if the file is a decoder without encoders, or with encoders that read text."""
    path, *encoders = files  # in order of their names, so the decoder is before the encoder
    names = _inputs_of(path)
    decodes = any(name == "position_ids" or name.startswith("past_key_values.") for name in names)
    if not decodes or not all("input_ids" in _inputs_of(encoder) for encoder in encoders):
        return {}
    made = _json("generate", path, "--prompt-ids", "5,9,3", "--max-new-tokens", "4", "--ignore-eos", "--json")
    return {"tokens": len(made["rows"][0]["tokens"])}


def _inputs_of(path: Path) -> set[str]:
    return {value.name for value in onnx.load(path, load_external_data=False).graph.input}


_KEPT = ("embed", "router", "bias")
"""Parts of tensor names. A fault in such a tensor may have no effect, for example if only the sign of a number chooses
the experts."""


def spoil(path: Path) -> None:
    """Multiply one matrix of a file by 1.25. The files beside it are removed, because the manifest would reveal the
    change."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.ndim == 2 and values.dtype.kind == "f" and not any(part in tensor.name for part in _KEPT):
            tensor.CopyFrom(numpy_helper.from_array((values * np.float32(1.25)).astype(values.dtype), tensor.name))
            break
    for beside in path.parent.glob(f"{path.name}*"):
        beside.unlink()
    onnx.save(model, path)


def _json(*arguments: Any, fine: Sequence[int] = (0,)) -> dict[str, Any]:
    """The JSON that a command prints. Raises FailedError with the command's message, or with the error that ended
    it."""
    from posexport.cli import main

    result = CliRunner().invoke(main, [str(one) for one in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        text = str(result.exception).strip().splitlines() or [""]
        raise FailedError(CRASHED, f"{arguments[0]}: {type(result.exception).__name__}: {text[0]}"[:400])
    if result.exit_code not in fine:
        lines = [line for line in result.stderr.splitlines() if line]
        state = REFUSED if result.exit_code == 2 and lines and lines[-1].startswith("Error: ") else CRASHED
        raise FailedError(state, f"{arguments[0]}: {lines[-1].removeprefix('Error: ') if lines else result.exit_code}")
    return dict(json.loads(result.stdout))


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
