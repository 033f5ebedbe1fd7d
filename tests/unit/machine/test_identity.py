"""Two stores are one location: they are bound once, compared at every open and before any deletion."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import pyarrow as pa
import pytest

from blob import Blob
from blob.memory_blobs import MemoryBlob
from blob.metrics import ForwardingBlob
from compactor.orphans import Sweeper, SweepSettings
from consensus import ConsensusIndeterminate
from consensus.memory_logs import MemoryConsensus
from consensus.metrics import ForwardingConsensus
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.commit.location import Location
from persist.commit.location_identity import CONFIRM_EVERY_S, ID_KEY, LOG_KEY
from persist.copies.recovery import run_recovery
from persist.core.blob_keys import is_rollup_key, part_key, shard_prefix
from persist.core.errors import Corruption, InvalidUsage, ReadOnly
from persist.core.ids import PartId, WriterId, shard_id_of
from persist.core.state import Policy
from persist.formats.state_frames import decode_binding
from persist.maintenance.collector import Collector
from tests.support.epochs import raise_epoch
from tests.support.location import AscendingIds, TestClock, client_of, memory_location
from tests.support.waiting import WAIT_S

SCHEMA = pa.schema([("id", pa.int64())])
HOUR_MS = 3_600_000
ORPHAN = part_key(shard_id_of("orders"), WriterId("w" + "0" * 32), PartId("p" + "0" * 32))
_origins = iter(range(1, 10_000))


class Stores:
    """A blob store and a consensus store, and processes that open them."""

    def __init__(self, blob: Blob | None = None, log: MemoryConsensus | None = None) -> None:
        self.clock = TestClock()
        self.blob = blob if blob is not None else MemoryBlob("mem:", now_ms=self.clock.now_ms)
        self.log = log if log is not None else MemoryConsensus("mem:")

    def open(self) -> Location:
        policy = Policy(inline_part_bytes_max=0, rollup_every=4)
        return memory_location(
            blob=self.blob, consensus=self.log, clock=self.clock, ids=AscendingIds(next(_origins)), policy=policy
        )

    def client(self) -> Client:
        return client_of(self.open())

    def filled(self, name: str = "orders", inserts: int = 10) -> Stores:
        shard = self.client().create_shard(name, SCHEMA, ["id"])
        for number in range(inserts):
            shard.insert(pa.table({"id": [number]}))
        return self

    def unbound(self) -> Stores:
        """As an earlier build left it: without a binding."""
        self.blob.delete([stat.key for stat in self.blob.list("") if not stat.key.startswith("s")])
        self.log = _without_binding(self.log)
        return self

    def keys(self) -> list[str]:
        return [stat.key for stat in self.blob.list("s")]


def _without_binding(log: MemoryConsensus) -> MemoryConsensus:
    copy = MemoryConsensus("mem:")
    names = log.keys()
    for key in names:
        for entry in log.scan(key, 0, 1_000):
            copy.compare_and_set(key, entry.seqno, entry.data)
    return copy


def test_the_first_process_binds_the_stores_and_the_others_find_them_bound() -> None:
    stores = Stores()
    assert stores.client().shards() == []
    bound = stores.log.head(LOG_KEY)
    assert bound is not None
    assert bound.data == stores.blob.get("epoch/1")
    assert decode_binding(bound.data).epoch == 1
    assert decode_binding(bound.data).location_id.encode() == stores.blob.get(ID_KEY)
    stores.filled()
    assert stores.log.head(LOG_KEY) == bound


def test_many_processes_that_open_new_stores_at_once_agree() -> None:
    stores = Stores()
    found: list[object] = []
    threads = [Thread(target=lambda: found.append(stores.open().identity.check())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(found) == 8
    assert found.count(found[0]) == 8


class Dies(ForwardingBlob):
    """A blob store whose user is killed at its n-th write."""

    left = 0

    def put(self, key: str, data: bytes | memoryview) -> None:
        if self.left == 0:
            raise SystemExit
        self.left -= 1
        super().put(key, data)


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_who_binds_may_be_killed_anywhere(writes: int) -> None:
    stores = Stores()
    truth, stores.blob = stores.blob, Dies(stores.blob)
    stores.blob.left = writes
    with pytest.raises(SystemExit):
        stores.client().shards()
    stores.blob = truth
    stores.filled()
    assert stores.client().shards() == ["orders"]


def test_a_binding_of_unknown_outcome_is_read_again() -> None:
    class Silent(ForwardingConsensus):
        def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
            won = super().compare_and_set(key, seqno, data, after)
            if key == LOG_KEY:
                raise ConsensusIndeterminate("the answer was lost")
            return won

    stores = Stores()
    assert memory_location(blob=stores.blob, consensus=Silent(stores.log)).identity.check().epoch == 1


def another() -> Stores:
    return Stores().filled("others")


def staging_on_the_blobs_of(ours: Stores) -> Stores:
    return Stores(ours.blob)


def the_blobs_of_another(ours: Stores) -> Stores:
    return Stores(another().blob, ours.log)


def an_empty_blob_store(ours: Stores) -> Stores:
    return Stores(None, ours.log)


def an_empty_consensus_store(ours: Stores) -> Stores:
    return Stores(ours.blob)


def blobs_without_an_epoch_and_no_log(ours: Stores) -> Stores:
    return Stores(ours.unbound().blob)


def logs_without_a_binding(ours: Stores) -> Stores:
    return Stores(None, ours.unbound().log)


@pytest.mark.parametrize(("mispaired", "told"), [
    (staging_on_the_blobs_of, "a prefix, of its own"),
    (the_blobs_of_another, "stores of two locations"),
    (an_empty_blob_store, "was emptied"),
    (an_empty_consensus_store, "has lost all.*persist backup recover"),
    (blobs_without_an_epoch_and_no_log, "the consensus store is empty"),
    (logs_without_a_binding, "was bound to none"),
], ids=lambda value: value.__name__ if callable(value) else "")  # fmt: skip
def test_stores_that_do_not_belong_together_are_refused(mispaired: Callable[[Stores], Stores], told: str) -> None:
    ours = Stores().filled()
    wrong = mispaired(ours)
    before = wrong.keys(), wrong.log.keys()
    for call in (
        lambda: wrong.client().shards(),
        lambda: wrong.client().shard("orders"),
        lambda: wrong.client().create_shard("new", SCHEMA, ["id"]),
        lambda: wrong.open().check(),
    ):
        with pytest.raises((InvalidUsage, Corruption), match=told):
            call()
    assert (wrong.keys(), wrong.log.keys()) == before


def test_of_two_logs_on_one_blob_store_the_second_cannot_delete_what_the_first_has() -> None:
    """Staging on production's bucket: dropping a shard there deleted the shard of that name in production."""
    production = Stores().filled()
    staging = Stores(production.blob, MemoryConsensus("mem:staging"))
    with pytest.raises(InvalidUsage, match="belong together"):
        staging.client().create_shard("orders", SCHEMA, ["id"]).drop()
    with pytest.raises(InvalidUsage, match="belong together"):
        Sweeper(staging.open(), SweepSettings(age_ms=48 * HOUR_MS)).sweep_unborn()
    assert production.client().shard("orders").snapshot().to_arrow().num_rows == 10


