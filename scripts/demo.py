"""The main job on real input: export a ViT-B/16-sized block with rope2d, verify it on a photograph, build a plan.

Each step is the command that it shows; files go to demo-output/. `scripts/demo --readme` also writes the table into
README.md.
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
import photo

from posexport.cli import console

FOLDER = Path("demo-output")
README = Path(__file__).parents[1] / "README.md"
TABLE = re.compile(r"(?<=<!-- scripts/demo -->\n```text\n).*?(?=```\n)", re.DOTALL)
"""Where README.md shows what the demo prints."""


def run(command: str) -> dict[str, Any]:
    """Run a posexport command, shown as it is, and give what it prints as JSON."""
    sys.stderr.write(f"$ {command}\n")
    words = [sys.executable, "-c", "from posexport.cli import main; main()", *shlex.split(command)[1:], "--json"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1):
        sys.exit(done.returncode)
    output: dict[str, Any] = json.loads(done.stdout)
    return {**output, "exit_code": done.returncode}


def main() -> int:
    FOLDER.mkdir(exist_ok=True)
    inputs, model, plan = FOLDER / "photograph.npz", FOLDER / "rope2d.onnx", FOLDER / "rope2d.plan"
    photo.write(inputs)
    exported = run(f"posexport export --encoding rope2d --hidden-size 768 --num-heads 12 --dtype fp16 -o {model}")
    verified = run(f"posexport verify {model} --inputs {inputs}")
    compiled = run(
        f"posexport compile {model} -o {plan} --runtime tensorrt-rtx --profile batch=1:1:8 --profile seq=196:196:1024"
    )
    kernels = compiled["kernels"]
    fused = "attention fused" if kernels["fused_attention"] else "attention NOT fused"
    rows = [
        ("input", f"{inputs}: the 14x14 patches of a photograph, fp16"),
        ("export", f"{model}: {exported['form']}, opset {exported['opset']}, {size(model)}"),
        *((f"verify {verdict['runtime']}", result_of(verdict)) for verdict in verified["verdicts"]),
        ("compile", f"{plan}: TensorRT-RTX, {kernels['count']} kernels, {fused}, {size(plan)}"),
    ]
    lines = "".join(f"{step:<24}{result}\n" for step, result in rows)
    click.echo(lines, nl=False)
    if "--readme" in sys.argv[1:]:
        README.write_text(TABLE.sub(lambda _: lines, README.read_text(encoding="utf-8"), count=1), encoding="utf-8")
    return max(verified["exit_code"], 0 if kernels["fused_attention"] else 1)


def result_of(verdict: dict[str, Any]) -> str:
    """One verdict in a few words."""
    if verdict["worst"] is None or verdict["state"] != "passed":
        return f"{verdict['state']}: {verdict['reason']}"
    worst = verdict["worst"]
    numbers = f"error {worst['max_error']:.2g}, torch error {worst['torch_error']:.2g}, limit {worst['limit']:.2g}"
    return "; ".join((f"passed: {numbers}", *verdict["notes"]))


def size(path: Path) -> str:
    """The size of a file for people."""
    return console.megabytes(path.stat().st_size)


if __name__ == "__main__":
    sys.exit(main())
