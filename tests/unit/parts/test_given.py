"""Python's values as columns: each is stored as it was given, or refused with the column's name."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.core.errors import InvalidUsage
from persist.parts import ShardSchema
from persist.parts.memory_size import is_surely_within, row_bytes, working_bytes
from persist.parts.python_values import column_of, parse_key
from persist.parts.text_values import from_text, is_textual
from persist.spark.options import Options, ReadOptions

MOMENT = dt.datetime.fromisoformat("2024-01-01T23:59:00.000500")
MIDNIGHT = dt.datetime.fromisoformat("2024-01-01")
NANOS = pd.Timestamp("2024-01-01T00:00:00.123456789")
POINT = pa.struct([("x", pa.int32()), ("y", pa.list_(pa.int8()))])
COUNTS = pa.map_(pa.string(), pa.int32())
KEPT: list[tuple[Any, Any, Any]] = [
    (pa.int64(), 1.0, 1),
    (pa.int64(), Decimal("7"), 7),
    (pa.int64(), np.int8(7), 7),
    (pa.int64(), pa.scalar(7), 7),
    (pa.float32(), pa.scalar(1.5, pa.float32()), 1.5),
    (pa.list_(pa.float16()), [pa.scalar(1.5, pa.float16())], [1.5]),
    (pa.uint64(), 2**63, 2**63),
    (pa.float32(), 0.5, 0.5),
    (pa.float32(), 7, 7.0),
    (pa.float32(), float("-inf"), float("-inf")),
    (pa.float64(), 2**53, 2.0**53),
    (pa.float64(), np.float32(0.5), 0.5),
    (pa.float16(), 2048, 2048.0),
    (pa.decimal128(5, 2), Decimal("1.5"), Decimal("1.50")),
    (pa.decimal128(5, 2), 7, Decimal("7.00")),
    (pa.string(), b"ab", "ab"),
    (pa.binary(), "ab", b"ab"),
    (pa.timestamp("us"), MOMENT, MOMENT),
    (pa.timestamp("s"), MIDNIGHT, MIDNIGHT),
    (pa.timestamp("us", "UTC"), MOMENT.replace(tzinfo=dt.UTC), MOMENT.replace(tzinfo=dt.UTC)),
    (pa.timestamp("ns"), NANOS, NANOS),
    (pa.date32(), dt.date(2024, 1, 1), dt.date(2024, 1, 1)),
    (pa.date32(), MIDNIGHT, dt.date(2024, 1, 1)),
    (pa.time32("s"), dt.time(1, 2, 3), dt.time(1, 2, 3)),
    (pa.duration("ms"), dt.timedelta(milliseconds=1500), dt.timedelta(milliseconds=1500)),
    (pa.list_(pa.float32()), np.array([0.5, 1]), [0.5, 1.0]),
    (pa.list_(pa.list_(pa.int8())), [[1], None, []], [[1], None, []]),
    (pa.list_(pa.int8(), 2), (1, 2), [1, 2]),
    (POINT, {"x": 1}, {"x": 1, "y": None}),
    (POINT, (1, [2]), {"x": 1, "y": [2]}),
    (POINT, [("x", 1)], {"x": 1, "y": None}),
    (COUNTS, {"a": 1}, [("a", 1)]),
    (COUNTS, [("a", 1), ("a", None)], [("a", 1), ("a", None)]),
]
CUT: list[tuple[Any, Any]] = [
    (pa.int64(), 1.5),
    (pa.int64(), np.float32(1.5)),
    (pa.int64(), Decimal("1.5")),
    (pa.int64(), Fraction(3, 2)),
    (pa.int64(), float("nan")),
    (pa.int64(), 2**63),
    (pa.int8(), 3.7),
    (pa.float64(), 2**53 + 1),
    (pa.float32(), 1e300),
    (pa.float32(), 1e-300),
    (pa.float16(), -1e-30),
    (pa.float32(), 2**24 + 1),
    (pa.float16(), 70000.0),
    (pa.float16(), 2049),
    (pa.float64(), np.uint64(2**64 - 1)),
    (pa.list_(pa.float32()), [np.uint64(2**64 - 1)]),
    (pa.int64(), np.datetime64("1971-01-01", "ns")),
    (pa.date64(), np.datetime64("1971-01-01", "ns")),
    (pa.decimal128(5, 1), Decimal("1.25")),
    (pa.timestamp("s"), MOMENT),
    (pa.timestamp("ms"), MOMENT),
    (pa.timestamp("ms", "UTC"), MOMENT.replace(tzinfo=dt.UTC)),
    (pa.timestamp("us"), NANOS),
    (pa.timestamp("us"), 1.5),
    *[(kind, 5) for kind in (pa.timestamp("s"), pa.timestamp("us", "UTC"), pa.date32(), pa.date64())],
    *[(kind, 5) for kind in (pa.time32("ms"), pa.time64("us"), pa.duration("s"))],
    (pa.timestamp("us"), np.int64(5)),
    (pa.date32(), Decimal(5)),
    (pa.date32(), True),
    (pa.list_(pa.date32()), [5]),
    (pa.struct([("at", pa.timestamp("us"))]), {"at": 5}),
    (pa.map_(pa.date32(), pa.duration("s")), [(5, None)]),
    (pa.map_(pa.string(), pa.duration("s")), {"a": 5}),
    (pa.timestamp("us", "UTC"), MOMENT),
    (pa.timestamp("us"), MOMENT.replace(tzinfo=dt.UTC)),
    (pa.date32(), MOMENT),
    (pa.date64(), MOMENT),
    (pa.time32("ms"), dt.time(1, 2, 3, 999)),
    (pa.time64("us"), dt.time(1, 2, 3, tzinfo=dt.UTC)),
    (pa.list_(pa.string()), "text"),
    (pa.list_(pa.int64()), b"bytes"),
    (pa.duration("s"), dt.timedelta(milliseconds=1500)),
    (pa.duration("us"), pd.Timedelta(1500, "ns")),
    (pa.list_(pa.int32()), [1, 1.5]),
    (pa.list_(pa.int32(), 1), np.array([1.5])),
    (pa.large_list(pa.float32()), [1e300]),
    (POINT, {"X": 1}),
    (POINT, {"x": 1.5}),
    (POINT, (1, [1.5])),
    (POINT, [("x", 1), ("z", 2)]),
    (COUNTS, {"a": 1.5}),
    (COUNTS, [("a", 1.5)]),
]


@pytest.mark.parametrize(("kind", "value", "stored"), KEPT, ids=[f"{row[0]} {row[1]!r}" for row in KEPT])
def test_a_value_that_fits_is_stored_as_it_is(kind: Any, value: Any, stored: Any) -> None:
    assert column_of("v", [None, value], kind).to_pylist() == [None, stored]


@pytest.mark.parametrize(("kind", "value"), CUT, ids=[f"{kind} {value!r}" for kind, value in CUT])
def test_a_value_that_would_be_cut_short_is_refused(kind: Any, value: Any) -> None:
    with pytest.raises(InvalidUsage, match="column 'v' does not fit"):
        column_of("v", [None, value], kind)


@pytest.mark.parametrize("number", [2049, 70000])
def test_whole_numbers_that_halves_would_round_are_refused_in_tables_too(number: int) -> None:
    schema = ShardSchema(pa.schema([("k", pa.int8()), ("h", pa.float16()), ("l", pa.list_(pa.float16()))]), ("k",))
    flat = pa.table({"k": pa.array([1], pa.int8()), "h": [number], "l": pa.array([None], pa.list_(pa.float16()))})
    nested = pa.table({"k": pa.array([1], pa.int8()), "h": pa.array([0.5], pa.float16()), "l": [[number]]})
    for rows, name in ((flat, "h"), (nested, "l")):
        with pytest.raises(InvalidUsage, match=f"column '{name}'"):
            schema.conform(rows, 0)


@pytest.mark.parametrize("option", ["startKey", "endKey", "keyPrefix"])
def test_keys_in_options_are_not_cut_short(option: str) -> None:
    schema = ShardSchema(pa.schema([("k", pa.int64())]), ("k",))
    with pytest.raises(InvalidUsage, match=r"column 'k' does not fit int64"):
        ReadOptions.of(Options({option: "[1.5]"})).selection.on(schema)


KEYS: list[tuple[Any, Any, float]] = [
    (pa.float64(), "0.1", 0.1),
    (pa.float64(), "1e23", 1e23),
    (pa.float64(), "0.10000000000000001", 0.1),
    (pa.float64(), "0.1000000000000000055511151231257827", 0.1),
    (pa.float64(), "5e-324", 5e-324),
    (pa.float64(), Decimal("0.1"), 0.1),
    (pa.float64(), 2**53, 2.0**53),
    (pa.float64(), "9007199254740992.00", 2.0**53),
    (pa.float64(), "-inf", float("-inf")),
    (pa.float64(), 1.7976931348623157e308, 1.7976931348623157e308),
    (pa.float32(), 0.1, float(np.float32(0.1))),
    (pa.float32(), "0.1", float(np.float32(0.1))),
    (pa.float32(), float(np.float32(0.1)), float(np.float32(0.1))),
    (pa.float16(), 0.1, float(np.float16(0.1))),
]
ROUNDED: list[tuple[Any, Any]] = [
    (pa.float64(), "9007199254740993"), (pa.float64(), Decimal("9007199254740993.0")), (pa.float64(), 2**53 + 1),
    (pa.float64(), "0.10000000000000000001"), (pa.float64(), "1e400"), (pa.float64(), "1e-400"),
    (pa.float64(), 10**400), (pa.float64(), True), (pa.float64(), "0.1 "), (pa.float32(), 16777217.0),
    (pa.float32(), "16777217"), (pa.float32(), 1e39), (pa.float32(), 1.00000000001), (pa.float16(), 2049.0),
    (pa.float16(), "2049"), (pa.int64(), Decimal("9007199254740992.5")),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "value", "wanted"), KEYS, ids=str)
def test_a_number_stands_for_the_key_that_is_written_so(kind: Any, value: Any, wanted: float) -> None:
    schema = ShardSchema(pa.schema([("k", kind)]), ("k",))
    assert float(parse_key(schema, [value], from_text=True)[0].as_py()) == wanted


@pytest.mark.parametrize(("kind", "value"), ROUNDED, ids=str)
def test_a_number_that_a_key_would_round_is_refused(kind: Any, value: Any) -> None:
    """It would mean another row: an erasure of 9007199254740993 took 9007199254740992.0."""
    schema = ShardSchema(pa.schema([("k", kind)]), ("k",))
    with pytest.raises(InvalidUsage):
        parse_key(schema, [value], from_text=True)


@pytest.mark.parametrize(
    ("kind", "text"),
    [(pa.int64(), "7"), (pa.uint8(), "7"), (pa.float64(), "7.5"), (pa.float32(), "7"), (pa.bool_(), "true")],
    ids=str,
)
def test_text_is_no_key_of_numbers_and_truths_unless_all_is_text(kind: Any, text: str) -> None:
    """Rows with such a text were refused, and a delete by it took a row."""
    schema = ShardSchema(pa.schema([("k", kind)]), ("k",))
    with pytest.raises(InvalidUsage):
        parse_key(schema, [text])
    assert parse_key(schema, [text], from_text=True)[0].type == kind


@pytest.mark.parametrize(("kind", "text"), [
    (pa.decimal128(5, 2), "7.5"),
    (pa.date32(), "2024-01-31"),
    (pa.timestamp("us", "UTC"), "2024-01-31T12:00:00Z"),
    (pa.float64(), "-Infinity"),
    (pa.float32(), "NaN"),
    (pa.string(), "7"),
    (pa.time32("s"), "23:59:59"),
    (pa.time32("ms"), "23:59:59.999"),
    (pa.time64("us"), "23:59:59.999999"),
    (pa.time64("ns"), "23:59:59.999999999"),
    (pa.duration("s"), "-PT86400S"),
    (pa.duration("ns"), "PT0.000000001S"),
    (pa.timestamp("us"), "@4611686018427387904"),
    (pa.timestamp("s", "Europe/Berlin"), "@-4611686018427387904"),
    (pa.date32(), "@2147483647"),
], ids=str)  # fmt: skip
def test_text_is_a_key_where_json_writes_text(kind: Any, text: str) -> None:
    """It is read as in a row. Times of day, durations and points in time beyond ISO 8601 were refused in a key."""
    schema = ShardSchema(pa.schema([("k", kind)]), ("k",))
    [key] = parse_key(schema, [text])
    assert key.type == kind
    if is_textual(kind):
        assert from_text(pa.array([text]), kind)[0] == key


@pytest.mark.parametrize(("kind", "text"), [
    (pa.time32("s"), "24:00:00"), (pa.time32("s"), "12:00:00.5"), (pa.time32("s"), "@86400"), (pa.duration("s"), "1"),
    (pa.duration("s"), "PT1.5S"), (pa.timestamp("us"), "@9223372036854775808"), (pa.date32(), "@x"),
], ids=str)  # fmt: skip
def test_text_that_is_no_value_is_no_key(kind: Any, text: str) -> None:
    with pytest.raises(InvalidUsage):
        parse_key(ShardSchema(pa.schema([("k", kind)]), ("k",)), [text])


# --- how many bytes rows take: what is seen at a glance is never less than what a closer look says

TEXTS = st.lists(st.none() | st.text(max_size=300), max_size=40)
TYPES: dict[str, tuple[Any, Any]] = {
    # what rows come as -> what the shard has
    "text": (pa.string(), pa.string()),
    "large": (pa.large_string(), pa.string()),
    "view": (pa.string_view(), pa.string()),
    "names": (pa.dictionary(pa.int32(), pa.string()), pa.string()),
    "bytes": (pa.binary(), pa.binary()),
    "none": (pa.null(), pa.decimal256(70, 3)),
    "lists": (pa.list_(pa.string()), pa.list_(pa.string())),
}


def table_of(texts: list[str | None], kinds: list[str]) -> tuple[pa.Table, pa.Schema]:
    columns, fields = {}, []
    for place, kind in enumerate(kinds):
        came, there = TYPES[kind]
        values: list[Any] = list(texts)
        if kind == "bytes":
            values = [None if text is None else text.encode() for text in texts]
        elif kind == "none":
            values = [None] * len(texts)
        elif kind == "lists":
            values = [None if text is None else [text] for text in texts]
        columns[f"{kind}{place}"] = (
            pa.array(values, pa.string()).cast(came) if kind == "names" else pa.array(values, came)
        )
        fields.append(pa.field(f"{kind}{place}", there))
    numbers = pa.array(range(len(texts)), pa.int8())
    return pa.table({"id": numbers, **columns}), pa.schema([pa.field("id", pa.decimal128(30, 2)), *fields])


@given(TEXTS, st.lists(st.sampled_from(sorted(TYPES)), max_size=4))
def test_what_is_seen_at_a_glance_is_never_too_little(texts: list[str | None], kinds: list[str]) -> None:
    table, schema = table_of(texts, kinds)
    exact = working_bytes(table, schema)
    assert not is_surely_within(table, row_bytes(schema), exact - 1)


def test_small_rows_of_plain_types_are_seen_at_a_glance() -> None:
    table, schema = table_of(["a"] * 100, ["text", "bytes"])
    assert is_surely_within(table, row_bytes(schema), 64 * 1024)


def test_a_few_bytes_that_stand_for_many_are_looked_at() -> None:
    table, schema = table_of(["a" * 1_000], ["names"])
    many = pa.table(
        {"id": table["id"].take(pa.array([0] * 10_000)), "names0": table["names0"].take(pa.array([0] * 10_000))}
    )
    assert not is_surely_within(many, row_bytes(schema), 256 * 1024)