class Exchanged(ForwardingBlob):
    """A blob store that becomes another one under a running process, as when a mount point changes."""

    def become(self, other: Blob) -> None:
        self._inner = other


def _collect(location: Location) -> None:
    Collector(location).run("orders")


def _sweep(location: Location) -> None:
    Sweeper(location, SweepSettings(age_ms=48 * HOUR_MS)).sweep("orders")


@pytest.mark.parametrize("maintenance", [_collect, _sweep], ids=["collector", "sweep"])
def test_stores_are_compared_again_before_anything_is_deleted(maintenance: Callable[[Location], None]) -> None:
    other = another()
    other.blob.put(ORPHAN, b"rows that somebody there needs")
    exchanged = Exchanged(MemoryBlob("mem:"))
    ours = Stores(exchanged).filled()
    location = ours.open()
    shard = client_of(location).shard("orders")
    shard.drop()
    for stat in list(exchanged.list("s")):
        other.blob.put(stat.key, exchanged.get(stat.key))
    ours.clock.advance_ms(100 * HOUR_MS)
    other.clock.advance_ms(100 * HOUR_MS)
    exchanged.become(other.blob)
    before = other.keys()
    with pytest.raises(InvalidUsage, match="stores of two locations"):
        maintenance(location)
    assert set(before) <= set(other.keys())


