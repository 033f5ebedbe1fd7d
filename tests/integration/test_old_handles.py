"""Handles from before two columns exchanged names: each method refuses these, or does what they mean to the handle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from operator import methodcaller
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist
import persist.aio
from persist import Client, InvalidUsage, PersistError, SchemaMismatch, Shard
from persist.client.erasure_api import EraseOperation
from persist.parts.schema_changes import AddColumn, RenameColumn

COLUMNS = pa.schema([("id", pa.int64()), ("a", pa.string()), ("b", pa.string())])
SWAP = RenameColumn("a", "x"), RenameColumn("b", "a"), RenameColumn("x", "b")
HERE = [{"id": 1, "b": "A", "a": "B"}]  # by the names of now
ROW = [{"id": 2, "a": "A", "b": "B"}]  # by those that the handle knows
Call = Callable[[Shard], Any]

REFUSED: dict[str, Call] = {
    "add_column": lambda s: s.add_column("more", pa.string()),
    "allow_nulls": lambda s: s.allow_nulls("a"),
    "alter": lambda s: s.alter(AddColumn("more", pa.string())),
    "changes": lambda s: s.changes(-1, columns=["a"]),
    "count": lambda s: s.count("a = 'A'"),
    "delete": lambda s: s.delete("a = 'A'"),
    "drop_column": lambda s: s.drop_column("a"),
    "erase": lambda s: s.erase(where="a = 'A'"),
    "get": lambda s: s.get(1, columns=["a"]),
    "head": lambda s: s.head(where="a = 'A'", columns=["id"]),
    "listen": lambda s: s.listen(-1, where="a = 'A'"),
    "merge": lambda s: s.merge(ROW).when_not_matched_insert().execute(),
    "move_column": lambda s: s.move_column("a"),
    "overwrite": lambda s: s.overwrite(ROW),
    "rename_column": lambda s: s.rename_column("a", "c"),
    "replace_where": lambda s: s.replace_where("a = 'A'", ROW),
    "retain": lambda s: s.retain({"column": "a", "column_age": "1d", "column_unit": "s"}),
    "scan": lambda s: s.scan(columns=["a"]),
    "snapshot": lambda s: s.snapshot(where="a = 'A'", columns=["id"]),
    "subscribe": lambda s: s.subscribe(columns=["a"]),
    "update": lambda s: s.update({"a": "Q"}),
    "upsert": lambda s: s.upsert([{"id": 1, "a": "Q"}]),
    "widen_column": lambda s: s.widen_column("a", pa.string()),
    # names that are shown, though the caller gives none
    "changes, all columns": lambda s: s.changes(-1),
    "get, all columns": lambda s: s.get(1),
    "head, all columns": lambda s: s.head(),
    "scan, all columns": lambda s: s.scan(),
    "snapshot, all columns": lambda s: s.snapshot(),
    # others
    "changes of another shard": lambda s: s.changes(0, 0, other=s, columns=["a"]),
    "delete by keys": lambda s: s.delete(keys=[1]),
    "erase by keys": lambda s: s.erase(keys=[1]),
    "set_constraints, nothing new": lambda s: s.set_constraints(unique=False),
}
LATE: dict[str, Call] = {  # which are about the schema that the handle knows, or about nothing
    "evolve_schema": lambda s: s.evolve_schema(s.schema.arrow.append(pa.field("more", pa.string()))),
    "set_constraints": lambda s: s.set_constraints(checks={"c": "a <> 'B'"}),
}


def _piped(shard: Shard) -> None:
    with shard.pipelined_writer("w") as writer:
        writer.append(ROW)


BY_NUMBER: dict[str, Call] = {
    "append": lambda s: s.append(ROW, 1, 2),
    "compare_and_append": lambda s: s.compare_and_append(ROW, 1, 2),
    "insert": lambda s: s.insert(ROW),
    "open_writer": lambda s: s.open_writer().insert(ROW),
    "pipelined_writer": _piped,
}
WITHOUT_ARGUMENTS = (
    "broken_constraints close count erasures history optimize retention run_retention since tags upper vacuum view"
)
NAMELESS: dict[str, Call] = {
    **{name: methodcaller(name) for name in WITHOUT_ARGUMENTS.split()},
    "advance_upper": lambda s: s.advance_upper(3),
    "attributes": lambda s: list(s.attributes.scan()),
    "configure": lambda s: s.configure(history="8d"),
    "critical_reader": lambda s: s.critical_reader("c"),
    "downgrade_since": lambda s: s.downgrade_since(0),
    "erase": lambda s: s.erase(gone=True),
    "erased": lambda s: s.erased(before=0),
    "forget": lambda s: s.forget(0),
    "open_reader": lambda s: s.open_reader().close(),
    "restore": lambda s: s.restore(0),
    "retain": lambda s: s.retain(None),
    "schema": lambda s: s.schema,
    "settings": lambda s: s.settings,
    "snapshot": lambda s: s.snapshot(0, schema="then", columns=["a"]).to_arrow(),
    "tag": lambda s: s.tag("t", at=0),
    "time_at": lambda s: s.time_at(datetime(2020, 1, 1, tzinfo=UTC)),
    "timestamp_of": lambda s: s.timestamp_of(0),
    "truncate": lambda s: s.truncate(1, dry_run=True),
    "untag": lambda s: s.untag("t"),
    "with_timeout": lambda s: s.with_timeout(30.0),
}
OF_THEIR_OWN = {"drop", "refresh_schema"}  # which end the shard, or are asked to learn its columns


@pytest.fixture
def client() -> Iterator[Client]:
    with persist.connect(blob="mem:", consensus="mem:") as client:
        yield client


def _of_before(client: Client) -> tuple[Shard, Shard]:
    """A shard in which two columns have exchanged their names, and a handle from before that."""
    shard = client.create_shard("s", COLUMNS, ["id"])
    shard.insert([{"id": 1, "a": "A", "b": "B"}])
    before = client.shard("s")
    shard.alter(*SWAP)
    return shard, before


def _all(client: Client) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = client.shard("s").snapshot().to_arrow(expand=True).to_pylist()
    return rows


def _check_not_moved(client: Client, before: Shard) -> None:
    assert before.schema.arrow.names == COLUMNS.names
    before.insert([{"id": 9, "a": "first", "b": "second"}])
    assert client.shard("s").get(9) == [{"id": 9, "b": "first", "a": "second"}]


def test_every_method_of_a_handle_is_looked_at() -> None:
    known = {name for name in dir(Shard) if not name.startswith("_")}
    assert known == {*REFUSED, *LATE, *BY_NUMBER, *NAMELESS, *OF_THEIR_OWN} & known
    assert not ({*LATE, *BY_NUMBER, *NAMELESS, *OF_THEIR_OWN} - known)


def test_a_name_that_means_another_column_is_refused(client: Client) -> None:
    shard = client.create_shard("s", COLUMNS, ["id"])
    shard.insert([{"id": 1, "a": "A", "b": "B"}])
    handles = {what: client.shard("s") for what in REFUSED}
    shard.alter(*SWAP)
    columns = client.shard("s").schema
    for what, before in handles.items():
        with pytest.raises(PersistError) as told:
            REFUSED[what](before)
        assert told.value.kind == InvalidUsage.kind, what
        assert "as this handle knows it" in told.value.message, what
        assert before.schema.arrow.names == COLUMNS.names, what
    assert _all(client) == HERE
    assert client.shard("s").schema == columns
    for before in handles.values():
        before.insert([{"id": 9, "a": "first", "b": "second"}])
    assert client.shard("s").snapshot(where="id = 9").to_arrow().to_pylist() == [
        {"id": 9, "b": "first", "a": "second", "__diff": len(handles)}
    ]


@pytest.mark.parametrize("call", LATE.values(), ids=LATE)
def test_a_change_of_the_columns_that_the_handle_knows_is_late(client: Client, call: Call) -> None:
    _, before = _of_before(client)
    with pytest.raises(SchemaMismatch):
        call(before)
    _check_not_moved(client, before)


@pytest.mark.parametrize("call", BY_NUMBER.values(), ids=BY_NUMBER)
def test_rows_go_into_the_columns_that_the_handle_knows(client: Client, call: Call) -> None:
    _, before = _of_before(client)
    call(before)
    assert _all(client) == [*HERE, {"id": 2, "b": "A", "a": "B"}]
    _check_not_moved(client, before)


@pytest.mark.parametrize("call", NAMELESS.values(), ids=NAMELESS)
def test_what_names_no_column_happens_and_teaches_the_handle_nothing(client: Client, call: Call) -> None:
    _, before = _of_before(client)
    call(before)
    assert _all(client) == HERE
    _check_not_moved(client, before)


def test_a_handle_that_is_refreshed_goes_on_with_the_names_of_now(client: Client) -> None:
    _, before = _of_before(client)
    before.refresh_schema()
    assert before.count("a = 'B'") == 1
    assert before.get(1) == HERE
    before.delete("a = 'B'")
    assert _all(client) == []


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_a_writer_keeps_the_columns_that_its_handle_knew_when_it_was_opened(client: Client, is_pipelined: bool) -> None:
    """It followed its handle, so that its caller's rows changed columns."""
    shard = client.create_shard("s", COLUMNS, ["id"])
    writer: Any = shard.pipelined_writer("w") if is_pipelined else shard.open_writer()
    client.shard("s").alter(*SWAP)
    shard.refresh_schema()
    writer.append(ROW) if is_pipelined else writer.insert(ROW)
    writer.close()
    assert _all(client) == [{"id": 2, "b": "A", "a": "B"}]


