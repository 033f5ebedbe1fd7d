"""What a shard's schema may be, and how rows are brought into it."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.core.errors import Corruption, InvalidUsage
from persist.core.ids import PartId
from persist.core.state import SchemaRecord
from persist.parts import ShardSchema, decode_inline, encode_inline
from persist.parts.column_types import NESTING_MAX, conform_column
from persist.parts.row_stats import digest_of_rows
from persist.parts.schema_evolution import check_evolution, evolution_error
from tests.unit.parts.strategies import FLAT, arrays

PLAIN = ShardSchema(pa.schema([("k", pa.string()), ("v", pa.int32())]), ("k",))


def nested(levels: int, wrap: Callable[[Any], Any]) -> Any:
    kind: Any = pa.int8()
    for _ in range(levels):
        kind = wrap(kind)
    return kind


def one(kind: Any, **field: Any) -> ShardSchema:
    return ShardSchema(pa.schema([pa.field("k", kind, **field)]), ("k",))


@pytest.mark.parametrize(("fields", "key", "says"), [
    ([("k", pa.string())], (), "at least one key"),
    ([("k", pa.string())], ("x",), "'x' is not among"),
    ([("k", pa.string())], ("k", "k"), "named twice"),
    ([("k", pa.string()), ("k", pa.int8())], ("k",), "occurs twice"),
    ([("k", pa.list_(pa.int8()))], ("k",), "nested"),
    ([("k", pa.string()), ("__time", pa.int64())], ("k",), "reserved"),
    ([("k", pa.string()), ("__diff", pa.int64())], ("k",), "reserved"),
    ([("k", pa.string()), ("v", pa.month_day_nano_interval())], ("k",), "cannot store"),
    ([("k", pa.string()), ("v", pa.null())], ("k",), "cannot store"),
    ([("k", pa.string()), ("v", pa.list_(pa.null()))], ("k",), "cannot store"),
    ([("k", pa.string()), ("v", pa.struct([]))], ("k",), "without fields"),
    ([("k", pa.string()), ("v", pa.decimal128(5, -3))], ("k",), "Parquet cannot store"),
    ([("k", pa.string()), ("v", nested(NESTING_MAX + 1, pa.list_))], ("k",), "more than 30 levels"),
    ([("k", pa.string()), ("v", nested(150, pa.list_))], ("k",), "more than 30 levels"),
])  # fmt: skip
def test_schemas_that_cannot_be(fields: Any, key: Any, says: str) -> None:
    with pytest.raises(InvalidUsage, match=says):
        ShardSchema(pa.schema(fields), key)


@pytest.mark.parametrize(
    "wrap", [pa.list_, lambda kind: pa.map_(pa.int8(), kind), lambda kind: pa.struct([("x", kind)])]
)
def test_what_is_nested_as_deep_as_it_may_be_can_be_written_and_read(wrap: Callable[[Any], Any]) -> None:
    """A schema was taken that no part could be written of, or that could not be read back."""
    schema = ShardSchema(pa.schema([("k", pa.string()), ("v", nested(NESTING_MAX, wrap))]), ("k",))
    assert ShardSchema.from_record(schema.to_record()) == schema
    rows = schema.conform(pa.table({"k": ["a"], "v": pa.nulls(1, schema.arrow.field("v").type)}), 0)
    part = encode_inline(rows.combine_chunks(), schema, 1, PartId("p" + "0" * 32))
    assert decode_inline(part, {1: schema}).equals(rows)
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink)
    assert pq.read_table(pa.BufferReader(sink.getvalue())).equals(rows)


def test_dictionaries_are_stored_decoded_and_views_as_large() -> None:
    schema = ShardSchema(
        pa.schema([("k", pa.dictionary(pa.int8(), pa.string())), ("v", pa.list_(pa.string_view()))]), ("k",)
    )
    assert schema.arrow.types == [pa.string(), pa.list_(pa.large_string())]
    rows = pa.table({"k": pa.array(["a", "b", "a"]).dictionary_encode(), "v": pa.array([["x"], None, []])})
    assert schema.conform(rows, 0)["k"].to_pylist() == ["a", "b", "a"]
    views = one(pa.binary_view()).conform(pa.table({"k": pa.array([b"x", None], pa.binary_view())}), 0)
    assert views["k"].to_pylist() == [b"x", None]


VIEW = pa.string_view()
VIEWED = pa.DictionaryArray.from_arrays(pa.array([0, None, 1], pa.uint32()), pa.array(["a", "b"], VIEW))
LISTS = pa.array([[1], None, [2, None]], pa.list_view(pa.int64()))
UUIDS = pa.array([b"a" * 16, None, b"b" * 16], pa.binary(16)).cast(pa.uuid())


@pytest.mark.parametrize(("column", "kind", "values"), [
    (VIEWED, pa.string(), ["a", None, "b"]),
    (pa.ListArray.from_arrays([0, 1, 3, 3], VIEWED), pa.list_(pa.string()), [["a"], [None, "b"], []]),
    (
        pa.StructArray.from_arrays([VIEWED], ["x"]),
        pa.struct([("x", pa.string())]),
        [{"x": "a"}, {"x": None}, {"x": "b"}],
    ),
    (LISTS, pa.list_(pa.int32()), [[1], None, [2, None]]),
    (
        pa.array([[1], None, [2, None]], pa.large_list_view(pa.int64())),
        pa.large_list(pa.int64()),
        [[1], None, [2, None]],
    ),
    (pa.RunEndEncodedArray.from_arrays([2, 3], pa.array(["a", None], VIEW)), pa.string(), ["a", "a", None]),
    (UUIDS, pa.binary(16), [b"a" * 16, None, b"b" * 16]),
    (pa.array([1, None, 0], pa.int8()).cast(pa.bool8()), pa.bool_(), [True, None, False]),
    (pa.array(["{}", None, "[]"], pa.json_()), pa.string(), ["{}", None, "[]"]),
    (
        pa.array([[("k", "v")], None, []], pa.map_(VIEW, VIEW)),
        pa.map_(pa.string(), pa.string()),
        [[("k", "v")], None, []],
    ),
    (
        pa.array([["a", None], None, ["b", "c"]], pa.list_(VIEW, 2)),
        pa.list_(pa.string(), 2),
        [["a", None], None, ["b", "c"]],
    ),
], ids=lambda given: str(given.type) if isinstance(given, pa.Array) else "")  # fmt: skip
def test_types_that_only_some_frames_have_are_taken(column: pa.Array, kind: Any, values: list[Any]) -> None:
    """Polars has dictionaries of views, DuckDB UUIDs. Arrow's cast does not read the former, and breaks list views."""
    schema = ShardSchema(pa.schema([("n", pa.int64()), ("v", kind)]), ("n",))
    for first in range(len(column)):
        some = pa.table({"n": range(first, len(column)), "v": column.slice(first)})
        assert schema.conform(some, 0)["v"].to_pylist() == values[first:]