def test_one_comparison_serves_the_deletions_of_some_seconds() -> None:
    reads: list[str] = []

    class Counting(ForwardingConsensus):
        def head(self, key: str) -> object:  # type: ignore[override]
            reads.append(key)
            return super().head(key)

    clock = TestClock()
    location = memory_location(consensus=Counting(MemoryConsensus("mem:")), clock=clock)
    for _ in range(100):
        location.identity.confirm()
    assert reads.count(LOG_KEY) <= 3
    reads.clear()
    clock.advance_ms(int(CONFIRM_EVERY_S * 1000))
    location.identity.confirm()
    assert reads == [LOG_KEY]


# --- epochs


def test_a_raised_epoch_is_in_both_stores() -> None:
    stores = Stores().filled()
    assert raise_epoch(stores.open()) == 2
    assert raise_epoch(stores.open()) == 3
    assert stores.open().identity.check().epoch == 3
    assert stores.client().shard("orders").snapshot().to_arrow().num_rows == 10
    stores.client().shard("orders").insert(pa.table({"id": [77]}))


def test_a_log_of_a_lower_epoch_only_reads() -> None:
    stores = Stores().filled()
    old = Stores(stores.blob, _copy(stores.log))
    running = old.open()
    running.identity.check()
    raise_epoch(stores.open())
    shard = old.client().shard("orders")
    assert shard.snapshot(0).to_arrow().num_rows == 1
    before = old.keys()
    for call in (
        lambda: shard.insert(pa.table({"id": [1]})),
        lambda: old.client().create_shard("new", SCHEMA, ["id"]),
        lambda: shard.drop(),
    ):
        with pytest.raises(ReadOnly, match="this process only reads"):
            call()
    old.clock.advance_ms(HOUR_MS)
    with pytest.raises(ReadOnly, match="this process only reads"):
        running.identity.confirm()  # it was open when the epoch was raised
    assert set(before) <= set(old.keys())
    assert not any(is_rollup_key(key) for key in set(old.keys()) - set(before))


def _copy(log: MemoryConsensus) -> MemoryConsensus:
    copy = _without_binding(log)
    for entry in log.scan(LOG_KEY, 0, 10):
        copy.compare_and_set(LOG_KEY, entry.seqno, entry.data)
    return copy


# --- a log that is older than what the blob store has seen


def _cut(log: MemoryConsensus, name: str, last: int) -> MemoryConsensus:
    copy = _copy(log)
    cut = MemoryConsensus("mem:")
    for key in (*copy.keys(), LOG_KEY):
        for entry in copy.scan(key, 0, 1_000):
            if key != name or entry.seqno <= last:
                cut.compare_and_set(key, entry.seqno, entry.data)
    return cut


def test_a_log_that_ends_before_a_rollup_is_refused_with_the_remedy() -> None:
    stores = Stores().filled(inserts=20).filled("quiet")
    stores.log = _cut(stores.log, "orders", 6)
    with pytest.raises(Corruption, match="the consensus store has lost commits") as told:
        stores.client().shard("orders")
    assert stores.client().shard("quiet").snapshot().to_arrow().num_rows == 10
    assert "persist backup recover" in told.value.message
    stores.log = MemoryConsensus("mem:empty")
    run_recovery(stores.open())  # the remedy works; nothing was published here, so rollups tell what they can
    assert stores.client().shard("orders").snapshot().to_arrow().num_rows >= 16


def test_a_log_that_has_lost_a_whole_shard_is_told_and_the_shard_is_not_made_anew() -> None:
    stores = Stores().filled(inserts=20).filled("quiet")
    stores.log = _cut(stores.log, "orders", 0)
    with pytest.raises(Corruption, match="is empty"):
        stores.client().create_shard("orders", SCHEMA, ["id"])
    with pytest.raises(Corruption, match="is empty"):
        stores.client().shard("orders")


def test_a_first_rollup_without_a_log_is_what_a_killed_creator_leaves() -> None:
    stores = Stores().filled("quiet")
    Client(EmbeddedTransport(memory_location(blob=stores.blob, consensus=_Refusing(stores.log)))).shards()
    with pytest.raises(SystemExit):
        Client(EmbeddedTransport(memory_location(blob=stores.blob, consensus=_Refusing(stores.log)))).create_shard(
            "orders", SCHEMA, ["id"]
        )
    left = [stat.key for stat in stores.blob.list(shard_prefix(shard_id_of("orders")))]
    assert len(left) == 1
    assert is_rollup_key(left[0])
    stores.filled()


class _Refusing(ForwardingConsensus):
    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        raise SystemExit
