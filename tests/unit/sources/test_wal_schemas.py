"""A table in WAL mode follows every change of the columns of its log."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest

from persist.client.client import Client
from persist.client.schema_lineage import has_same_columns
from persist.client.shard import Shard
from persist.core.errors import InvalidUsage, Unavailable
from persist.parts.schema_changes import (
    AddColumn,
    Change,
    DropColumn,
    MoveColumn,
    RelaxColumn,
    RenameColumn,
    WidenColumn,
)
from persist.sources.wal import FrontEnd, Replica
from tests.support.bound import Processes
from tests.support.examples import walks
from tests.support.location import client_of, memory_location

COLUMNS = pa.schema([pa.field("id", pa.int64(), nullable=False), ("a", pa.int32()), ("b", pa.int32())])
STEPS = 30


@pytest.fixture
def client() -> Iterator[Client]:
    with client_of(memory_location()) as client:
        client.create_shard("log", COLUMNS, ["id"])
        yield client


def check_equal(log: Shard, table: Shard) -> None:
    assert table.upper() == log.upper()
    assert has_same_columns(table.refresh_schema(), log.refresh_schema())
    for time in range(log.upper().element or 0):
        assert table.snapshot(as_of=time).to_arrow() == log.snapshot(as_of=time).to_arrow()


SWAP = (RenameColumn("a", "t"), RenameColumn("b", "a"), RenameColumn("t", "b"))
CHANGES: dict[str, tuple[tuple[Change, ...], dict[str, Any]]] = {
    "swap": (SWAP, {"id": 2, "a": 1, "b": 2}),
    "rename": ((RenameColumn("a", "x"),), {"id": 2, "x": 1, "b": 2}),
    "rename of the key": ((RenameColumn("id", "x"),), {"x": 2, "a": 1, "b": 2}),
    "rename and another of the name": (
        (RenameColumn("a", "x"), AddColumn("a", pa.int32())),
        {"id": 2, "x": 1, "a": 3, "b": 2},
    ),
    "drop": ((DropColumn("a"),), {"id": 2, "b": 2}),
    "drop and another of the name": ((DropColumn("a"), AddColumn("a", pa.int32())), {"id": 2, "a": 3, "b": 2}),
    "widen": ((WidenColumn("a", pa.int64()),), {"id": 2, "a": 2**40, "b": 2}),
    "default": ((AddColumn("x", pa.string(), False, "EUR", "id"),), {"id": 2, "a": 1, "b": 2}),
    "null": ((AddColumn("x", pa.string()),), {"id": 2, "a": 1, "b": 2, "x": "x"}),
    "move": ((MoveColumn("b"),), {"id": 2, "a": 1, "b": 2}),
    "relax": ((RelaxColumn("id"),), {"id": None, "a": 1, "b": 2}),
    "plain in the middle, then by number": (
        (AddColumn("x", pa.int32(), after="id"),),
        {"id": 2, "x": 1, "a": 1, "b": 2},
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_table_has_the_columns_and_rows_of_the_log_after_a_change(client: Client, name: str) -> None:
    changes, row = CHANGES[name]
    log = client.shard("log")
    front, replica = FrontEnd(log, "front"), Replica.open(client, "log", "table")
    front.write([{"id": 1, "a": 10, "b": 20}, {"id": 1, "a": 11, "b": 20}])
    replica.step()
    log.alter(*changes)
    front.write([row])
    replica.step()
    check_equal(log, client.shard("table"))
    late = Replica.open(client, "log", "late")
    late.step()
    check_equal(log, late.table)
    log.alter(RenameColumn("b", "was b"))
    for one in (replica, late, Replica.open(client, "log", "table")):
        one.step()
        check_equal(log, one.table)


def test_a_table_that_missed_plain_schemas_gets_their_numbers(client: Client) -> None:
    """Numbers follow from the last plain schema. Taken from the first one, `a` would have been that of `x`."""
    log, replica = client.shard("log"), Replica.open(client, "log", "table")
    FrontEnd(log, "front").write([{"id": 1, "a": 10, "b": 20}])
    replica.step()
    log.add_column("x", pa.int32(), after="id")
    log.alter(DropColumn("b"), *[RenameColumn(*names) for names in (("a", "b"), ("x", "a"))])
    log.insert([{"id": 2, "a": 1, "b": 2}])
    replica.step()
    check_equal(log, client.shard("table"))


def test_a_change_without_rows_comes_to_the_table(client: Client) -> None:
    log, replica = client.shard("log"), Replica.open(client, "log", "table")
    FrontEnd(log, "front").write([{"id": 1, "a": 10, "b": 20}])
    assert replica.step()
    log.drop_column("a")
    assert replica.step()
    check_equal(log, client.shard("table"))
    assert not replica.step()


def test_rows_that_were_read_before_a_rival_followed_are_written_by_number(client: Client) -> None:
    """The slow one has read its rows by the columns before a swap; the table and its handle have those after it."""
    log, slow = client.shard("log"), Replica.open(client, "log", "table")
    FrontEnd(log, "front").write([{"id": 1, "a": 10, "b": 20}])
    append, before = slow._writer.append, log.schema

    class Late:
        def append(self, *given: Any, **more: Any) -> Any:
            log.alter(*SWAP)
            Replica.open(client, "log", "table")._evolve_table(log.schema)
            slow.table.refresh_schema()
            return append(slow._as_of_table(given[0].rows, before), *given[1:], **more)

    slow._writer = Late()  # type: ignore[assignment]
    slow.step()
    assert client.shard("table").get(1) == [{"id": 1, "b": 10, "a": 20}]
    check_equal(log, client.shard("table"))


def test_the_handles_of_the_caller_learn_nothing(client: Client) -> None:
    """Rows that their caller gives by the names that he knows would be taken for those of other columns."""
    client.create_shard("table", COLUMNS, ["id"])
    log, table = client.shard("log"), client.shard("table")
    known = [log.schema, table.schema]
    replica = Replica(log, table)
    client.shard("log").alter(*SWAP)
    client.shard("log").insert([{"id": 1, "a": 10, "b": 20}])
    replica.step()
    check_equal(client.shard("log"), client.shard("table"))
    assert [log.schema, table.schema] == known
    log.insert([{"id": 2, "a": 1, "b": 2}])
    assert client.shard("log").get(2) == [{"id": 2, "b": 1, "a": 2}]


def test_constraints_of_the_log_are_not_asked_again_and_those_of_the_table_stay(client: Client) -> None:
    log, replica = client.shard("log"), Replica.open(client, "log", "table")
    front = FrontEnd(log, "front")
    front.write([{"id": 1, "a": 10, "b": 20}])
    replica.step()
    log.set_constraints(not_null=["a"])
    client.shard("table").set_constraints(not_null=["b"])
    log.rename_column("b", "c")
    front.write([{"id": 2, "a": 10, "c": 20}])
    replica.step()
    check_equal(log, client.shard("table"))
    number = log.schema.id_of["c"]
    assert client.shard("table").schema.details.not_null == (number,)


# --- what is wrong: what docs/streaming.md refuses


@pytest.mark.parametrize("change", [AddColumn("x", pa.int64()), RenameColumn("a", "x"), DropColumn("a")])
def test_a_table_that_somebody_else_changed_is_refused(client: Client, change: Change) -> None:
    log = client.shard("log")
    replica = Replica.open(client, "log", "table")
    client.shard("table").alter(change)
    with pytest.raises(InvalidUsage, match="that its log 'log' never had"):
        Replica.open(client, "log", "table")
    log.alter(*SWAP)
    with pytest.raises(InvalidUsage, match="apply the log to a table of another name"):
        replica.step()


def test_a_table_of_the_same_names_with_other_numbers_is_refused(client: Client) -> None:
    log = client.shard("log")
    log.alter(DropColumn("a"), AddColumn("a", pa.int32()))
    client.create_shard("table", log.schema.arrow, ["id"])
    with pytest.raises(InvalidUsage, match="never had"):
        Replica.open(client, "log", "table")


# --- by stories


class Story:
    """A log whose columns change at any time, and two rivals that are killed at any commit."""

    def __init__(self, seed: int) -> None:
        self.chosen = random.Random(seed)
        self.processes = Processes()
        self.log = self.processes.client().create_shard("log", COLUMNS, ["id"])
        self.front = FrontEnd(self.log, "front")
        self.replicas: list[Replica] = [self.replica(), self.replica()]
        self.names = 0
        self.acting = False

    def replica(self) -> Replica:
        found = Replica.open(self.processes.client(), "log", "table")
        append, evolve = found._writer.append, found.table.evolve_schema

        def before(act: Any) -> Any:
            def acted(*given: Any, **more: Any) -> Any:
                if not self.acting and self.chosen.random() < 0.3:
                    self.acting = True
                    self.change() if self.chosen.random() < 0.5 else self.write()
                    with suppress(Unavailable):
                        self.chosen.choice([one for one in self.replicas if one is not found]).step()
                    self.acting = False
                if self.chosen.random() < 0.1:
                    raise Unavailable("killed before")
                done = act(*given, **more)
                if self.chosen.random() < 0.1:
                    raise Unavailable("killed after")
                return done

            return acted

        found._writer.append = before(append)  # type: ignore[method-assign]
        found.table.evolve_schema = before(evolve)  # type: ignore[method-assign]
        return found

    def change(self) -> None:
        values = list(self.log.schema.value)
        one, self.names = self.chosen.choice(values), self.names + 1
        new = f"c{self.names}"
        added = AddColumn(new, pa.int32(), True, self.chosen.choice([None, 7]), self.chosen.choice(["a key", None]))
        kinds: list[tuple[Change, ...]] = [
            (RenameColumn(self.log.schema.key[0], f"k{self.names}"),),
            (AddColumn(new, added.type, True, added.default, self.log.schema.key[0] if added.after else None),),
            (RenameColumn(one, new), AddColumn(one, pa.int32())),
            (WidenColumn(one, pa.int64()),),
            (MoveColumn(one),),
        ]
        if len(values) > 1:
            two = self.chosen.choice([name for name in values if name != one])
            kinds += [(RenameColumn(one, "t"), RenameColumn(two, one), RenameColumn("t", two)), (DropColumn(one),)]
        self.log.alter(*self.chosen.choice(kinds))

    def write(self) -> None:
        schema = self.log.schema
        row = {name: self.chosen.randrange(3) for name in schema.arrow.names}
        self.front.write([row, {**row, schema.value[0]: 9}])

    def act(self) -> None:
        number = self.chosen.randrange(2)
        match self.chosen.choice(["write", "write", "change", "apply", "apply", "kill"]):
            case "write":
                self.write()
            case "change":
                self.change()
            case "apply":
                with suppress(Unavailable):
                    self.replicas[number].step()
            case "kill":
                self.replicas[number] = self.replica()


def check(seed: int) -> None:
    story = Story(seed)
    for _ in range(STEPS):
        story.act()
    client = story.processes.client()
    replica = Replica.open(client, "log", "table")
    while replica.step():
        pass
    check_equal(client.shard("log"), client.shard("table"))


@pytest.mark.parametrize("seeds", walks(range(4), 20))
def test_the_table_follows_its_log_through_every_change(seeds: Iterable[int]) -> None:
    for seed in seeds:
        check(seed)
