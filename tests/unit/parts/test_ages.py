"""Ages by a column: every kind of wall clock, by rows and by Parquet's statistics alike."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from persist.core.errors import InvalidUsage
from persist.parts import ShardSchema
from persist.parts.row_age import DAY_MS, AgeColumn, AgeFilter

# The type, its unit, how many milliseconds one of its units is (as a fraction), and the arrow type of the raw values.
KINDS: list[tuple[Any, str, tuple[int, int], Any]] = [
    (pa.timestamp("s"), "", (1_000, 1), pa.int64()),
    (pa.timestamp("ms"), "", (1, 1), pa.int64()),
    (pa.timestamp("us", tz="UTC"), "", (1, 1_000), pa.int64()),
    (pa.timestamp("ns", tz="Europe/Rome"), "", (1, 1_000_000), pa.int64()),
    (pa.date32(), "", (DAY_MS, 1), pa.int32()),
    (pa.date64(), "", (DAY_MS, 1), pa.int64()),
    (pa.int64(), "s", (1_000, 1), pa.int64()),
    (pa.int32(), "s", (1_000, 1), pa.int32()),
    (pa.uint32(), "s", (1_000, 1), pa.uint32()),
    (pa.int64(), "ms", (1, 1), pa.int64()),
    (pa.uint64(), "us", (1, 1_000), pa.uint64()),
    (pa.int64(), "ns", (1, 1_000_000), pa.int64()),
]


def column_of(kind: Any, unit: str) -> AgeColumn:
    return AgeColumn.of(ShardSchema(pa.schema([("id", pa.int64()), ("at", kind)]), ("id",)), "at", unit)


def table_of(kind: Any, raw: Any, values: list[int | None]) -> pa.Table:
    scaled = [None if v is None else v * DAY_MS for v in values] if pa.types.is_date64(kind) else values
    return pa.table({"at": pa.array(scaled, raw).cast(kind)})


def statistics_of(table: pa.Table) -> dict[str, Any]:
    file = io.BytesIO()
    pq.write_table(table, file)
    column = pq.read_metadata(file).row_group(0).column(0)
    return {column.path_in_schema: column.statistics}


@pytest.mark.parametrize(("kind", "unit", "ms", "raw"), KINDS, ids=lambda one: str(one))
def test_rows_and_statistics_agree(kind: Any, unit: str, ms: tuple[int, int], raw: Any) -> None:
    column = column_of(kind, unit)
    values = [20_000, 20_001, 20_007]
    over = [(v + 1) * DAY_MS if column.unit == "day" else v * ms[0] // ms[1] + 1 for v in values]
    assert [column.over_ms(v) for v in values] == over
    for place, value in enumerate(values):
        for off_ms in (-1, 0, 1):
            old_ms = over[place] + off_ms
            sieve = AgeFilter(column, old_ms)
            kept = len(sieve.rows(table_of(kind, raw, [*values, None])))
            assert kept == sum(one <= old_ms for one in over)
            assert sieve.next_ms == min((one for one in over if one > old_ms), default=None)
            alone = statistics_of(table_of(kind, raw, [value, None]))
            pruned = AgeFilter(column, old_ms)
            assert pruned.keeps(alone) == (over[place] <= old_ms)
            assert pruned.next_ms == (None if over[place] <= old_ms else over[place])


def test_nulls_have_no_age_and_are_not_read() -> None:
    column = column_of(pa.timestamp("us"), "")
    nulls = table_of(pa.timestamp("us"), pa.int64(), [None, None])
    sieve = AgeFilter(column, 2**50)
    assert (len(sieve.rows(nulls)), sieve.keeps(statistics_of(nulls)), sieve.next_ms) == (0, False, None)
    assert sieve.first_ms(nulls) is None
    assert sieve.keeps({}), "a row group that tells nothing is read"


def test_ages_beyond_what_a_column_can_hold() -> None:
    for kind, raw in ((pa.uint64(), pa.uint64()), (pa.int64(), pa.int64())):
        column = column_of(kind, "ns")
        for old_ms, kept in ((2**47, 2), (-(2**47), 0)):
            assert len(AgeFilter(column, old_ms).rows(table_of(kind, raw, [1, 7]))) == kept
    least = table_of(pa.uint64(), pa.uint64(), [2**64 - 1])
    assert not AgeFilter(column_of(pa.uint64(), "ms"), 2**47).keeps(statistics_of(least))


@pytest.mark.parametrize(("name", "kind", "unit", "told"), [
    ("nobody", pa.timestamp("us"), "", "no column 'nobody'"),
    ("at", pa.string(), "", "not an instant"),
    ("at", pa.float64(), "s", "of integers"),
    ("at", pa.list_(pa.int64()), "", "not an instant"),
    ("at", pa.int64(), "", "column_unit"),
    ("at", pa.timestamp("us"), "us", "of integers"),
    ("at", pa.date32(), "s", "of integers"),
    ("at", pa.int16(), "s", "cannot hold s"),
    ("at", pa.int32(), "ms", "cannot hold ms"),
])  # fmt: skip
def test_what_tells_no_wall_clock(name: str, kind: Any, unit: str, told: str) -> None:
    schema = ShardSchema(pa.schema([("id", pa.int64()), ("at", kind)]), ("id",))
    with pytest.raises(InvalidUsage, match=told):
        AgeColumn.of(schema, name, unit)
