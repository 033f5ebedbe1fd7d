"""Expressions of other engines: no row group that has a matching row is left out, and no column that is looked at."""

from __future__ import annotations

import datetime as dt
import io
import math
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.core.batch import Run
from persist.core.errors import InvalidUsage
from persist.parts import ALL_KEYS, ShardSchema
from persist.parts.filter_eval import ExpressionPruner, Filter, filter_rows, prune_runs, required_columns
from persist.parts.part_files import PartFiles
from tests.unit.parts.strategies import Shard

ZONE = dt.UTC
FOLD = dt.datetime(2026, 11, 1, 5, 30, tzinfo=ZONE)  # half past one in New York, for the first time that day
VALUES: dict[str, tuple[Any, list[Any]]] = {
    "i": (pa.int64(), [None, -(2**63), -1, 0, 1, 2, 2**63 - 1]),
    "n": (pa.int32(), [None, -1, 0, 1, 2]),
    "f": (pa.float64(), [None, math.nan, -math.inf, -1.0, -0.0, 0.0, 1.0]),
    "s": (pa.string(), [None, "", "a", "ab", "b", "\uffff"]),
    "d": (pa.decimal128(10, 2), [None, Decimal("-1.50"), Decimal("0.00"), Decimal("1.50")]),
    "day": (pa.date32(), [None, dt.date(1, 1, 1), dt.date(1970, 1, 1), dt.date(9999, 12, 31)]),
    "at": (pa.timestamp("us", "America/New_York"), [None, dt.datetime(1970, 1, 1, tzinfo=ZONE), FOLD]),
    "ns": (pa.timestamp("ns"), [None, 0, 1, 2**62]),
    "flag": (pa.bool_(), [None, True, False]),
}  # fmt: skip
KINDS = pa.schema([(name, kind) for name, (kind, _) in VALUES.items()])
COMPARE = ["__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"]


def literal(name: str, value: Any) -> pa.Scalar:
    return pa.scalar(value, KINDS.field(name).type)


@st.composite
def leaves(draw: st.DrawFn) -> Any:
    name = draw(st.sampled_from(KINDS.names))
    column, values = pc.field(name), [value for value in VALUES[name][1] if value is not None]
    how = draw(st.sampled_from(["compare", "in", "null", "valid"]))
    if how == "null":
        return column.is_null()
    if how == "valid":
        return column.is_valid()
    if how == "in":
        return column.isin(pa.array(draw(st.lists(st.sampled_from(values), max_size=3)), KINDS.field(name).type))
    return getattr(column, draw(st.sampled_from(COMPARE)))(pc.scalar(literal(name, draw(st.sampled_from(values)))))


def combined(inner: Any) -> Any:
    both = st.builds(lambda one, other: one & other, inner, inner)
    return both | st.builds(lambda one, other: one | other, inner, inner) | inner.map(lambda one: ~one)


EXPRESSIONS = st.recursive(leaves(), combined, max_leaves=4)
ROWS = st.lists(
    st.fixed_dictionaries({name: st.sampled_from(values) for name, (_, values) in VALUES.items()}),
    min_size=1,
    max_size=4,
)


def statistics_of(table: pa.Table) -> dict[str, Any]:
    """As `PartFile` gives them to whoever keeps row groups."""
    file = io.BytesIO()
    pq.write_table(table, file)
    found = pq.ParquetFile(file).metadata
    columns = [found.row_group(0).column(at) for at in range(found.num_columns)]
    return {one.path_in_schema: one.statistics for one in columns if one.statistics is not None}


@given(ROWS, EXPRESSIONS)
def test_a_row_group_with_a_row_that_matches_is_never_left_out(rows: list[dict[str, Any]], expression: Any) -> None:
    table = pa.Table.from_pylist(rows, schema=KINDS)
    if len(table.filter(expression)):
        assert ExpressionPruner(expression, KINDS)(statistics_of(table))


@pytest.mark.parametrize(("expression", "may"), [
    (pc.field("i") > 2, False),
    (pc.field("i") == 1, True),
    (pc.field("n") < 1, False),
    (pc.field("n").isin([7, 8]), False),
    (pc.field("n").is_null(), False),
    (pc.field("s").is_null(), True),
    (pc.field("s") >= "c", False),
    (pc.field("d") > Decimal("1.50"), False),
    (pc.field("day") < dt.date(1970, 1, 1), False),
    (pc.field("at") > pc.scalar(pa.scalar(dt.datetime(2027, 1, 1, tzinfo=ZONE), pa.timestamp("us", "UTC"))), False),
    ((pc.field("i") > 2) | (pc.field("s") == "a"), True),
    ((pc.field("i") > 2) & (pc.field("s") == "a"), False),
    (pc.field("f") > 100, True),  # NaN may be there, which no bound tells
    (pc.field("i") + 1 > 100, True),  # a computation tells nothing
])  # fmt: skip
def test_row_groups_are_left_out_by_what_is_known_of_them(expression: Any, may: bool) -> None:
    day, at = dt.date(1970, 1, 1), dt.datetime(2026, 1, 1, tzinfo=ZONE)
    row = {"i": 1, "n": 1, "f": 1.0, "s": "a", "d": 1, "day": day, "at": at}
    rows = [row, {**row, "i": 2, "n": 2, "s": None}]
    assert ExpressionPruner(expression, KINDS)(statistics_of(pa.Table.from_pylist(rows, schema=KINDS))) is may


