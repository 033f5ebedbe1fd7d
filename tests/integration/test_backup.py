"""Backups: what is in them to the row, what they send, and what a crash at any moment leaves."""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from typing import Any

import pyarrow as pa
import pytest

from blob import Blob, BlobUnavailable
from blob.memory_blobs import MemoryBlob
from blob.metrics import ForwardingBlob
from compactor.orphans import Sweeper, SweepSettings
from compactor.worker import Worker
from persist import AttributeUpdate, named_key
from persist.client.shard import Shard
from persist.client.timestamps import to_datetime
from persist.commit.location import Location, LocationSettings
from persist.copies.backup_creation import UPPER, BackupRequest, Progress, back_up
from persist.copies.backup_restore import RestoreRequest, ShardRestored, restore, select_backup, verify_backup
from persist.copies.backup_store import BLOBS, PRUNING, RUNNING, Backup, BackupStore, KeepRule, prune
from persist.copies.verify import Depth, verify_shards
from persist.core.blob_keys import is_bundle_key
from persist.core.errors import Conflict, ConstraintViolated, Corruption, NotReadable, PersistError
from persist.core.ids import token_of_key
from persist.core.record import replace
from persist.core.spill import ENTRIES, OUTCOMES
from persist.core.state import Policy
from persist.formats.state_frames import encode_state
from persist.maintenance.collector import Collector
from tests.support.clocks import HOUR_MS, Machine, World
from tests.support.examples import thinned
from tests.support.location import InlineBackground

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])
SMALL = Policy(inline_part_bytes_max=0, plain_parts_max=1, rollup_every=4, overlay_flush_at=4)


class Counting(ForwardingBlob):
    """Counts what is put, and fails from one put on."""

    def __init__(self, inner: Blob, fails_at: int | None = None) -> None:
        super().__init__(inner)
        self.puts: Counter[str] = Counter()
        self.fails_at = fails_at

    def put(self, key: str, data: bytes | memoryview) -> None:
        if self.fails_at is not None and sum(self.puts.values()) >= self.fails_at:
            raise BlobUnavailable("killed")
        super().put(key, data)
        self.puts[key] += 1


@pytest.fixture
def world() -> World:
    return World(policy=SMALL)


@pytest.fixture
def kept(world: World) -> Counting:
    """Where backups are kept."""
    return Counting(MemoryBlob("mem:backups", now_ms=lambda: world.true_ms))


def store(machine: Machine, kept: Blob) -> BackupStore:
    return BackupStore(kept, machine.location.clock, machine.location.ids)


def made(machine: Machine, kept: Blob, wanted: BackupRequest | None = None, **told: Any) -> Backup:
    return back_up(machine.location, store(machine, kept), wanted or BackupRequest(at_once=1), **told)


def elsewhere(world: World) -> tuple[World, Machine]:
    """Another location, where time is the same."""
    other = World(policy=world.policy)
    other.true_ms = world.true_ms
    return other, other.machine()


def back(
    machine: Machine, kept: Blob, backup: Backup | None = None, choice: RestoreRequest | None = None
) -> list[ShardRestored]:
    """Restore a backup: if none is given, the one that the choice needs."""
    found, chosen = store(machine, kept), choice or RestoreRequest(at_once=1)
    return restore(found, backup or select_backup(found, chosen.at, None), machine.location, chosen)


def to_wall_clock(machine: Machine, kept: Blob, at: datetime, *names: str) -> list[ShardRestored]:
    return back(machine, kept, choice=RestoreRequest(names=names, at=at, at_once=1))


def rows(shard: Shard, as_of: int | None = None) -> Counter[tuple[Any, ...]]:
    found: Counter[tuple[Any, ...]] = Counter()
    for row in shard.snapshot(as_of).to_arrow().to_pylist():
        diff = row.pop("__diff", 1)
        found[tuple(row.items())] += diff
    return found


def filled(machine: Machine, name: str, count: int = 12) -> Shard:
    shard = machine.client.create_shard(name, SCHEMA, ["id"], history="forever")
    for number in range(count):
        diff = -1 if number % 5 == 4 else 1
        changed = number - 1 if diff < 0 else number
        shard.insert([{"id": changed, "v": f"{name} {changed}", "__diff": diff}], token=token_of_key(f"{name}{number}"))
        machine.location.clock.sleep(1.5)
    return shard


