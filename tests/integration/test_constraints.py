"""Constraints of a shard: unique keys, columns without nulls, checks. docs/schemas.md describes them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

import persist
from compactor.on_demand import maintain
from compactor.worker import Worker
from persist import (
    Client,
    ConstraintViolated,
    InvalidUsage,
    PersistError,
    SchemaMismatch,
    Shard,
    ShardExists,
    UnknownShard,
    UpperMismatch,
)
from persist.client.embedded import EmbeddedTransport
from persist.client.optimistic_edit import EditOperation
from persist.core import commands as c
from persist.core.batch import Run
from persist.core.errors import TokenReused
from persist.core.frontier import Antichain
from persist.core.ids import Token
from persist.parts import ShardSchema
from persist.parts.shard_schema import Check
from rpc.app import create_app
from rpc.cli.program import main
from rpc.settings import ServerSettings
from tests.support.clocks import World
from tests.support.location import memory_location
from tests.support.rewrites import before_rewrites

COLUMNS = pa.schema([("id", pa.int64()), ("n", pa.int64())])
Row = dict[str, Any]


@pytest.fixture
def client() -> Iterator[Client]:
    with Client(EmbeddedTransport(memory_location(), maintain)) as client:
        yield client


@pytest.fixture
def unique(client: Client) -> Shard:
    """A shard with unique keys and the rows of two."""
    shard = client.create_shard("unique", COLUMNS, ["id"], unique=True)
    shard.insert([{"id": 1, "n": 1}, {"id": 2, "n": 2}])
    return shard


@pytest.fixture
def checked(client: Client) -> Shard:
    """A shard whose `n` is positive, or null."""
    shard = client.create_shard("checked", COLUMNS, ["id"], checks={"positive": "n > 0"})
    shard.insert([{"id": 1, "n": 1}, {"id": 2, "n": None}])
    return shard


def there(shard: Shard, as_of: int | None = None) -> list[tuple[int, int | None]]:
    return [(row["id"], row["n"]) for row in shard.snapshot(as_of).to_arrow(expand=True).to_pylist()]


def details(refused: pytest.ExceptionInfo[ConstraintViolated]) -> tuple[str, int, list[list[Any]]]:
    told = refused.value.details
    return told["constraint"], told["count"], told["keys"]


# --- checks and columns without nulls

WRITES: dict[str, Callable[[Shard, list[Row]], object]] = {
    "insert": lambda shard, rows: shard.insert(rows),
    "append": lambda shard, rows: shard.append(rows, 1, 2),
    "compare_and_append": lambda shard, rows: shard.compare_and_append(rows, 1, 2),
    "upsert": lambda shard, rows: shard.upsert(rows),
    "overwrite": lambda shard, rows: shard.overwrite(rows),
    "replace_where": lambda shard, rows: shard.replace_where("id >= 0", rows),
    "merge": lambda shard, rows: shard.merge(rows).when_not_matched_insert().execute(),
    "stage": lambda shard, rows: shard.open_writer().stage(rows, None),
}


@pytest.mark.parametrize("way", WRITES)
def test_no_way_of_writing_adds_a_row_that_makes_a_check_false(checked: Shard, way: str) -> None:
    rows = [{"id": 7, "n": 0}, {"id": 8, "n": 8}, {"id": 9, "n": -9}]
    with pytest.raises(ConstraintViolated, match=r"constraint 'positive' refuses 2 rows .*'n > 0' is false") as refused:
        WRITES[way](checked, rows)
    assert details(refused) == ("positive", 2, [[7], [9]])
    assert there(checked) == [(1, 1), (2, None)]


def test_a_row_that_breaks_a_check_may_be_taken_away(client: Client) -> None:
    shard = client.create_shard("late", COLUMNS, ["id"])
    shard.insert([{"id": 1, "n": -1}])
    stale = client.shard("late")
    shard.delete("n < 0")
    shard.set_constraints(checks={"positive": "n > 0"})
    assert stale.insert([{"id": 2, "n": -2, "__diff": -1}]).lower.element == 2


def test_constraints_are_set_if_what_is_there_obeys_them(client: Client) -> None:
    shard = client.create_shard("later", COLUMNS, ["id"])
    shard.insert([{"id": number, "n": None if number % 2 else number} for number in range(30)])
    with pytest.raises(
        ConstraintViolated, match=r"'not null: n' cannot be set: shard 'later' holds 15 rows"
    ) as refused:
        shard.set_constraints(not_null=["n"])
    assert details(refused) == ("not null: n", 15, [[number] for number in range(1, 20, 2)])
    with pytest.raises(ConstraintViolated, match=r"'small' cannot be set: shard 'later' holds 2 rows"):
        shard.set_constraints(checks={"small": "n < 26"})
    assert not shard.refresh_schema().details.checks
    shard.delete("n is null")
    shard.set_constraints(not_null=["n"], checks={"small": "n < 100"})
    with pytest.raises(ConstraintViolated, match="not null: n"):
        shard.insert([{"id": 1}])
    assert len(there(shard, as_of=0)) == 30  # what was there before stays readable


# --- writers of before


def test_rows_that_were_staged_by_weaker_constraints_are_refused(client: Client) -> None:
    shard = client.create_shard("staged", COLUMNS, ["id"])
    writer = shard.open_writer()
    staged = writer.stage([{"id": 1, "n": -1}], None)
    shard.set_constraints(checks={"positive": "n > 0"})
    with pytest.raises(
        SchemaMismatch, match=r"whose schema 2 has stricter constraints.*stage the rows again"
    ) as refused:
        writer.commit_insert(staged)
    assert refused.value.details == {"expected": 1, "actual": 2}
    assert shard.view().upper.element == 0


def test_a_writer_that_does_not_look_at_its_rows_is_refused(checked: Shard) -> None:
    """The commit believes nothing that it can check."""
    number, schema = checked._current_schema()
    writer = checked.open_writer()
    writer._schema = lambda: (number, schema.with_details(checks=()))
    for stage in (writer.stage, writer.stage_for_one_commit):
        staged = stage([{"id": 3, "n": -3}], None)
        unseen = [Run(tuple(part.without_receipt() for part in run.parts)) for run in staged]
        with pytest.raises(ConstraintViolated, match="positive"):
            writer.commit_insert(unseen)


@pytest.mark.parametrize("way", ["insert", "append", "compare_and_append", "upsert"])
def test_a_handle_of_before_writes_by_the_new_constraints(client: Client, way: str) -> None:
    old, new = client.create_shard("old", COLUMNS, ["id"]), client.shard("old")
    old.insert([{"id": 1, "n": 1}])
    new.set_constraints(checks={"positive": "n > 0"}, unique=True)
    with pytest.raises(ConstraintViolated, match="positive"):
        WRITES[way](old, [{"id": 5, "n": -5}])
    WRITES[way](old, [{"id": 5, "n": 5}])
    assert there(new) == [(1, 1), (5, 5)]


# --- columns that change


@pytest.mark.parametrize("is_empty", [True, False])
@pytest.mark.parametrize("asked", [{"unique": True}, {"not_null": ["n"]}, {"checks": {"positive": "n > 0"}}])
@pytest.mark.parametrize("way", ["overwrite", "upsert", "replace_where", "merge"])
def test_a_write_that_constraints_overtake_is_planned_anew(
    client: Client, monkeypatch: pytest.MonkeyPatch, way: str, asked: Any, is_empty: bool
) -> None:
    """A shard's first write and an overwrite were refused as of another schema."""
    shard = client.create_shard("plain", COLUMNS, ["id"])
    if not is_empty:
        shard.insert([{"id": 1, "n": 1}])
    before_rewrites(monkeypatch, lambda: client.shard("plain").set_constraints(**asked))
    WRITES[way](shard, [{"id": 2, "n": 2}])
    assert (2, 2) in there(shard)
    before_rewrites(monkeypatch, lambda: client.shard("plain").set_constraints(checks={"few": "n < 3"}))
    with pytest.raises(ConstraintViolated):
        WRITES[way](shard, [{"id": 3, "n": 3}])
    assert (3, 3) not in there(shard)


