"""Attrs classes to plain data and back: what is accepted, what is refused, and the place that a refusal names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posexport.jsondata import DataError, omitted, structure, unstructure


@attrs.frozen(kw_only=True)
class Row:
    state: Literal["timed", "failed"]
    seconds: float = attrs.field(default=1.0, validator=attrs.validators.gt(0))
    count: int | None = None


@attrs.frozen(kw_only=True)
class Table:
    number: int
    rows: tuple[Row, ...]
    by_name: Mapping[str, Row] = attrs.field(factory=dict)
    notes: tuple[str, ...] = omitted(())
    parts: Mapping[str, tuple[float, ...]] = attrs.field(factory=dict)


ROWS = st.builds(
    Row,
    state=st.sampled_from(["timed", "failed"]),
    seconds=st.floats(1e-9, 1e9),
    count=st.none() | st.integers(-(2**53), 2**53),
)


@given(
    st.builds(
        Table,
        number=st.integers(0, 9),
        rows=st.lists(ROWS, max_size=3).map(tuple),
        by_name=st.dictionaries(st.text(max_size=3), ROWS, max_size=2),
        notes=st.lists(st.text(max_size=3), max_size=2).map(tuple),
        parts=st.dictionaries(st.text(max_size=3), st.lists(st.floats(-1, 1), max_size=2).map(tuple), max_size=2),
    )
)
def test_what_is_written_is_read_back(table: Table) -> None:
    data = json.loads(json.dumps(unstructure(table)))
    assert ("notes" in data) == bool(table.notes)
    assert structure(data, Table) == table


def test_unknown_keys_are_not_read() -> None:
    assert structure({"number": 1, "rows": [], "colour": "red"}, Table) == Table(number=1, rows=())


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ({"number": 1.0, "rows": []}, "number is 1.0, not a whole number"),
        ({"number": True, "rows": []}, "number is True, not a whole number"),
        ({"rows": []}, "it lacks 'number'"),
        ({"number": 1, "rows": [{"state": "won"}]}, "rows[0].state is 'won', not one of timed, failed"),
        ({"number": 1, "rows": [{"state": ["timed"]}]}, "rows[0].state is ['timed'], not one of timed, failed"),
        ({"number": 1, "rows": [{"state": "timed", "seconds": -1}]}, "rows[0] 'seconds' must be > 0: -1.0"),
        ({"number": 1, "rows": 3}, "rows is 3, not a list"),
        ({"number": 1, "rows": "abc"}, "rows is 'abc', not a list"),
        ({"number": 1, "rows": [], "by_name": {"a": 4}}, "by_name[a] is 4, not an object"),
        ({"number": 1, "rows": [], "by_name": [4]}, "by_name is [4], not an object"),
        ({"number": 1, "rows": [], "parts": {"a": ["1"]}}, "parts[a][0] is '1', not a number"),
        ({"number": 1, "rows": [{"state": "timed", "seconds": float("nan")}]}, "rows[0].seconds is NaN"),
        ({"number": 1, "rows": [{"state": "timed", "seconds": 10**400}]}, "rows[0].seconds is 1000"),
        ([], "it is [], not an object"),
    ],
)
def test_a_refusal_names_the_place(data: Any, complaint: str) -> None:
    with pytest.raises(DataError) as error:
        structure(data, Table)
    assert str(error.value).startswith(complaint), str(error.value)
