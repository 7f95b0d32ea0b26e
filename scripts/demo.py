"""The main use on real input: export a block of the size of ViT-B/16 with rope2d, verify it on a photograph, build a
plan.

Each step runs the command that it shows. Files go to demo-output/. `scripts/demo --readme` also writes the table into
README.md. The photograph is the portrait of Grace Hopper that matplotlib ships (public domain, US Navy). ViT-B/16
projects its 14x14 patches of 16x16 pixels, 768 numbers each, to hidden size 768. The block takes the patches without
this projection. They are normalised per channel with the mean and deviation of ImageNet (Dosovitskiy et al. 2021,
arXiv:2010.11929).
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
from matplotlib import cbook
from PIL import Image

from posexport.machine import size_text

FOLDER = Path("demo-output")
README = Path(__file__).parents[1] / "README.md"
TABLE = re.compile(r"(?<=<!-- scripts/demo -->\n```text\n).*?(?=```\n)", re.DOTALL)
"""The place in README.md that shows what the demo prints."""

SIDE, PATCH = 224, 16
_MEAN, _DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def write_patches(path: Path) -> None:
    """Write hidden_states [1, 196, 768] fp16 and position_ids [1, 196, 2] (x = column first, then y = row)."""
    with Image.open(cbook.get_sample_data("grace_hopper.jpg", asfileobj=False)) as image:
        side = min(image.size)
        left, grid = (image.width - side) // 2, SIDE // PATCH
        square = image.convert("RGB").crop((left, 0, left + side, side))
        pixels = np.asarray(square.resize((SIDE, SIDE), Image.Resampling.BICUBIC), dtype=np.float64) / 255
    normal = (pixels - _MEAN) / _DEVIATION
    tokens = normal.reshape(grid, PATCH, grid, PATCH, 3).transpose(0, 2, 1, 3, 4).reshape(1, grid * grid, -1)
    rows, columns = np.divmod(np.arange(grid * grid), grid)
    position_ids = np.stack([columns, rows], -1)[None].astype(np.int64)
    np.savez(path, hidden_states=tokens.astype(np.float16), position_ids=position_ids)


def run(command: str) -> dict[str, Any]:
    """Show a posexport command, run it, and return the JSON that it prints."""
    sys.stderr.write(f"$ {command}\n")
    words = [sys.executable, "-c", "from posexport.cli import main; main()", *shlex.split(command)[1:], "--json"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1):
        sys.exit(done.returncode)
    return {**json.loads(done.stdout), "exit_code": done.returncode}


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    inputs, model, plan = FOLDER / "photograph.npz", FOLDER / "rope2d.onnx", FOLDER / "rope2d.plan"
    write_patches(inputs)
    exported = run(f"posexport export --encoding rope2d --hidden-size 768 --num-heads 12 --dtype fp16 -o {model}")
    verified = run(f"posexport verify {model} --inputs {inputs}")
    profiles = "--profile batch=1:1:8 --profile seq=196:196:1024"
    kernels = run(f"posexport compile {model} -o {plan} --runtime tensorrt-rtx {profiles}")["kernels"]
    fused = "attention fused" if kernels["fused_attention"] else "attention NOT fused"
    model_size, plan_size = (size_text(path.stat().st_size) for path in (model, plan))
    rows = [
        ("input", f"{inputs}: the 14x14 patches of a photograph, fp16"),
        ("export", f"{model}: {exported['form']}, opset {exported['opset']}, {model_size}"),
        *((f"verify {verdict['runtime']}", result_of(verdict)) for verdict in verified["verdicts"]),
        ("compile", f"{plan}: TensorRT-RTX, {kernels['count']} kernels, {fused}, {plan_size}"),
    ]
    lines = "".join(f"{step:<24}{result}\n" for step, result in rows)
    click.echo(lines, nl=False)
    if "--readme" in sys.argv[1:]:
        README.write_text(TABLE.sub(lambda _: lines, README.read_text(encoding="utf-8"), count=1), encoding="utf-8")
    return int(verified["exit_code"] != 0 or not kernels["fused_attention"])


def result_of(verdict: dict[str, Any]) -> str:
    if verdict["worst"] is None or verdict["state"] != "passed":
        return f"{verdict['state']}: {verdict['reason']}"
    worst = verdict["worst"]
    numbers = f"error {worst['max_error']:.2g}, torch error {worst['torch_error']:.2g}, limit {worst['limit']:.2g}"
    return "; ".join((f"passed: {numbers}", *verdict["notes"]))


if __name__ == "__main__":
    sys.exit(main())
