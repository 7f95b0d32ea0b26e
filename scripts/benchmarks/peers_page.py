"""docs/results/peers.json and docs/results/alternatives.md from what `peers` measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers_cells import COMPILED, EXPORTED, LOWER_BOUND, OPTIMIZED, OWN_GROWN, SIZES, TORCH
from tools import machine_line, versions

from posexport.files import staged, write_json

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "docs/results/peers.json", ROOT / "docs/results/alternatives.md"
COLUMNS = (TORCH, COMPILED, *EXPORTED.values(), *OPTIMIZED, OWN_GROWN, LOWER_BOUND)

PLACES = ("fastest", "equal", "inconclusive")

TITLES = {
    "prefill:128": "Prefill of 128 tokens",
    "prefill:1024": "Prefill of 1024 tokens",
    "batch:8": "Eight prompts of 128 tokens",
    "decode:2048": "One token behind 2048 in the cache",
}

METHOD = """# posexport against its peers

Made by `./scripts/benchmark --only peers`; the numbers are in `docs/results/peers.json`.

## Method

One block, attention with its projections, hidden 768, 12 heads, fp32, batch 1 where nothing else is said; causal, but
for encodings of a grid, which are encoders'. ONNX Runtime's CPU provider and torch with two threads each, in one
process.

- **Peers.** `torch` is posexport's own block in torch, with `scaled_dot_product_attention` wherever it can carry the
  encoding; `torch-compile` the same, compiled for the shape; `torch-onnx 18`, `20` and `24` what
  `torch.onnx.export(dynamo=True)` makes of it with its default optimizations, without an operator of posexport's;
  `ort-optimizer` is opset 20 through `onnxruntime.transformers.optimizer`, and `ort-fusions` through onnxscript's
  `optimize_for_ort`. Two that fuse nothing leave the file as it was, so they are not timed. Every output is compared
  with torch eager's before anything is timed (1e-3).
- **posexport** is its fastest form for ONNX Runtime, found in a race of its own over forms and targets (`posexport
  tune` also tries opsets and the session's options, which peers don't get either), and then timed in fresh sessions. A
  decode step may keep its cache in a shared buffer of 2560 places, written in place; the caches of all peers grow, as
  torch's do. Where a buffer was faster, a column says by how much it beats posexport's fastest form with grown caches.
- **Lower bound.** The bare matrix products of the block, or the bytes that a decode step must read, whichever takes
  longer (`lower_bound`). Scores count as whole rectangles: a causal kernel that skips masked keys can be faster.
- **Ratios** are posexport's time over the peer's, round by round in random order with pauses, the median over all
  rounds of two sessions; in brackets the interval that holds the true median with 99 %. Below 1 posexport is faster.
- **Verdict.** *fastest*: every peer's whole interval lies below 1. *equal*: none lies above, at least one holds 1.
  *inconclusive*: one that holds 1 reaches beyond 1.25, so that the rounds say little. *slower*: a peer's whole
  interval lies above 1, and it is named. Goals are missed where the whole interval lies above:
  1.1 of the lower bound at prefill:1024, 0.35 of torch eager at decode:2048.