def bundled(shard: Shard) -> None:
    """An insert of so many parts that they go to bundles."""
    writer = shard.open_writer()
    staged = [writer.stage([{"id": 5_000 + number, "v": "bundled"}], None) for number in range(6)]
    writer.commit_insert(tuple(run for runs in staged for run in runs))


def attributed(shard: Shard) -> None:
    for number in range(20):
        shard.attributes.update([AttributeUpdate.replace(named_key(f"job {number}"), number)])


def maintained(machine: Machine) -> None:
    for name in machine.location.all_names(with_dropped=False):
        Worker(machine.location).run(name, idle=True)
        collector = Collector(machine.location)
        while not collector.run(name).done:
            pass


def alike(shard: Shard, other: Shard, upper: int) -> None:
    """Whether both show the same at every time before `upper`."""
    for as_of in range(shard.since().element or 0, upper):
        assert rows(shard, as_of) == rows(other, as_of), as_of


def test_what_is_restored_is_what_was_there_at_every_time(world: World, machine: Machine, kept: Counting) -> None:
    shards = [filled(machine, "eu/a", 30), filled(machine, "eu/b")]
    shards[0].tag("first", 3)
    bundled(shards[0])
    attributed(shards[0])
    backup = made(machine, kept)
    assert [shard.name for shard in backup.shards] == ["eu/a", "eu/b"]
    _, other = elsewhere(world)
    told = back(other, kept)
    assert [(shard.name, shard.upper) for shard in told] == [("eu/a", [31]), ("eu/b", [12])]
    for shard in shards:
        found = other.client.shard(shard.name)
        assert (found.since(), found.upper()) == (shard.since(), shard.upper())
        alike(shard, found, shard.upper().element or 0)
        assert [e.seqno for e in found.history()] == [e.seqno for e in shard.history()]
    again = other.client.shard("eu/b").insert([{"id": 11, "v": "eu/b 11"}], token=token_of_key("eu/b11"))
    assert (again.lower.element, other.client.shard("eu/b").upper()) == (11, shards[1].upper()), "tokens are known"
    assert other.client.shard("eu/a").tags() == shards[0].tags()
    state, now = (m.location.machine("eu/a").refresh() for m in (machine, other))
    assert any(map(is_bundle_key, state.blob_keys()))
    assert state.files_of(OUTCOMES)
    assert state.files_of(ENTRIES)
    assert (now.attribute_root, now.seal.last) == (state.attribute_root, state.seal.last)
    assert now.files_of(OUTCOMES)
    assert all(found.is_sound for found in verify_shards(other.location, iter(["eu/a", "eu/b"]), Depth(deep=True)))


def test_no_shard_shows_what_came_after_the_wall_clock(world: World, machine: Machine, kept: Counting) -> None:
    """A pair of writes, one to each shard, is never torn the wrong way; nor is anything there from after."""
    first, second = filled(machine, "a"), filled(machine, "b")
    written: list[tuple[int, int]] = []

    def write(progress: Progress | None = None) -> None:
        number = 1_000 + len(written)
        first.insert([{"id": number, "v": "pair"}])
        begun_ms = world.true_ms
        second.insert([{"id": number, "v": "pair"}])
        written.append((number, begun_ms))
        world.pass_ms(700)

    for _ in range(3):
        write()
    acknowledged = len(written)
    backup = made(machine, kept, report=write)
    assert len(written) > acknowledged
    write()
    _, other = elsewhere(world)
    back(other, kept)
    pairs = [{dict(row)["id"] for row in rows(other.client.shard(name)) if dict(row)["v"] == "pair"} for name in "ab"]
    assert pairs[1] <= pairs[0]
    assert {number for number, _ in written[:acknowledged]} <= pairs[1]
    assert backup.at_ms is not None
    assert not {number for number, begun_ms in written if begun_ms > backup.at_ms} & (pairs[0] | pairs[1])