def test_what_a_writer_learnt_hides_no_name_of_before(client: Client) -> None:
    """It compared the names of now with those that it had learnt last, not with those that its caller goes by."""
    shard = client.create_shard("s", COLUMNS, ["id"])
    before = client.shard("s")
    shard.alter(RenameColumn("a", "c"), AddColumn("more", pa.string()))
    before.insert([{"id": 1, "b": "B", "more": "M"}])
    shard.rename_column("b", "a")
    with pytest.raises(InvalidUsage, match="as this handle knows it"):
        before.insert([{"id": 2, "a": "A", "more": "M"}])


def test_a_change_teaches_its_handle_only_what_it_has_made(client: Client) -> None:
    shard = client.create_shard("s", COLUMNS, ["id"])
    view, calls = shard.view, []

    def viewed() -> Any:
        calls.append(None)
        if len(calls) == 2:  # the change has landed, and another one comes
            client.shard("s").alter(*SWAP)
        return view()

    shard.view = viewed  # type: ignore[method-assign,assignment]
    assert shard.add_column("more", pa.string()).arrow.names == ["id", "a", "b", "more"]
    shard.insert([{"id": 2, "a": "A", "b": "B", "more": "M"}])
    assert _all(client) == [{"id": 2, "b": "A", "a": "B", "more": "M"}]


