"""Tools that fuse attention in ONNX files. Each is a function from a file to a file.

posexport's own rewriting is compared with tools that others offer for ONNX Runtime. posexport reports the attentions
that it kept, with reasons. The other tools report nothing.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime
from graph_facts import facts_of

from posexport.rewrite.request import RewriteOptions

ONNXSIM = "0.8.1"
"""The version of onnxsim, which is installed into its own environment."""

Tool = Callable[[Path, Path], dict[str, Any]]
"""Writes its result for the first file to the second, in an empty folder. Returns what it reports."""


class NotInstalledError(Exception):
    """The tool is not installed."""


def as_it_is(source: Path, target: Path) -> dict[str, Any]:
    """Copies the file unchanged."""
    shutil.copy(source, target)
    return {}


def rewritten(form: str, source: Path, target: Path) -> dict[str, Any]:
    """`posexport rewrite --form FORM --target ort`, in this process."""
    from posexport.rewrite.files import rewrite_into

    result = rewrite_into(target.parent, source, target, RewriteOptions(form=form, target="ort"))
    left = [{"name": one["name"], **one["reason"]} for one in result.left]
    errors = [one["error"] for one in result.attentions if one["error"] is not None]
    evidence = {"sites": max(errors, default=None), "whole": result.whole and result.whole.error}
    return {"recognised": len(result.attentions) - len(left), "kept": left, "evidence": evidence}


def optimize_for_ort(source: Path, target: Path) -> dict[str, Any]:
    """onnxscript's fusions for ONNX Runtime."""
    from onnxscript.rewriter.ort_fusions import optimize_for_ort as optimize

    ir.save(optimize(ir.load(source))[0], target)
    return {}


def fuse_for_onnxruntime(source: Path, target: Path) -> dict[str, Any]:
    """The fusions that transformers' exporter applies with `ort_fusions="cpu"`. They are private to that package."""
    from transformers.exporters.onnxruntime_fusions import fuse_for_onnxruntime as fuse

    model = ir.load(source)
    fuse(model, "cpu")
    ir.save(model, target)
    return {}


def ort_optimizer(source: Path, target: Path) -> dict[str, Any]:
    """ONNX Runtime's transformers optimizer, run for the model type for which it fuses the most attention."""
    from onnxruntime.transformers import optimizer

    made: dict[str, onnx.ModelProto] = {}
    failures: list[Exception] = []
    for kind in optimizer.MODEL_TYPES:
        try:
            made[kind] = optimizer.optimize_model(str(source), model_type=kind).model
        except Exception as error:
            failures.append(error)
    if not made:
        raise failures[0]
    facts = {kind: facts_of(model) for kind, model in made.items()}
    best = min(facts, key=lambda kind: (-facts[kind].attentions, -facts[kind].rotations, facts[kind].nodes))
    onnx.save(made[best], target)
    return {"kind": best}


def ort_session(source: Path, target: Path) -> dict[str, Any]:
    """The graph that a session of ONNX Runtime runs with all its optimizations."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(target)
    options.log_severity_level = 4
    onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
    return {}


def onnxsim(environment: Path, source: Path, target: Path) -> dict[str, Any]:
    """onnxsim, run from its own virtual environment because it needs other versions."""
    python = environment / "bin" / "python"
    if not python.exists():
        raise NotInstalledError("onnxsim could not be installed")
    done = subprocess.run([python, "-m", "onnxsim", source, target], capture_output=True, text=True, check=False)
    if done.returncode or not target.exists():
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else f"exit status {done.returncode}")
    return {}


def install_onnxsim(environment: Path) -> None:
    """Create the virtual environment if it does not exist. Without a network it is not created."""
    if environment.exists():
        return
    install = [str(environment / "bin" / "python"), "-m", "pip", "--quiet", "install", f"onnxsim=={ONNXSIM}"]
    try:
        for command in ([sys.executable, "-m", "venv", str(environment)], install):
            subprocess.run(command, check=True, capture_output=True, timeout=300)
    except subprocess.SubprocessError:
        shutil.rmtree(environment, ignore_errors=True)


def tools(work: Path) -> dict[str, Tool]:
    """All tools by name. `work` is the folder that contains their environments."""
    return {
        "as it is": as_it_is,
        "posexport native": partial(rewritten, "native"),
        "posexport contrib": partial(rewritten, "contrib"),
        "onnxscript": optimize_for_ort,
        "transformers": fuse_for_onnxruntime,
        "ort-optimizer": ort_optimizer,
        "ort-session": ort_session,
        "onnxsim": partial(onnxsim, work / "onnxsim"),
    }


@contextlib.contextmanager
def quiet() -> Any:
    """Hide what tools print."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