def test_maintenance_meanwhile_takes_nothing_away(world: World, machine: Machine, kept: Counting) -> None:
    """All shards are merged, aged and collected between the hold and the copy of each."""
    shards = [filled(machine, name) for name in ("a", "b")]
    expected = {shard.name: rows(shard) for shard in shards}

    def collect(progress: Progress) -> None:
        for shard in shards:
            shard.insert([{"id": 9_000, "v": "later"}])
            shard.forget((shard.upper().element or 1) - 1)
        maintained(machine)

    made(machine, kept, report=collect)
    _, other = elsewhere(world)
    back(other, kept)
    for name, found in expected.items():
        restored = rows(other.client.shard(name))
        restored.pop((("id", 9_000), ("v", "later")), None)
        assert restored == found
    assert not machine.location.machine("a").refresh().leased_readers


def kills(most: int) -> list[Any]:
    """After how many puts a process is killed."""
    return thinned([*range(12), *range(12, most, 5)], 5)


@pytest.mark.parametrize("puts", kills(40))
def test_a_killed_backup_is_none_and_the_next_one_goes_on(
    world: World, machine: Machine, kept: Counting, puts: int
) -> None:
    shard = filled(machine, "orders")
    kept.fails_at = puts
    try:
        made(machine, kept)
    except PersistError:
        assert not any(key.endswith("manifest.json") for key in kept.puts)
    kept.fails_at = None
    world.pass_ms(31 * 60_000)
    backup = made(machine, kept)
    assert max(count for key, count in kept.puts.items() if key.startswith(BLOBS)) == 1
    _, other = elsewhere(world)
    back(other, kept, backup)
    assert rows(other.client.shard("orders")) == rows(shard)


@pytest.mark.parametrize("puts", kills(30))
def test_a_killed_restore_leaves_whole_shards_or_none(
    world: World, machine: Machine, kept: Counting, puts: int
) -> None:
    shards = [filled(machine, name, 6) for name in ("a", "b")]
    made(machine, kept)
    other = World(policy=world.policy)
    other.true_ms = world.true_ms
    killed = Counting(other.blob, fails_at=puts)
    location = Location(killed, other.consensus, settings=LocationSettings(policy=SMALL), clock=machine.location.clock,
                        background=InlineBackground())  # fmt: skip
    found = BackupStore(kept, machine.location.clock, machine.location.ids)
    backup = select_backup(found, None, None)
    with suppress(PersistError):
        restore(found, backup, location, RestoreRequest(at_once=1))
    again = other.machine()
    for name in again.location.all_names():
        shard = next(shard for shard in shards if shard.name == name)
        assert rows(again.client.shard(name)) == rows(shard)
    restore(found, backup, again.location, RestoreRequest(at_once=1))
    for shard in shards:
        assert rows(again.client.shard(shard.name)) == rows(shard)
    before = again.location.machine("a").refresh()
    restore(found, backup, again.location, RestoreRequest(at_once=1))
    assert again.location.machine("a").refresh() == before


def every(kept: Counting, part: str) -> list[str]:
    return [stat.key for stat in kept.list("") if part in stat.key]


