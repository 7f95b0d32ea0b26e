"""Score verify: `python -m mutation --help` with `tests/verify` on PYTHONPATH."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import attrs

from mutation.artifacts import ARTIFACTS
from mutation.corner_faults import CLASSES
from mutation.scoring import Score, score


def _table(made: Score) -> str:
    rows = [f"{'class':12} {'made':>5} {'same':>5} {'border':>6} {'fault':>5} {'caught':>6} {'score':>7}"]
    for group in ("random", *CLASSES, "corner"):
        mine = [m for m in made.mutants if m.group == group or (group == "corner" and m.group != "random")]
        states = Counter(mutant.state for mutant in mine)
        caught = sum(mutant.state == "fault" and mutant.caught is True for mutant in mine)
        faults = states["fault"]
        rows.append(
            f"{group:12} {len(mine):5} {states['equivalent'] + states['does not run']:5} {states['borderline']:6} "
            f"{faults:5} {caught:6} {100 * caught / max(1, faults):6.1f}%"
        )
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="mutation")
    parser.add_argument("--artifacts", nargs="*", default=list(ARTIFACTS))
    parser.add_argument("--random", type=int, default=20)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--groups", nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    made = score(
        arguments.artifacts,
        random_count=arguments.random,
        corner_share=arguments.share,
        corner_draws=arguments.draws,
        groups=arguments.groups,
        seed=arguments.seed,
        progress=lambda text: print(text, file=sys.stderr, flush=True),
    )
    print(_table(made))
    missed = [mutant for mutant in made.mutants if mutant.state == "fault" and not mutant.caught]
    for mutant in missed:
        print(f"missed: {mutant.group} / {mutant.kind} / {mutant.artifact} / {mutant.numbers} / x{mutant.ratio:.3g}")
    for alarm in made.alarms:
        print(f"false alarm: {alarm}")
    print(f"oracle {made.oracle_seconds:.0f} s, verify {made.verify_seconds:.0f} s")
    if arguments.out:
        rows = [attrs.asdict(mutant, filter=lambda field, _: field.name != "model") for mutant in made.mutants]
        arguments.out.write_text(json.dumps({"alarms": made.alarms, "mutants": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
