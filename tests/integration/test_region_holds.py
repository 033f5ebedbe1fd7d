"""What readers of a region need is held at home, as long as the link is up."""

from __future__ import annotations

from typing import Any

import pytest

from compactor.worker import Worker
from persist import Antichain, Expired, Unavailable
from persist.client.embedded import EmbeddedTransport
from persist.client.transport import Transport
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from persist.core.ids import ReaderId, SeqNo, mint
from persist.maintenance.collector import Collector
from persist.regions import remote_holds
from persist.regions.remote_holds import IDLE_S, SILENT_MAX, HomeHolds, list_region_holds, release_region_holds
from persist.regions.replication import ReplicateSettings, Replicator
from tests.integration.test_regions import Place, rows
from tests.support.clones import Shards


class Held(Place):
    """A region that holds at home; a copy that deletes at once what home deletes."""

    def __init__(self) -> None:
        super().__init__()
        settings = ReplicateSettings(at_once=1, keep_s=0.0)
        self.replicator = Replicator(self.world.blob, self.copy, self.machine.location.clock, settings)
        self.is_cut = False
        self.region.hold_at(self.way_home, "us")
        rows(self.there)
        self.round()
        self.follow()

    def way_home(self) -> Transport:
        if self.is_cut:
            raise Unavailable("the link is cut")
        return EmbeddedTransport(self.world.machine().location)

    @property
    def holds(self) -> HomeHolds:
        assert self.region.holds is not None
        return self.region.holds

    def round(self) -> None:
        self.holds.round()

    def follow(self) -> None:
        """All that was published has come."""
        self.arrive()
        self.region.follower.poll(now=True)

    def purposes(self) -> list[str]:
        state = self.world.machine().location.machine("orders").refresh()
        return [reader.purpose for reader in state.leased_readers.values()]

    def maintained(self) -> None:
        """Home merges what it can, and deletes what nobody holds."""
        location = self.world.machine().location
        Worker(location).run("orders", idle=True)
        collector = Collector(location)
        for _ in range(20):
            if collector.run("orders").done:
                break


@pytest.fixture
def held() -> Held:
    return Held()


def changed(held: Held) -> None:
    """What a snapshot of before needs is merged away at home, and deleted here as soon as home lets it go."""
    for number in range(20, 32):
        held.insert(number)
    held.shard.configure(history="none")
    held.maintained()
    held.maintained()
    held.follow()


def test_a_snapshot_reads_on_while_home_merges_and_collects(held: Held) -> None:
    expected = rows(held.there)
    snapshot = held.there.snapshot()
    held.round()
    changed(held)
    assert sorted(map(repr, snapshot.to_arrow().to_pylist())) == expected
    snapshot.close()
    assert rows(held.there) == rows(held.shard)


def test_without_a_hold_the_same_snapshot_is_expired(held: Held) -> None:
    held.holds.close()
    held.region.holds = None
    snapshot = held.there.snapshot()
    changed(held)
    with pytest.raises(Expired):
        snapshot.to_arrow()


def test_holds_are_seen_at_home_and_move_on_as_readers_do(held: Held) -> None:
    assert held.purposes() == ["region:us"]
    snapshot = held.there.snapshot()
    held.round()
    changed(held)
    blobs = len(list(held.world.blob.list("s")))
    snapshot.close()
    held.round()
    held.maintained()
    held.maintained()
    assert len(list(held.world.blob.list("s"))) < blobs
    assert held.purposes() == ["region:us"]


def test_a_shard_that_nobody_reads_any_more_is_let_go(held: Held) -> None:
    held.world.pass_ms(int(IDLE_S * 1000) - 60_000)
    held.round()
    assert held.purposes() == ["region:us"]
    held.world.pass_ms(120_000)
    held.round()
    assert held.purposes() == []
    assert held.holds.count == 0


def test_a_region_that_is_closed_gives_back_what_it_held(held: Held) -> None:
    held.holds.close()
    assert held.purposes() == []


def test_without_a_link_reads_go_on_and_holds_come_back_with_it(held: Held) -> None:
    lost: Any = held.holds._transport
    held.holds._transport, held.is_cut = None, True
    held.round()
    assert held.holds.failed is not None
    assert rows(held.there) == rows(held.shard)
    held.world.pass_ms(2 * 900_000)  # at home the lease has lapsed
    held.is_cut = False
    rows(held.there)
    held.insert(40)
    held.maintained()
    held.round()
    held.round()
    assert held.holds.failed is None
    assert held.purposes() == ["region:us"]
    assert lost is not None