def test_the_bytes_of_a_uuid_are_no_text_and_a_union_is_refused() -> None:
    union = pa.UnionArray.from_dense(pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array([1])])
    for column, kind in ((UUIDS, pa.string()), (union, pa.int64())):
        with pytest.raises(InvalidUsage):
            ShardSchema(pa.schema([("k", kind)]), ("k",)).conform(pa.table({"k": column}), 0)


def test_a_schema_survives_its_record() -> None:
    schema = ShardSchema(pa.schema([("v", pa.map_(pa.string(), pa.int8())), ("k", pa.uint8())]), ("k",))
    assert ShardSchema.from_record(schema.to_record()) == schema
    with pytest.raises(Corruption):
        ShardSchema.from_record(SchemaRecord(b"nonsense", ("k",)))


def test_columns_are_ordered_and_defaults_filled_in() -> None:
    table = PLAIN.conform(pa.table({"v": pa.array([1], pa.int64()), "k": ["a"]}), 7)
    assert table.schema == PLAIN.updates_schema
    assert table.to_pylist() == [{"k": "a", "v": 1, "__time": 7, "__diff": 1}]
    given = {"k": ["a"], "v": [1], "__time": pa.array([3], pa.int32()), "__diff": [-1]}
    assert PLAIN.conform(pa.table(given), None).to_pylist() == [{"k": "a", "v": 1, "__time": 3, "__diff": -1}]


