"""Types that allow no null within them: a file holds each of their values, whatever a null hides."""

from __future__ import annotations

import io
from datetime import date
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persist.parts.column_types import fill_hidden_nulls, has_forbidden_null, has_required_children

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
    sink = io.BytesIO()
    if not _holds_fixed_lists(kind):  # what Arrow reads of lists of a fixed size with nulls is asked elsewhere
        pq.write_table(table, sink)
        assert pq.read_table(sink).column(0).to_pylist() == table.column(0).to_pylist()


def _holds_fixed_lists(kind: pa.DataType) -> bool:
    if pa.types.is_fixed_size_list(kind):
        return True
    return any(_holds_fixed_lists(kind.field(index).type) for index in range(kind.num_fields))


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
