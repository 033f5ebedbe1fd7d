"""What goes by the name of a column while columns have ids: a test for each case in which the name got another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pyarrow as pa
import pytest

import persist
from persist.client.client import Client
from persist.client.shard import Shard
from persist.core.errors import InvalidUsage
from persist.parts.schema_changes import AddColumn, Change, DropColumn, RenameColumn, WidenColumn

COLUMNS = pa.schema([("id", pa.int64()), ("a", pa.int32()), ("b", pa.int32())])
SWAP = (RenameColumn("a", "t"), RenameColumn("b", "a"), RenameColumn("t", "b"))
MOVES: dict[str, tuple[Change, ...]] = {
    "swap": SWAP,
    "rename": (RenameColumn("a", "c"),),
    "rename and rename": (RenameColumn("a", "c"), RenameColumn("b", "a")),
    "drop": (DropColumn("a"),),
    "drop and add": (DropColumn("a"), AddColumn("a", pa.int32(), default=7)),
}


@pytest.fixture
def client(tmp_path: Any) -> Iterator[Client]:
    with closing(persist.connect(f"persist://{tmp_path / 'data'}")) as client:
        yield client


@pytest.mark.parametrize("change", MOVES.values(), ids=MOVES)
def test_a_check_never_comes_to_be_about_another_column(client: Client, change: tuple[Change, ...]) -> None:
    shard = client.create_shard("orders", COLUMNS, ["id"], checks={"positive": "a > 0"})
    with pytest.raises(InvalidUsage, match="the check 'positive' refers to column 'a': remove it first"):
        shard.alter(*change)
    assert shard.refresh_schema().arrow.names == ["id", "a", "b"]
    shard.set_constraints(checks={})
    shard.alter(*change)


@pytest.mark.parametrize("change", MOVES.values(), ids=MOVES)
def test_a_policy_of_rows_never_comes_to_go_by_another_column(client: Client, change: tuple[Change, ...]) -> None:
    """Maintenance took all rows away, by the column that had got the name."""
    shard = client.create_shard("orders", pa.schema([("id", pa.int64()), ("a", pa.int64()), ("b", pa.int32())]), ["id"])
    shard.retain({"column": "a", "column_age": "30d", "column_unit": "s"})
    with pytest.raises(InvalidUsage, match="a row policy uses column 'a'"):
        shard.alter(*change)


@pytest.mark.parametrize(
    ("kind", "default"),
    [
        (pa.int64(), pa.scalar(None, pa.int64())),
        (pa.struct([pa.field("x", pa.int32(), nullable=False)]), {}),
        (pa.list_(pa.field("item", pa.int32(), nullable=False)), [None]),
    ],
    ids=["null", "struct", "list"],
)
def test_a_default_with_a_null_where_none_may_be_is_refused(client: Client, kind: pa.DataType, default: Any) -> None:
    shard = client.create_shard("orders", COLUMNS, ["id"])
    with pytest.raises(InvalidUsage, match="'c'"):
        shard.add_column("c", kind, nullable=False, default=default)
    assert shard.refresh_schema().arrow == COLUMNS


ROW = [{"id": 2, "a": 100, "b": 200}]
BY_NUMBER: dict[str, Callable[[Shard], object]] = {
    "insert": lambda s: s.insert(ROW),
    "compare_and_append": lambda s: s.compare_and_append(ROW, 1, 2),
}


@pytest.mark.parametrize("write", BY_NUMBER.values(), ids=BY_NUMBER)
@pytest.mark.parametrize("asked", [{"unique": True}, {"checks": {"c": "id > 0"}}], ids=["unique", "check"])
def test_rows_that_have_to_be_staged_anew_are_never_read_by_names_of_other_columns(
    client: Client, write: Callable[[Shard], object], asked: dict[str, Any]
) -> None:
    shard, before = _with_handle_of_before(client)
    shard.set_constraints(**asked)
    with pytest.raises(InvalidUsage, match="'a', as this handle knows it, is called 'b' now"):
        write(before)
    before.refresh_schema()
    write(before)
    assert shard.get(2) == [{"id": 2, "b": 200, "a": 100}]


def test_a_merge_by_the_former_name_of_a_column_is_refused(client: Client) -> None:
    """It wrote null in the renamed column."""
    shard, before = _with_handle_of_before(client, RenameColumn("a", "c"))
    with pytest.raises(InvalidUsage, match="column 'a' is called 'c' now; use that name"):
        before.merge(ROW).when_not_matched_insert().execute()
    before.refresh_schema()  # from here on `a` is a column of the source alone
    before.merge(ROW).when_not_matched_insert({"id": 2, "c": persist.source("a")}).execute()
    assert shard.get(2) == [{"id": 2, "c": 100, "b": None}]


def _with_handle_of_before(client: Client, *changes: Change) -> tuple[Shard, Shard]:
    """A shard whose columns were changed (none given: two names were swapped), and a handle that does not know it."""
    shard = client.create_shard("orders", COLUMNS, ["id"])
    before = client.shard("orders")
    before.insert([{"id": 1, "a": 10, "b": 20}])
    shard.alter(*(changes or SWAP))
    return shard, before


STRICT = pa.struct([pa.field("x", pa.int32(), nullable=False)])


def test_a_null_within_a_value_that_allows_none_is_refused(client: Client) -> None:
    """Dicts with one were taken, and stopped the maintenance of the shard."""
    shard = client.create_shard("orders", pa.schema([("id", pa.int64()), ("c", STRICT)]), ["id"])
    with pytest.raises(InvalidUsage, match="column 'c' has a null where struct<x: int32 not null> allows none"):
        shard.insert([{"id": 1, "c": {"x": None}}])
    assert len(shard.snapshot().to_arrow()) == 0
    shard.widen_column("c", pa.struct([pa.field("x", pa.int32())]))
    shard.insert([{"id": 1, "c": {"x": None}}])


def test_a_change_that_is_none_is_refused(client: Client) -> None:
    """They ended raw, a name by HTTP as 500; and what is no truth value was taken as one."""
    shard = client.create_shard("orders", COLUMNS, ["id"])
    changes: list[Any] = [AddColumn("\ud800", pa.int32()), RenameColumn("a", "\ud800"), WidenColumn("a", "int64")]  # type: ignore[arg-type]
    changes += [AddColumn("x", kind) for kind in ("int64", None)]  # type: ignore[arg-type]
    for change in (*changes, AddColumn("x", pa.int32(), nullable="no"), "x", []):  # type: ignore[arg-type]
        with pytest.raises(InvalidUsage):
            shard.alter(change)
    assert shard.refresh_schema().arrow == COLUMNS
