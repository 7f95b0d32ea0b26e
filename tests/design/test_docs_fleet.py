"""docs/guide/fleet.md: its commands run, its table of kinds agrees with the code, and its arithmetic is right."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pages
import pytest

from posexport.bench.scenarios import SWEEPS
from posexport.cli.sweep_command import _options_of as options_of
from posexport.spec.forms import FORMS
from posexport.spec.spec import DTYPES
from posexport.workflows.sweep.kinds import KINDS

PAGE = pages.ROOT / "docs" / "guide" / "fleet.md"
TEXT = PAGE.read_text()


def test_the_table_of_kinds_is_that_of_the_code() -> None:
    rows = {row[0]: row for row in re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \| (.*) \|$", TEXT, re.MULTILINE)}
    assert list(rows) == list(KINDS)
    for name, (_, axes, options, takes) in rows.items():
        kind = KINDS[name]
        named = set(re.findall(r"`([\w-]+)`", f"{axes} {options}"))
        known = {*options_of(name), *(["artifact"] if kind.artifact else [])} - {"json", *kind.excluded}
        assert named == known if name != "tune" else named < known, name
        assert set(re.findall(r"`([\w-]+)`", axes)) == {*kind.axes, *(["artifact"] if kind.artifact else [])}, name
        assert takes == ("1 CPU" if kind.cpus == 1 else "a machine"), name


def test_its_numbers() -> None:
    text = " ".join(TEXT.split())
    from posexport.verify.matrix.schedule import Selection

    entries = Selection().entries()
    refused = sum(entry.refusal("portable") is not None for entry in entries)
    assert f"{len(entries):,} entries, {refused} of them refused" in text
    assert f"{len(entries) - refused:,} jobs of about" in text
    encodings = len({entry.encoding for entry in entries})
    scenarios = sum(len(sizes) for sizes in SWEEPS.values())
    jobs = encodings * len(FORMS) * len(DTYPES) * scenarios
    assert f"{encodings} encodings × {len(FORMS)} forms × {len(DTYPES)} dtypes × {scenarios} scenarios are" in text
    assert f"scenarios are {jobs:,} jobs for each type of GPU" in text
    assert f"that is {jobs * 60 / 3600:.0f} hours of work" in text
    assert f"| 125 | {jobs / 125:.0f} min | {round(jobs * 8 / 60, -1):.0f} |" in text
    assert f"| 1,000 | {-(-jobs // 1000)} min | {jobs / 60:.0f} |" in text


@pytest.mark.slow
def test_its_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert pages.run(PAGE, tmp_path, slow=True) == 6
    records = [json.loads(path.read_text()) for path in Path("sweep/.state/jobs").glob("*.json")]
    assert sorted(record["label"] for record in records) == [
        "bench models/rope.onnx prefill:16",
        "bench models/rope.onnx prefill:64",
        "matrix alibi native fp32 prefill",
        "matrix rope native fp32 prefill",
        "verify models/rope.onnx",
    ]
    assert {record["state"] for record in records} == {"passed"}
