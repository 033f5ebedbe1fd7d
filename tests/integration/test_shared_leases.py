"""Reads of one process share leases: they cost a shard no commits, and hold no more than somebody needs."""

from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

import persist
from persist.client import lease_pool
from persist.client.lease_pool import CLOSE_S, KEPT_S, PARTS_OF_LEASE, POINTS_MAX, LeaseKind
from persist.client.read_leases import CLOSE_RETRY_S
from persist.core import commands as c
from persist.core.ids import ShardId
from persist.core.state import State
from persist.formats.records import encoded
from rpc.app import create_app
from rpc.settings import ServerSettings
from tests.support.asking import typed
from tests.support.clocks import Machine, World
from tests.support.location import UntendedPool
from tests.support.server import url_of
from tests.support.waiting import wait_until

SCHEMA = pa.schema([("id", pa.int64())])
READS = 300
LEASE_S = 900
MOVES_S = LEASE_S / PARTS_OF_LEASE


BY_BOTH = pytest.mark.parametrize("url", ["directory", "server"], indirect=True)


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with url_of(getattr(request, "param", "directory"), tmp_path) as url:
        yield url


class Pooled:
    """A machine of a world whose time stands still, with a pool that is tended by hand."""

    def __init__(self) -> None:
        self.world = World()
        self.machine: Machine = self.world.machine()
        transport = self.machine.client.transport
        self.pool = transport.leases = UntendedPool(self.machine.clock)
        self.shard = self.machine.client.create_shard("orders", SCHEMA, ["id"])
        self.other = self.world.machine().client.shard("orders")

    @property
    def state(self) -> State:
        return self.machine.location.machine("orders").refresh()

    @property
    def readers(self) -> int:
        return len(self.state.leased_readers)

    @property
    def held(self) -> list[int]:
        """The times that leases hold."""
        return sorted(one.since.element or 0 for one in self.state.leased_readers.values())

    def write(self, times: int = 1) -> None:
        for number in range(times):
            self.other.insert([{"id": number}])

    def read(self, times: int = 1, as_of: int | None = None) -> None:
        for _ in range(times):
            self.shard.snapshot(as_of).to_arrow()

    def pass_s(self, seconds: float) -> None:
        self.world.pass_ms(int(seconds * 1000))
        self.pool.tend()


@pytest.fixture
def place() -> Pooled:
    made = Pooled()
    made.shard.insert([{"id": 0}])
    return made


def test_many_reads_are_one_commit_and_a_minute_after_the_last_one_the_hold_is_gone(place: Pooled) -> None:
    before = place.state.seqno
    place.read(READS)
    assert place.state.seqno - before == 1
    place.pass_s(KEPT_S - 1)
    assert place.readers == 1
    place.pass_s(1)
    assert place.readers == 0


def test_an_edit_reads_by_a_shared_lease_and_is_one_commit(place: Pooled) -> None:
    place.shard.upsert([{"id": 1}])
    before = place.state
    for number in range(2, 5):
        place.shard.upsert([{"id": number}])
    place.shard.delete(keys=[4])
    place.shard.delete(keys=[4])  # nothing is there
    assert place.state.seqno - before.seqno == 4 + 1, "the delete has a lease of its own purpose"
    assert place.state.writers == before.writers, "an edit registers no writer"
    assert len(place.state.outcomes) - len(before.outcomes) == 4


def test_snapshots_over_http_share_a_lease_of_the_server(place: Pooled) -> None:
    with typed(TestClient(create_app(place.machine.location, ServerSettings()), base_url="http://127.0.0.1")) as http:
        path = "/v1/shards/orders"
        assert http.get(f"{path}/snapshot").status_code == http.get(f"{path}/count").status_code == 200
        before = place.state.seqno
        for number in range(3):
            place.write()
            assert http.get(f"{path}/count").json() == {"as_of": number + 1, "count": number + 2}
            assert http.get(f"{path}/snapshot").headers["persist-as-of"] == str(number + 1)
        assert place.state.seqno - before == 3, "those of the writer"
        assert [reader.purpose for reader in place.state.leased_readers.values()] == ["http snapshot", "count"]
        assert http.post(f"{path}/forget", params={"before": 2}).json()["since"] == [2], "nobody reads before it now"
        drop = c.Drop(shard=place.state.shard_id)
        assert http.post(f"{path}/commands", content=encoded(drop)).status_code == 200, "nobody reads now"
    assert place.state.is_closed


def test_earlier_times_and_tags_join_too(place: Pooled) -> None:
    place.write(5)
    place.shard.tag("first", at=0)
    place.read()
    place.read(as_of=2)
    place.shard.snapshot(tag="first").to_arrow()
    before = place.state.seqno
    for as_of in (2, 3, 5, None):
        place.read(as_of=as_of)
    assert place.shard.snapshot(tag="first").to_arrow().num_rows == 1
    assert place.state.seqno == before
    assert place.held == [0, 2], "the lease of the latest time was given up for the one of the earlier time"