def test_what_is_asked_of_a_column_keeps_its_new_name_and_goes_with_it(client: Client) -> None:
    shard = client.create_shard("columns", COLUMNS, ["id"])
    shard.set_constraints(not_null=["n"], unique=True)
    shard.rename_column("n", "amount")
    with pytest.raises(ConstraintViolated, match="not null: amount"):
        shard.insert([{"id": 1, "amount": None}])
    shard.rename_column("id", "key")
    shard.insert([{"key": 1, "amount": 1}])
    with pytest.raises(ConstraintViolated, match="unique"):
        shard.insert([{"key": 1, "amount": 2}])
    shard.drop_column("amount")
    assert shard.schema.details.not_null == ()
    shard.insert([{"key": 2}])


def test_a_writer_of_before_a_rename_obeys_the_checks_that_it_knew(client: Client, checked: Shard) -> None:
    checked.add_column("note", pa.string())
    writer = client.shard("checked").open_writer()
    staged = writer.stage([{"id": 3, "n": 3, "note": "x"}], None)
    checked.rename_column("note", "remark")
    writer.commit_insert(staged)
    assert checked.get(3) == [{"id": 3, "n": 3, "remark": "x"}]


def test_a_column_that_is_left_out_has_its_default_which_the_checks_see(client: Client) -> None:
    shard = client.create_shard("defaults", COLUMNS, ["id"], unique=True)
    shard.add_column("state", pa.string(), nullable=False, default="new")
    shard.set_constraints(checks={"known": "state IN ('new', 'paid')"})
    shard.insert([{"id": 1, "n": 1}])
    with pytest.raises(ConstraintViolated, match="unique"):
        shard.insert([{"id": 1, "n": 1}])
    with pytest.raises(ConstraintViolated, match="known"):
        shard.upsert([{"id": 1, "n": 1, "state": "lost"}])


