"""A region reads what home has published, from a copy of its blob store alone, and writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing, suppress
from datetime import UTC, datetime
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from blob import Blob, BlobUnavailable
from blob.memory_blobs import MemoryBlob
from blob.metrics import ForwardingBlob
from compactor.on_demand import maintain
from consensus.memory_logs import MemoryConsensus
from persist import AttributeUpdate, Client, HandleSettings, ReadSettings, Shard, WriteSettings, named_key
from persist.client.embedded import EmbeddedTransport
from persist.copies.recovery import RecoveryRequest, run_recovery
from persist.core.errors import (
    Conflict,
    Expired,
    HistoryLost,
    InvalidUsage,
    NotComplete,
    PersistError,
    ReadOnly,
    Unavailable,
    UnknownShard,
)
from persist.core.shard_view import SeenVersion
from persist.core.state import Policy
from persist.maintenance.journal_writer import PublishSettings
from persist.regions.replica import Home, ReplicaLocation
from persist.regions.replication import GONE, ReplicateSettings, Replicator
from tests.support.clocks import HOUR_MS, Machine, World
from tests.support.examples import size, thinned
from tests.support.regions import Regions, publish

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])
SMALL = Policy(inline_part_bytes_max=0, plain_parts_max=1, rollup_every=4, overlay_flush_at=4)
HOME = Home("eu", ("http://eu:8787",))
AT_ONCE = HandleSettings(write=WriteSettings(retry_s=0.0), read=ReadSettings(retry_s=0.0))


class Counting(ForwardingBlob):
    """Counts what is put; fails from one put on."""

    def __init__(self, inner: Blob, fails_at: int | None = None) -> None:
        super().__init__(inner)
        self.puts = 0
        self.fails_at = fails_at

    def put(self, key: str, data: bytes | memoryview) -> None:
        if self.fails_at is not None and self.puts >= self.fails_at:
            raise BlobUnavailable("killed")
        super().put(key, data)
        self.puts += 1


class Place:
    """Home with the shard `orders`, a copy of its blob store, and a region that reads it."""

    def __init__(self) -> None:
        self.world = World(policy=SMALL)
        self.machine: Machine = self.world.machine()
        self.copy = Counting(MemoryBlob("copy", now_ms=lambda: self.world.true_ms))
        settings = ReplicateSettings(at_once=1, keep_s=300.0)
        self.replicator = Replicator(self.world.blob, self.copy, self.machine.location.clock, settings)
        self.shard = self.machine.client.create_shard("orders", SCHEMA, ["id"], history="forever")
        for number in range(5):
            self.insert(number)
        self.replicate()
        self.region = self.server()

    def insert(self, number: int) -> None:
        self.shard.insert([{"id": number, "v": f"row {number}"}])
        self.world.pass_ms(1_500)

    def publish(self) -> None:
        """Maintenance at home has published everything."""
        publish(self.world.machine().location, PublishSettings())

    def replicate(self) -> None:
        self.publish()
        self.replicator.round(whole=True)

    def arrive(self) -> None:
        """What home has has come, and the region looks again."""
        self.replicate()
        self.world.pass_ms(1_000)

    def server(self) -> ReplicaLocation:
        return ReplicaLocation(self.copy, HOME, poll_s=0.001, clock=self.machine.location.clock)

    @property
    def there(self) -> Shard:
        return self.client.shard("orders")

    @property
    def client(self) -> Client:
        return Client(EmbeddedTransport(self.region, maintain), AT_ONCE)


@pytest.fixture
def place() -> Place:
    return Place()


def rows(shard: Shard, as_of: Any = None) -> list[Any]:
    return sorted(map(repr, shard.snapshot(as_of, wait_s=0.0).to_arrow().to_pylist()))


def test_all_that_can_be_asked_of_a_shard_is_answered_alike(place: Place) -> None:
    place.shard.tag("first", 2)
    for number in range(12):
        place.shard.attributes.update([AttributeUpdate.replace(named_key(f"job {number}"), number)])
    place.shard.configure(history="30d")
    when = datetime.fromtimestamp(place.world.true_ms / 1000 - 3, UTC)
    assert place.shard.time_at(when)  # home has sealed it
    place.arrive()
    there, home = place.there, place.shard
    assert there.tags() == home.tags()
    assert there.settings == home.settings
    assert [entry.seqno for entry in there.history()] == [entry.seqno for entry in home.history()]
    assert there.attributes.get(named_key("job 3")) == home.attributes.get(named_key("job 3")) == 3
    assert there.time_at(when) == home.time_at(when)
    assert rows(there, when) == rows(home, when)
    assert there.timestamp_of(2) == home.timestamp_of(2)
    assert there.changes(1, 4).to_arrow().num_rows == home.changes(1, 4).to_arrow().num_rows
    assert place.client.shards() == ["orders"]
    with closing(there.listen(1, until=5)) as events:
        seen = [row["id"] for event in events for row in event.updates.to_pylist()]
    assert seen == [2, 3, 4]


WRITES: dict[str, Callable[[Place], object]] = {
    "create": lambda p: p.client.create_shard("new", SCHEMA, ["id"]),
    "create again": lambda p: p.client.create_shard("orders", SCHEMA, ["id"]),
    "clone": lambda p: p.client.clone("orders", "copy"),
    "insert": lambda p: p.there.insert([{"id": 1, "v": "x"}]),
    "insert large": lambda p: p.there.insert(pa.table({"id": range(50_000), "v": [str(n) for n in range(50_000)]})),
    "append": lambda p: p.there.append([{"id": 1, "v": "x", "__time": 5}], 5, 6),
    "compare_and_append": lambda p: p.there.compare_and_append([{"id": 1, "v": "x", "__time": 5}], 5, 6),
    "advance_upper": lambda p: p.there.advance_upper(9),
    "evolve_schema": lambda p: p.there.evolve_schema(pa.schema([*SCHEMA, ("w", pa.int64())])),
    "configure": lambda p: p.there.configure(history="1d"),
    "forget": lambda p: p.there.forget(2),
    "tag": lambda p: p.there.tag("x", 2),
    "untag": lambda p: p.there.untag("first"),
    "truncate": lambda p: p.there.truncate(2),
    "restore": lambda p: p.there.restore(2),
    "attributes": lambda p: p.there.attributes.update([AttributeUpdate.replace(named_key("job"), 1)]),
    "critical_reader": lambda p: p.there.critical_reader("x"),
    "downgrade_since": lambda p: p.there.downgrade_since(2),
    "drop": lambda p: p.there.drop(),
    "drop by force": lambda p: p.there.drop(force=True),
}


def test_a_write_is_refused_with_the_address_of_home(place: Place) -> None:
    before = sorted(stat.key for stat in place.copy.list(""))
    puts = place.copy.puts
    for verb, write in WRITES.items():
        with pytest.raises(ReadOnly) as told:
            write(place)
        assert told.value.details["home"] == ["http://eu:8787"], verb
    assert (sorted(stat.key for stat in place.copy.list("")), place.copy.puts) == (before, puts)


def test_reading_writes_nothing_at_all(place: Place) -> None:
    puts = place.copy.puts
    rows(place.there)
    with closing(place.there.listen(0, until=4)) as events:
        list(events)
    with suppress(Unavailable):
        place.there.time_at(datetime.fromtimestamp(place.world.true_ms / 1000 + 5, UTC))
    place.region.check()
    assert place.copy.puts == puts


def test_a_time_that_is_not_here_yet_is_waited_for_or_refused(place: Place) -> None:
    with pytest.raises(NotComplete, match="is complete before"):
        rows(place.there, 5)
    with pytest.raises(NotComplete, match="is not over yet"):
        rows(place.there, datetime.fromtimestamp(place.world.true_ms / 1000 + 2, UTC))
    with pytest.raises(UnknownShard, match="as far as home has published"):
        place.client.shard("nothing")
    place.insert(5)
    place.replicate()
    assert rows(place.there, 5) == rows(place.shard, 5)


def test_blobs_that_go_under_a_reader_are_expired_and_never_missing_rows(place: Place) -> None:
    snapshot = place.there.snapshot()
    parts = [stat.key for stat in place.copy.list("s") if stat.key.endswith((".parquet", ".bundle"))]
    place.copy.delete(parts)
    with pytest.raises(Expired, match="not in this copy any more"):
        snapshot.to_arrow()


def test_who_has_read_a_later_version_is_not_shown_an_earlier_one(place: Place) -> None:
    """A client is sent to another server of the region, which has not looked yet."""
    behind = place.server()
    rows(Client(EmbeddedTransport(behind, maintain), AT_ONCE).shard("orders"))
    place.insert(5)
    place.arrive()
    newest = place.region.machine("orders").refresh()
    behind.follower.poll = lambda *, now=False: None  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="the caller has read"):
        behind.machine("orders").check_seen(
            behind.machine("orders").refresh(), SeenVersion(newest.seqno, newest.commit_id)
        )
    place.region.machine("orders").check_seen(newest, SeenVersion(newest.seqno, newest.commit_id))
    with pytest.raises(HistoryLost, match="two histories"):
        place.region.machine("orders").check_seen(newest, SeenVersion(newest.seqno, "f" * 32))


def test_how_far_behind_a_copy_is(place: Place) -> None:
    rows(place.there)
    place.world.pass_ms(61_000)
    place.replicate()
    place.world.pass_ms(2_000)
    assert place.region.follower.poll(now=True) is None
    assert 0 < (place.region.behind_s("orders") or 0) <= 65
    place.world.pass_ms(HOUR_MS)
    assert (place.region.behind_s("orders") or 0) > 3_600
    assert place.machine.location.behind_s("orders") is None


def test_a_region_goes_on_where_home_was_recovered(place: Place) -> None:
    """The log at home began anew, far ahead, under a later epoch."""
    before = {as_of: rows(place.there, as_of) for as_of in range(5)}
    place.world.consensus = MemoryConsensus("mem:new")
    place.machine = place.world.machine()
    [told] = run_recovery(place.machine.location, RecoveryRequest(gap=100)).shards
    assert told.resumes == [105]
    place.shard = place.machine.client.shard("orders")
    place.insert(7)
    place.arrive()
    assert place.region.follower.poll(now=True) is None
    there = place.there
    assert there.upper().element == 106
    assert {as_of: rows(there, as_of) for as_of in range(5)} == before
    assert rows(there, 105) == rows(place.shard, 105)
    place.world.pass_ms(10_000)
    assert EmbeddedTransport(place.region).belongs()[1] == 2


def test_a_journal_that_cannot_be_read_holds_up_nothing_else(place: Place) -> None:
    """A journal that this build cannot read is told and passed over; what came before is shown."""
    before = rows(place.there)
    place.copy.put(f"pub/{'0' * 31}1/j000000000001.journal", b"of a build to come")
    place.world.pass_ms(1_000)
    place.region.follower.poll(now=True)
    assert place.region.follower.bad_blobs == 1
    assert rows(place.there) == before
    place.insert(9)
    place.arrive()
    assert len(rows(place.there)) == len(before) + 1


# --- replication


@pytest.mark.parametrize("seed", thinned(range(6), 6))
def test_what_has_arrived_can_be_read_wherever_replication_is_killed(seed: int) -> None:
    pick = Random(seed)
    regions = Regions(pick)
    regions.create("a")
    regions.create("b")
    for _ in range(size(12, 25)):
        name = pick.choice("ab")
        for act in pick.sample([regions.write, regions.write_bundles, regions.home.merge, regions.home.collect], 2):
            act(name)
        regions.publish()
        target = Counting(regions.copy, pick.choice((None, 1, 2, 5, 9)))
        settings = ReplicateSettings(at_once=1, keep_s=pick.choice((0.0, 30.0)))
        with suppress(PersistError):
            Replicator(regions.home.blob, target, regions.home.clock, settings).round(whole=True)
        regions.copier.came |= {stat.key for stat in regions.copy.list("")}
        regions.home.clock.advance_ms(2_000)
        for one in "ab":
            regions.check(one)
    assert regions.read


def test_nothing_is_sent_twice_and_what_home_deletes_goes_later(place: Place) -> None:
    puts = place.copy.puts
    assert place.replicator.round(whole=True).copied == 0
    assert place.copy.puts == puts
    gone = next(stat.key for stat in place.world.blob.list("pub/") if stat.key.endswith(".journal"))
    place.world.blob.delete([gone])
    assert place.replicator.round(whole=True).waiting == 1
    place.world.pass_ms(299_000)
    assert place.replicator.round(whole=True).deleted == 0
    place.world.pass_ms(2_000)
    assert place.replicator.round(whole=True).deleted == 1
    assert place.copy.stat(gone) is None


def once(place: Place) -> Any:
    """A round by a process of its own, as `persist region replicate --once`."""
    clock, settings = place.machine.location.clock, ReplicateSettings(at_once=1, keep_s=300.0)
    return Replicator(place.world.blob, place.copy, clock, settings).round(whole=True)


def test_what_home_deletes_goes_also_if_each_round_is_a_process_of_its_own(place: Place) -> None:
    """The time since when a blob was gone was lost with the process, so that the copy grew for ever."""
    place.insert(6)
    place.replicate()
    kept = {stat.key for stat in place.copy.list("")}
    first, second = sorted(stat.key for stat in place.world.blob.list("pub/") if stat.key.endswith(".journal"))[:2]
    place.world.blob.delete([first])
    assert (once(place).deleted, once(place).waiting) == (0, 1)
    place.world.pass_ms(200_000)
    place.world.blob.delete([second])
    assert once(place).deleted == 0
    place.world.pass_ms(101_000)
    done = once(place)
    assert (done.deleted, done.waiting) == (1, 1)
    assert (place.copy.stat(first), place.copy.stat(second) is not None) == (None, True)
    place.world.pass_ms(200_000)
    assert once(place).deleted == 1
    assert {stat.key for stat in place.copy.list("")} >= kept - {first, second}
    assert not list(place.copy.list(GONE)), "no note is left"


def test_a_blob_that_came_back_or_was_gone_in_another_epoch_waits_anew(place: Place) -> None:
    gone = min(stat.key for stat in place.world.blob.list("pub/") if stat.key.endswith(".journal"))
    data = place.world.blob.get(gone)
    place.world.blob.delete([gone])
    assert once(place).waiting == 1
    place.world.blob.put(gone, data)
    place.world.pass_ms(301_000)
    assert (once(place).waiting, list(place.copy.list(GONE))) == (0, [])
    place.world.blob.delete([gone])
    assert once(place).waiting == 1
    [note] = [stat.key for stat in place.copy.list(GONE)]
    place.copy.put(f"{GONE}7/x", place.copy.get(note))
    place.copy.delete([note])
    place.world.pass_ms(301_000)
    done = once(place)
    assert (done.deleted, done.waiting) == (0, 1)
    [note] = [stat.key for stat in place.copy.list(GONE)]
    assert note.startswith(f"{GONE}1/")


def test_a_copy_that_went_on_by_itself_is_left_alone(place: Place) -> None:
    place.copy.put("epoch/2", b"promoted")
    with pytest.raises(Conflict, match="has become home"):
        place.replicator.round()


def test_stores_that_do_not_belong_together_are_refused(place: Place) -> None:
    clock = place.machine.location.clock
    with pytest.raises(InvalidUsage, match="has no location"):
        Replicator(MemoryBlob("mem:x"), place.copy, clock).round()
    full = MemoryBlob("mem:y")
    full.put("x", b"1")
    with pytest.raises(InvalidUsage, match="not empty"):
        Replicator(place.world.blob, full, clock).round()
    other = MemoryBlob("mem:z")
    other.put("copy-of", b"f" * 32)
    with pytest.raises(InvalidUsage, match="has another location"):
        Replicator(place.world.blob, other, clock).round()
    assert [stat.key for stat in full.list("")] == ["x"]


def test_the_wrong_way_round_nothing_is_deleted_at_home(place: Place) -> None:
    place.insert(7)  # home has what the copy does not: to a copier it would be gone
    before = [stat.key for stat in place.world.blob.list("")]
    with pytest.raises(InvalidUsage, match="not swapped"):
        Replicator(place.copy, place.world.blob, place.machine.location.clock, ReplicateSettings(keep_s=0.0)).round()
    assert [stat.key for stat in place.world.blob.list("")] == before


@pytest.mark.parametrize(
    "wrong",
    [{"whole_s": -1.0}, {"keep_s": float("nan")}, {"rate": 5}, {"at_once": 0}, {"at_once": 65}],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidUsage):
        ReplicateSettings(**wrong).check()