@pytest.mark.parametrize("part", thinned([".state", ".list", ".parquet", ".bundle", ".nodes", ".spill"], 2))
@pytest.mark.parametrize("damage", thinned(["flip", "short", "gone"], 3))
def test_damage_is_found_and_nothing_of_the_shard_is_restored(
    world: World, machine: Machine, kept: Counting, part: str, damage: str
) -> None:
    shard = filled(machine, "orders", 30)
    bundled(shard)
    attributed(shard)
    backup = made(machine, kept)
    found = every(kept, part)
    if not found:
        pytest.skip(f"the shard has no {part}")
    key = found[-1]
    data = bytearray(kept.get(key))
    data[len(data) // 2] ^= 1
    kept.delete([key])
    if damage != "gone":
        kept.put(key, bytes(data if damage == "flip" else data[:-1]))
    [(_, faults)] = verify_backup(store(machine, kept), backup, Depth(deep=True))
    assert faults
    _, other = elsewhere(world)
    with pytest.raises(Corruption):
        back(other, kept)
    assert list(other.location.all_names()) == []


def test_a_damaged_blob_at_home_is_not_taken_for_sound(world: World, machine: Machine, kept: Counting) -> None:
    filled(machine, "orders")
    named = machine.location.machine("orders").refresh().blob_keys()
    key = next(key for key in named if key.endswith(".parquet"))
    data = bytearray(world.blob.get(key))
    data[40] ^= 1
    world.blob.delete([key])
    world.blob.put(key, bytes(data))
    with pytest.raises(Corruption, match="checksum"):
        made(machine, kept)
    assert store(machine, kept).listed().backups == ()


def test_pruning_keeps_what_any_backup_names(world: World, machine: Machine, kept: Counting) -> None:
    shard = filled(machine, "orders")
    made(machine, kept)
    world.pass_ms(HOUR_MS)
    shard.insert([{"id": 77, "v": "later"}])
    maintained(machine)
    last = made(machine, kept)
    assert len(store(machine, kept).listed().backups) == 2
    would = prune(store(machine, kept), KeepRule(last=1), dry_run=True)
    assert len(would.backups) == 1
    assert len(store(machine, kept).listed().backups) == 2
    assert prune(store(machine, kept), KeepRule(within_ms=2 * HOUR_MS)).backups == ()
    assert prune(store(machine, kept), KeepRule(last=1)) == would
    assert [backup.id for backup in store(machine, kept).listed().backups] == [last.id]
    assert prune(store(machine, kept), KeepRule(within_ms=1)).backups == ()  # the newest one stays
    assert [faults for _, faults in verify_backup(store(machine, kept), last, Depth(deep=True))] == [()]
    named = set(store(machine, kept).sums(last.shards[0]))
    assert {stat.key.removeprefix(BLOBS) for stat in kept.list(BLOBS)} == named


def test_pruning_takes_what_a_killed_backup_left(world: World, machine: Machine, kept: Counting) -> None:
    filled(machine, "orders")
    last = made(machine, kept)
    kept.put(BLOBS + "s" + "0" * 32 + "/a/x" + "1" * 32 + ".nodes", b"left")
    kept.put("backups/20990101T000000Z-00000000/left.state", b"left")
    assert prune(store(machine, kept), KeepRule(last=5)).blobs == 1
    assert every(kept, "left") == []
    assert [faults for _, faults in verify_backup(store(machine, kept), last, Depth(deep=True))] == [()]


def test_a_backup_that_cannot_be_read_keeps_everything(machine: Machine, kept: Counting) -> None:
    filled(machine, "orders")
    first = made(machine, kept)
    made(machine, kept)
    key = first.shards[0].list.key
    kept.delete([key])
    before = [stat.key for stat in kept.list(BLOBS)]
    with pytest.raises(Corruption):
        prune(store(machine, kept), KeepRule(last=2))
    assert [stat.key for stat in kept.list(BLOBS)] == before
    assert every(kept, PRUNING) == []


@pytest.mark.parametrize(("first", "second"), [(RUNNING, PRUNING), (PRUNING, RUNNING)])
def test_a_backup_and_a_pruning_give_way(
    world: World, machine: Machine, kept: Counting, first: str, second: str
) -> None:
    filled(machine, "orders")
    found = store(machine, kept)
    found.open("x" * 32)
    under_way = found.run(first)
    with pytest.raises(Conflict, match="is running"):
        found.run(second)
    under_way.beat()
    world.pass_ms(31 * 60_000)  # it was killed
    other = found.run(second)
    with pytest.raises(Conflict, match="suspended"):
        under_way.beat()
    other.end()
    under_way.end()
    assert every(kept, first) == every(kept, second) == []


def test_any_time_between_two_backups(world: World, machine: Machine, kept: Counting) -> None:
    shard = filled(machine, "orders", 4)
    made(machine, kept)
    world.pass_ms(10_000)
    shard.insert([{"id": 50, "v": "between"}])
    world.pass_ms(10_000)
    between_ms, expected = world.true_ms, rows(shard)
    world.pass_ms(10_000)
    shard.insert([{"id": 50, "v": "between", "__diff": -1}, {"id": 51, "v": "a wrong deploy"}])
    made(machine, kept)
    at, (_, other) = to_datetime(between_ms), elsewhere(world)
    [told] = to_wall_clock(other, kept, at)
    restored = other.client.shard("orders")
    assert (rows(restored), told.left) == (expected, False)
    assert rows(restored, 5) == rows(shard, 5)  # what came after stays in its history
    restored.insert([{"id": 60, "v": "new"}])
    [told] = to_wall_clock(other, kept, at)
    assert told.left
    assert dict(rows(restored) - expected) == {(("id", 60), ("v", "new")): 1}


def poisoned(machine: Machine, world: World) -> tuple[Shard, datetime]:
    machine.client.create_shard("z", SCHEMA, ["id"]).insert([{"id": 1, "v": "z"}])
    shard = machine.client.create_shard("fed", SCHEMA, ["id"])
    shard.append([{"id": 1, "v": "good"}], 0, 1)
    world.pass_ms(10_000)
    at = to_datetime(world.true_ms)
    world.pass_ms(10_000)
    shard.append([{"id": 2, "v": "poison"}], 1, 2)
    return shard, at


@pytest.mark.parametrize("waits", [False, True])
def test_a_fed_shard_comes_back_as_of_a_wall_clock(world: World, machine: Machine, kept: Counting, waits: bool) -> None:
    shard, at = poisoned(machine, world)
    if waits:
        shard.truncate(1)
    made(machine, kept)
    _, other = elsewhere(world)
    assert [one.name for one in to_wall_clock(other, kept, at)] == ["fed", "z"]
    restored = other.client.shard("fed")
    assert rows(restored) == {(("id", 1), ("v", "good")): 1}
    assert rows(other.client.shard("z")) == {(("id", 1), ("v", "z")): 1}
    restored.append([{"id": 3, "v": "new"}], 3, 4)
    assert rows(restored) == {(("id", 1), ("v", "good")): 1, (("id", 3), ("v", "new")): 1}


def test_a_shard_that_is_younger_than_the_time_is_named_and_may_be_left_out(
    world: World, machine: Machine, kept: Counting
) -> None:
    shard = filled(machine, "orders", 4)
    world.pass_ms(10_000)
    at, expected = to_datetime(world.true_ms), rows(shard)
    world.pass_ms(10_000)
    filled(machine, "young")
    made(machine, kept)
    _, other = elsewhere(world)
    with pytest.raises(NotReadable) as refused:
        to_wall_clock(other, kept, at)
    assert refused.value.details["shards"] == ["young"]
    [told] = to_wall_clock(other, kept, at, "orders")
    assert (told.name, rows(other.client.shard("orders"))) == ("orders", expected)


def test_a_time_whose_rows_break_a_constraint_that_was_set_later_restores_nothing(
    world: World, machine: Machine, kept: Counting
) -> None:
    """It was refused after the shard was there, with the contents of the backup."""
    shard = filled(machine, "orders", 4)
    world.pass_ms(10_000)
    at = to_datetime(world.true_ms)
    world.pass_ms(10_000)
    shard.delete(where="id >= 0")
    shard.set_constraints(checks={"none": "id < 0"})
    made(machine, kept)
    _, other = elsewhere(world)
    with pytest.raises(ConstraintViolated) as refused:
        to_wall_clock(other, kept, at)
    assert refused.value.details["constraint"] == "none"
    assert list(other.location.all_names()) == []


def test_what_would_take_rows_away_waits(world: World, machine: Machine, kept: Counting) -> None:
    shard = filled(machine, "orders")
    shard.retain({"age": "1000h"})
    shard.critical_reader("job")
    made(machine, kept)
    world.pass_ms(100 * HOUR_MS)
    for keeps in (False, True):
        _, other = elsewhere(world)
        [told] = back(other, kept, choice=RestoreRequest(keeps_policies=keeps, at_once=1))
        state = other.location.machine("orders").refresh()
        assert (told.policy, state.settings.rows is not None) == (not keeps, keeps)
        assert len(told.readers) == 1
        assert rows(other.client.shard("orders")) == rows(shard)


def test_a_shard_that_is_dropped_meanwhile_is_left_out(world: World, machine: Machine, kept: Counting) -> None:
    filled(machine, "gone").drop()
    filled(machine, "a")
    goes = filled(machine, "goes")

    def drop(progress: Progress) -> None:
        if progress.shards_done == 1:
            goes.drop(force=True)
            for _ in range(5):
                Collector(machine.location).run("goes")

    backup = made(machine, kept, report=drop)
    assert [shard.name for shard in backup.shards] == ["a"]
    assert [faults for _, faults in verify_backup(store(machine, kept), backup, Depth(deep=True))] == [()]


@pytest.mark.parametrize("again", [False, True], ids=["dropped", "created again"])
def test_a_closed_shard_that_is_dropped_meanwhile_is_no_dropped_shard_in_the_backup(
    world: World, machine: Machine, kept: Counting, again: bool
) -> None:
    filled(machine, "first")
    closed = filled(machine, "second")
    closed.advance_upper(None)
    expected = rows(closed)

    def drop(progress: Progress) -> None:
        if progress.shards_done == 1:
            closed.drop(force=True)
            if again:
                filled(machine, "second", 1)

    backup = made(machine, kept, BackupRequest(at_once=1, consistent=UPPER), report=drop)
    _, other = elsewhere(world)
    back(other, kept, backup)
    assert [shard.name for shard in backup.shards] in (["first"], ["first", "second"])
    if len(backup.shards) > 1:
        assert rows(other.shard("second")) == expected


def test_a_shard_comes_back_under_another_name_beside_itself(world: World, machine: Machine, kept: Counting) -> None:
    shard = filled(machine, "orders", 30)
    bundled(shard)
    attributed(shard)
    made(machine, kept)
    expected = {as_of: rows(shard, as_of) for as_of in range(31)}
    before = machine.location.machine("orders").refresh()
    for _ in range(2):  # the second run finds it there
        [told] = back(machine, kept, choice=RestoreRequest(as_name="found/again", at_once=1))
        assert (told.name, told.upper) == ("found/again", [31])
    assert machine.location.machine("orders").refresh().trace == before.trace
    found = machine.client.shard("found/again")
    shard.drop()
    for _ in range(5):
        Collector(machine.location).run("orders")
    assert {as_of: rows(found, as_of) for as_of in range(31)} == expected
    assert [found.attributes.get(named_key(f"job {number}")) for number in range(20)] == list(range(20))
    assert [entry.operation for entry in found.history()][-1] == "create"
    whole = encode_state(replace(machine.location.machine("found/again").refresh(), entries={}))
    assert str(before.shard_id).encode() not in whole  # no key of the other one is left in any field
    [verdict] = verify_shards(machine.location, iter(["found/again"]), Depth(deep=True))
    assert verdict.is_sound
    for number in range(10):
        found.insert([{"id": 9_000 + number, "v": "new"}])
        maintained(machine)
    assert sum(rows(found).values()) == sum(expected[30].values()) + 10
    [verdict] = verify_shards(machine.location, iter(["found/again"]), Depth(deep=True))
    assert verdict.is_sound


def test_blobs_that_were_brought_ahead_are_not_sent_again(world: World, machine: Machine, kept: Counting) -> None:
    shard = filled(machine, "orders", 6)
    bundled(shard)
    made(machine, kept)
    _, target = elsewhere(world)
    ahead = RestoreRequest(at_once=1, ahead=True)
    [told] = back(target, kept, choice=ahead)
    assert told.upper is None
    assert told.sent > 0
    assert target.client.shards() == []
    shard.insert([{"id": number, "v": "new" * 30} for number in range(2_000)])
    backup = made(machine, kept)
    assert [one.sent for one in back(target, kept, backup, ahead)] == [backup.sent]
    [told] = back(target, kept, backup)
    assert told.sent == 0
    assert rows(target.client.shard("orders")) == rows(shard)
    [verdict] = verify_shards(target.location, iter(["orders"]), Depth(deep=True))
    assert verdict.is_sound
    assert [one.left for one in back(target, kept, backup, ahead)] == [False]  # and does no harm later


def resealed(kept: Counting, key: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest by somebody who knows how its checksum is made."""
    body = json.loads(kept.get(key))
    del body["crc"]
    change(body)
    text = json.dumps(body, separators=(",", ":")).encode()
    kept.delete([key])
    body["crc"] = zlib.crc32(text)
    kept.put(key, json.dumps(body, separators=(",", ":")).encode())


@pytest.mark.parametrize("field", ["state", "list", "shard_id", "name", "id"])
def test_a_manifest_that_names_what_is_not_its_own_is_refused(machine: Machine, kept: Counting, field: str) -> None:
    """Else a pruning would delete that, and a restore write it."""
    for name in ("a", "b"):
        filled(machine, name)
    made(machine, kept)
    [manifest] = every(kept, "manifest.json")
    others = every(kept, BLOBS)

    def change(body: dict[str, Any]) -> None:
        shards = body["shards"]
        if field == "id":
            body["id"] = "../backups"
        elif field in ("state", "list"):
            shards[0][field]["key"] = others[0]
        else:
            shards[0][field] = shards[1][field]

    resealed(kept, manifest, change)
    [unread] = store(machine, kept).listed().unread
    assert "is damaged" in unread.error.message
    with pytest.raises(Corruption):
        prune(store(machine, kept), KeepRule(last=1))
    assert every(kept, BLOBS) == others


def test_a_damaged_manifest_hides_no_other_backup(world: World, machine: Machine, kept: Counting) -> None:
    shard = filled(machine, "orders")
    good = made(machine, kept)
    world.pass_ms(HOUR_MS)
    shard.insert([{"id": 77, "v": "later"}])
    bad = made(machine, kept)
    manifest = f"backups/{bad.id}/manifest.json"
    data = kept.get(manifest)
    kept.delete([manifest])
    kept.put(manifest, data.replace(b'"epoch":1', b'"epoch":2'))
    backups = store(machine, kept)
    listed = backups.listed()
    assert [one.id for one in listed.backups] == [good.id]
    assert [one.id for one in listed.unread] == [bad.id]
    with pytest.raises(Corruption, match=f"latest readable one is {good.id}"):
        select_backup(backups, None, None)
    assert select_backup(backups, None, good.id) == good
    with pytest.raises(Corruption, match="--damaged"):
        prune(backups, KeepRule(last=1))
    assert kept.stat(manifest) is not None
    again = made(machine, kept)  # sends nothing: the blobs of the damaged one are there
    assert again.sent == 0
    assert select_backup(backups, None, None) == again
    assert prune(backups, KeepRule(damaged=True), dry_run=True).backups == (bad.id,)
    assert kept.stat(manifest) is not None
    assert prune(backups, KeepRule(damaged=True)).backups == (bad.id,)
    assert {key for key in every(kept, "") if key.startswith(f"backups/{bad.id}")} == set()
    assert [one.id for one in backups.listed().backups] == [good.id, again.id]
    for one in (good, again):
        assert [faults for _, faults in verify_backup(backups, one, Depth(deep=True))] == [()]


def test_a_list_that_names_blobs_of_another_shard_is_refused(world: World, machine: Machine, kept: Counting) -> None:
    filled(machine, "a")
    backup = made(machine, kept)
    [manifest] = every(kept, "manifest.json")
    data = zlib.compress(json.dumps([["epoch/1", 3, zlib.crc32(b"bad")]]).encode())
    key = backup.shards[0].list.key
    kept.delete([key])
    kept.put(key, data)
    kept.put(BLOBS + "epoch/1", b"bad")

    def change(body: dict[str, Any]) -> None:
        body["shards"][0]["list"] |= {"size": len(data), "crc": zlib.crc32(data)}

    resealed(kept, manifest, change)
    _, other = elsewhere(world)
    with pytest.raises(Corruption, match="another shard"):
        back(other, kept)
    assert list(other.location.all_names()) == []


@pytest.mark.parametrize("name", [None, "found/again"])
def test_an_erasure_that_is_pending_is_kept(machine: Machine, world: World, kept: Counting, name: str | None) -> None:
    """With the rows that it takes away, which nothing else names."""
    shard = machine.client.create_shard("orders", SCHEMA, ["id"])
    shard.append([{"id": 1, "v": "gone"}, {"id": 2, "v": "kept"}], 0, 1)
    told = shard.erase(keys=[1])
    made(machine, kept)
    other_world, other = elsewhere(world)
    [back_again] = back(other, kept, choice=RestoreRequest(as_name=name, at_once=1))
    found = other.client.shard(back_again.name)
    assert found.erased(told.id).phase == "pending"
    other_world.pass_ms(100 * HOUR_MS)
    Sweeper(other.location, SweepSettings(age_ms=14 * HOUR_MS)).sweep(found.name)
    found.append((), 1, 2)
    assert rows(found) == {(("id", 2), ("v", "kept")): 1}
    [verdict] = verify_shards(other.location, iter([found.name]), Depth(deep=True))
    assert verdict.is_sound, verdict.faults


def phases(machine: Machine) -> list[str]:
    """Shards in every phase of their life."""
    filled(machine, "life", 6).drop()
    for _ in range(5):
        Collector(machine.location).run("life")
    filled(machine, "life", 7)  # the second one of its name
    filled(machine, "closed", 5).advance_upper(None)
    filled(machine, "unreadable", 4).critical_reader("last").downgrade_since(None, force=True)
    machine.client.create_shard("empty", SCHEMA, ["id"])
    fed = machine.client.create_shard("fed", SCHEMA, ["id"], history="forever")
    fed.append([{"id": 1, "v": "x", "__time": 3}, {"id": 2, "v": "y", "__time": 5}], 0, 10)
    return ["closed", "empty", "fed", "life", "unreadable"]


def test_shards_in_every_phase_of_their_life(world: World, machine: Machine, kept: Counting) -> None:
    names = phases(machine)
    assert [shard.name for shard in made(machine, kept).shards] == names
    other_world, other = elsewhere(world)
    back(other, kept)
    for name in names:
        back(other, kept, choice=RestoreRequest(names=(name,), as_name=f"renamed/{name}", at_once=1))
        home = machine.client.shard(name)
        for found in (other.client.shard(name), other.client.shard(f"renamed/{name}")):
            assert (found.since(), found.upper()) == (home.since(), home.upper())
            upper = home.upper().element
            if not home.since().is_empty:
                alike(home, found, 5 if upper is None else upper)
    other.client.shard("fed").append([{"id": 9, "v": "z", "__time": 12}], 10, 20)
    with pytest.raises(PersistError):
        other.client.shard("closed").insert([{"id": 9, "v": "z"}])
    other_world.pass_ms(100 * HOUR_MS)
    sweeper = Sweeper(other.location, SweepSettings(age_ms=14 * HOUR_MS))
    for name in other.location.all_names():
        Collector(other.location).run(name)
        assert sweeper.sweep(name).orphans == (name == "closed"), "the rows that were refused"
    assert sweeper.sweep_unborn().orphans == 0
    found = verify_shards(other.location, other.location.all_names(with_dropped=False), Depth(deep=True))
    assert [shard.shard for shard in found if not shard.is_sound] == []
    other.client.shard("life").drop()
    for _ in range(5):
        Collector(other.location).run("life")
    third = other.client.create_shard("life", SCHEMA, ["id"])
    third.insert([{"id": 1, "v": "third"}])
    assert sum(rows(third).values()) == 1


def test_a_shard_that_cannot_be_copied_ends_a_backup_of_many(world: World, machine: Machine) -> None:
    for name in "abcdefgh":
        filled(machine, name, 4)
    kept = Counting(MemoryBlob("mem:backups", now_ms=lambda: world.true_ms), fails_at=5)
    with pytest.raises(PersistError) as caught:
        made(machine, kept, BackupRequest(at_once=4))
    assert caught.value.kind == "unavailable"
    assert store(machine, kept).listed().backups == ()
    assert not any(machine.location.machine(name).refresh().leased_readers for name in "abcdefgh"), "no hold is left"


def test_two_backups_at_once(world: World, machine: Machine, kept: Counting) -> None:
    shards = [filled(machine, name) for name in ("a", "b")]
    with ThreadPoolExecutor(2) as pool:
        backups = list(pool.map(lambda _: made(world.machine(), kept), range(2)))
    assert len({backup.id for backup in backups}) == 2
    for backup in backups:
        _, other = elsewhere(world)
        back(other, kept, backup)
        for shard in shards:
            assert rows(other.client.shard(shard.name)) == rows(shard)
    assert every(kept, RUNNING) == []