# --- unique keys

CROWDING: dict[str, Callable[[Shard], object]] = {
    "insert of a key that is there": lambda shard: shard.insert([{"id": 1, "n": 5}, {"id": 9, "n": 9}]),
    "insert of the row that is there": lambda shard: shard.insert([{"id": 1, "n": 1}]),
    "insert of a key twice": lambda shard: shard.insert(
        [{"id": 1, "n": 1, "__diff": -1}, {"id": 1, "n": 5}, {"id": 1, "n": 6}]
    ),
    "insert of a row twice": lambda shard: shard.insert([{"id": 1, "n": 1, "__diff": 2}]),
    "insert in the place of a row that is not there": lambda shard: shard.insert(
        [{"id": 1, "n": 7, "__diff": -1}, {"id": 1, "n": 8}]
    ),
    "compare_and_append": lambda shard: shard.compare_and_append([{"id": 1, "n": 5}], 1, 2),
    "append": lambda shard: shard.append([{"id": 1, "n": 5}], 1, 2),
    "append of times of which the first are there": lambda shard: shard.append(
        [{"id": 7, "n": 1, "__time": 0}, {"id": 1, "n": 5, "__time": 1}], 0, 2
    ),
    "update of a key": lambda shard: shard.update({"id": 1}),
    "replace_where": lambda shard: shard.replace_where("n = 2", [{"id": 1, "n": 2}]),
    "merge": lambda shard: shard.merge([{"id": 1, "n": 5}], ["n"]).when_not_matched_insert().execute(),
}  # fmt: skip


@pytest.mark.parametrize("way", CROWDING)
def test_no_key_gets_a_second_row(unique: Shard, way: str) -> None:
    with pytest.raises(ConstraintViolated, match="constraint 'unique': 1 key would have more than one row") as refused:
        CROWDING[way](unique)
    assert details(refused) == ("unique", 1, [[1]])
    assert there(unique) == [(1, 1), (2, 2)]
    assert unique.view().upper.element == 1


