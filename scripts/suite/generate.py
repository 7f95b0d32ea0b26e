"""`python scripts/suite/generate.py FOLDER`: makes the suite of graphs that other tools write. Each export runs in a
process of its own with a time limit. Existing files are kept. `FOLDER/index.json` has a record for every file, and the
reason for every export that failed. `FOLDER/STATUS.txt` shows the progress."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
from exporters import EXPORTERS
from real_files import REAL_FILES, fetch
from table import ARCHITECTURES

HERE = Path(__file__).resolve().parent
SECONDS = 900
"""The time limit of one export, in seconds."""

FEW = ("dynamo20", "transformers_cpu")
"""Exporters that are similar to others. They get only the architectures of CORE."""
CORE = (
    *("llama", "qwen3", "gptj", "gpt_neox", "gpt2", "bloom", "gemma2", "gemma3", "phi3", "falcon", "cohere", "gpt_oss"),
    *("bert", "t5_encoder", "deberta_v2", "modernbert", "roformer", "dinov3_vit", "swin", "beit", "whisper_encoder"),
)


def attempt(folder: Path, name: str, exporter: str) -> dict[str, Any]:
    """The record of one file, made in a child process."""
    record = folder / "records" / f"{name}-{exporter}.json"
    if record.exists():
        return dict(json.loads(record.read_text(encoding="utf-8")))
    command = [sys.executable, str(HERE / "make_one.py"), str(folder), name, exporter, str(record)]
    failure = ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        failure = f"took more than {SECONDS} s"
    else:
        if done.returncode or not record.exists():
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            failure = f"exit status {done.returncode}: {lines[-1] if lines else ''}"[:400]
    if failure:
        fields = {"name": f"{name}-{exporter}", "architecture": name, "exporter": exporter, "error": failure}
        record.write_text(json.dumps(fields), encoding="utf-8")
    return dict(json.loads(record.read_text(encoding="utf-8")))


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--only", "names", multiple=True, help="only this architecture; repeatable  [default: all]")
@click.option(
    "--exporter", "exporters", multiple=True, type=click.Choice(list(EXPORTERS)), help="only this one; repeatable"
)
@click.option("--again", is_flag=True, help="try failed exports again")
def main(folder: Path, names: tuple[str, ...], exporters: tuple[str, ...], again: bool) -> None:
    """Make the suite in FOLDER."""
    (folder / "records").mkdir(parents=True, exist_ok=True)
    work = [
        (name, exporter)
        for exporter in exporters or EXPORTERS
        for name in ARCHITECTURES
        if name in (names or (CORE if exporter in FEW else ARCHITECTURES))
    ]
    for number, (name, exporter) in enumerate(work, 1):
        path = folder / "records" / f"{name}-{exporter}.json"
        if again and path.exists() and "error" in json.loads(path.read_text(encoding="utf-8")):
            path.unlink()
        start = time.monotonic()
        known = path.exists()
        record = attempt(folder, name, exporter)
        write_index(folder)
        if not known:
            state = record.get("error") or record.get("onnxruntime")
            line = f"{number}/{len(work)} {name}-{exporter} {time.monotonic() - start:.0f} s: {state}\n"
            with (folder / "STATUS.txt").open("a", encoding="utf-8") as status:
                status.write(line)
    if not exporters:
        for row in REAL_FILES:
            if not names or row.name in names:
                record = fetch(folder, row)
                (folder / "records" / f"{record['name']}.json").write_text(json.dumps(record), encoding="utf-8")
        write_index(folder)


def write_index(folder: Path) -> None:
    """Write all existing records, sorted by name."""
    paths = sorted((folder / "records").glob("*.json"))
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    (folder / "index.json").write_text(json.dumps(records, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