What these peers can't express: **optimum-onnx** can't be installed beside the transformers that posexport is tested
with; it calls torch's exporter, which has columns here. **onnxruntime-genai**'s builder makes whole decoders, here with
rope only: it has a section of its own.
"""


def write(found: Sequence[Mapping[str, Any]], builder: Mapping[str, Any]) -> None:
    """Both files, whole."""
    measured = {"cells": list(found), "onnxruntime-genai": dict(builder)}
    data = {"machine": machine_line(), "versions": versions(), **measured}
    write_json(RESULTS, _rounded(data))
    text = page(data)
    with staged() as files:
        files.write(PAGE, lambda file: file.write(text.encode()))


def page(data: Mapping[str, Any]) -> str:
    """docs/results/alternatives.md of results as they stand in the file."""
    versions_used = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    lines = [METHOD, "## Results", "", f"{data['machine']}; {versions_used}.", "", *_summary(data["cells"])]
    for scenario in SIZES:
        cells = [each for each in data["cells"] if each["scenario"] == scenario]
        if cells:
            lines += ["", f"### {TITLES[scenario]} (`{scenario}`)", "", *_table(cells), "", *_reasons(cells)]
    return "\n".join([*lines, "", *_builder(data["onnxruntime-genai"])]) + "\n"


def _summary(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["| scenario | encodings | fastest | equal | inconclusive | slower | goal missed |"]
    lines.append("| --- | --: | --: | --: | --: | --- | --- |")
    for scenario in SIZES:
        here = [each for each in cells if each["scenario"] == scenario]
        if not here:
            continue
        places = [sum(each["place"] == place for each in here) for place in PLACES]
        slower = ", ".join(f"`{each['encoding']}`" for each in here if each["place"] == "slower") or "-"
        missed = ", ".join(f"`{each['encoding']}`" for each in here if each["missed"]) or "-"
        lines.append(f"| {scenario} | {len(here)} | {' | '.join(map(str, places))} | {slower} | {missed} |")
    return lines


def _table(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    shown = [name for name in COLUMNS if any(name in cell["ratios"] for cell in cells)]
    lines = [f"| encoding | posexport | ms | {' | '.join(f'× {name}' for name in shown)} | verdict |"]
    lines.append(f"| --- | --- | --: | {'--: | ' * len(shown)}--- |")
    for cell in cells:
        ratios = [_ratio(cell["ratios"].get(name)) for name in shown]
        verdict = "; ".join([_place(cell), *cell["missed"]])
        milliseconds = f"{cell['seconds'][cell['best']] * 1e3:.2f}"
        lines.append(f"| {cell['encoding']} | {cell['best']} | {milliseconds} | {' | '.join(ratios)} | {verdict} |")
    return lines


def _place(cell: Mapping[str, Any]) -> str:
    return f"slower than {', '.join(cell['slower_than'])}" if cell["slower_than"] else str(cell["place"])


def _ratio(found: Mapping[str, float] | None) -> str:
    return "-" if found is None else f"{found['median']:.2f} ({found['low']:.2f}-{found['high']:.2f})"


def _reasons(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why a peer has no figure, each reason once with the encodings that it holds for."""
    whose: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        for name, why in cell["missing"].items():
            whose.setdefault((name, why.rstrip(".")), []).append(cell["encoding"])
    return [
        f"- {name}, not run: {why} ({'all' if len(found) == len(cells) else ', '.join(found)})."
        for (name, why), found in whose.items()
    ]


def _builder(found: Mapping[str, Any]) -> list[str]:
    lines = ["## onnxruntime-genai's model builder", ""]
    if found["state"] != "measured":
        return [*lines, f"Not run: {found['reason']}."]
    lines += [
        "One layer of a Llama (rope, RMS norms, an MLP of 32 features) from a checkpoint with the same weights; the"
    ]
    lines += ["builder keeps its cache in one buffer that is written in place, posexport where that is faster.", ""]
    lines += ["| scenario | posexport | ms | builder ms | × builder |", "| --- | --- | --: | --: | --: |"]
    for row in found["rows"]:
        times = " | ".join(f"{row['seconds'][name] * 1e3:.2f}" for name in (row["best"], "builder"))
        lines.append(f"| {row['scenario']} | {row['best']} | {times} | {_ratio(row['ratio'])} |")
    size, tokens, off, bare = (found["window"][name] for name in ("window", "tokens", "windowed", "without"))
    lines += [
        "",
        f"A checkpoint with a sliding window of {size} (Mistral), over {tokens} tokens: the builder's file for the",
    ]
    lines += [f"CPU is {off:.2g} off that function, and {bare:.2g} off the one without a window."]
    return [*lines, "Rope is the only encoding here that it has decoders for whose layers can be fed alone."]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {name: _rounded(entry) for name, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, list | tuple) else value
