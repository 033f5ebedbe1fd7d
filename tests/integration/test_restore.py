"""Restore and changes as users see them, over stores whose clocks the tests move."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from persist import AttributeUpdate, Shard, WriteHandle, named_key
from persist.client.arguments import read_attribute
from persist.client.optimistic_loop import RETRIES_MAX
from persist.client.restore_and_truncate import RestoreOperation
from persist.commit.blob_tasks import merged
from persist.core import commands as c
from persist.core.errors import (
    AttributeMismatch,
    InvalidUsage,
    NotReadable,
    PersistError,
    SchemaMismatch,
    TokenReused,
    Unavailable,
    UnknownShard,
    UpperMismatch,
)
from persist.core.frontier import TIME_MAX, Antichain
from persist.core.ids import token_of_key
from persist.core.shard_view import ViewRequest
from persist.core.state import Policy
from tests.support.clocks import Machine, World
from tests.support.rewrites import before_rewrites

NAME = "orders"
SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])


@pytest.fixture
def world() -> World:
    return World(policy=Policy())


@pytest.fixture
def shard(machine: Machine) -> Shard:
    return machine.client.create_shard(NAME, SCHEMA, ["id"], history="7d")


def insert(world: World, shard: Shard, *rows: tuple[int, str, int]) -> None:
    shard.insert([{"id": number, "v": value, "__diff": diff} for number, value, diff in rows])
    world.pass_ms(1_000)


def rows(table: pa.Table) -> list[tuple[object, ...]]:
    return [tuple(row.values()) for row in table.to_pylist()]


@pytest.fixture
def months(world: World, shard: Shard) -> Shard:
    """Three good months, at the times 0 to 2, and a bad one at 3."""
    insert(world, shard, (1, "a", 1), (2, "b", 1))
    insert(world, shard, (3, "c", 2))
    insert(world, shard, (1, "a", -1), (1, "z", 1))
    insert(world, shard, (2, "b", -1), (9, "bad", 3))
    return shard


# --- changes


def test_changes_of_some_columns(months: Shard) -> None:
    """`tests/property/test_changes.py` compares those of all columns with a model."""
    found = months.changes(0, columns=["v"], num_splits=3)
    assert rows(found.to_arrow()) == [("a", -1), ("z", 1), ("b", -1), ("c", 2), ("bad", 3)], "up to the latest time"


def test_changes_are_held_and_given_back(world: World, months: Shard, machine: Machine) -> None:
    with months.changes(1, 3) as changes:
        assert repr(changes) == "Changes('orders', 1, 3, splits=1)"
        assert "from 1 to 3" in changes._repr_html_()
        assert months.forget(3) == Antichain(1), "the lease holds what it reads"
        assert changes.to_pandas()["__diff"].tolist() == [-1, 1, -1, 3]
    assert not machine.location.machine(NAME).refresh().leased_readers


def test_splits_are_read_elsewhere_and_name_only_what_was_written_between(machine: Machine, months: Shard) -> None:
    copy = machine.client.create_shard("copy", SCHEMA, ["id"])
    copy.insert(months.snapshot(2).to_arrow())
    elsewhere = machine.world.machine().client.transport
    with months.changes(2, 3, num_splits=2) as changes, months.changes(2, 0, other=copy, num_splits=2) as pair:
        splits = pickle.loads(pickle.dumps(changes.splits))
        assert {part.id for split in splits for run in split.runs for part in run.parts} == {
            part.id for batch in months._transport.view(NAME, ViewRequest()).batches[3:] for part in batch.parts()
        }
        found = [row for split in splits for table in split.read(elsewhere) for row in rows(table)]
        assert found == [(2, "b", -1), (9, "bad", 3)]
        assert [table for split in pickle.loads(pickle.dumps(pair.splits)) for table in split.read(elsewhere)] == []


def test_columns_that_were_added_since_are_null_before(world: World, months: Shard) -> None:
    months.evolve_schema(SCHEMA.append(pa.field("w", pa.int64())))
    months.insert([{"id": 3, "v": "c", "w": None, "__diff": -1}, {"id": 4, "v": "d", "w": 7}])
    assert rows(months.changes(2).to_arrow()) == [
        (2, "b", None, -1), (3, "c", None, -1), (4, "d", 7, 1), (9, "bad", None, 3),
    ]  # fmt: skip
    assert months.restore(2).changed
    assert rows(months.snapshot().to_arrow()) == [(1, "z", None, 1), (2, "b", None, 1), (3, "c", None, 2)]


def test_changes_begin_before_the_first_write(machine: Machine, months: Shard) -> None:
    """As of -1 every shard is empty: that was told, and could not be given back."""
    assert rows(months.changes(-1, 0).to_arrow()) == [(1, "a", 1), (2, "b", 1)]
    assert months.changes(-1).to_arrow() == months.snapshot().to_arrow()
    assert rows(months.changes(1, -1, num_splits=2).to_arrow()) == [(1, "a", -1), (2, "b", -1), (3, "c", -2)]
    fresh = machine.client.create_shard("fresh", SCHEMA, ["id"])
    with fresh.changes(-1) as found:
        assert (found.start, found.end, found.to_arrow().num_rows) == (-1, -1, 0)
    assert fresh.changes(-1, 0, other=months).to_arrow() == months.snapshot(0).to_arrow()
    assert months.changes(0, -1, other=fresh).to_arrow().num_rows == 2


def test_shards_of_equal_columns_are_compared_whatever_their_ids_defaults_and_constraints(
    machine: Machine, months: Shard
) -> None:
    other = machine.client.create_shard("other", SCHEMA, ["id"])
    other.add_column("w", pa.int64())
    other.drop_column("w")
    names = other.schema.arrow.names
    other.rename_column(names[-1], "x")
    other.rename_column("x", names[-1])
    other.insert(months.snapshot().to_arrow())
    other.set_constraints(checks={"any": "id > -1000000"})
    assert months.changes(months.snapshot().as_of, other=other).to_arrow().num_rows == 0
    other.delete(where="id > -1000000")
    assert other.changes(1, other=months).to_arrow().num_rows == months.snapshot().to_arrow().num_rows


def other_columns(machine: Machine, shard: Shard) -> object:
    other = machine.client.create_shard("other", SCHEMA.append(pa.field("w", pa.int8())), ["id"])
    other.insert([{"id": 1}])
    return shard.changes(0, other=other)


def other_client(machine: Machine, shard: Shard) -> object:
    return shard.changes(0, other=machine.world.machine().shard(NAME))


BAD_CHANGES: list[tuple[Callable[[Machine, Shard], object], type[PersistError], str]] = [
    (lambda _, shard: shard.changes(-2), InvalidUsage, r"start is -2; it must be a time in \[-1, "),
    (lambda _, shard: shard.changes("1"), InvalidUsage, "start is '1'; it must be a time"),  # type: ignore[arg-type]
    (lambda _, shard: shard.changes(datetime(2026, 1, 1)), InvalidUsage, "without a zone"),  # noqa: DTZ001
    (lambda _, shard: shard.changes(0, 1, num_splits=0), InvalidUsage, "num_splits is 0"),
    (lambda _, shard: shard.changes(0, 1, columns=["no"]), InvalidUsage, "'no'"),
    (lambda _, shard: shard.changes(0, 1, other="copy"), InvalidUsage, "it must be a Shard"),  # type: ignore[arg-type]
    (lambda _, shard: shard.changes(0, 99, wait_s=0), Unavailable, "not as of 99"),
    (lambda _, shard: (shard.forget(2), shard.changes(1)), NotReadable, "its history was forgotten"),
    (lambda _, shard: (shard.tag("t", at=0), shard.forget(2), shard.changes(-1)), NotReadable, "is readable from"),
    (lambda _, shard: shard.changes(datetime(2000, 1, 1, tzinfo=UTC)), NotReadable, "nothing was written"),
    (lambda _, shard: (shard.drop(), shard.changes(1)), UnknownShard, "was dropped"),
    (other_columns, InvalidUsage, "only shards of equal columns are compared"),
    (other_client, InvalidUsage, "were opened by two clients"),
]


@pytest.mark.parametrize(("ask", "error", "sentence"), BAD_CHANGES)
def test_changes_say_what_is_wrong_and_write_nothing(
    machine: Machine, months: Shard, ask: Callable[[Machine, Shard], object], error: type[PersistError], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        ask(machine, months)
    state = machine.location.machine(NAME).refresh()
    assert state.upper == Antichain(4) or state.upper.is_empty
    assert not state.leased_readers


# --- restore


def test_a_restore_is_one_commit_after_which_the_contents_are_those_of_then(months: Shard) -> None:
    then = rows(months.snapshot(2).to_arrow())
    done = months.restore(2)
    assert (done.as_of, done.lower, done.upper, done.changed) == (2, Antichain(4), Antichain(5), True)
    assert (done.added, done.removed) == (1, 3)
    assert done.timestamp == months.timestamp_of(2)
    assert rows(months.snapshot().to_arrow()) == then
    with months.listen(3, until=5) as listen:
        assert [rows(event.updates) for event in listen] == [[(2, "b", 4, 1), (9, "bad", 4, -3)]]


def others_write(monkeypatch: pytest.MonkeyPatch, shard: Shard) -> None:
    """Before the next two commits of a restore."""
    before_rewrites(monkeypatch, *(lambda n=n: shard.insert([{"id": n, "v": "between"}]) for n in (51, 50)))  # type: ignore[misc]


def test_told_to_retry_it_takes_that_back_too(monkeypatch: pytest.MonkeyPatch, months: Shard) -> None:
    then = rows(months.snapshot(2).to_arrow())
    others_write(monkeypatch, months)
    with pytest.raises(UpperMismatch) as told:
        months.restore(2, retries=1)
    assert told.value.details == {"expected": [5], "actual": [6]}
    done = months.restore(2, retries=1)
    assert (done.lower, done.added, done.removed) == (Antichain(6), 1, 5)
    assert rows(months.snapshot().to_arrow()) == then


def test_the_history_tells_the_time_of_a_restore_and_a_truncation(months: Shard) -> None:
    """Also of a command that comes without a caller, as from a program that knows the protocol alone."""
    months.truncate(2)
    writer = months.open_writer()
    writer.commit_rewrite(writer.stage([{"id": 1, "v": "z"}], None), 5, operation=c.RESTORE, undoes=2)
    assert [(entry.operation, entry.point) for entry in months.history(3)] == [
        ("restore", 2), ("truncate", 2), ("insert", None),
    ]  # fmt: skip


POSITION, OTHER = named_key("position of the source"), named_key("other")


def test_attributes_are_kept_unless_they_are_set_with_the_rows(months: Shard) -> None:
    """A consumer that keeps its position with the rows went on after what the restore had taken away."""
    months.attributes.update([AttributeUpdate.replace(POSITION, 3), AttributeUpdate.replace(OTHER, 7)])
    done = months.restore(2)
    assert (done.attributes, done.to_json()["attributes"]) == ((), {"changed": [], "others": "kept"})
    assert months.attributes.get(POSITION) == 3
    back = months.restore(1, attributes=AttributeUpdate.replace(POSITION, 1))
    assert (back.changed, back.attributes) == (True, (POSITION,))
    assert (months.attributes.get(POSITION), months.attributes.get(OTHER)) == (1, 7)


def test_attributes_change_also_where_no_row_differs(months: Shard) -> None:
    token = token_of_key("undo")
    for _ in range(2):
        done = months.restore(3, attributes=[AttributeUpdate.accumulate(POSITION, 5)], token=token)
        assert (done.changed, done.added, done.removed, done.attributes) == (False, 0, 0, (POSITION,))
        assert (done.lower, months.upper()) == (Antichain(4), Antichain(4)), "no time is taken"
    assert months.attributes.get(POSITION) == 5, "once"
    with pytest.raises(TokenReused):
        months.restore(3, attributes=[AttributeUpdate.accumulate(POSITION, 6)], token=token)
    assert months.history(1)[0].operation == "restore"


def test_a_restore_whose_condition_fails_changes_nothing(months: Shard) -> None:
    months.attributes.update(AttributeUpdate.replace(POSITION, 3))
    wrong = AttributeUpdate.replace_if_equals(POSITION, 1, expected=2)
    for as_of in (2, 3):
        with pytest.raises(AttributeMismatch) as caught:
            months.restore(as_of, attributes=[wrong])
        assert caught.value.details["actual"] == {POSITION: 3}
    assert (months.upper(), months.attributes.get(POSITION)) == (Antichain(4), 3)
    with pytest.raises(InvalidUsage):
        months.restore(2, attributes="position")  # type: ignore[arg-type]


def test_a_retry_that_was_overtaken_sets_attributes_once(monkeypatch: pytest.MonkeyPatch, months: Shard) -> None:
    others_write(monkeypatch, months)
    done = months.restore(2, retries=2, attributes=AttributeUpdate.accumulate(POSITION, 1))
    assert (done.changed, months.attributes.get(POSITION)) == (True, 1)


@pytest.mark.parametrize(
    ("text", "update"),
    [
        ("a b=c=7", AttributeUpdate.replace(named_key("a b=c"), 7)),
        ("x=-9", AttributeUpdate.replace(named_key("x"), -9)),
        ("x=", AttributeUpdate.delete(named_key("x"))),
        (f"{POSITION}=0", AttributeUpdate.replace(POSITION, 0)),
        ("01234567-89AB-cdef-0123-456789abcdef=1", AttributeUpdate.replace("0123456789abcdef" * 2, 1)),
    ],
)
def test_attributes_as_text(text: str, update: AttributeUpdate) -> None:
    assert read_attribute("--attribute", text) == update


@pytest.mark.parametrize("text", ["x", "=1", "x=1.5", "x=one", "x=²", f"x={'9' * 20}", ""])
def test_a_text_that_is_no_attribute(text: str) -> None:
    with pytest.raises(InvalidUsage) as caught:
        read_attribute("--attribute", text)
    assert caught.value.kind == "invalid_usage"


@pytest.mark.parametrize(
    "then",
    [
        pytest.param(lambda shard: shard.advance_upper(None), id="closed"),
        pytest.param(lambda shard: shard.forget(4), id="forgotten"),
        pytest.param(lambda shard: shard.drop(), id="dropped"),
    ],
)
def test_a_try_that_would_be_refused_though_the_other_one_landed_is_told_so(
    monkeypatch: pytest.MonkeyPatch, months: Shard, then: Callable[[Shard], object]
) -> None:
    """It was told that nothing was changed."""
    token, told, real = token_of_key("undo"), [], RestoreOperation._landed

    def landed(restoring: RestoreOperation, *args: Any) -> object:
        found = real(restoring, *args)
        if not told:
            told.append(restoring)  # the other one, which goes on now, does not come here again
            told[:] = [months.restore(2, token=token)]
            then(months)
        return found

    monkeypatch.setattr(RestoreOperation, "_landed", landed)
    again = months.restore(2, token=token)
    assert (again.as_of, again.lower, again.upper) == (told[0].as_of, Antichain(4), Antichain(5))


def test_what_cancels_out_after_a_lost_race_is_not_committed(monkeypatch: pytest.MonkeyPatch, months: Shard) -> None:
    back = [{"id": 9, "v": "bad", "__diff": -3}, {"id": 2, "v": "b"}]
    before_rewrites(monkeypatch, lambda: months.insert(back))
    done = months.restore(2, retries=3)
    assert (done.changed, done.upper, done.added, done.removed) == (False, Antichain(5), 0, 0)
    assert months.upper() == Antichain(5)


def test_rows_that_a_stricter_schema_refuses_are_staged_anew(monkeypatch: pytest.MonkeyPatch, months: Shard) -> None:
    """Nobody wrote, but what was staged was looked at by the constraints of before."""
    then = rows(months.snapshot(2).to_arrow())
    before_rewrites(monkeypatch, lambda: months.set_constraints(checks={"known": "v != 'unknown'"}))
    with pytest.raises(SchemaMismatch):
        months.restore(2)
    before_rewrites(monkeypatch, lambda: months.set_constraints(checks={"known": "v != 'nothing'"}))
    assert (months.restore(2, retries=1).upper, rows(months.snapshot().to_arrow())) == (Antichain(5), then)


def test_a_drop_that_comes_between_is_seen(monkeypatch: pytest.MonkeyPatch, months: Shard) -> None:
    """It is no change of rows."""
    then = rows(months.snapshot(2).to_arrow())
    before_rewrites(monkeypatch, lambda: months.truncate(4, mode="drop"))
    months.restore(2, retries=1)
    assert rows(months.snapshot().to_arrow()) == then


def test_where_no_time_is_left_that_is_said_at_once(monkeypatch: pytest.MonkeyPatch, months: Shard) -> None:
    months.advance_upper(TIME_MAX, force=True)
    assert months.restore(2).upper == Antichain(TIME_MAX + 1)
    monkeypatch.setattr(WriteHandle, "stage_for_one_commit", None)  # nothing is tried
    for write in (lambda: months.restore(3, retries=50), lambda: months.insert([{"id": 5, "v": "e"}])):
        with pytest.raises(UpperMismatch, match="shard 'orders' has no time left") as told:
            write()
        assert told.value.details["expected"] is None
    monkeypatch.undo()
    with pytest.raises(UpperMismatch, match="shard 'orders' has no time left"):
        months.open_writer().commit_rewrite((), TIME_MAX + 1, operation=c.RESTORE, undoes=3)


def test_a_multiplicity_that_one_commit_cannot_write_is_restored_in_steps(months: Shard) -> None:
    months.restore(2)
    for _ in range(2):
        months.insert([{"id": 7, "v": "g", "__diff": 2**32}])
    with pytest.raises(InvalidUsage, match=r"was 8589934592 times more or less there at time 2, and one .* in steps"):
        months.restore(2)
    assert months.upper() == Antichain(7)
    months.restore(5)
    assert months.restore(2).removed == 2**32
    assert rows(months.changes(2).to_arrow()) == []


BAD_RESTORES: list[tuple[Callable[[Shard], object], type[PersistError], str]] = [
    (lambda shard: shard.restore(-1), InvalidUsage, "as_of is -1; it must be a time"),
    (lambda shard: shard.restore(4), InvalidUsage, r"time 4 of shard 'orders' is not complete: its upper is \[4\]"),
    (lambda shard: shard.restore(datetime(2100, 1, 1, tzinfo=UTC)), Unavailable, "is not over yet"),
    (lambda shard: (shard.forget(2), shard.restore(1)), NotReadable, "its history was forgotten"),
    (lambda shard: (shard.forget(2), shard.snapshot(-1)), NotReadable, r"on, not as of -1, when it was empty"),
    (lambda shard: (shard.forget(2), shard.listen(-1)), NotReadable, r"on, not as of -1, when it was empty"),
    (lambda shard: shard.restore(2, retries=RETRIES_MAX + 1), InvalidUsage, "retries is 1001"),
    (lambda shard: shard.restore(2, token=""), InvalidUsage, "a token has 1 to 200"),  # type: ignore[arg-type]
    (lambda shard: (shard.advance_upper(None), shard.restore(2)), UpperMismatch, "is closed"),
    (lambda shard: (shard.advance_upper(None), shard.restore(2, token=token_of_key("a"))), UpperMismatch, "is closed"),
    (
        lambda shard: (shard.downgrade_since(None, force=True), shard.restore(2)),
        NotReadable,
        "its history was forgotten",
    ),
    (lambda shard: (shard.drop(), shard.restore(2)), UnknownShard, "was dropped"),
]


@pytest.mark.parametrize(("ask", "error", "sentence"), BAD_RESTORES)
def test_a_restore_says_what_is_wrong_and_writes_nothing(
    machine: Machine, months: Shard, ask: Callable[[Shard], object], error: type[PersistError], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        ask(months)
    state = machine.location.machine(NAME).refresh()
    assert state.upper == Antichain(4) or state.upper.is_empty
    assert not state.leased_readers
    assert not state.outcomes


# --- retries that others come between, and locations of an older level


def test_a_restore_to_a_tag_with_retries_is_exact_though_since_passes_what_it_has_read(
    monkeypatch: pytest.MonkeyPatch, world: World, machine: Machine
) -> None:
    """The lease of a tag holds one time. What was staged up to a time that is merged away since would come twice."""
    shard = machine.client.create_shard(NAME, SCHEMA, ["id"], history="forever")
    for number in range(6):
        shard.insert([{"id": number, "v": "a"}])
    shard.tag("eom", at=1)
    shard.forget(4)
    _merge_all(machine)

    def others() -> None:
        other = world.machine()
        for number in (10, 11):
            other.client.shard(NAME).insert([{"id": number, "v": "a"}])
        other.client.shard(NAME).forget(7)
        _merge_all(other)

    before_rewrites(monkeypatch, others)
    done = shard.restore(1, retries=5)
    assert shard.snapshot().to_arrow().column("id").to_pylist() == [0, 1]
    assert done.changed


def _merge_all(machine: Machine) -> None:
    location = machine.location
    state = location.machine(NAME).refresh()
    merge: Any = merged(state, state.trace.batches, location.blob, location.ids)
    location.machine(NAME).apply(merge)