@pytest.mark.parametrize(("columns", "says"), [
    ({"v": [1]}, "'k' is absent"),
    ({"k": ["a"], "v": [1], "w": [1]}, "has no column 'w'; its columns are k, v"),
    ({"k": [1], "v": [1]}, "'k' is int64, not string"),
    ({"k": ["a"], "v": ["1"]}, "'v' is string, not int32"),
    ({"k": ["a"], "v": [2**40]}, "'v' does not fit"),
    ({"k": ["a"], "v": [1.0]}, "'v' is double"),
    ({"k": ["a"], "v": [1], "__time": pa.array([None], pa.int64())}, "'__time' holds 1 nulls"),
    ({"k": ["a"], "v": [1], "__diff": pa.array([None], pa.int64())}, "'__diff' holds 1 nulls"),
    ({"k": ["a"], "v": [1], "__time": [-1]}, "__time is outside"),
    ({"k": ["a"], "v": [1], "__time": [2**63 - 1]}, "__time is outside"),
])  # fmt: skip
def test_rows_that_do_not_fit_name_their_column(columns: Any, says: str) -> None:
    with pytest.raises(InvalidUsage, match=says):
        PLAIN.conform(pa.table(columns), 0)


def test_rows_without_a_time_need_a_default() -> None:
    with pytest.raises(InvalidUsage, match="'__time' is absent"):
        PLAIN.conform(pa.table({"k": ["a"], "v": [1]}), None)


FAR = pa.array([86_400_000 * 2**31]).view(pa.date64())  # a day that wraps in Parquet
LATE = pa.array([2**60]).cast(pa.timestamp("s"))


@pytest.mark.parametrize(("kind", "column", "says"), [
    (pa.float32(), pa.array([0.1]), "precision"),
    (pa.float64(), pa.array([2**53 + 1]), "does not fit"),
    (pa.timestamp("s"), pa.array([1500], pa.timestamp("ms")), "does not fit"),
    (pa.timestamp("s"), pa.array([2**60]).cast(pa.timestamp("s")), "does not fit"),
    (pa.timestamp("us", "UTC"), pa.array([1], pa.timestamp("us")), "cast it first"),
    (pa.date64(), pa.array([1]).cast(pa.timestamp("ms")).view(pa.date64()), "times of day"),
    (pa.date64(), FAR, "32 bits"),
    (pa.date64(), pa.array([-86_400_000 * (2**31 + 1)]).view(pa.date64()), "32 bits"),
    (pa.string(), pa.array([b"\xff"]), "does not fit"),
    (pa.string(), pa.array([b"a UUID, 16 bytes"], pa.binary(16)), "cast it first"),
    (pa.decimal32(7, 2), pa.array([Decimal("1.005")], pa.decimal128(30, 5)), "does not fit"),
    (pa.decimal32(7, 2), pa.array([Decimal("100000")], pa.decimal128(30, 5)), "does not fit"),
    (pa.decimal32(9, 0), pa.array([Decimal("115770563878515355")], pa.decimal64(18, 0)), "does not fit"),
    (pa.decimal32(9, 9), pa.array([Decimal(-5)], pa.decimal32(1, 0)), "does not fit"),
    (pa.decimal128(38, 29), pa.array([Decimal("17671527272655")], pa.decimal64(15, 0)), "does not fit"),
])  # fmt: skip
def test_losses_are_refused(kind: Any, column: pa.Array, says: str) -> None:
    with pytest.raises(InvalidUsage, match=says):
        one(kind).conform(pa.table({"k": column}), 0)


@pytest.mark.parametrize(("kind", "column", "says"), [
    (pa.list_(pa.date64()), pa.ListArray.from_arrays([0, 1], FAR), "32 bits"),
    (pa.map_(pa.string(), pa.date64()), pa.MapArray.from_arrays([0, 1], ["a"], FAR), "32 bits"),
    (pa.struct([("x", pa.timestamp("s"))]), pa.StructArray.from_arrays([LATE], ["x"]), "does not fit"),
    (pa.list_(pa.decimal32(9, 0)), pa.array([[Decimal(815945761794)]], pa.list_(pa.decimal64(18, 1))), "does not fit"),
])  # fmt: skip
def test_losses_within_nested_columns_are_refused(kind: Any, column: pa.Array, says: str) -> None:
    schema = ShardSchema(pa.schema([("k", pa.int64()), ("v", kind)]), ("k",))
    with pytest.raises(InvalidUsage, match=f"column 'v'.*{says}"):
        schema.conform(pa.table({"k": [1], "v": column}), 0)
    nothing = pa.nulls(1, kind)
    assert schema.conform(pa.table({"k": [1], "v": nothing}), 0).column("v").null_count == 1


