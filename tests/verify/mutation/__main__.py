"""`scripts/mutation`: score verify and write docs/results/mutation.json and the tables of docs/results/mutation.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import attrs
import click

from mutation import page
from mutation.artifacts import ARTIFACTS
from mutation.corners import CLASSES
from mutation.scoring import Plan, Score, score
from mutation.sound_specs import draw_specs, false_alarms
from posexport.files import staged

RESULTS = Path(__file__).resolve().parents[3] / "docs/results"
PARTS = ("mutants", "sound")
SLOW_RUNTIMES = ("onnx-reference", "tensorrt-import")
"""Runtimes that get only a tenth of the sound specs."""


@click.command()
@click.option("--only", type=click.Choice(PARTS), multiple=True, help="make this part alone")
@click.option("--artifact", "artifacts", multiple=True, type=click.Choice(list(ARTIFACTS)), help="mutate this one")
@click.option("--group", "groups", multiple=True, type=click.Choice(["random", *CLASSES]), help="this class alone")
@click.option("--random", "random_count", default=17, show_default=True, help="random mutants of each artifact")
@click.option("--share", default=1.0, show_default=True, help="of the families of each artifact")
@click.option("--draws", default=1, show_default=True, help="mutants of each family and artifact")
@click.option("--specs", default=500, show_default=True, help="sound specs")
@click.option("--seed", default=0, show_default=True)
@click.option("--jobs", default=1, show_default=True, help="artifacts at a time")
@click.option("--keep", type=click.Path(path_type=Path), help="a folder: sound specs go on where a run before ended")
@click.option("--details", type=click.Path(path_type=Path), help="write every mutant to this JSON file")
@click.option("--write", is_flag=True, help="write the parts that were made to docs/results")
def main(
    only: tuple[str, ...],
    artifacts: tuple[str, ...],
    groups: tuple[str, ...],
    random_count: int,
    share: float,
    draws: int,
    specs: int,
    seed: int,
    jobs: int,
    keep: Path | None,
    details: Path | None,
    write: bool,
) -> None:
    """Score `posexport verify`. Exits 1 where a target is missed."""
    made: dict[str, Any] = {}
    good = True
    if not only or "mutants" in only:
        plan = Plan(random_count=random_count, corner_share=share, corner_draws=draws, groups=groups, seed=seed)
        scored = score(artifacts or tuple(ARTIFACTS), plan, jobs, progress=lambda text: click.echo(text, err=True))
        made["score"] = page.score_data(scored, seed)
        good &= _show(scored, made["score"])
        if details is not None:
            rows = [attrs.asdict(mutant, filter=lambda field, _: field.name != "model") for mutant in scored.mutants]
            details.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    if not only or "sound" in only:
        made["sound"] = []
        for runtimes, count in ((("ort-cpu",), specs), (SLOW_RUNTIMES, specs // 10)):
            alarms = false_alarms(
                draw_specs(count, seed),
                runtimes,
                jobs=jobs,
                kept=keep,
                progress=lambda text: click.echo(text, err=True),
            )
            made["sound"].append(page.sound_data(alarms, count, seed))
            for line in alarms.failed:
                click.echo(f"false alarm: {line}")
            good &= not alarms.failed
    if write:
        path = RESULTS / "mutation.json"
        data = {**(json.loads(path.read_bytes()) if path.exists() else {}), **made}
        text = (RESULTS / "mutation.md").read_text(encoding="utf-8")
        block = re.compile(r"(?<=<!-- figures -->\n).*?(?=<!-- end of figures -->)", re.DOTALL)
        text = block.sub(lambda _: "\n".join(page.figures(data)) + "\n", text)
        with staged() as files:
            files.write(path, lambda file: file.write((json.dumps(data, indent=1) + "\n").encode()))
            files.write(RESULTS / "mutation.md", lambda file: file.write(text.encode()))
    raise SystemExit(int(not good))


def _show(scored: Score, data: dict[str, Any]) -> bool:
    """Print the score and the faults that passed. Return whether the score reaches the targets."""
    rows = {"random": data["random"], "corner": data["corner"], **data["classes"]}
    for name, row in rows.items():
        click.echo(
            f"{name:12}" + "".join(f"{key} {value:5}  " for key, value in row.items()) + f"{page.share(row):.1%}"
        )
    for mutant in page.missed(scored):
        click.echo(f"missed: {mutant.group} / {mutant.kind} / {mutant.artifact} / {mutant.numbers} / {mutant.sizes}")
    for alarm in scored.alarms:
        click.echo(f"false alarm: {alarm}")
    click.echo(f"oracle {scored.oracle_seconds:.0f} s, verify {scored.verify_seconds:.0f} s")
    return not scored.alarms and all(page.share(data[name]) >= target for name, target in page.TARGETS.items())


if __name__ == "__main__":
    main()
