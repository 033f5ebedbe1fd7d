"""Erasure: rows that were erased are in no byte of either store, and the receipt says so only then."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Callable
from contextlib import closing
from fractions import Fraction
from typing import Any

import pyarrow as pa
import pytest

from blob import BlobMisconfigured, Unfinished
from compactor.loop import in_turn
from compactor.orphans import Sweeper
from compactor.tasks import Eraser
from compactor.worker import Worker
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import Shard
from persist.client.transport import ForwardingTransport
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from persist.core.blob_keys import is_journal_key, part_key
from persist.core.erasure import ERASURES_MAX
from persist.core.erasure_progress import is_merged
from persist.core.errors import (
    Conflict,
    Indeterminate,
    InvalidUsage,
    NotReadable,
    Overloaded,
    Unavailable,
    UpperMismatch,
)
from persist.core.frontier import Antichain
from persist.core.ids import WriterId, token_of_key
from persist.core.state import Policy
from persist.maintenance.collector import Collector
from persist.maintenance.journal_writer import FAILED_TRIES_MAX, Publisher, PublishSettings
from tests.support.clocks import HOUR_MS, Machine, World
from tests.support.markers import in_memory, marker, uncompressed, where

NAME = "orders"
SCHEMA = pa.schema([("id", pa.string()), ("v", pa.string())])


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    uncompressed(monkeypatch)


@pytest.fixture
def world() -> World:
    return World(policy=Policy())


@pytest.fixture
def shard(machine: Machine) -> Shard:
    return machine.client.create_shard(NAME, SCHEMA, ["id"], history="7d")


class Maintenance:
    """What `persist maintain run` does with one shard, step after step."""

    def __init__(self, machine: Machine) -> None:
        self._world = machine.world
        self._worker = Worker(machine.location)
        collector = Collector(machine.location)
        self._eraser = Eraser(machine.location, collector)
        self._collector = collector

    def step(self) -> float | None:
        self._worker.run(NAME)
        wait = self._eraser.run(NAME)
        self._collector.run(NAME)
        return wait

    def run(self, most_h: float = 1.0) -> int:
        """Steps until it rests, at most for so many hours; how many there were."""
        until = self._world.true_ms + int(most_h * HOUR_MS)
        for steps in range(1, 10_000):
            wait = self.step()
            if wait is None or self._world.true_ms > until:
                return steps
            self._world.pass_ms(int(wait * 1000) + 1)
        raise AssertionError("it never rests")


def found(world: World, wanted: str) -> list[str]:
    return where(in_memory(world.blob, world.consensus), wanted)


def expect_erased(machine: Machine, erasure: str, secret: str, most_h: float = 1.0) -> None:
    """After maintenance the erasure has its receipt, and neither store has a byte of it."""
    Maintenance(machine).run(most_h)
    assert machine.shard(NAME).erased(erasure).done
    assert found(machine.world, secret) == []


def rows(shard: Shard, as_of: int | None = None) -> list[str]:
    return [row["id"] for row in shard.snapshot(as_of).to_arrow().to_pylist()]


def padded(shard: Shard, *ids: str, value: str = "x") -> None:
    """Rows that are too large to lie inline."""
    shard.insert([{"id": one, "v": value + "." * 70_000} for one in ids])


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("asked", ["keys", "where"])
def test_no_byte_of_either_store_has_it_any_more(
    world: World, machine: Machine, shard: Shard, large: bool, asked: str
) -> None:
    secret, value = marker(), marker()
    shard.insert([{"id": "a", "v": "1"}], info={"of": secret})
    write = padded if large else lambda shard, *ids, value: shard.insert([{"id": one, "v": value} for one in ids])
    write(shard, "b", secret, "z", value=value)
    for number in range(40):
        shard.insert([{"id": f"n{number:03}", "v": "1"}])
    assert found(world, secret)
    kept = sorted(one for one in rows(shard) if one != secret)
    question = {"keys": [secret]} if asked == "keys" else {"where": f"id = '{secret}'"}
    told = shard.erase(**question, deadline="30d", reason="dsr-1")
    assert (told.phase, told.removed, told.reason) == ("retracted", 1, "dsr-1")
    assert sorted(rows(shard)) == kept, "the latest contents are without it at once"
    Maintenance(machine).run()
    receipt = shard.erased(told.id)
    assert receipt.phase == "erased", receipt
    assert found(world, secret) == []
    assert sorted(rows(shard)) == kept
    shown = receipt.to_json()
    assert shown["proof"]["horizon_seqno"] >= shown["rewritten"]["seqno"]
    assert shown["blobs_deleted"]["count"] > 0
    assert secret not in str(shown) + repr(receipt) + repr(shard.erasures())


def test_it_is_one_of_the_bounds_of_its_part_and_not_of_the_next_one(
    world: World, machine: Machine, shard: Shard
) -> None:
    first, last = "!" + marker(), "~" + marker()
    padded(shard, first, "m", last)
    padded(shard, "b", "c")
    told = shard.erase(keys=[first, last])
    Maintenance(machine).run()
    assert shard.erased(told.id).done
    assert found(world, first[1:]) + found(world, last[1:]) == []
    assert rows(shard) == ["b", "c", "m"]


@pytest.mark.parametrize("by", ["tag", "reader"])
def test_what_was_empty_when_it_was_rewritten_and_joined_to_later_rows_is_rewritten_again(
    world: World, machine: Machine, shard: Shard, by: str
) -> None:
    """Seed 6990. A merge meanwhile kept an earlier time apart, so no receipt could come: nobody merged it again."""
    shard.insert([{"id": "a", "v": "1"}])
    shard.truncate(1)
    shard.forget(1)
    Maintenance(machine).run()
    reader = shard.snapshot(1) if by == "reader" else None
    if reader is None:
        shard.tag("empty", at=1)
    shard.advance_upper(5)
    key = part_key(shard.view().shard_id, WriterId("w" + "1" * 32), f"p{machine.location.ids.uuid7()}")  # type: ignore[arg-type]
    world.blob.put(key, b"a write under way")
    told = shard.erase(gone=True)
    Maintenance(machine).step()
    assert shard.erased(told.id).phase == "rewritten", "no row is there that could show"
    for number in range(9):
        shard.insert([{"id": f"b{number}", "v": "1"}])
        Maintenance(machine).step()
    assert not is_merged(machine.location.machine(NAME).refresh(), told.at)
    shard.untag("empty") if reader is None else reader.close()
    Maintenance(machine).run(most_h=30)
    assert shard.erased(told.id).done


def test_a_shard_is_not_cloned_before_its_erasures_are_complete(world: World, machine: Machine, shard: Shard) -> None:
    """The clone would keep the rows, in its tags, its log and its own files, and the receipt would not know of it."""
    shard.insert([{"id": "a", "v": "one@example.org"}, {"id": "b", "v": "1"}])
    shard.tag("before", 0)
    told = shard.erase(keys=["a"])
    for as_of in (None, 0):
        with pytest.raises(Conflict, match=r"an erasure of shard '.*' is not complete.*persist erase list"):
            machine.client.clone(NAME, "copy", as_of=as_of)
    assert machine.client.shards() == [NAME]
    shard.untag("before")
    expect_erased(machine, told.id, "one@example.org")
    assert machine.client.clone(NAME, "copy").count() == 1
    assert found(world, "one@example.org") == []


def test_what_a_killed_put_has_left_is_abandoned_before_the_receipt(
    monkeypatch: pytest.MonkeyPatch, world: World, machine: Machine, shard: Shard
) -> None:
    """It lies in the store under no key, so no listing shows it."""
    shard.insert([{"id": "a", "v": "1"}])
    left = [Unfinished("~tmp/half", 100, world.true_ms, "half")]
    monkeypatch.setattr(world.blob, "unfinished", lambda prefix: list(left))
    monkeypatch.setattr(world.blob, "abandon", lambda found: [left.remove(one) for one in found])
    told = shard.erase(keys=["a"])
    Maintenance(machine).run(most_h=12)
    assert (shard.erased(told.id).phase, len(left)) == ("rewritten", 1), "a put may still be under way"
    left.append(Unfinished("~tmp/later", 100, world.true_ms, "later"))
    Maintenance(machine).run(most_h=30)
    assert (shard.erased(told.id).done, [one.token for one in left]) == (True, ["later"])


def test_a_store_that_does_not_tell_of_killed_puts_is_swept_and_gives_no_receipt(
    monkeypatch: pytest.MonkeyPatch, world: World, machine: Machine, shard: Shard
) -> None:
    shard.insert([{"id": "a", "v": "1"}])
    key = part_key(shard.view().shard_id, WriterId("w" + "1" * 32), f"p{machine.location.ids.uuid7()}")  # type: ignore[arg-type]
    world.blob.put(key, b"left by a process that was killed")

    def refused(prefix: str) -> None:
        raise BlobMisconfigured("AccessDenied: give s3:ListBucketMultipartUploads")

    monkeypatch.setattr(world.blob, "unfinished", refused)
    world.pass_ms(25 * HOUR_MS)
    assert Sweeper(machine.location).sweep(NAME).deleted == 1
    told = shard.erase(keys=["a"])
    with pytest.raises(InvalidUsage, match="ListBucketMultipartUploads"):
        Maintenance(machine).run(most_h=30)
    assert not shard.erased(told.id).done


def test_a_clock_that_is_behind_does_not_make_old_files_young(world: World, machine: Machine, shard: Shard) -> None:
    """By such a clock the files were written long after the rows were rewritten: they would not count."""
    secret = marker()
    shard.insert([{"id": secret, "v": "1"}])
    key = part_key(shard.view().shard_id, WriterId("w" + "1" * 32), f"p{machine.location.ids.uuid7()}")  # type: ignore[arg-type]
    world.blob.put(key, secret.encode())
    told, behind = shard.erase(keys=[secret]), world.machine(off_ms=-40 * 24 * HOUR_MS)
    Worker(behind.location).run(NAME)
    with pytest.raises(Unavailable, match="are older than its erasure; set the clock, or retry"):
        Eraser(behind.location, Collector(behind.location)).run(NAME)
    assert shard.erased(told.id).phase == "retracted"
    expect_erased(machine, told.id, secret, most_h=40)


def test_an_erasure_that_landed_is_never_said_not_to_have_happened(machine: Machine, shard: Shard) -> None:
    """Unavailable says that nothing has happened."""

    class Deaf(ForwardingTransport):
        def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
            if isinstance(command, c.ReadErasures):
                raise Overloaded("busy")
            return super().apply(name, command, caller)

    shard.insert([{"id": "a", "v": "1"}])
    deaf = Client(Deaf(EmbeddedTransport(machine.location))).shard(NAME)
    with pytest.raises(Indeterminate, match=r"erasure e[0-9a-f]{32} of shard 'orders' is committed"):
        deaf.erase(keys=["a"], token=token_of_key("dsr-5"))
    assert shard.erase(keys=["a"], token=token_of_key("dsr-5")).at == 1
    assert (rows(shard), len(shard.erasures())) == ([], 1)


def test_a_tag_is_named_until_it_goes(world: World, machine: Machine, shard: Shard) -> None:
    secret = marker()
    shard.insert([{"id": secret, "v": "1"}])
    shard.tag("eom", 0)
    told = shard.erase(keys=[secret])
    Maintenance(machine).run()
    waiting = shard.erased(told.id)
    assert waiting.phase == "retracted"
    assert [(wait.kind, wait.name, wait.time) for wait in waiting.waits] == [("tag", "eom", 0)]
    assert shard.snapshot(tag="eom").to_arrow().num_rows == 1, "what is kept is readable all the while"
    shard.untag("eom")
    expect_erased(machine, told.id, secret)


def test_what_a_reader_holds_is_not_read_by_others(shard: Shard) -> None:
    shard.insert([{"id": "a", "v": "1"}])
    with closing(shard.open_reader(0)):
        shard.erase(keys=["a"])
        reads: list[Callable[[], object]] = [
            lambda: shard.get("a", as_of=0),
            lambda: shard.head(as_of=0),
            lambda: shard.head(as_of=-1),
            lambda: shard.count(as_of=0),
            lambda: shard.snapshot(0),
        ]
        for read in reads:
            with pytest.raises(NotReadable, match="rows were erased"):
                read()
        assert shard.get("a") == []


WRONG: list[dict[str, Any]] = [
    *({"keys": keys} for keys in ([], [("a", "b")], [1], ["a"] * 1_001)),
    {"keys": ["a"], "where": "id = 'a'"},
    {},
    {"where": "nobody = 'a'"},
    *({"gone": True, **more} for more in ({"deadline": "none"}, {"reason": "x" * 257}, {"tags": 1})),
]


def test_what_is_wrong_is_refused(machine: Machine, shard: Shard) -> None:
    shard.insert([{"id": "a", "v": "1"}])
    before = machine.location.machine(NAME).refresh()
    for asked in WRONG:
        with pytest.raises(InvalidUsage):
            shard.erase(**asked)
    after = machine.location.machine(NAME).refresh()
    assert (after.trace, after.erasures, after.since) == (before.trace, before.erasures, before.since)


def test_erasures_that_have_not_ended_are_bounded(shard: Shard) -> None:
    shard.insert([{"id": "a", "v": "1"}])
    for _ in range(ERASURES_MAX):
        shard.erase(gone=True)
    with pytest.raises(Conflict):
        shard.erase(keys=["a"])


def test_nothing_can_be_erased_where_nothing_was_written_or_can_be(shard: Shard) -> None:
    with pytest.raises(InvalidUsage, match="nothing was written to shard 'orders' yet"):
        shard.erase(keys=["a"])
    shard.insert([{"id": "a", "v": "1"}])
    shard.advance_upper(None)
    with pytest.raises(UpperMismatch, match="is closed"):
        shard.erase(keys=["a"])
    with pytest.raises(InvalidUsage, match="has no erasure 'e1'"):
        shard.erased("e1")


def test_a_task_that_is_to_end_is_the_last_one() -> None:
    done: list[str] = []
    tasks = [lambda name, one=one: done.append(one) for one in ("merge", "erase", "gc")]
    in_turn(tasks, ending=lambda: "erase" in done)("orders")  # type: ignore[arg-type]
    assert done == ["merge", "erase"]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_a_predicate_compares_wall_clocks_exactly_in_every_unit(machine: Machine, unit: str) -> None:
    """One row that has more digits than a predicate, or lies further off than it can say, refused it for all."""
    per_s = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    far = 2**52 if unit == "s" else 2**62  # a file has seconds as milliseconds
    values = [-far, -1, 0, per_s, per_s + 1, 2 * per_s, far]
    kind = pa.timestamp(unit, tz="UTC")
    shard = machine.client.create_shard("clocks", pa.schema([("at", kind), ("v", pa.string())]), ["at"])
    shard.insert(pa.table({"at": pa.array(values, kind), "v": ["x"] * len(values)}))
    for micros, text in ((1_000_000, "1970-01-01 00:00:01Z"), (1_000_001, "1970-01-01 00:00:01.000001Z")):
        bound = Fraction(micros, 10**6) * per_s
        for op, wanted in (("<", operator.lt), (">=", operator.ge), ("=", operator.eq)):
            fitting = sum(wanted(value, bound) for value in values)
            assert shard.erase(where=f"at {op} TIMESTAMP '{text}'").removed == fitting
            shard.insert(
                pa.table({"at": pa.array([v for v in values if wanted(v, bound)], kind), "v": ["x"] * fitting})
            )


def test_what_was_dropped_leaves_a_shard_that_is_closed_to_reads_too(
    world: World, machine: Machine, shard: Shard
) -> None:
    """A merge brought it to the latest time, beyond the cut, where nothing takes it away any more."""
    secret = marker()
    for number in range(3):
        shard.insert([{"id": f"{secret}{number}", "v": "1"}])
    shard.insert([{"id": "a", "v": "1"}])
    shard.truncate(3, mode="drop")
    shard.critical_reader("last").downgrade_since(None, force=True)
    committer = machine.location.machine(NAME)
    for number in range(12):
        Worker(machine.location).run(NAME, idle=True)
        committer.apply(c.ForgetOutlived())
        shard.insert([{"id": f"later{number}", "v": "1"}])
        Maintenance(machine).run()
        world.pass_ms(3 * HOUR_MS)
    assert found(world, secret) == []
    assert shard.erased(before=3)["phase"] == "erased"


@pytest.mark.parametrize("large", [False, True])
def test_an_erasure_waits_for_a_drop_and_what_was_dropped_goes_with_it(
    world: World, machine: Machine, shard: Shard, large: bool
) -> None:
    """While the drop stands, merges keep what lies before its cut apart."""
    dropped, erased = marker(), marker()
    write = padded if large else lambda shard, *ids: shard.insert([{"id": one, "v": "x"} for one in ids])
    write(shard, dropped, "a")
    write(shard, erased, "b")
    shard.truncate(1, mode="drop")
    assert rows(shard) == sorted(["b", erased])
    told = shard.erase(keys=[erased])
    Maintenance(machine).run()
    assert not shard.erased(told.id).done
    machine.location.machine(NAME).apply(c.ForgetOutlived())
    Maintenance(machine).run()
    assert shard.erased(told.id).done
    assert found(world, dropped) + found(world, erased) == []
    assert rows(shard) == ["b"]


def test_while_only_the_sweep_can_help_nothing_is_committed(world: World, machine: Machine, shard: Shard) -> None:
    """A rollup that nothing names, as its maker was killed. Each look made four more, which brought the next one."""
    secret = marker()
    shard.insert([{"id": secret, "v": "1"}])
    machine.location.versions.write_rollup(machine.location.machine(NAME).refresh())
    told = shard.erase(keys=[secret])
    Maintenance(machine).run(most_h=2)
    rested = machine.location.machine(NAME).refresh().seqno, len(list(world.blob.list("s")))
    assert shard.erased(told.id).phase == "rewritten"
    Maintenance(machine).run(most_h=12)
    assert (machine.location.machine(NAME).refresh().seqno, len(list(world.blob.list("s")))) == rested
    expect_erased(machine, told.id, secret, most_h=30)


def test_behind_an_old_reader_no_new_one_comes(world: World, machine: Machine, shard: Shard) -> None:
    """One after the other they would put the receipt off for ever, and show the rows."""
    secret = marker()
    shard.insert([{"id": "a", "v": "1"}])
    shard.insert([{"id": secret, "v": "1"}])
    shard.tag("eom", 0)
    old = shard.snapshot(1)
    told = shard.erase(keys=[secret])
    assert shard.since() == Antichain(1), "it is held there"
    with pytest.raises(NotReadable, match="for new readers, since rows were erased"):
        shard.snapshot(1)
    with pytest.raises(NotReadable, match="since rows were erased"):
        shard.changes(1).to_arrow()
    with pytest.raises(NotReadable, match="can no longer be tagged"):
        shard.tag("late", 1)
    assert shard.critical_reader("new").since == Antichain(told.at)
    assert rows(shard) == ["a"]
    assert shard.snapshot(tag="eom").to_arrow().num_rows == 1
    assert shard.snapshot(0).to_arrow().num_rows == 1, "the time of a tag"
    assert old.to_arrow().num_rows == 2
    old.close()
    shard.untag("eom")
    expect_erased(machine, told.id, secret)


def test_the_digest_is_the_one_that_the_page_tells(shard: Shard) -> None:
    shard.insert([{"id": "ann", "v": "1"}])
    told = shard.erase(keys=["ann"], reason="dsr-7")
    said = json.dumps([told.id, "dsr-7", None, [[repr("ann")]]])
    assert told.question_sha256 == hashlib.sha256(said.encode()).hexdigest()


# --- erased rows lie in no journal of publications once there is a receipt, also where one comes late


SETTINGS = PublishSettings(every_s=5.0)
STEPS_MAX = 100


def queued(machine: Machine) -> Publisher:
    """A process that has committed all that is in the log, and has not published it."""
    location = machine.location
    publisher = Publisher(location.blob, location.identity, location.clock, location.ids, SETTINGS)
    for entry in location.consensus.scan(NAME, 1, 1_000):
        publisher.add(NAME, entry.data)
    return publisher


def maintained(machine: Machine, published_within_s: float = 0.0) -> float | None:
    """One step of maintenance; in how many seconds to look again."""
    collector = Collector(machine.location)
    Worker(machine.location).run(NAME)
    wait = Eraser(machine.location, collector, published_within_s=published_within_s).run(NAME)
    collector.run(NAME)
    return wait


def journals(machine: Machine) -> list[str]:
    return [stat.key for stat in machine.location.blob.list("pub/") if is_journal_key(stat.key)]


@pytest.mark.parametrize("failed", [0, 1, FAILED_TRIES_MAX - 1])
def test_a_receipt_waits_for_what_is_yet_to_be_published(machine: Machine, shard: Shard, failed: int) -> None:
    """The rows are erased within the interval in which they were committed; it is put as late as a process may."""
    secret = marker()
    shard.insert([{"id": secret, "v": "1"}, {"id": "kept", "v": "2"}])
    publisher = queued(machine)
    told = shard.erase(keys=[secret], deadline="30d", reason="dsr-1")
    late_ms = machine.location.clock.now_ms() + int((failed + 1) * SETTINGS.every_s * 1000) - 1
    for _ in range(STEPS_MAX):
        wait = maintained(machine, SETTINGS.within_s)
        if machine.location.clock.now_ms() >= late_ms and not publisher.is_idle:
            assert shard.erased(told.id).phase != "erased"
            publisher.publish(now=True)
            assert any(
                where_ in secret_at for secret_at in found(machine.world, secret) for where_ in journals(machine)
            )
        if wait is None:
            break
        machine.world.pass_ms(1_000)
    assert shard.erased(told.id).phase == "erased"
    assert publisher.is_idle
    assert found(machine.world, secret) == []
    assert [row["id"] for row in shard.snapshot().to_arrow().to_pylist()] == ["kept"]


def test_where_nobody_publishes_no_receipt_waits(machine: Machine, shard: Shard) -> None:
    secret = marker()
    shard.insert([{"id": secret, "v": "1"}, {"id": "kept", "v": "2"}])
    told = shard.erase(keys=[secret], deadline="30d", reason="dsr-1")
    while maintained(machine) is not None:
        machine.world.pass_ms(1)
        assert machine.location.clock.now_ms() - told.requested_ms < 1_000
    assert shard.erased(told.id).phase == "erased"