def test_a_time_that_is_kept_alone_is_read_at_itself_only(place: Pooled) -> None:
    place.write(5)
    place.shard.tag("first", at=0)
    place.shard.tag("second", at=2)
    place.shard.downgrade_since(4)
    for _ in range(2):
        assert place.shard.snapshot(tag="first").to_arrow().num_rows == 1
        assert place.shard.snapshot(0).to_arrow().num_rows == 1
        assert place.shard.snapshot(2).as_of == 2
        for lost in (1, 3):
            with pytest.raises(persist.NotReadable):
                place.shard.snapshot(lost)
    place.shard.untag("first")
    with pytest.raises(persist.NotReadable):
        place.shard.snapshot(tag="first")


def test_more_single_times_than_are_shared_are_read_as_well(place: Pooled) -> None:
    times = range(POINTS_MAX + 3)
    place.write(len(times) + 1)
    for at in times:
        place.shard.tag(f"t{at}", at=at)
    place.shard.downgrade_since(len(times))
    for _ in range(2):
        assert [place.shard.snapshot(at).as_of for at in times] == list(times)
    assert place.readers == POINTS_MAX


def test_reads_that_never_cease_let_history_go_on(place: Pooled) -> None:
    for _ in range(40):
        place.write()
        place.read(2)
        place.pass_s(MOVES_S / 5)
        assert place.readers == 1
        upper = place.state.upper.element or 0
        assert place.held[0] >= upper - 1 - 5 - 2, "a quarter of the lease, and a minute"


def test_reads_of_a_tag_that_never_cease_let_go_of_earlier_states(place: Pooled) -> None:
    place.shard.tag("first", at=0)
    for _ in range(20):
        place.write(2)
        place.shard.snapshot(tag="first").to_arrow()
        place.pass_s(MOVES_S / 5)
        assert place.readers == 1
        assert place.state.seqno - place.state.seqno_since <= 3 * 6, "a quarter of the lease, and a minute"


def test_beside_a_busy_writer_a_lease_moves_on_sooner(place: Pooled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_pool, "COMMITS_HELD_MAX", 40)
    place.read()
    begun = place.state.seqno_since
    place.write(30)
    place.read()
    place.pass_s(1)
    assert place.state.seqno_since == begun, "a few commits cost no move"
    place.write(10)
    seen = place.state.seqno
    place.read()
    place.pass_s(1)
    assert place.state.seqno_since == seen


@pytest.mark.parametrize(("as_of", "held"), [(None, 49), (4, 4), ("first", 0)])
def test_a_read_that_is_being_planned_holds_no_more_than_it_may_need(
    place: Pooled, monkeypatch: pytest.MonkeyPatch, as_of: int | str | None, held: int
) -> None:
    """With many readers there is always one of them."""
    monkeypatch.setattr(lease_pool, "COMMITS_HELD_MAX", 40)
    place.write(9)
    place.shard.tag("first", at=0)
    place.read(as_of=0)
    place.pass_s(KEPT_S / 2)
    place.read()
    place.pass_s(KEPT_S / 2)
    place.write(40)
    seen = place.state.seqno
    place.read()
    [kind] = place.pool._known
    planned = place.pool.take(kind, as_of)
    assert planned is not None
    place.pass_s(KEPT_S / 2)
    assert (place.state.seqno_since, place.held) == (seen, [held])
    place.pool.give_back(planned)


def test_a_long_read_keeps_what_it_needs_after_the_others_have_gone(place: Pooled) -> None:
    place.read()
    slow = place.shard.snapshot()
    place.write()
    place.pass_s(1.5 * MOVES_S)
    place.read()
    place.shard.downgrade_since(1)
    place.pass_s(1.5 * MOVES_S)
    assert place.state.since <= persist.Antichain(slow.as_of)
    assert slow.to_arrow().num_rows == 1
    place.pass_s(KEPT_S)
    assert place.readers == 0


def test_a_reader_that_ended_keeps_nobody_from_dropping_or_forgetting(place: Pooled) -> None:
    place.write()
    place.read()
    assert place.readers == 1
    assert place.shard.downgrade_since(1) == persist.Antichain(1)
    place.shard.critical_reader("default").expire()
    place.read()
    place.shard.drop()
    with pytest.raises(persist.UnknownShard):
        place.shard.snapshot()


def test_a_time_before_an_erasure_is_not_read_anew_though_a_shared_lease_holds_it(place: Pooled) -> None:
    place.shard.insert([{"id": 1}])
    reading = place.shard.snapshot()
    place.other.erase(keys=[(1,)])
    for _ in range(2):
        with pytest.raises(persist.NotReadable):
            place.shard.snapshot(reading.as_of)
        assert place.shard.snapshot().to_arrow()["id"].to_pylist() == [0]
    assert reading.to_arrow().num_rows == 2, "who held the time before reads on"
    place.pass_s(2 * MOVES_S)
    assert place.readers == 0, "so the erasure goes on"


def test_snapshots_of_several_splits_have_leases_of_their_own(place: Pooled) -> None:
    place.read()
    far = place.shard.snapshot(num_splits=2)
    (near,) = place.shard.snapshot().splits
    assert {split.reader for split in far.splits}.isdisjoint({near.reader})
    assert far.splits[0].reader in place.state.leased_readers


