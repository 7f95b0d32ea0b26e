"""The main job on real input: export a ViT-B/16-sized block with rope2d, verify it on a photograph, build a plan.

Each step is the command that it shows; files go to demo-output/.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import photo

from posexport.cli import console

FOLDER = Path("demo-output")


def run(command: str) -> dict[str, Any]:
    """Run a posexport command, shown as it is, and give what it prints as JSON."""
    sys.stderr.write(f"$ {command}\n")
    words = [sys.executable, "-c", "from posexport.cli import main; main()", *shlex.split(command)[1:], "--json"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1):
        sys.exit(done.returncode)
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "exit_code": done.returncode}


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
    rows = [("input", "the 14x14 patches of a photograph, 768 numbers each, fp16", str(inputs))]
    rows.append(("export", f"{exported['form']}, opset {exported['opset']}, {size(model)}", str(model)))
    rows += [(f"verify {each['runtime']}", told(each), str(model)) for each in verified["verdicts"]]
    fused = "attention fused" if kernels["fused_attention"] else "attention NOT fused"
    rows.append(("compile", f"TensorRT-RTX, {kernels['count']} kernels, {fused}, {size(plan)}", str(plan)))
    console.show_table("rope2d, hidden 768, 12 heads", ("step", "result", "file"), rows)
    return max(verified["exit_code"], 0 if kernels["fused_attention"] else 1)


def told(verdict: dict[str, Any]) -> str:
    """One verdict in a few words."""
    if verdict["worst"] is None or verdict["state"] != "passed":
        return f"{verdict['state']}: {verdict['reason']}"
    worst = verdict["worst"]
    numbers = f"error {worst['max_error']:.2g}, eager's {worst['torch_error']:.2g}, allowed {worst['allowed']:.2g}"
    return "; ".join((f"passed: {numbers}", *verdict["notes"]))


def size(path: Path) -> str:
    """The size of a file for people."""
    return console.megabytes(path.stat().st_size)


if __name__ == "__main__":
    sys.exit(main())
