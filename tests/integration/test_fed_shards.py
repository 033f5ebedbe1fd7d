"""Shards that are fed by `append`: truncations and policies take no time of the writer, other verbs are refused."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Literal

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

from compactor.orphans import Sweeper
from compactor.tasks import Eraser, retention_task
from compactor.worker import Worker
from persist.client import restore_and_truncate, unique_insert
from persist.client.embedded import EmbeddedTransport
from persist.client.erasure_api import EraseOperation
from persist.client.shard import Shard
from persist.client.timestamps import to_datetime
from persist.core import commands as c
from persist.core.errors import (
    Conflict,
    ConstraintViolated,
    InvalidUsage,
    NotReadable,
    PersistError,
    TokenReused,
    UpperMismatch,
)
from persist.core.frontier import Antichain
from persist.core.ids import token_of_key
from persist.maintenance.collector import Collector
from tests.support.clocks import DAY_MS, START_MS, Machine, World

NAME = "orders"
SCHEMA = pa.schema([("id", pa.int64())])
MODES = ("retract", "drop")


@pytest.fixture
def world() -> World:
    found = World()
    found.true_ms = START_MS // DAY_MS * DAY_MS
    return found


@pytest.fixture
def shard(machine: Machine) -> Shard:
    """Rows 0 to 3 at their times."""
    found = machine.client.create_shard(NAME, SCHEMA, ["id"], history="1d")
    for time in range(4):
        append(found, time)
    return found


def append(shard: Shard, time: int, upper: int | None = None) -> None:
    """One row a time, from this time on, which are their numbers."""
    upper = time + 1 if upper is None else upper
    times = pa.array(range(time, upper), pa.int64())
    shard.append(pa.table({"id": times, "__time": times}), time, upper)


def maintain(machine: Machine) -> None:
    """What `persist maintain run` does, twice over: what was merged first is collected then."""
    collector = Collector(machine.location)
    for _ in range(2):
        Worker(machine.location).run(NAME, idle=True)
        Eraser(machine.location, collector).run(NAME)
        Sweeper(machine.location).sweep(NAME)
        collector.run(NAME)


def ids(shard: Shard, as_of: int | None = None) -> list[int]:
    found: list[int] = shard.snapshot(as_of).to_arrow()["id"].to_pylist()
    return found


def events(shard: Shard, as_of: int, until: int) -> list[tuple[int, int, int]]:
    found = [row for event in shard.listen(as_of, until=until) for row in event.updates.to_pylist()]
    return sorted((row["__time"], row["id"], row["__diff"]) for row in found)


def test_a_token_of_a_truncation_is_answered_whether_or_not_the_shard_is_fed_by_now(shard: Shard) -> None:
    first, second = token_of_key("orders-1"), token_of_key("orders-2")
    pending = shard.truncate(2, token=first)
    shard.insert([{"id": 9}])
    done = shard.truncate(3, token=second)
    assert (pending.mode, done.mode, done.removed) == ("drop", "retract", 1)
    again = shard.truncate(2, token=first)
    assert (again.mode, again.lower, again.pending) == ("drop", pending.lower, False)
    append(shard, shard.upper().element or 0)
    assert shard.truncate(3, token=second) == done
    with pytest.raises(TokenReused):
        shard.truncate(2, token=second)
    shard.advance_upper(None)
    assert (shard.truncate(2, token=first).lower, shard.truncate(3, token=second)) == (pending.lower, done)


@pytest.mark.parametrize("mode", MODES)
def test_a_truncation_waits_for_the_next_commit_of_the_writer(shard: Shard, mode: Literal["retract", "drop"]) -> None:
    done = shard.truncate(2, mode=mode)
    assert (done.pending, done.changed, done.removed, done.mode) == (True, False, None, "drop")
    assert (done.lower, done.upper, shard.upper()) == (Antichain(4), Antichain(4), Antichain(4))
    assert ids(shard) == [0, 1, 2, 3], "no complete time changes"
    assert shard.truncate(1, mode=mode).pending
    append(shard, 4, 6)  # also what reaches over several times
    assert [ids(shard, time) for time in (3, 4, 5)] == [[0, 1, 2, 3], [2, 3, 4], [2, 3, 4, 5]]
    assert events(shard, 3, 6) == [(4, 0, -1), (4, 1, -1), (4, 4, 1), (5, 5, 1)]
    again = shard.truncate(2, mode=mode)
    assert (again.pending, again.changed, again.removed) == (False, False, 0)


def test_its_rows_stay_until_it_is_effective_even_if_no_time_is_readable(machine: Machine, shard: Shard) -> None:
    """Readers may hold the upper: they have read everything before it. The truncation may still be revoked."""
    shard.configure(history="none")
    shard.truncate(2)
    shard.downgrade_since(4, "billing")
    assert shard.since() == shard.upper()
    maintain(machine)
    machine.location.machine(NAME).apply(c.ForgetOutlived())
    retracts(shard)
    assert ids(shard) == [0, 2, 3]


def retracts(shard: Shard) -> None:
    shard.append(pa.table({"id": [1], "__diff": [-1]}), 4, 5)


@pytest.mark.parametrize("withdraw", [retracts, lambda shard: shard.erase(keys=[1])], ids=["retracted", "erased"])
def test_the_token_of_a_truncation_that_was_withdrawn_tells_so(shard: Shard, withdraw: Callable[[Shard], None]) -> None:
    """It was answered as if nothing had been left to take away."""
    token, nothing = token_of_key("orders-1"), token_of_key("orders-2")
    assert shard.truncate(0, token=nothing).removed == 0
    assert shard.truncate(2, token=token).pending
    withdraw(shard)
    with pytest.raises(Conflict) as refused:
        shard.truncate(2, token=token)
    assert refused.value.kind == "conflict"
    assert refused.value.details == {"before": 2, "at": [4]}
    append(shard, shard.upper().element or 0)
    least = 5  # beyond the time of the retraction
    asks: list[dict[str, Any]] = [{}, {"mode": "drop"}, {"force": True}, {"dry_run": True}]
    for ask in asks if withdraw is retracts else []:  # an erasure forgets the history before it
        with pytest.raises(InvalidUsage) as unfit:
            shard.truncate(2, **ask)
        assert unfit.value.details == {"before": 2, "least": least}
    assert shard.truncate(least).pending
    append(shard, shard.upper().element or 0)
    assert min(ids(shard)) >= 4
    assert shard.truncate(2, token=token).removed is None, "the later one has taken these rows too"


@pytest.mark.parametrize("withdraw", [retracts, lambda shard: shard.erase(keys=[1])], ids=["retracted", "erased"])
def test_a_withdrawn_truncation_is_not_done_once_merges_have_moved_the_times(
    world: World, machine: Machine, shard: Shard, withdraw: Callable[[Shard], None]
) -> None:
    token, earlier = token_of_key("orders-1"), token_of_key("orders-2")
    assert shard.truncate(2, token=token).pending
    assert shard.truncate(1, token=earlier).pending, "it waits for the one that comes further"
    withdraw(shard)
    for time in range(shard.upper().element or 0, 8):
        append(shard, time)
    shard.forget(7)
    maintain(machine)
    assert all(part.time_min > 2 for part in machine.location.machine(NAME).refresh().trace.parts())
    other = world.machine().shard(NAME)
    for before, known in ((2, token), (1, earlier)):
        with pytest.raises(Conflict) as refused:
            other.truncate(before, token=known)
        assert refused.value.details == {"before": before, "at": [4]}
    assert 0 in ids(other)
    other.drop()
    assert not other.truncate(2, token=token).pending


def test_a_truncation_that_is_withdrawn_before_its_call_returns_tells_so(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client retracts between the commit and the question whether it is pending."""
    asked, read = [], restore_and_truncate.read_facts

    def withdrawn_first(*given: Any) -> Any:
        asked.append(given)
        if len(asked) == 2:
            retracts(shard)
        return read(*given)

    monkeypatch.setattr(restore_and_truncate, "read_facts", withdrawn_first)
    with pytest.raises(Conflict):
        shard.truncate(2)


