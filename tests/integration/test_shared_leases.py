"""Reads that come often share a lease: they cost a shard no commits, and nobody hears of it."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from persist.client.embedded import EmbeddedTransport
from persist.client.lease_pool import BUSY_READS, KEPT_S, TAKES_S, LeasePool
from persist.client.transport import OneShard
from persist.core.state import State
from tests.integration.test_fork import forked
from tests.support.clocks import Machine, World
from tests.support.server import url_of
from tests.support.waiting import wait_until

SCHEMA = pa.schema([("id", pa.int64())])
READS = 300
FEW = 3 * BUSY_READS


BY_BOTH = pytest.mark.parametrize("url", ["directory", "server"], indirect=True)


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with url_of(getattr(request, "param", "directory"), tmp_path) as url:
        yield url


class Pooled:
    """A machine of a world whose time stands still, with a pool that is tended by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(LeasePool, "_begin_to_tend", lambda pool: None)
        self.world = World()
        self.machine: Machine = self.world.machine()
        transport = self.machine.client.transport
        assert isinstance(transport, EmbeddedTransport)
        self.pool = transport.leases = LeasePool(self.machine.clock)
        self.shard = self.machine.client.create_shard("orders", SCHEMA, ["id"])

    @property
    def state(self) -> State:
        return self.machine.location.machine("orders").refresh()

    @property
    def readers(self) -> int:
        return len(self.state.leased_readers)

    def read(self, times: int = 1, as_of: int | None = None) -> None:
        for _ in range(times):
            self.shard.snapshot(as_of).to_arrow()

    def pass_s(self, seconds: float) -> None:
        self.world.pass_ms(int(seconds * 1000))
        self.pool.tend()


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Pooled:
    made = Pooled(monkeypatch)
    made.shard.insert([{"id": 0}])
    return made


def test_many_small_reads_are_a_few_commits_and_leave_a_handful_of_readers(place: Pooled) -> None:
    before = place.state.seqno
    place.read(READS)
    assert place.state.seqno - before <= FEW
    assert place.readers == 1
    place.pass_s(KEPT_S)
    assert place.readers == 0


def test_reads_while_others_write_see_what_was_written(place: Pooled) -> None:
    for number in range(1, 5 * BUSY_READS):
        place.shard.insert([{"id": number}])
        assert place.shard.snapshot().to_arrow().num_rows == number + 1
    assert place.readers == 1


def test_reads_that_never_cease_take_a_new_lease_now_and_then_and_history_moves_on(place: Pooled) -> None:
    held = []
    for number in range(60):
        place.shard.insert([{"id": number}])
        place.read(2)
        place.pass_s(TAKES_S / 10)
        assert place.readers <= 2
        held.append(min((one.since for one in place.state.leased_readers.values()), default=None))
    assert len(set(held)) > 3, "no reader holds the first time for ever"


def test_a_long_read_keeps_what_it_needs_after_the_others_have_gone(place: Pooled) -> None:
    place.read(2 * BUSY_READS)
    slow = place.shard.snapshot()
    place.shard.insert([{"id": 1}])
    place.pass_s(2 * TAKES_S)
    place.read(2 * BUSY_READS)
    place.shard.downgrade_since(1)
    place.pass_s(2 * TAKES_S)
    assert place.state.since <= persist.Antichain(slow.as_of)
    assert slow.to_arrow().num_rows == 1
    place.pass_s(KEPT_S)
    assert place.readers == 0


def test_a_reader_that_ended_keeps_nobody_from_dropping_or_forgetting(place: Pooled) -> None:
    place.shard.insert([{"id": 1}])
    place.read(2 * BUSY_READS)
    assert place.readers == 1
    assert place.shard.downgrade_since(1) == persist.Antichain(1)
    place.shard.critical_reader("default").expire()
    place.read(2 * BUSY_READS)
    place.shard.drop()
    with pytest.raises(persist.UnknownShard):
        place.shard.snapshot()


def test_another_life_of_the_name_shares_nothing_with_the_last_one(place: Pooled) -> None:
    place.read(2 * BUSY_READS)
    place.shard.drop()
    other = place.machine.client.create_shard("orders", SCHEMA, ["id"])
    other.insert([{"id": 7}])
    for _ in range(2 * BUSY_READS):
        assert other.snapshot().to_arrow().num_rows == 1