CROWDING_BESIDE: dict[str, Callable[[Shard], object]] = {
    "update of a key": lambda shard: shard.update({"id": 1}, "id = 2"),
    "update of keys by which one loses an absent row": lambda shard: shard.update({"id": 1}, "n = 2 or n = -4"),
    "replace_where": lambda shard: shard.replace_where("n > 6", [{"id": 1, "n": 7}]),
    "merge": lambda shard: shard.merge([{"id": 1, "n": 9}], ["id", "n"]).when_not_matched_insert().execute(),
    "merge by a value": lambda shard: shard.merge([{"id": 1, "n": 9}], ["n"]).when_not_matched_insert().execute(),
    "insert": lambda shard: shard.insert([{"id": 1, "n": 7}]),
}  # fmt: skip


@pytest.mark.parametrize("way", CROWDING_BESIDE)
def test_a_row_that_is_there_less_than_no_times_makes_no_room_for_another_one(unique: Shard, way: str) -> None:
    """Verbs that read before they write added up the rows of a key: one that was not there cancelled one that was."""
    unique.insert([{"id": 1, "n": 5, "__diff": -1}, {"id": 3, "n": -4, "__diff": -1}])
    before = unique.snapshot().to_arrow()
    with pytest.raises(ConstraintViolated, match="constraint 'unique': 1 key would have more than one row") as refused:
        CROWDING_BESIDE[way](unique)
    assert details(refused) == ("unique", 1, [[1]])
    assert unique.snapshot().to_arrow() == before


def test_a_merge_that_changes_the_rows_of_keys_keeps_them_unique(unique: Shard) -> None:
    unique.insert([{"id": 1, "n": 5, "__diff": -1}])
    unique.merge([{"id": 2, "n": 7}, {"id": 3, "n": 3}]).when_matched_update().when_not_matched_insert().execute()
    rows = unique.snapshot().to_arrow().to_pylist()
    assert [(row["id"], row["n"], row["__diff"]) for row in rows] == [(1, 1, 1), (1, 5, -1), (2, 7, 1), (3, 3, 1)]


def test_a_time_of_before_comes_back_only_if_its_keys_are_unique(client: Client) -> None:
    shard = client.create_shard("past", COLUMNS, ["id"])
    shard.insert([{"id": 1, "n": 1}])
    shard.insert([{"id": 1, "n": 2}])
    shard.upsert([{"id": 1, "n": 3}])
    shard.set_constraints(unique=True)
    with pytest.raises(ConstraintViolated, match="1 key would have more than one row"):
        shard.restore(1)
    assert there(shard) == [(1, 3)]
    shard.restore(0)
    assert there(shard) == [(1, 1)]


@pytest.mark.parametrize("way", ["compare_and_append", "append"])
def test_a_token_is_answered_as_the_first_time_after_a_drop(client: Client, unique: Shard, way: str) -> None:
    token, rows = client.new_token(), [{"id": 3, "n": 3}]
    first = getattr(unique, way)(rows, 1, 2, token=token)
    unique.drop()
    assert getattr(unique, way)(rows, 1, 2, token=token) == first
    with pytest.raises(UnknownShard):
        getattr(unique, way)(rows, 2, 3, token=client.new_token())


AGAIN: dict[str, Callable[[Shard, Token], object]] = {
    "insert": lambda shard, token: shard.insert([{"id": 3, "n": -3}], token=token),
    "compare_and_append": lambda shard, token: shard.compare_and_append([{"id": 3, "n": -3}], 1, 2, token=token),
    "append": lambda shard, token: shard.append([{"id": 3, "n": -3}], 1, 2, token=token),
}


@pytest.mark.parametrize("way", AGAIN)
@pytest.mark.parametrize("asked", [{"checks": {"positive": "n > 0"}}, {"not_null": ["n"], "checks": {"p": "id < 3"}}])
def test_rows_that_have_landed_are_not_said_to_be_refused_by_a_constraint_that_came_since(
    client: Client, way: str, asked: Any
) -> None:
    """A write that was repeated by its token was told that nothing had been written."""
    shard, token = client.create_shard("plain", COLUMNS, ["id"]), client.new_token()
    shard.insert([{"id": 1, "n": 1}])
    AGAIN[way](shard, token)
    shard.insert([{"id": 3, "n": -3, "__diff": -1}])  # a shard that append feeds refuses a deletion
    shard.set_constraints(**asked)
    with pytest.raises(TokenReused):
        AGAIN[way](client.shard(shard.name), token)
    with pytest.raises(TokenReused):
        client.shard(shard.name).insert([{"id": 5, "n": -5}], token=token)
    with pytest.raises(ConstraintViolated, match="nothing was written"):
        client.shard(shard.name).insert([{"id": 4, "n": -4}], token=client.new_token())