def test_a_truncation_that_was_effective_and_undone_is_not_withdrawn(machine: Machine, shard: Shard) -> None:
    token = token_of_key("orders-1")
    assert shard.truncate(2, token=token).pending
    shard.insert([{"id": 9}])  # from here on the service has the times
    shard.restore(3)
    for _ in range(2):
        again = shard.truncate(2, token=token)
        assert (again.pending, again.changed, ids(shard)) == (False, False, [0, 1, 2, 3])
        shard.forget((shard.upper().element or 0) - 1)
        maintain(machine)
        machine.location.machine(NAME).apply(c.ForgetOutlived())
    state = machine.location.machine(NAME).refresh()
    assert (state.drops, state.floor) == ((), 2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("waits", [False, True])
def test_by_force_it_takes_a_time_at_once(shard: Shard, mode: Literal["retract", "drop"], waits: bool) -> None:
    if waits:
        shard.truncate(2, mode=mode)
    done = shard.truncate(2, mode=mode, force=True)
    assert (done.pending, done.lower, done.upper) == (False, Antichain(4), Antichain(5))
    assert (ids(shard, 3), ids(shard)) == ([0, 1, 2, 3], [2, 3])
    with pytest.raises(UpperMismatch):
        append(shard, 4)
    append(shard, 5)
    assert ids(shard) == [2, 3, 5]


VERBS: list[Callable[[Shard], Any]] = [
    lambda shard: shard.delete(where="id = 1"),
    lambda shard: shard.update({"id": 7}, where="id = 1"),
    lambda shard: shard.upsert([{"id": 1}]),
    lambda shard: shard.merge([{"id": 7}], on=["id"]).when_not_matched_insert().execute(),
    lambda shard: shard.restore(0),
    lambda shard: shard.overwrite([{"id": 1}]),
    lambda shard: shard.replace_where("id = 1", [{"id": 1}]),
]


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_that_work_on_what_is_there_are_refused(machine: Machine, shard: Shard, verb: Any) -> None:
    """They took a time of the writer, and what he appended there was refused or lost."""
    trace = machine.location.machine(NAME).refresh().trace
    with pytest.raises(PersistError) as refused:
        verb(shard)
    assert refused.value.kind == "invalid_usage"
    assert machine.location.machine(NAME).refresh().trace == trace
    append(shard, 4)
    shard.insert([{"id": 9}])  # from here on the service has the times
    verb(shard)
    with pytest.raises(UpperMismatch):
        append(shard, 5)


def test_a_policy_takes_rows_away_and_no_append_is_refused(world: World, machine: Machine, shard: Shard) -> None:
    """Day by day: the oldest row is younger than the age and one cut."""
    said = shard.retain({"age": "7d", "cut_every": "1d"})
    assert any("fed by append" in reason for reason in said.held_by), "it is told at once"
    keep = retention_task(machine.location, EmbeddedTransport(machine.location), None)
    written: dict[int, datetime] = {}
    for time in range(4, 30):
        world.pass_ms(DAY_MS // 2)
        append(shard, time)
        written[time] = to_datetime(world.true_ms)
        world.pass_ms(DAY_MS // 2)
        machine.location.machine(NAME).refresh()
        keep(NAME)
        if time > 14:
            age = to_datetime(world.true_ms) - written[ids(shard)[0]]
            assert 7 <= age.days <= 9, "seven days, one until the next cut, and one until the next commit"
    assert shard.upper() == Antichain(30)


def test_an_erasure_waits_for_the_next_commit_of_the_writer(shard: Shard) -> None:
    asked = shard.erase(keys=[1], reason="dsr-1")
    assert (asked.phase, asked.at, asked.removed, asked.pending_s) == ("pending", 4, 1, 0.0)
    assert [(wait.kind, wait.name, wait.time) for wait in asked.waits] == [("writer", "append", 4)]
    assert (shard.upper(), ids(shard), ids(shard, 0)) == (Antichain(4), [0, 1, 2, 3], [0]), "no complete time changes"
    listening = shard.listen(3, until=6)  # it holds the time before, and may follow
    append(shard, 4, 6)
    rows = [row for event in listening for row in event.updates.to_pylist()]
    assert sorted((row["__time"], row["id"], row["__diff"]) for row in rows) == [(4, 1, -1), (4, 4, 1), (5, 5, 1)]
    assert (shard.erased(asked.id).phase, shard.erased(asked.id).pending_s) == ("retracted", None)
    assert [ids(shard, time) for time in (4, 5)] == [[0, 2, 3, 4], [0, 2, 3, 4, 5]]
    with pytest.raises(NotReadable):
        ids(shard, 2)
    append(shard, 6)


WRITES: list[Callable[[Shard, list[dict[str, Any]]], Any]] = [
    lambda shard, rows: shard.append(rows, 1, 2),
    lambda shard, rows: shard.append([{"id": 1, "v": "old", "__time": 0}, *rows], 0, 2),  # another replica
    lambda shard, rows: shard.compare_and_append(rows, 1, 2),
    lambda shard, rows: shard.insert(rows),
]


@pytest.mark.parametrize("write", WRITES, ids=["append", "replica", "compare_and_append", "insert"])
def test_a_unique_key_that_is_to_be_erased_may_be_written_anew(
    machine: Machine, write: Callable[[Shard, list[dict[str, Any]]], Any]
) -> None:
    """The commit that writes it retracts the old row. The feed would stand still otherwise."""
    fed = machine.client.create_shard("keyed", pa.schema([("id", pa.int64()), ("v", pa.string())]), ["id"], unique=True)
    fed.append([{"id": key, "v": "old"} for key in (1, 2, 3)], 0, 1)
    assert {fed.erase(keys=[1]).phase, fed.erase(where="id = 2").phase} == {"pending"}
    new = [{"id": key, "v": "new", "__time": 1} for key in (1, 2)]
    if write is WRITES[-1]:  # the service chooses the time
        new = [{"id": row["id"], "v": row["v"]} for row in new]
    for refused in ([new[0], {**new[0], "v": "twice"}], [{**new[0], "id": 3}]):
        with pytest.raises(ConstraintViolated):
            write(fed, refused)
    write(fed, new)
    assert [(row["id"], row["v"]) for row in fed.snapshot().to_arrow().to_pylist()] == [
        (1, "new"),
        (2, "new"),
        (3, "old"),
    ]
    assert {one.phase for one in fed.erasures().values()} == {"retracted"}
    with pytest.raises(ConstraintViolated):
        fed.append([{"id": 2, "v": "newer"}], 2, 3)


@pytest.mark.parametrize("write", [WRITES[0], *WRITES[2:]], ids=["append", "compare_and_append", "insert"])
def test_a_truncation_that_is_withdrawn_after_keys_were_looked_up(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, write: Callable[[Shard, list[dict[str, Any]]], Any]
) -> None:
    """The row that it would have taken away stays. So the key is looked up anew, and refused."""
    fed = machine.client.create_shard("keyed", pa.schema([("id", pa.int64()), ("v", pa.string())]), ["id"], unique=True)
    fed.append([{"id": key, "v": "old"} for key in (1, 2)], 0, 1)
    assert fed.truncate(1).pending
    withdraws, real = [True], unique_insert.check_keys

    def check_keys(*args: Any) -> None:
        real(*args)
        if withdraws:
            withdraws.clear()
            machine.shard("keyed").erase(keys=[2])

    monkeypatch.setattr(unique_insert, "check_keys", check_keys)
    with pytest.raises(ConstraintViolated):
        write(fed, [{"id": 1, "v": "new"}])
    write(fed, [{"id": 2, "v": "new"}])
    found = [(row["id"], row["v"]) for row in fed.snapshot().to_arrow().to_pylist()]
    assert (found, fed.broken_constraints()) == ([(1, "old"), (2, "new")], [])


def test_a_truncation_that_is_withdrawn_after_keys_of_a_post_were_looked_up(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, http: TestClient
) -> None:
    fed = machine.client.create_shard("keyed", pa.schema([("id", pa.int64()), ("v", pa.string())]), ["id"], unique=True)
    fed.append([{"id": key, "v": "old"} for key in (1, 2)], 0, 1)
    looks: list[None] = []
    real = unique_insert.check_keys

    def check_keys(*args: Any) -> None:
        real(*args)
        looks.append(None)
        if len(looks) == 1:
            machine.shard("keyed").erase(keys=[2])

    monkeypatch.setattr(unique_insert, "check_keys", check_keys)
    assert fed.truncate(1).pending
    body: dict[str, Any] = {"content": b'{"id": 2, "v": "new"}', "headers": {"content-type": "application/x-ndjson"}}
    answer = http.post("/v1/shards/keyed/append", params={"lower": 1, "upper": 2}, **body)
    assert (answer.status_code, len(looks)) == (200, 2), answer.text
    assert [(row["id"], row["v"]) for row in fed.snapshot().to_arrow().to_pylist()] == [(1, "old"), (2, "new")]


def test_looks_at_keys_that_are_always_overtaken_end(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    """Another replica makes an erasure effective during each of them, and asks for the next one."""
    fed = machine.client.create_shard("keyed", SCHEMA, ["id"], unique=True)
    fed.append([{"id": 0}], 0, 1)
    fed.erase(keys=[0])
    real, rows = unique_insert.hold_for_block, pa.table({"id": range(1, 40), "__time": range(1, 40)})

    def holding(*args: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(unique_insert, "hold_for_block", real)
            other = machine.shard("keyed")
            time = other.upper().element or 0
            other.append(rows.slice(time - 1, 1), time, time + 1)
            other.erase(keys=[time])
        return real(*args)

    fed.append(rows.slice(0, 2), 1, 3)
    fed.erase(keys=[1])
    monkeypatch.setattr(unique_insert, "hold_for_block", holding)
    before = fed.upper()
    with pytest.raises(PersistError) as refused:
        fed.append(rows, 1, 40)
    assert refused.value.kind == "unavailable", "nothing was written, and it may be repeated"
    monkeypatch.setattr(unique_insert, "hold_for_block", real)
    assert before < fed.upper() < Antichain(40)
    fed.append(rows, 1, 40)
    assert fed.upper() == Antichain(40)


def test_an_erasure_that_another_one_overtook_counts_what_that_takes(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, shard: Shard
) -> None:
    overtakes, real = [True], EraseOperation._commit

    def committed(erasing: EraseOperation, *args: Any) -> Any:
        if overtakes:
            overtakes.clear()
            machine.shard(NAME).erase(keys=[1])
        return real(erasing, *args)

    monkeypatch.setattr(EraseOperation, "_commit", committed)
    assert shard.erase(where="id < 2").removed == 1
    append(shard, 4)
    assert ids(shard) == [2, 3, 4]


def test_an_append_overtakes_an_erasure(monkeypatch: pytest.MonkeyPatch, shard: Shard) -> None:
    """What was appended meanwhile is meant too, and the erasure is pending at the time after."""
    overtakes, real = [True], EraseOperation._commit

    def committed(erasing: EraseOperation, *args: Any) -> Any:
        if overtakes:
            overtakes.clear()
            append(shard, 4)
        return real(erasing, *args)

    monkeypatch.setattr(EraseOperation, "_commit", committed)
    asked = shard.erase(where="id in (1, 4)")
    assert (asked.phase, asked.at, asked.removed) == ("pending", 5, 2)
    append(shard, 5)
    assert ids(shard) == [0, 2, 3, 5]


ENDS: list[Callable[[Shard], Any]] = [
    lambda shard: shard.append((), 4, 5),
    lambda shard: shard.append((), 4, None),
    lambda shard: shard.append(pa.table({"id": [3, 4], "__time": [3, 4]}), 3, 5),
    lambda shard: shard.compare_and_append((), 4, 5),
    lambda shard: shard.advance_upper(9),
    lambda shard: shard.insert([{"id": 4}]),
]


@pytest.mark.parametrize("end", ENDS)
def test_whatever_completes_the_time_makes_an_erasure_effective(machine: Machine, shard: Shard, end: Any) -> None:
    asked = shard.erase(keys=[1])
    end(shard)
    state = machine.location.machine(NAME).refresh()
    assert [one.phase for one in state.erasures.values()] == ["retracted"]
    assert shard.erased(asked.id).phase == "retracted"
    found = shard.snapshot(4).to_arrow()["id"].to_pylist()
    assert [one for one in found if one != 4] == [0, 2, 3]


def test_a_truncation_and_an_erasure_wait_one_at_a_time(shard: Shard) -> None:
    """Rows that a drop takes must not be retracted as well. The erasure comes first."""
    assert shard.truncate(2).pending
    asked = shard.erase(keys=[0, 3])
    assert not shard.retention().held_by[0].startswith("rows from before")
    for force in (False, True):
        with pytest.raises(PersistError) as refused:
            shard.truncate(2, force=force)
        assert refused.value.kind == "invalid_usage"
        assert refused.value.details == {"erasures": [asked.id], "least": 5}
    with pytest.raises(InvalidUsage) as unfit:
        shard.truncate(2, dry_run=True)
    assert unfit.value.details["least"] == 5, "a dry run tells what the truncation would come to"
    append(shard, 4)
    assert (ids(shard), shard.erased(asked.id).removed) == ([1, 2, 4], None)


def test_the_age_of_an_erasure_is_shown_while_no_writer_comes(world: World, machine: Machine, shard: Shard) -> None:
    asked = shard.erase(keys=[1], reason="dsr-1")
    world.pass_ms(3 * DAY_MS)
    maintain(machine)
    found = shard.erased(asked.id)
    assert (found.phase, found.pending_s) == ("pending", 3 * DAY_MS / 1000)
    assert found.to_json()["pending_s"] == 3 * DAY_MS / 1000
    assert any("4320 minutes" in reason for reason in shard.retention().held_by)
    assert ids(shard) == [0, 1, 2, 3], "it can still be read"


@pytest.mark.parametrize("many", [False, True])
def test_an_erasure_of_a_fed_shard_gets_its_receipt(world: World, machine: Machine, many: bool) -> None:
    """Also of rows that are too many to lie inline: nothing sweeps them while they are pending."""
    shard = machine.client.create_shard(NAME, pa.schema([("id", pa.string())]), ["id"], history="1d")
    rows = [f"erased-{number:06}" for number in range(20_000 if many else 2)]
    shard.append(pa.table({"id": [*rows, "kept"]}), 0, 1)
    asked = shard.erase(where="id <> 'kept'")
    assert (asked.removed, asked.phase) == (len(rows), "pending")
    [known] = machine.location.machine(NAME).refresh().erasures.values()
    assert known.pending is not None
    assert {part.is_inline for run in known.pending.runs for part in run.parts} == {not many}
    for _ in range(3):
        world.pass_ms(DAY_MS)
        maintain(machine)
    assert shard.count() == len(rows) + 1
    shard.append(pa.table({"id": ["later"]}), 1, 2)
    for _ in range(4):
        world.pass_ms(DAY_MS)
        maintain(machine)
    assert (shard.erased(asked.id).phase, shard.snapshot().to_arrow()["id"].to_pylist()) == (
        "erased",
        ["kept", "later"],
    )


def test_the_history_of_commits_goes_when_the_rows_do(shard: Shard) -> None:
    shard.tag("then", 1)
    shard.erase(keys=[1], tags=True)
    assert shard.tags().keys() == {"then"}
    before = len(list(shard.history()))
    append(shard, 4)
    assert (shard.tags(), before, [one.operation for one in shard.history()]) == ({}, 4 + 3, ["append", "erase"])


@pytest.mark.parametrize("end", [append, lambda shard, time: shard.insert([{"id": time}])], ids=["append", "insert"])
def test_a_truncation_is_in_the_history_of_commits_when_asked_for_and_when_effective(shard: Shard, end: Any) -> None:
    shard.truncate(2, info={"ticket": 1})
    end(shard, 4)
    written, effective, asked = list(shard.history(3))
    assert (written.lower, written.upper, written.rows) == (4, 5, 1)
    assert [(one.operation, one.lower, one.upper) for one in (effective, asked)] == [
        ("drop_before", 4, 5),
        ("drop_before", 4, 4),
    ]
    assert effective.seqno == written.seqno > asked.seqno
    assert {(one.point, one.purpose, str(one.info)) for one in (effective, asked)} == {
        (2, "drop before 2", "{'ticket': 1}")
    }


def test_a_truncation_that_is_withdrawn_is_never_effective_in_the_history_of_commits(shard: Shard) -> None:
    shard.truncate(2)
    shard.append(pa.table({"id": [1], "__diff": [-1]}), 4, 5)
    append(shard, 5)
    told = [(one.operation, one.lower, one.upper) for one in shard.history(3)]
    assert told == [("append", 5, 6), ("append", 4, 5), ("drop_before", 4, 4)]


def test_erasures_are_in_the_history_of_commits_once_they_are_effective(shard: Shard) -> None:
    first = shard.erase(keys=[1])
    second = shard.erase(keys=[2, 3])
    assert [(one.rows, one.lower, one.upper) for one in shard.history(2)] == [(0, 4, 4)] * 2, "nothing is retracted yet"
    append(shard, 4, 6)
    written, *erased = list(shard.history())
    assert (written.operation, written.rows, written.retractions, written.upper) == ("append", 2, 0, 6)
    told = {(one.purpose, one.rows, one.retractions, one.lower, one.upper) for one in erased}
    assert told == {(f"erase, erasure {first.id}", 1, 1, 4, 5), (f"erase, erasure {second.id}", 2, 2, 4, 5)}


def _pend_policy(shard: Shard) -> None:
    shard.retain({"rows": 1, "cut_every": "1s"}, confirm=True)


PENDING: dict[str, Callable[[Shard], Any]] = {
    "truncation": lambda shard: shard.truncate(2),
    "policy": _pend_policy,
    "erasure": lambda shard: shard.erase(keys=[1]),
    "erasure of nothing": lambda shard: shard.erase(keys=[9]),
}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("pend", PENDING.values(), ids=PENDING)
def test_a_shard_is_dropped_with_what_is_pending(world: World, machine: Machine, pend: Any, force: bool) -> None:
    shard = machine.client.create_shard(NAME, SCHEMA, ["id"], history="1d")
    for time in range(4):
        append(shard, time)
    pend(shard)
    shard.drop(force=force)
    world.pass_ms(DAY_MS)
    maintain(machine)
    again = machine.client.create_shard(NAME, SCHEMA, ["id"])
    append(again, 0)
    assert (ids(again), again.erasures()) == ([0], {})
