"""Types that allow no null within them: a file holds each of their values, whatever a null hides."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from decimal import Decimal
from itertools import product
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persist import InvalidUsage
from persist.parts.column_types import fill_hidden_nulls, has_forbidden_null, has_required_children
from persist.parts.schema_changes import check_new
from persist.parts.shard_schema import ShardSchema

LEAVES = {
    pa.int32(): 1, pa.string(): "a", pa.bool_(): True, pa.binary(3): b"abc", pa.decimal128(5, 2): Decimal("1.50"),
    pa.date32(): date(2026, 1, 2),
}  # fmt: skip
KINDS = st.recursive(
    st.sampled_from(list(LEAVES)),
    lambda inner: st.one_of(
        st.lists(st.tuples(inner, st.booleans()), min_size=1, max_size=3).map(
            lambda those: pa.struct([pa.field(f"f{at}", kind, may) for at, (kind, may) in enumerate(those)])
        ),
        st.tuples(inner, st.booleans()).map(lambda one: pa.list_(pa.field("element", *one))),
        st.tuples(inner, st.booleans()).map(lambda one: pa.large_list(pa.field("element", *one))),
        st.tuples(inner, st.booleans()).map(lambda one: pa.list_(pa.field("element", *one), 2)),
        st.tuples(inner, st.booleans()).map(lambda one: pa.map_(pa.string(), pa.field("value", *one))),
    ),
    max_leaves=4,
)


def _values(kind: pa.DataType, may_be_null: bool) -> st.SearchStrategy[Any]:
    if pa.types.is_struct(kind):
        found: Any = st.fixed_dictionaries({field.name: _values(field.type, field.nullable) for field in kind})
    elif pa.types.is_map(kind):
        pair = st.tuples(st.sampled_from("ab"), _values(kind.item_type, kind.item_field.nullable))
        found = st.lists(pair, max_size=2)
    elif pa.types.is_nested(kind):
        size = kind.list_size if pa.types.is_fixed_size_list(kind) else None
        value = _values(kind.value_type, kind.value_field.nullable)
        found = st.lists(value, min_size=size or 0, max_size=size or 2)
    else:
        found = st.just(LEAVES[kind])
    return st.none() | found if may_be_null else found


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_file_gives_back_every_value(data: st.DataObject) -> None:
    kind = data.draw(KINDS)
    values = data.draw(st.lists(_values(kind, True), max_size=4))
    field = pa.field("c", kind)
    plain = pa.array(values, kind)
    column = pa.concat_arrays([pa.nulls(2, kind), plain, pa.nulls(1, kind)]).slice(1)  # what Arrow hides there is null
    assert not has_forbidden_null(column, field)
    table = fill_hidden_nulls(pa.table([column], pa.schema([field])))
    assert table.column(0).to_pylist() == [None, *plain.to_pylist(), None]
    table.validate(full=True)
    if _is_allowed(field):
        assert _from_file(table).column(0).to_pylist() == table.column(0).to_pylist()


def _is_allowed(column: pa.Field) -> bool:
    """Whether a new shard may have the column."""
    with suppress(InvalidUsage):
        check_new(ShardSchema(pa.schema([("id", pa.int64()), column]), ("id",)))
        return True
    return False


def _from_file(table: pa.Table) -> pa.Table:
    sink = io.BytesIO()
    pq.write_table(table, sink, version="2.6")
    return pq.ParquetFile(sink).read(use_threads=False)


PAIR = pa.list_(pa.int32(), 2)
WRAPPED: dict[str, Callable[[pa.Field], pa.DataType]] = {
    "struct": lambda child: pa.struct([pa.field("s", pa.string()), child]),
    "list": pa.list_,
    "fixed list": lambda child: pa.list_(child, 2),
    "map": lambda child: pa.map_(pa.string(), child),
}


def _values_with_nulls(kind: pa.DataType, may_be_null: bool) -> list[Any]:
    """A null, and a value with the nulls, and one with the values, of the types within."""
    nulls = [None] if may_be_null else []
    if pa.types.is_struct(kind):
        within = [_values_with_nulls(field.type, field.nullable) for field in kind]
        return nulls + [dict(zip(kind.names, one, strict=True)) for one in product(*within)]
    if pa.types.is_map(kind):
        return [*nulls, [], *([("a", one)] for one in _values_with_nulls(kind.item_type, kind.item_field.nullable))]
    if pa.types.is_nested(kind):
        empty = [] if pa.types.is_fixed_size_list(kind) else [[]]
        within = _values_with_nulls(kind.value_type, kind.value_field.nullable)
        return [*nulls, *empty, *([one, within[-1]] for one in within)]
    return [*nulls, 7 if pa.types.is_int32(kind) else "a"]


@pytest.mark.parametrize("levels", [0, 1, 2])
def test_a_type_that_no_reader_reads_from_a_file_is_refused_and_no_other(levels: int) -> None:
    """Arrow reads no list of a fixed size below a null of its struct, if the list itself may not be null."""
    refused = 0
    for chain in product(WRAPPED, repeat=levels):
        for may in product([True, False], repeat=levels + 1):
            field = pa.field("c", PAIR, may[-1])
            for name, is_nullable in zip(reversed(chain), reversed(may[:-1]), strict=True):
                field = pa.field("c", WRAPPED[name](field), is_nullable)
            values = _values_with_nulls(field.type, field.nullable)
            table = fill_hidden_nulls(pa.table([pa.array(values, field.type)], pa.schema([field])))
            if _is_allowed(field):
                assert _from_file(table).column(0).to_pylist() == table.column(0).to_pylist(), field
            else:
                refused += 1
                with pytest.raises(pa.ArrowInvalid, match="Expected all lists to be of size"):
                    _from_file(table)
    assert refused == [0, 1, 11][levels]


S = pa.struct([pa.field("x", pa.int32(), nullable=False)])


@pytest.mark.parametrize(("kind", "value"), [
    (S, {"x": None}),
    (pa.list_(S), [{"x": None}]),
    (pa.list_(pa.field("element", pa.int32(), nullable=False)), [1, None]),
    (pa.map_(pa.string(), pa.field("value", pa.int32(), nullable=False)), [("a", None)]),
    (pa.struct([pa.field("o", S, nullable=False)]), {"o": None}),
    (pa.struct([pa.field("o", S)]), {"o": {"x": None}}),
], ids=str)  # fmt: skip
def test_a_null_where_none_may_be_is_found(kind: pa.DataType, value: Any) -> None:
    assert has_required_children(kind)
    assert has_forbidden_null(pa.array([None, value], kind), pa.field("c", kind))
    assert not has_forbidden_null(pa.nulls(3, kind), pa.field("c", kind))


def test_a_list_of_a_fixed_size_that_is_null_within_a_map_hides_its_nulls() -> None:
    """Arrow's own cast of such a map refused them: "nulls in input cannot be viewed as non-nullable"."""
    pair = pa.list_(pa.field("element", pa.int32(), nullable=False), 2)
    kind = pa.list_(pa.field("element", pa.map_(pa.string(), pa.field("value", pair))), 2)
    column = pa.array([[None, [("a", None)]], [[("b", [1, 2])], None]], kind)
    assert not has_forbidden_null(column, pa.field("c", kind))
    assert fill_hidden_nulls(pa.table({"c": column})).column(0).to_pylist() == column.to_pylist()