@pytest.mark.parametrize("unique", [False, True])
def test_an_insert_is_answered_also_after_its_keys_became_unique_or_ceased_to_be(client: Client, unique: bool) -> None:
    shard, token = client.create_shard("plain", COLUMNS, ["id"], unique=unique), client.new_token()
    first = shard.insert([{"id": 1, "n": 1}], token=token)
    shard.set_constraints(unique=not unique)
    for handle in (shard, client.shard("plain")):
        assert handle.insert([{"id": 1, "n": 1}], token=token) == first
        with pytest.raises(TokenReused):
            handle.insert([{"id": 2, "n": 1}], token=token)
    assert shard.count() == 1


def test_an_insert_that_lands_while_it_is_tried_again_is_answered_as_the_first_time(
    client: Client, unique: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own row was taken for that of another one."""
    token, tried, landed = client.new_token(), EditOperation._attempt, []

    def late(self: EditOperation, of: Token | None) -> object:
        monkeypatch.setattr(EditOperation, "_attempt", tried)
        landed.append(client.shard(unique.name).insert([{"id": 3, "n": 3}], token=token))
        return tried(self, of)

    monkeypatch.setattr(EditOperation, "_attempt", late)
    assert unique.insert([{"id": 3, "n": 3}], token=token) == landed[0]
    assert there(unique) == [(1, 1), (2, 2), (3, 3)]


def test_keys_are_made_unique_if_they_are(client: Client) -> None:
    shard = client.create_shard("twice", COLUMNS, ["id"])
    shard.insert([{"id": number % 20, "n": number} for number in range(32)])
    with pytest.raises(ConstraintViolated, match=r"'unique' cannot be set: shard 'twice' has 12 keys") as refused:
        shard.set_constraints(unique=True)
    assert details(refused) == ("unique", 12, [[number] for number in range(10)])
    shard.delete("n >= 20")
    assert shard.set_constraints(unique=True).details.unique
    with pytest.raises(ConstraintViolated):
        shard.insert([{"id": 1, "n": 1}])


def test_a_command_that_asks_more_needs_a_look_and_changes_no_columns(client: Client, checked: Shard) -> None:
    """A client of one's own is refused what `set_constraints` would not send."""
    upper, known = checked.upper(), checked.schema
    more = known.with_details(not_null=(2,))
    wider = ShardSchema(COLUMNS.append(pa.field("m", pa.int8())), ("id",), replace(more.details, ids=(), next_id=0))
    less = known.with_details(checks=())

    def change(expected: int, schema: ShardSchema, upper: Antichain | None = None) -> c.Result:
        return checked._send(c.EvolveSchema(expected, schema.to_record(), upper))

    with pytest.raises(InvalidUsage, match="verified"):
        change(1, more)
    with pytest.raises(InvalidUsage, match="separately"):
        change(1, wider, upper)
    with pytest.raises(UpperMismatch):
        change(1, more, Antichain(0))
    with pytest.raises(SchemaMismatch):
        change(7, more, upper)
    with pytest.raises(InvalidUsage, match="which the shard does not have"):
        change(1, known.with_details(checks=(Check("bad", "gone > 0"),)), upper)
    assert checked.refresh_schema() == known
    with closing(checked.open_writer()) as writer:
        staged = writer.stage(pa.table({"id": [3], "n": pa.array([None], pa.int64())}), None)
        assert change(1, less) == c.SchemaRegistered(2)
        writer.commit_insert(staged)  # rows that were staged by stricter constraints obey these
        staged = writer.stage(pa.table({"id": [4], "n": [4]}), None)
        assert change(2, less.with_details(unique=True), checked.upper()) == c.SchemaRegistered(3)
        assert change(2, less.with_details(unique=True), upper) == c.SchemaRegistered(3), "a retry"
        with pytest.raises(SchemaMismatch, match="stage the rows again"):
            writer.commit_insert(staged)


def test_what_others_write_while_the_contents_are_looked_at_is_looked_at_as_well(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that come between a look and the change are looked at; the second try finds what they break."""
    shard = client.create_shard("raced", COLUMNS, ["id"])
    shard.insert([{"id": 1, "n": 1}])
    from persist.client import schema_api

    rivals = [[{"id": 2, "n": 2}], [{"id": 1, "n": 3}]]
    looked: list[int] = []
    check = schema_api.SchemaLook.check

    def interrupted(look: Any, held: Any) -> None:
        check(look, held)
        looked.append(1)
        if rivals:
            shard.insert(rivals.pop(0))

    monkeypatch.setattr(schema_api.SchemaLook, "check", interrupted)
    with pytest.raises(ConstraintViolated, match="1 key with more than one row"):
        shard.set_constraints(unique=True)
    assert len(looked) == 2


# --- what is found


def by_hand(shard: Shard, rows: list[Row]) -> None:
    """Write rows by a way that looks no keys up."""
    with closing(shard.open_writer()) as writer:
        writer.commit_insert(writer.stage(rows, None))


def test_a_merge_counts_them_and_goes_on(client: Client, unique: Shard, caplog: pytest.LogCaptureFixture) -> None:
    by_hand(unique, [{"id": key, "n": 7} for key in (1, 2, 3)])
    by_hand(unique, [{"id": 3, "n": 3}])
    worker = Worker(client.transport.location)  # type: ignore[attr-defined]
    with caplog.at_level(logging.ERROR, "persist.compactor"):
        assert worker.run("unique", idle=True)
    assert worker.metrics.counters.crowded_keys == 3
    [told] = caplog.records
    assert (told.shard, told.keys) == ("unique", 3)  # type: ignore[attr-defined]
    assert len(there(unique)) == 6


# --- what is refused

NO_CONSTRAINTS: Sequence[tuple[dict[str, Any], type[PersistError], str]] = [
    ({"unique": 1}, InvalidUsage, "unique must be true or false, not 1"),
    ({"not_null": "n"}, InvalidUsage, "not_null must be a list of columns, not 'n'"),
    ({"not_null": ["x"]}, InvalidUsage, "the shard has no column 'x'"),
    ({"not_null": ["n", "n"]}, InvalidUsage, "a column is named twice"),
    ({"checks": "n > 0"}, InvalidUsage, "checks must be predicates by their names"),
    ({"checks": {"a b": "n > 0"}}, InvalidUsage, "'a b' is not a valid name of a check"),
    ({"checks": {"a": ""}}, InvalidUsage, "check 'a' has a predicate of 0 characters"),
    ({"checks": {"a": "n > 0 AND " * 500 + "n > 0"}}, InvalidUsage, "it has 1 to 4000"),
    ({"checks": {"a": "x > 0"}}, InvalidUsage, "check 'a': where names 'x', which the shard does not have"),
    ({"checks": {f"c{n}": "n > 0" for n in range(65)}}, InvalidUsage, "there are 65 checks; a shard has at most 64"),
]


@pytest.mark.parametrize(("given", "kind", "message"), NO_CONSTRAINTS, ids=[one[2] for one in NO_CONSTRAINTS])
def test_what_is_no_constraint_is_refused_by_name(
    client: Client, given: dict[str, Any], kind: type[PersistError], message: str
) -> None:
    shard = client.create_shard("none", COLUMNS, ["id"])
    with pytest.raises(kind) as refused:
        shard.set_constraints(**given)
    assert message in refused.value.message
    if "not_null" not in given:
        with pytest.raises(kind) as refused:
            client.create_shard("other", COLUMNS, ["id"], **given)
        assert message in refused.value.message
        assert client.shards() == ["none"]
    assert shard.refresh_schema().is_plain


def test_a_shard_with_other_constraints_is_another_shard(client: Client, unique: Shard) -> None:
    assert client.create_shard("unique", COLUMNS, ["id"], unique=True).schema.details.unique
    with pytest.raises(ShardExists):
        client.create_shard("unique", COLUMNS, ["id"])


# --- constraints over HTTP and by commands, and what is refused


FIELDS = [{"name": "id", "type": "int64", "key": True}, {"name": "n", "type": "int64"}]
ORDERS = "/v1/shards/orders"


@pytest.fixture
def http() -> Iterator[TestClient]:
    machine = World().machine()
    with TestClient(create_app(machine.location, ServerSettings()), base_url="http://127.0.0.1") as client:
        made = client.put(ORDERS, json={"fields": FIELDS, "unique": True, "checks": {"positive": "n > 0"}})
        assert made.status_code == 200, made.text
        yield client


def insert(http: TestClient, *rows: dict[str, Any], verb: str = "insert", **params: Any) -> Any:
    body = "\n".join(map(json.dumps, rows))
    headers = {"Content-Type": "application/x-ndjson"}
    return http.post(f"{ORDERS}/{verb}", content=body, headers=headers, params=params)


def test_rows_that_are_posted_obey_them(http: TestClient) -> None:
    assert insert(http, {"id": 1, "n": 1}).json()["upper"] == [1]
    for bad, constraint in (({"id": 1, "n": 2}, "unique"), ({"id": 2, "n": 0}, "positive")):
        for verb, params in (
            ("insert", {}),
            ("append", {"lower": 1, "upper": 2}),
            ("compare-and-append", {"expected_upper": 1, "new_upper": 2}),
        ):
            answer = insert(http, bad, verb=verb, **params)
            told = answer.json()
            assert (answer.status_code, told["kind"]) == (400, "constraint_violated"), told
            assert told["details"] == {"constraint": constraint, "count": 1, "keys": [[bad["id"]]]}
    answer = insert(http, {"id": 1, "n": 1, "__diff": -1}, {"id": 1, "n": 5})
    assert (answer.json()["lower"], answer.json()["upper"]) == ([1], [2])


def test_they_are_read_and_changed(http: TestClient) -> None:
    shown = {"unique": True, "not_null": [], "checks": {"positive": "n > 0"}}
    assert http.get(f"{ORDERS}/constraints").json() == shown
    insert(http, {"id": 1, "n": None})
    answer = http.put(f"{ORDERS}/constraints", json={"not_null": ["n"]})
    assert (answer.status_code, answer.json()["details"]["keys"]) == (400, [[1]])
    answer = http.put(f"{ORDERS}/constraints", json={"checks": {}, "unique": False})
    assert answer.json() == {"unique": False, "not_null": [], "checks": {}}
    assert insert(http, {"id": 1, "n": -1}).status_code == 200


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--dir", str(tmp_path)]

    def run(*words: str, code: int = 0) -> list[dict[str, Any]]:
        capsys.readouterr()
        assert main([*words, *where]) == code, capsys.readouterr().err
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    run("create", "s", "--schema", "id int64, n int64", "--key", "id", "--unique", "--check", "positive: n > 0")
    asked = {"unique": True, "not_null": [], "checks": {"positive": "n > 0"}}
    assert run("schema", "constraints", "s") == [{"shard": "s", **asked}]
    [shown] = run("shards", "s", "--json")
    assert shown["constraints"] == asked
    options = ["--not-unique", "--not-null", "n", "--check", "small: n < 9", "--drop-check", "positive"]
    changed = run("schema", "constraints", "s", *options)
    assert changed == [{"shard": "s", "unique": False, "not_null": ["n"], "checks": {"small": "n < 9"}}]
    [allowed] = run("schema", "constraints", "s", "--allow-null", "n")
    assert allowed["not_null"] == []
    run("schema", "constraints", "s", "--unique")
    with persist.connect(f"persist://{tmp_path}") as client:
        writer = client.shard("s").open_writer()
        writer.commit_insert(writer.stage([{"id": 1, "n": 1}, {"id": 1, "n": 2}], None))
    _, found = run("schema", "constraints", "s", "--look", code=1)
    assert (found["constraint"], found["count"], found["keys"]) == ("unique", 1, [[1]])
    for wrong in (["--check", "n > 0"], ["--check", "a: n > 0", "--check", "a: n < 5"], ["--drop-check", "gone"]):
        assert run("schema", "constraints", "s", *wrong, code=1) == []
