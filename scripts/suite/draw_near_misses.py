"""`python scripts/suite/draw_near_misses.py FOLDER`: draws near misses of the suite into FOLDER/near_misses, with
`index.json`: what was changed in which file, and by how much its outputs differ."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx_ir as ir

TESTS = Path(__file__).resolve().parents[2] / "tests" / "rewrite"
SMALLEST = 1e-3
"""Smallest difference of outputs, over the largest value, that makes a near miss: a hundred rounding errors or more."""


def usable(folder: Path) -> dict[str, dict[str, Any]]:
    """Records of files with attention that ONNX Runtime runs at every reference."""
    records = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    return {
        record["name"]: record
        for record in records
        if record.get("file") and record["sites"] and all_run(record.get("onnxruntime", {}))
    }


def all_run(differences: dict[str, Any]) -> bool:
    """Whether every reference gave a number near torch's."""
    return all(isinstance(gap, float) and gap < 1e-2 for gap in differences.values())


def feeds_of(folder: Path, record: dict[str, Any]) -> list[dict[str, Any]]:
    """Reference inputs by the file's names."""
    names = record.get("feeds") or {name: name for name in record["inputs"]}
    references = (np.load(folder / reference) for reference in record["references"])
    return [{mine: data[f"in/{theirs}"] for mine, theirs in names.items()} for data in references]


def draws(models: list[str], faults: list[str], seed: int) -> Iterator[tuple[str, str, int]]:
    """Endless draws of (model, fault, seed): every fault in turn."""
    rng = random.Random(seed)
    while True:
        for fault in faults:
            yield rng.choice(models), fault, rng.randrange(100)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--count", default=360, show_default=True, help="near misses to make")
@click.option("--seed", default=0, show_default=True)
def main(folder: Path, count: int, seed: int) -> None:
    """Draw near misses of the suite in FOLDER."""
    sys.path.insert(0, str(TESTS))
    near_misses: Any = importlib.import_module("near_misses")
    records = usable(folder)
    place = folder / "near_misses"
    place.mkdir(exist_ok=True)
    made: list[dict[str, Any]] = []
    tried: set[tuple[str, str, int]] = set()
    unchanged = failed = 0
    for name, fault, number in draws(list(records), list(near_misses.NEAR_MISSES), seed):
        if len(made) == count or len(tried) > 40 * count:
            break
        if (name, fault, number) in tried:
            continue
        tried.add((name, fault, number))
        model = ir.load(folder / records[name]["file"])
        changed = near_misses.near_miss(model, fault, number)
        if changed is None:
            continue
        try:
            gap = near_misses.difference(model, changed, feeds_of(folder, records[name]))
        except Exception:  # shapes that no longer fit: not a near miss
            failed += 1
            continue
        if not gap > SMALLEST:
            unchanged += 1
            continue
        path = place / f"{len(made):03d}-{name}-{fault}.onnx"
        ir.save(changed, path)
        made.append({"file": path.name, "of": name, "fault": fault, "seed": number, "difference": gap})
    (place / "index.json").write_text(json.dumps(made, indent=1), encoding="utf-8")
    click.echo(
        f"{len(made)} near misses of {len({row['of'] for row in made})} files, {len({row['fault'] for row in made})}"
    )
    click.echo(f"faults; {unchanged} draws changed nothing, {failed} did not run")


if __name__ == "__main__":
    main()
