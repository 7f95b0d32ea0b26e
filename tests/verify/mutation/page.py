"""The committed result: the contents of `docs/results/mutation.json`, and the tables of its page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from mutation.corners import CLASSES
from mutation.inputs import REACH
from mutation.oracle import BROKEN, DOUBTFUL, EQUIVALENT, FAULT
from mutation.scoring import Mutant, Score
from mutation.sound_specs import Alarms

TARGETS = {"random": 0.995, "corner": 0.95}
"""The least share of faults that verify must catch."""

Data = dict[str, Any]


def counts(mutants: Iterable[Mutant]) -> Data:
    """How many mutants were made, how many are equivalent, doubtful or faults, and how many faults were caught."""
    listed = list(mutants)
    states = Counter(mutant.state for mutant in listed)
    return {
        "made": len(listed),
        "equivalent": states[EQUIVALENT] + states[BROKEN],
        "borderline": states[DOUBTFUL],
        "faults": states[FAULT],
        "caught": sum(mutant.state == FAULT and mutant.caught is True for mutant in listed),
    }


def share(row: Mapping[str, Any]) -> float:
    """The share of faults that were caught. 1 if there are no faults."""
    return float(row["caught"] / row["faults"]) if row["faults"] else 1.0


def missed(score: Score) -> list[Mutant]:
    """The faults that passed."""
    return [mutant for mutant in score.mutants if mutant.state == FAULT and not mutant.caught]


def score_data(score: Score, seed: int) -> Data:
    """A score as plain data."""
    random = [mutant for mutant in score.mutants if mutant.group == "random"]
    corner = [mutant for mutant in score.mutants if mutant.group != "random"]
    names = ("artifact", "group", "kind", "numbers", "sizes")
    return {
        "seed": seed,
        "reach": attrs.asdict(REACH),
        "artifacts": len({mutant.artifact for mutant in score.mutants}),
        "random": counts(random),
        "corner": counts(corner),
        "classes": {name: counts(mutant for mutant in corner if mutant.group == name) for name in CLASSES},
        "missed": [{name: getattr(mutant, name) for name in names} for mutant in missed(score)],
        "failed_originals": score.alarms,
    }


def sound_data(alarms: Alarms, count: int, seed: int) -> Data:
    """The false alarms as plain data."""
    return {"seed": seed, "specs": count, "passed": alarms.passed, "not_run": alarms.not_run, "failed": alarms.failed}


COLUMNS = ("class", "made", "equivalent", "borderline", "faults", "caught", "score")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A table in Markdown. All columns but the first are aligned to the right."""
    marks = ["---", *("--:" for _ in columns[1:])]
    return [f"| {' | '.join(str(cell) for cell in cells)} |" for cells in (columns, marks, *rows)]


def _row(name: str, row: Mapping[str, Any]) -> tuple[object, ...]:
    score = f"{100 * share(row):.1f} %" if row["faults"] else "-"
    return (name, *(row[column] for column in COLUMNS[1:-1]), score)


def figures(data: Mapping[str, Any]) -> list[str]:
    """The generated lines of the page."""
    score, sound = data["score"], data["sound"]
    lines = [
        f"{score['artifacts']} artifacts, seed {score['seed']}.",
        "",
        *table(COLUMNS, [_row("random", score["random"]), _row("corner", score["corner"])]),
        "",
        "### Corner mutants by class",
        "",
        *table(COLUMNS, [_row(CLASSES[name], row) for name, row in score["classes"].items()]),
        "",
        "### Faults that passed",
        "",
        *(_missed(score["missed"]) or ["None."]),
        "",
        "### Sound specs",
        "",
        *_sound(sound),
    ]
    return [line.rstrip() for line in lines]


def _sound(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of sound specs."""
    rows = [
        (
            runtime,
            part["specs"],
            part["passed"].get(runtime, 0),
            part["not_run"].get(runtime, 0),
            sum(line.startswith(f"{runtime},") for line in part["failed"]),
        )
        for part in parts
        for runtime in sorted({*part["passed"], *part["not_run"]})
    ]
    return table(("runtime", "specs", "passed", "not run", "failed"), rows)


def _missed(rows: Sequence[Mapping[str, str]]) -> list[str]:
    return [f"- {row['kind']} ({row['group']}), `{row['artifact']}`: {row['numbers']}" for row in rows]