def test_an_erasure_that_goes_on_after_a_swap_takes_no_other_row(client: Client, monkeypatch: Any) -> None:
    """Its predicate was read by the names of before, and the rows that came since by those of now."""
    shard = client.create_shard("s", COLUMNS, ["id"])
    shard.insert([{"id": 1, "a": "A", "b": "B"}])
    staged, calls = EraseOperation._staged, []

    def once(self: EraseOperation, *given: Any) -> Any:
        found = staged(self, *given)
        calls.append(None)
        if len(calls) == 1:
            client.shard("s").alter(*SWAP)
            client.shard("s").insert([{"id": 2, "a": "A", "b": "B"}])
        return found

    monkeypatch.setattr(EraseOperation, "_staged", once)
    with pytest.raises(InvalidUsage, match="as this handle knows it"):
        shard.erase(where="a = 'A'")
    assert _all(client) == [*HERE, {"id": 2, "b": "B", "a": "A"}]


def test_a_handle_of_asyncio_refuses_likewise(tmp_path: Path) -> None:
    async def work() -> None:
        async with persist.aio.connect(f"persist://{tmp_path}") as client:
            shard = await client.create_shard("s", COLUMNS, ["id"])
            before = await client.shard("s")
            await before.insert(ROW)
            await shard.alter(*SWAP)
            with pytest.raises(InvalidUsage, match="as this handle knows it"):
                await before.count("a = 'A'")
            with pytest.raises(InvalidUsage, match="as this handle knows it"):
                await before.erase(where="a = 'A'")

    asyncio.run(work())
