"""A handle that threads share learns of other columns between two looks at it: a test for each way to mix them up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import pyarrow as pa
import pytest

from persist import Client, ConstraintViolated, InvalidUsage, Shard
from persist.client.schema_lineage import SchemaHistory
from persist.core.shard_view import ShardView
from persist.parts.schema_changes import AddColumn, RenameColumn
from persist.sources import wal
from persist.sources.partition_map import Routes
from persist.sources.routed import RoutedWriter
from persist.sources.sequenced_writer import SequencedWriter
from persist.sources.wal import FrontEnd, Replica
from tests.support.embedded import client_of
from tests.support.location import memory_location

COLUMNS = pa.schema([("id", pa.int64()), ("a", pa.int64()), ("b", pa.int64())])
SWAP = RenameColumn("a", "x"), RenameColumn("b", "a"), RenameColumn("x", "b")
ROW = {"id": 1, "a": 10, "b": 20}
SWAPPED = {"id": 1, "b": 10, "a": 20}


@pytest.fixture
def client() -> Iterator[Client]:
    with client_of(memory_location()) as client:
        client.create_shard("s", COLUMNS, ["id"])
        yield client


def once(work: Callable[[], object], real: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
    """As `real`; and the first call of it does something, before or after that."""
    done: list[object] = []

    def called(*given: Any, **more: Any) -> Any:
        is_first, found = not done, None
        done.append(None)
        if after:
            found = real(*given, **more)
        if is_first:
            work()
        return found if after else real(*given, **more)

    return called


def swapped(shard: Shard, client: Client) -> Callable[[], object]:
    """Somebody lets two columns change their names, and another thread refreshes the handle."""

    def work() -> None:
        client.shard(shard.name).alter(*SWAP)
        shard.refresh_schema()

    return work


def test_a_front_end_wrote_what_it_had_read_by_other_names(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    log = client.shard("s")
    front = FrontEnd(log, "front")
    monkeypatch.setattr(wal, "pin_rows", once(swapped(log, client), wal.pin_rows, after=True))
    front.write([ROW])
    assert log.get(1) == [SWAPPED]


def test_a_front_end_learnt_of_a_column_and_of_a_swap(client: Client) -> None:
    """It refreshes the handle where a column is not known; what its caller calls the others is of before."""
    log = client.shard("s")
    front = FrontEnd(log, "front")
    client.shard("s").alter(*SWAP, AddColumn("more", pa.int64()))
    for _ in range(2):
        with pytest.raises(InvalidUsage, match="column 'a', as this handle knows it, is called 'b' now"):
            front.write([{**ROW, "more": 1}])
    assert front.write([ROW]) == 0
    log.refresh_schema()
    front.write([{**ROW, "id": 2, "more": 1}])
    assert log.snapshot().to_arrow(expand=True).to_pylist() == [{**SWAPPED, "more": None}, {**ROW, "id": 2, "more": 1}]


def test_a_replica_undid_what_a_rival_had_brought_to_the_table(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    log, slow = client.shard("s"), Replica.open(client, "s", "table")
    log.rename_column("a", "x")

    def rival() -> None:
        client.shard("s").rename_column("x", "y")
        Replica.open(client, "s", "table").step()
        slow.table.refresh_schema()

    monkeypatch.setattr(SchemaHistory, "following", once(rival, SchemaHistory.following, after=True))
    slow.step()
    assert [schema.arrow.names for schema in SchemaHistory.of(client.shard("table")).written] == [
        ["id", "a", "b"],
        ["id", "y", "b"],
    ]


def test_a_replica_wrote_by_the_columns_of_another_moment(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    log, slow = client.shard("s"), Replica.open(client, "s", "table")
    FrontEnd(log, "front").write([ROW])

    def rival() -> None:
        log.alter(*SWAP)
        Replica.open(client, "s", "table")._evolve_table(log.schema)
        slow.table.refresh_schema()

    monkeypatch.setattr(slow, "_as_of_table", once(rival, slow._as_of_table, after=True))
    slow.step()
    assert client.shard("table").get(1) == [SWAPPED]


def test_a_routed_append_was_read_by_names_not_compared(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.create_shard("t", COLUMNS, ["id"])
    routes = Routes.open(client, "routes", ["s", "t"], ["id"])
    writer = RoutedWriter(routes, "w")

    def work() -> None:
        for name in ("s", "t"):
            swapped(routes.of(name), client)()

    monkeypatch.setattr(SequencedWriter, "conditions", once(work, SequencedWriter.conditions, after=False))
    assert writer.append([ROW]) == 1
    assert [*client.shard("s").get(1), *client.shard("t").get(1)] == [SWAPPED]


def test_keys_were_looked_up_by_a_name_that_another_column_has_by_now(client: Client) -> None:
    """A key got a second row."""
    shard = client.create_shard("unique", COLUMNS, ["id"], unique=True)
    shard.insert([ROW])
    client.shard("unique").alter(RenameColumn("id", "key"), RenameColumn("a", "id"))
    for number, write in enumerate((shard.compare_and_append, shard.append), 1):
        with pytest.raises(ConstraintViolated, match="unique"):
            write([{"id": 1, "a": 7, "b": 7}], number, number + 1)
        write([{"id": number + 1, "a": 1, "b": 1}], number, number + 1)
    assert [row["key"] for row in client.shard("unique").snapshot().to_arrow().to_pylist()] == [1, 2, 3]


def test_a_late_answer_put_back_what_another_thread_had_learnt(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = client.shard("s")

    def late(view: ShardView) -> ShardView:
        client.shard("s").alter(*SWAP)
        other = Thread(target=shard.refresh_schema)
        other.start()
        other.join()
        return view

    asked: list[ShardView] = []
    real = shard.view

    def view() -> ShardView:
        asked.append(found := real())
        return late(found) if len(asked) == 1 else found

    monkeypatch.setattr(shard, "view", view)
    assert shard.refresh_schema().arrow.names == ["id", "b", "a"]
    assert shard.schema.arrow.names == ["id", "b", "a"]
    assert len(asked) == 2
