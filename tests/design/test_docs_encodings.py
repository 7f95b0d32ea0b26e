"""docs/reference/encodings.md names every encoding and scaling, with the same source as the code."""

from __future__ import annotations

import re
from pathlib import Path

from posexport.models import ENCODINGS
from posexport.models.scaling import SCALINGS

TEXT = (Path(__file__).parents[2] / "docs" / "reference" / "encodings.md").read_text()
FORMULAS = TEXT.split("## How each is tested")[1]
ROWS = dict(re.findall(r"^\| `([\w-]+)` \|(.*)\|$", FORMULAS, flags=re.MULTILINE))


def test_every_encoding_and_scaling_has_a_row() -> None:
    assert set(ROWS) == {*ENCODINGS, *SCALINGS} - {"none"}


def test_rows_name_the_source_that_the_code_names() -> None:
    for name, cls in ENCODINGS.items():
        if name != "none":
            year = re.search(r"(\w+) et al\. (\d{4})|(\w+) (\d{4})", cls.source)
            assert year is not None, name
            author, number = (year[1], year[2]) if year[1] else ("Llama 4", "2025")
            assert author in ROWS[name] and number in ROWS[name], (name, cls.source)
            for equation in re.findall(r"eq\. [\d to]*\d|section [\d.]+\d", cls.source):
                assert equation in ROWS[name], (name, equation)
