"""What goes by the name of a column while columns have ids: a test for each case in which the name got another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pyarrow as pa
import pytest

import persist
from persist.client.connect import Client
from persist.core.errors import InvalidUsage
from persist.parts.altering import AddColumn, Change, DropColumn, RenameColumn

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
    with pytest.raises(InvalidUsage, match="the check 'positive' names column 'a': take it away first"):
        shard.alter(*change)
    assert shard.refresh_schema().arrow.names == ["id", "a", "b"]
    shard.set_constraints(checks={})
    shard.alter(*change)


@pytest.mark.parametrize("change", MOVES.values(), ids=MOVES)
def test_a_policy_of_rows_never_comes_to_go_by_another_column(client: Client, change: tuple[Change, ...]) -> None:
    """Maintenance took all rows away, by the column that had got the name."""
    shard = client.create_shard("orders", pa.schema([("id", pa.int64()), ("a", pa.int64()), ("b", pa.int32())]), ["id"])
    shard.retain({"column": "a", "column_age": "30d", "column_unit": "s"})
    with pytest.raises(InvalidUsage, match="a policy of rows goes by column 'a'"):
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


def test_shards_of_equal_columns_with_other_ids_are_told_apart_in_words(client: Client) -> None:
    """The message showed the same columns twice."""
    one, other = (client.create_shard(name, COLUMNS, ["id"]) for name in ("one", "other"))
    for shard in (one, other):
        shard.insert([{"id": 1, "a": 1, "b": 2}])
    other.alter(AddColumn("z", pa.int8()), DropColumn("z"))
    other.alter(*SWAP, *SWAP)
    other.alter(*SWAP, DropColumn("a"), AddColumn("a", pa.int32(), after="id"))
    assert one.schema.arrow == other.schema.arrow
    with pytest.raises(InvalidUsage, match="have equal columns, and other ids"):
        one.changes(0, 0, other=other)