@pytest.mark.parametrize(("kind", "column", "value"), [
    (pa.float32(), pa.array([0.5, None]), 0.5),
    (pa.float64(), pa.array([7]), 7.0),
    (pa.timestamp("us"), pa.array([5], pa.timestamp("s")), datetime.datetime(1970, 1, 1, 0, 0, 5)),  # noqa: DTZ001
    (pa.large_string(), pa.array(["x"]), "x"),
    (pa.decimal32(7, 2), pa.array([Decimal("-99999.99")], pa.decimal128(30, 5)), Decimal("-99999.99")),
    (pa.decimal32(7, 2), pa.array([Decimal("-99999.99")], pa.decimal256(76, 10)), Decimal("-99999.99")),
    (pa.decimal128(38, 29), pa.array([Decimal("176715272")], pa.decimal64(15, 0)), Decimal("176715272")),
    (pa.int8(), pa.nulls(1), None),
])  # fmt: skip
def test_lossless_casts_are_made(kind: Any, column: pa.Array, value: Any) -> None:
    assert one(kind).conform(pa.table({"k": column}), 0)["k"][0].as_py() == value


def _encoded(values: pa.Array, encoding: str) -> pa.Array:
    """The same values; Arrow's own encoders do not take every type."""
    if encoding == "dictionary":
        return pa.DictionaryArray.from_arrays(pa.array(range(len(values)), pa.int32()), values)
    return pa.RunEndEncodedArray.from_arrays(pa.array(range(1, len(values) + 1), pa.int32()), values)


@given(
    st.sampled_from(list(FLAT)).flatmap(lambda kind: st.lists(arrays(kind, 1), min_size=1, max_size=3)),
    st.sampled_from(["dictionary", "run ends"]),
    st.sampled_from(["", "struct", "list"]),
)
def test_an_encoded_column_of_any_type_is_stored_as_its_values(chunks: Any, encoding: str, within: str) -> None:
    kind = chunks[0].type

    def wrap(values: pa.Array) -> pa.Array:
        if within == "struct":
            return pa.StructArray.from_arrays([values], ["x"])
        return pa.ListArray.from_arrays(list(range(len(values) + 1)), values) if within == "list" else values

    field = pa.field("v", {"": kind, "struct": pa.struct([("x", kind)]), "list": pa.list_(kind)}[within])
    stored = conform_column(pa.chunked_array([wrap(_encoded(chunk, encoding)) for chunk in chunks]), field)
    plain = pa.chunked_array([wrap(chunk) for chunk in chunks], field.type)
    stored.validate(full=True)
    assert stored.type == field.type
    same = ShardSchema(pa.schema([pa.field("k", pa.int64()), field]), ("k",))
    tables = [pa.table({"k": pa.array(range(len(plain)), pa.int64()), "v": column}) for column in (stored, plain)]
    assert len({digest_of_rows(same.conform(table, 1)) for table in tables}) == 1


def test_a_column_that_is_not_nullable_refuses_nulls() -> None:
    with pytest.raises(InvalidUsage, match="'k' holds 1 nulls"):
        one(pa.int8(), nullable=False).conform(pa.table({"k": pa.nulls(1, pa.int8())}), 0)


@pytest.mark.parametrize(("fields", "key", "says"), [
    ([("k", pa.string()), ("v", pa.int32()), ("w", pa.int8())], ("k",), None),
    ([("w", pa.int8()), ("k", pa.string()), ("v", pa.int32())], ("k",), None),
    ([("k", pa.string()), ("v", pa.int32())], ("v",), "the key is"),
    ([("k", pa.string())], ("k",), "'v' is missing"),
    ([("k", pa.string()), ("v", pa.int64())], ("k",), "'v' changes"),
    ([("v", pa.int32()), ("k", pa.string())], ("k",), "order"),
    ([("k", pa.string()), ("v", pa.int32()), pa.field("w", pa.int8(), nullable=False)], ("k",), "allow nulls"),
])  # fmt: skip
def test_schemas_evolve_by_nullable_columns_only(fields: Any, key: Any, says: str | None) -> None:
    new = ShardSchema(pa.schema(fields), key)
    assert (evolution_error(PLAIN, new) is None) == (says is None)
    if says is None:
        check_evolution(PLAIN, new)
    else:
        with pytest.raises(InvalidUsage, match=says):
            check_evolution(PLAIN, new)