def test_parts_are_left_out_by_the_bounds_of_their_keys_without_being_opened() -> None:
    schema = ShardSchema(pa.schema([("s", pa.string()), ("v", pa.int64())]), ("s",))
    shard = Shard(schema)
    rows = [[{"s": key, "v": 1} for key in keys] for keys in (["a", "b"], ["m", "x" * 300], [None, "c"])]
    parts = [shard.part(pa.Table.from_pylist(some, schema.arrow)) for some in rows]

    def kept(expression: Any) -> list[int]:
        found = prune_runs([Run((part,)) for part in parts], schema, ExpressionPruner(expression, schema.arrow))
        return [parts.index(part) for run in found for part in run.parts]

    # Long keys have no bound above that can be read, and null none below.
    assert kept(pc.field("s") == "b") == [0, 1, 2]
    assert kept(pc.field("s") == "y") == [1, 2]
    assert kept(pc.field("v") == 7) == [0, 1, 2]


def test_a_column_with_a_dot_is_not_taken_for_a_field_within_another_one() -> None:
    """Regression: `where` went by the bounds of whichever came last, and rows were lost."""
    kinds = pa.schema([("k", pa.int64()), ("st.x", pa.int64()), ("st", pa.struct([("x", pa.int64())]))])
    schema = ShardSchema(kinds, ("k",))
    shard = Shard(schema)
    rows = pa.Table.from_pylist([{"k": 1, "st.x": 5, "st": {"x": 100}}], kinds)
    part = shard.part(rows)
    for keeps in (ExpressionPruner(pc.field("st.x") == 5, kinds), Filter.of("`st.x` = 5", schema).may_match):
        files = PartFiles(shard.blob, {1: schema}, keeps=keeps)
        assert list(files.open(part).wanted(ALL_KEYS)) == [0]


NESTED = pa.schema(
    [("a", pa.int64()), ("st", pa.struct([("x", pa.int64())])), ("a b", pa.string()), ("is", pa.int64())]
)


@pytest.mark.parametrize(("shown", "expression", "found"), [
    (None, None, (NESTED.names, NESTED.names)),
    (["a"], None, (["a"], ["a"])),
    (["a"], pc.field("st", "x") > 1, (["a"], ["a", "st"])),
    ({"twice": pc.field("a") * 2}, pc.field("a b") == "x", (["a"], ["a", "a b"])),
    (["a"], pc.field("a").isin([1]), (["a"], ["a"])),  # `is` is in the text of the expression only
    (["a"], pc.field(3) > 1, (["a"], NESTED.names)),  # by its place: it may be any
    ([], pc.field("is") > 1, ([], ["is"])),
])  # fmt: skip
def test_only_columns_that_are_looked_at_are_needed(shown: Any, expression: Any, found: Any) -> None:
    assert required_columns(NESTED, shown, expression) == found


@pytest.mark.parametrize(
    ("shown", "expression"), [(["nope"], None), (None, pc.field("nope") > 1), (None, pc.field("a") > "x")]
)
def test_expressions_that_do_not_fit_are_refused(shown: Any, expression: Any) -> None:
    with pytest.raises(InvalidUsage, match="columns or filter do not fit the columns a, st, a b, is: "):
        required_columns(NESTED, shown, expression)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_both_zeros_are_members_of_a_set_that_has_one(zero: float) -> None:
    """Regression: Arrow looks for members by their bits, and DuckDB's `IN (0.0, 1.0)` lost the rows with -0.0."""
    kinds = pa.schema([("f", pa.float64()), ("st", pa.struct([("x", pa.float32())]))])
    values = [0.0, -0.0, 1.0, 2.0, math.nan, None]
    table = pa.Table.from_pylist(
        [{"f": value, "st": {"x": value}} for value in values] + [{"f": None, "st": None}], kinds
    )
    for column in (pc.field("f"), pc.field("st", "x")):
        found = filter_rows(table.slice(1), column.isin(pa.array([zero, 1.0], pa.float64())))
        assert [str(value) for value in found.column("f").to_pylist()] == ["-0.0", "1.0"]