def test_what_a_region_holds_is_shown_with_its_age_and_let_go(held: Held) -> None:
    location = held.machine.location  # which watches the shard
    [hold] = list_region_holds(location)
    assert (hold.shard, hold.region) == ("orders", "us")
    held.world.pass_ms(60_000)
    [later] = list_region_holds(location, "us")
    assert later.silent_s >= hold.silent_s + 60
    assert later.lapses_s <= hold.lapses_s - 60
    assert not list(list_region_holds(location, "jp"))
    assert not release_region_holds(location, "jp")
    assert [one.shard for one in release_region_holds(location, "us")] == ["orders"]
    assert held.purposes() == []
    assert not release_region_holds(location, "us")


class Many:
    """Holds on many shards at a home that is asked by commands, as a region's server does."""

    def __init__(self, *names: str) -> None:
        self.shards = Shards()
        for name in names:
            self.shards.create(name, 1)
        self.home = Failing(self.shards.process())
        self.readers = {name: mint(ReaderId, self.shards.process().ids) for name in names}
        self.holds = HomeHolds("us", lambda: self.home, lambda name: (Antichain(0), SeqNo(1)), self.shards.clock)
        for name, reader in self.readers.items():
            self.holds.register(name, c.RegisterReader(reader, None, 900_000), Antichain(0), SeqNo(1))
            self.pass_ms(1)

    def pass_ms(self, ms: int) -> None:
        self.shards.clock.advance_ms(ms)

    def round(self) -> None:
        """Five seconds later everybody has gone on reading."""
        self.pass_ms(5_000)
        for name, reader in self.readers.items():
            self.holds.renew(name, c.DowngradeSince(reader, None, SeqNo(1), False))
            self.pass_ms(1)
        self.holds.round()

    def held(self) -> list[str]:
        return [name for name in self.readers if self.holds._shards[name].lease is not None]


class Failing(EmbeddedTransport):
    """The way to a home that does not answer for some shards."""

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self.silent: set[str] = set()
        self.asked: list[str] = []

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        self.asked.append(name)
        if name in self.silent:
            raise Unavailable(f"home does not answer for {name}")
        return super().apply(name, command, caller)


def test_a_shard_that_is_dropped_while_it_is_held_ends_no_other_hold() -> None:
    many = Many("a", "b", "c")
    many.round()
    many.shards.client.shard("a").drop(force=True)
    many.pass_ms(400_000)  # the holds are to be renewed
    many.round()
    assert many.held() == ["b", "c"]
    assert many.holds.failed is None


def test_what_goes_wrong_with_one_shard_is_told_and_harms_no_other() -> None:
    many = Many("a", "b", "c")
    many.home.silent = {"a"}
    many.round()
    assert many.held() == ["b", "c"]
    assert many.holds.failed is not None
    many.home.silent = set()
    many.round()
    assert many.held() == ["a", "b", "c"]
    assert many.holds.failed is None


def test_a_home_that_does_not_answer_is_not_asked_for_every_shard() -> None:
    """Each request may take long. The next round begins with the others."""
    names = [f"s{number}" for number in range(SILENT_MAX + 2)]
    many = Many(*names)
    many.home.silent = set(names[:SILENT_MAX])
    many.round()
    assert many.home.asked == names[:SILENT_MAX]
    assert many.held() == []
    many.round()
    assert many.held() == names[SILENT_MAX:]


def test_every_shard_has_its_turn_where_there_are_more_than_one_round_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are read all the time are held too, though others were read less lately."""
    monkeypatch.setattr(remote_holds, "PER_ROUND_MAX", 2)
    names = [f"s{number}" for number in range(5)]
    many = Many(*names)
    many.readers = {name: many.readers[name] for name in names[2:]}  # the first two are not read any more
    for _ in range(3):
        many.round()
    many.readers = dict.fromkeys(names, many.readers[names[-1]])
    assert many.held() == names
    many.home.asked.clear()
    many.pass_ms(400_000)
    for _ in range(3):
        many.holds.round()
    assert sorted(set(many.home.asked)) == names, "and all are renewed"


def test_a_round_that_holds_are_closed_under_ends_quietly() -> None:
    many = Many("a", "b")
    shown = many.holds._shown_version

    def closing_first(name: str) -> tuple[Antichain, SeqNo] | None:
        many.holds._shards.clear()
        return shown(name)

    many.holds._shown_version = closing_first
    many.round()
    assert many.holds.failed is None