def test_a_time_before_an_erasure_is_not_read_anew_though_a_shared_lease_holds_it(place: Pooled) -> None:
    place.shard.insert([{"id": 1}])
    place.read(2 * BUSY_READS)
    reading = place.shard.snapshot()
    place.shard.erase(keys=[(1,)])
    for _ in range(2 * BUSY_READS):
        with pytest.raises(persist.NotReadable):
            place.shard.snapshot(reading.as_of)
        assert place.shard.snapshot().to_arrow()["id"].to_pylist() == [0]
    assert reading.to_arrow().num_rows == 2, "who held the time before reads on"
    place.pass_s(2 * TAKES_S)
    assert place.readers == 0, "so the erasure goes on"


def test_snapshots_of_several_splits_have_leases_of_their_own(place: Pooled) -> None:
    place.read(2 * BUSY_READS)
    far = place.shard.snapshot(num_splits=2)
    (near,) = place.shard.snapshot().splits
    assert {split.reader for split in far.splits}.isdisjoint({near.reader})
    assert far.splits[0].reader in place.state.leased_readers


def test_a_split_that_went_elsewhere_can_be_read_while_its_snapshot_is_open(place: Pooled) -> None:
    place.read(2 * BUSY_READS)
    snapshot = place.shard.snapshot()
    (split,) = pickle.loads(pickle.dumps(snapshot.splits))
    place.pass_s(3 * TAKES_S)
    elsewhere = place.world.machine().client
    assert sum(table.num_rows for table in split.read(elsewhere.transport)) == 1
    snapshot.close()


def test_after_the_machine_was_suspended_for_longer_than_the_lease_reads_take_another_one(place: Pooled) -> None:
    place.read(2 * BUSY_READS)
    place.machine.suspended(3_600_000)
    watcher = place.world.machine()
    watcher.shard("orders").insert([{"id": 1}])
    place.world.pass_ms(3_600_000)
    watcher.shard("orders").insert([{"id": 2}])
    for _ in range(2 * BUSY_READS):
        assert place.shard.snapshot().to_arrow().num_rows == 3


def test_a_read_that_fails_gives_its_part_of_the_lease_back(place: Pooled) -> None:
    place.read(2 * BUSY_READS)
    for _ in range(BUSY_READS):
        with pytest.raises(persist.InvalidUsage):
            place.shard.snapshot(columns=["no such"])
    place.pass_s(KEPT_S)
    assert place.readers == 0


@BY_BOTH
def test_many_threads_read_at_once(url: str) -> None:
    with persist.connect(url) as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        shard.insert([{"id": 0}])
        seen: list[int] = []

        def read() -> None:
            for _ in range(25):
                seen.append(client.shard("orders").snapshot().to_arrow().num_rows)

        threads = [threading.Thread(target=read) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == [1] * 400
        assert isinstance(shard._transport, OneShard)
        pool = shard._transport.leases
        assert pool is not None
        wait_until(lambda: pool.tend() is None, "the lease is given back")
    with persist.connect(url) as client:
        client.shard("orders").drop()


EXITS = """
import sys, persist
client = persist.connect(sys.argv[1])
shard = client.shard("orders")
for _ in range(40):
    shard.snapshot().to_arrow()
"""


@pytest.mark.smoke
@pytest.mark.proof
def test_a_process_that_ends_leaves_no_shared_lease_behind(url: str) -> None:
    with persist.connect(url) as client:
        client.create_shard("orders", SCHEMA, ["id"]).insert([{"id": 0}])
        subprocess.run([sys.executable, "-c", EXITS, url], check=True)
        client.shard("orders").drop()  # is refused while readers hold it


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_leaves_the_shared_leases_to_its_parent(url: str) -> None:
    with persist.connect(url) as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        shard.insert([{"id": 0}])
        for _ in range(3 * BUSY_READS):
            shard.snapshot().to_arrow()
        held = shard.snapshot()

        def use(_number: int) -> str:
            with pytest.raises(persist.InvalidUsage, match="forked"):
                shard.snapshot()
            held.close()
            client.close()
            return "refused"

        assert set(forked(use)) == {"refused"}
        assert held.to_arrow().num_rows == 1


def test_after_the_client_was_closed_the_last_user_gives_it_back(place: Pooled) -> None:
    place.read(2 * BUSY_READS)
    last = place.shard.snapshot()
    place.pool.close()
    place.read()
    assert place.readers == 1
    last.close()
    assert place.readers == 0
