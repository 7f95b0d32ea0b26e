"""`python scripts/suite/draw_near_misses.py FOLDER`: draws near misses of the suite into FOLDER/near_misses. Its
`index.json` lists which file was changed, the fault, and how much the outputs differ."""

from __future__ import annotations

import importlib
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import click
import onnx_ir as ir
from outputs import references
from score import files_of

TESTS = Path(__file__).resolve().parents[2] / "tests" / "rewrite"
SMALLEST = 1e-3
"""The smallest difference of outputs, relative to the largest value, that counts as a near miss. It is at least a
hundred rounding errors."""


def usable(folder: Path) -> dict[str, dict[str, Any]]:
    """The records of files with attention whose outputs in ONNX Runtime are near torch's for every reference."""
    return {
        record["name"]: record
        for record in files_of(folder)
        if record["sites"]
        and all(isinstance(gap, float) and gap < 1e-2 for gap in record.get("onnxruntime", {}).values())
    }


class Drawer:
    """Draws near misses of the suite's files. Every fault occurs about equally often: each fault goes through the files
    in its own order until it can be planted in one."""

    def __init__(self, folder: Path, seed: int) -> None:
        sys.path.insert(0, str(TESTS))
        self.near_misses: Any = importlib.import_module("near_misses")
        self.folder = folder
        self.records = usable(folder)
        self.rng = random.Random(seed)
        self.unchanged = self.failed = 0
        self.orders = {
            fault: self.rng.sample(list(self.records), len(self.records)) for fault in self.near_misses.NEAR_MISSES
        }

    def draw(self, fault: str) -> tuple[dict[str, Any], ir.Model] | None:
        """The next near miss with one fault, and a description of it; None if no file is left."""
        while self.orders[fault]:
            name, number = self.orders[fault].pop(), self.rng.randrange(100)
            model = ir.load(self.folder / self.records[name]["file"])
            changed = self.near_misses.near_miss(model, fault, number)
            gap = self.difference(name, model, changed) if changed is not None else 0.0
            if gap > SMALLEST:
                return {"of": name, "fault": fault, "seed": number, "difference": gap}, changed
        return None

    def difference(self, name: str, model: ir.Model, changed: ir.Model) -> float:
        """How much the outputs differ. It is 0 if the changed model does not run: this is not a near miss."""
        feeds = [reference.feeds for reference in references(self.folder, self.records[name])]
        try:
            gap = float(self.near_misses.difference(model, changed, feeds))
        except Exception:
            self.failed += 1
            return 0.0
        self.unchanged += gap <= SMALLEST
        return gap


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--count", default=360, show_default=True, help="near misses to make")
@click.option("--seed", default=0, show_default=True)
@click.option("--add", is_flag=True, help="keep existing near misses, and draw more with another seed")
def main(folder: Path, count: int, seed: int, add: bool) -> None:
    """Draw near misses of the suite in FOLDER."""
    place = folder / "near_misses"
    if not add:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
    drawer, made = Drawer(folder, seed), list[dict[str, Any]]()
    made += json.loads((place / "index.json").read_text(encoding="utf-8")) if add else []
    faults = list(drawer.orders)
    while len(made) < count and faults:
        for fault in list(faults):
            drawn = drawer.draw(fault) if len(made) < count else None
            if drawn is None:
                faults.remove(fault)
                continue
            record = {"file": f"{len(made):03d}-{drawn[0]['of']}-{fault}.onnx", **drawn[0]}
            ir.save(drawn[1], place / record["file"])
            made.append(record)
            (place / "index.json").write_text(json.dumps(made, indent=1), encoding="utf-8")
    files, kinds = len({row["of"] for row in made}), len({row["fault"] for row in made})
    click.echo(f"{len(made)} near misses of {files} files, {kinds} faults")
    click.echo(f"{drawer.unchanged} draws changed nothing, {drawer.failed} did not run")


if __name__ == "__main__":
    main()