def test_a_lease_that_somebody_took_away_is_noticed_by_the_next_read(place: Pooled) -> None:
    place.read()
    [reader] = place.state.leased_readers
    place.machine.location.machine("orders").apply(persist.core.commands.ExpireReader(reader))
    place.read()
    assert place.readers == 1
    assert reader not in place.state.leased_readers


def test_an_open_snapshot_that_nobody_reads_lapses_as_any_lease(place: Pooled) -> None:
    forgotten = place.shard.snapshot()
    for _ in range(40):
        place.write()
        place.read()
        place.pass_s(LEASE_S / 20)
    assert place.held[0] > forgotten.as_of
    with pytest.raises(persist.Expired):
        forgotten.to_arrow()
    place.pass_s(KEPT_S)
    assert place.readers == 0


def test_a_split_that_went_elsewhere_holds_for_as_long_as_it_is_renewed_there(place: Pooled) -> None:
    """Its snapshot is forgotten here, so that nobody here can give it back."""
    place.read()
    (split,) = pickle.loads(pickle.dumps(place.shard.snapshot().splits))
    elsewhere = place.world.machine().client
    for _ in range(20):
        place.write()
        place.read()
        place.pass_s(LEASE_S / 4)
        assert sum(table.num_rows for table in split.read(elsewhere.transport)) == 1
    for _ in range(3):
        place.pass_s(LEASE_S)
        place.write()
    with pytest.raises(persist.Expired):
        list(split.read(elsewhere.transport))


def test_a_garbage_collection_gives_back_whatever_this_thread_holds(place: Pooled) -> None:
    """It may run while the thread has the lock of the pool; it waited there for itself."""
    place.read()
    snapshot = place.shard.snapshot()
    with place.pool._changed:
        begun = time.monotonic()
        snapshot._lease.release()
        assert time.monotonic() - begun < CLOSE_RETRY_S, "it does not wait for this thread"
    place.pass_s(KEPT_S)
    place.pass_s(KEPT_S)
    assert place.readers == 0


def test_closing_ends_in_bounded_time_where_nobody_answers(place: Pooled, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = [place.machine.client.create_shard(f"s{number}", SCHEMA, ["id"]) for number in range(10)]
    for shard in shards:
        shard.insert([{"id": 1}])
        shard.snapshot().to_arrow()

    def away(*_given: object) -> None:
        place.world.pass_ms(4_000)
        raise persist.Unavailable("nobody answers")

    monkeypatch.setattr(place.machine.client.transport, "apply", away)
    before = place.world.true_ms
    place.pool.close()
    assert place.world.true_ms - before <= 1000 * (CLOSE_S + 4)


def test_what_is_read_of_one_shard_costs_nothing_for_others(place: Pooled) -> None:
    """Each new lease looked through those of all shards."""
    place.read()
    looked: list[object] = []
    place.pool._end(lambda shared: bool(looked.append(shared)), LeaseKind("other", ShardId("s"), "snapshot", 1))
    assert looked == []


def test_a_read_that_fails_gives_its_part_of_the_lease_back(place: Pooled) -> None:
    place.read()
    with pytest.raises(persist.InvalidUsage):
        place.shard.snapshot(columns=["no such"])
    place.pass_s(KEPT_S)
    assert place.readers == 0


EXITS = """
import sys, persist
client = persist.connect(sys.argv[1])
client.shard("orders").snapshot().to_arrow()
"""


def read_once(url: str) -> None:
    """Run by a child of `multiprocessing`, whose end runs no `atexit`."""
    persist.connect(url).shard("orders").snapshot().to_arrow()


@BY_BOTH
@pytest.mark.smoke
@pytest.mark.proof
@pytest.mark.parametrize("how", ["program", "child"])
def test_a_process_that_ends_leaves_no_shared_lease_behind(url: str, how: str) -> None:
    with persist.connect(url) as client:
        client.create_shard("orders", SCHEMA, ["id"]).insert([{"id": 0}])
        if how == "program":
            subprocess.run([sys.executable, "-c", EXITS, url], check=True)
        else:
            child = multiprocessing.get_context("spawn").Process(target=read_once, args=(url,))
            child.start()
            child.join()
            assert child.exitcode == 0
        client.shard("orders").drop()  # is refused while readers hold it


def test_after_the_client_was_closed_the_last_user_gives_it_back(place: Pooled) -> None:
    place.read()
    last = place.shard.snapshot()
    place.pool.close()
    place.read()
    assert place.readers == 1
    last.close()
    assert place.readers == 0


def test_leases_of_an_idle_client_are_given_back_by_themselves(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persist.client.lease_pool.KEPT_S", 0.05)
    monkeypatch.setattr("persist.client.lease_pool.LOOK_S", 0.05)
    with persist.connect(url) as client, persist.connect(url) as other:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        shard.insert([{"id": 0}])
        shard.snapshot().to_arrow()
        machine = other.transport.location.machine("orders")
        wait_until(lambda: not machine.refresh().leased_readers, "the lease is given back")
