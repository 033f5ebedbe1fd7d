"""Leases of listen streams: many listeners share one, which holds what the slowest of them needs and no more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pyarrow as pa
import pytest

from consensus import ConsensusUnavailable
from consensus.memory_logs import MemoryConsensus
from persist.commit import committer
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.errors import Expired, NotReadable, UnknownShard
from persist.core.frontier import Antichain
from persist.core.state import State
from rpc import change_streams as module
from rpc.change_streams import StreamHold, StreamLeases
from rpc.concurrency_limits import Work
from rpc.settings import Limits
from tests.support.location import TestClock, client_of, memory_location
from tests.support.waiting import WAIT_S

SCHEMA = pa.schema([("id", pa.string())])
LEASE_MS = 300  # so that the keeper looks every 5 ms
UPPER = 20


class Flaky(MemoryConsensus):
    """A log that takes nothing while it is away."""

    away = False

    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        if self.away:
            raise ConsensusUnavailable("away")
        return super().compare_and_set(key, seqno, data, after)


class Scene:
    """The leases of one server, on an event loop, with a clock that stands still until it is moved."""

    def __init__(self, location: Location, clock: TestClock, consensus: Flaky) -> None:
        self.location = location
        self.clock = clock
        self.consensus = consensus
        self.work = Work(Limits())
        self.leases = StreamLeases(location, self.work)

    @property
    def state(self) -> State:
        return self.location.machine("orders").refresh()

    def sinces(self) -> list[int | None]:
        """What the leases hold, as the shard knows it."""
        return sorted((reader.since.element for reader in self.state.leased_readers.values()), key=str)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for the keeper."""
        async with asyncio.timeout(WAIT_S):
            while not is_so():
                await asyncio.sleep(0.002)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[Scene], Awaitable[None]]], None]]:
    monkeypatch.setattr(module, "LEASE_MS", LEASE_MS)
    clock, consensus = TestClock(), Flaky("mem:")
    monkeypatch.setattr(committer, "RETRY_S", 0.0)
    location = memory_location(clock=clock, consensus=consensus)
    shard = client_of(location).create_shard("orders", SCHEMA, ["id"])
    shard.compare_and_append([{"id": "a"}], 0, UPPER)

    def play(act: Callable[[Scene], Awaitable[None]]) -> None:
        async def scene() -> None:
            playing = Scene(location, clock, consensus)
            try:
                await act(playing)
            finally:
                playing.leases.stop()
                playing.work.close()

        asyncio.run(scene())

    yield play
    location.close()


Play = Callable[[Callable[[Scene], Awaitable[None]]], None]


def test_listeners_share_one_lease_and_the_last_one_gives_it_back(stage: Play) -> None:
    async def act(scene: Scene) -> None:
        async with scene.leases.hold("orders", Antichain(5)):
            before = scene.state.seqno
            async with scene.leases.hold("orders", Antichain(5)), scene.leases.hold("orders", Antichain(9)):
                assert scene.sinces() == [4], "what lies at 5 or later can be told apart from 4 on"
                assert scene.state.seqno == before, "joining costs no commit"
            assert scene.sinces() == [4]
        assert scene.sinces() == []

    stage(act)


def test_a_listener_that_needs_more_takes_a_lease_of_its_own(stage: Play) -> None:
    async def act(scene: Scene) -> None:
        async with scene.leases.hold("orders", Antichain(9)):
            async with scene.leases.hold("orders", Antichain(3)):
                assert scene.sinces() == [2, 8]
            assert scene.sinces() == [8]
        async with scene.leases.hold("orders", Antichain(0)):
            assert scene.sinces() == [0]

    stage(act)


def test_a_listener_for_what_is_forgotten_or_was_never_there_is_refused(stage: Play) -> None:
    async def act(scene: Scene) -> None:
        async with scene.leases.hold("orders", Antichain(9), moves_since=True) as hold:
            hold.frontier = Antichain(15)
            scene.clock.advance_ms(LEASE_MS // 2)
            await scene.until(lambda: scene.sinces() == [14])
        with pytest.raises(NotReadable):
            async with scene.leases.hold("orders", Antichain(9)):
                raise AssertionError("not reached")
        with pytest.raises(UnknownShard):
            async with scene.leases.hold("nobody", Antichain(0)):
                raise AssertionError("not reached")
        async with scene.leases.hold("orders", Antichain(15)):
            assert scene.sinces() == [14], "a refusal leaves no lock behind"

    stage(act)


def test_the_shards_since_follows_only_those_who_may_move_it(stage: Play) -> None:
    async def act(scene: Scene) -> None:
        async with (
            scene.leases.hold("orders", Antichain(3)) as reads,
            scene.leases.hold("orders", Antichain(3), moves_since=True) as writes,
        ):
            assert scene.sinces() == [2, 2], "they share no lease"
            reads.frontier = Antichain(15)
            await scene.until(lambda: scene.sinces() == [14, 2])
            assert scene.state.since == Antichain(0)
            writes.frontier = Antichain(9)
            await scene.until(lambda: scene.sinces() == [14, 8])
            assert scene.state.since == Antichain(8)
        assert scene.state.since == Antichain(8)

    stage(act)


def test_a_lease_moves_with_the_slowest_of_its_listeners(stage: Play) -> None:
    async def act(scene: Scene) -> None:
        async with scene.leases.hold("orders", Antichain(3)) as slow, scene.leases.hold("orders", Antichain(3)) as fast:
            fast.frontier = Antichain(12)
            scene.clock.advance_ms(LEASE_MS)
            await scene.until(lambda: True)
            await asyncio.sleep(4 * LEASE_MS / 1000 / module.MOVES_PER_LEASE)
            assert scene.sinces() == [2]
            slow.frontier = Antichain(8)
            await scene.until(lambda: scene.sinces() == [7])

    stage(act)


def test_an_idle_lease_is_renewed_when_a_third_of_it_has_passed(stage: Play) -> None:
    async def act(scene: Scene) -> None:
        async with scene.leases.hold("orders", Antichain(3)):
            began = scene.state.seqno
            await asyncio.sleep(4 * LEASE_MS / 1000 / module.MOVES_PER_LEASE)
            assert scene.state.seqno == began, "while nothing is due it costs no commit"
            for _ in range(10):
                seqno = scene.state.seqno
                scene.clock.advance_ms(LEASE_MS // 2)
                await scene.until(lambda: scene.state.seqno > seqno)  # noqa: B023
            assert scene.sinces() == [2], "five lengths of the lease later"

    stage(act)


def test_files_that_a_listener_reads_are_held(stage: Play) -> None:
    async def act(scene: Scene) -> None:
        async with scene.leases.hold("orders", Antichain(3)) as hold:
            reading = scene.state.seqno
            with hold.reading(reading):
                scene.location.machine("orders").apply(c.AdvanceUpper(Antichain(UPPER + 1)))
                hold.frontier = Antichain(9)
                await scene.until(lambda: scene.sinces() == [8])
                assert [reader.seqno for reader in scene.state.leased_readers.values()] == [reading]
            hold.frontier = Antichain(12)
            await scene.until(lambda: scene.sinces() == [11])
            assert min(reader.seqno for reader in scene.state.leased_readers.values()) > reading

    stage(act)


def test_a_lease_that_is_gone_tells_its_listeners_and_is_not_joined_again(stage: Play) -> None:
    async def act(scene: Scene) -> None:
        async with scene.leases.hold("orders", Antichain(3)) as hold:
            (reader,) = scene.state.leased_readers
            scene.location.machine("orders").apply(c.ExpireReader(reader))
            hold.frontier = Antichain(9)
            await scene.until(lambda: is_lost(hold, scene.state))
            async with scene.leases.hold("orders", Antichain(9)) as other:
                assert not is_lost(other, scene.state)
                assert scene.sinces() == [8]

    stage(act)


def is_lost(hold: StreamHold, state: State) -> bool:
    try:
        with hold.reading(state.seqno):
            return False
    except Expired:
        return True


def test_a_store_that_is_away_for_a_while_costs_no_lease(stage: Play) -> None:
    async def act(scene: Scene) -> None:
        async with scene.leases.hold("orders", Antichain(3)) as hold:
            scene.consensus.away = True
            hold.frontier = Antichain(9)
            await asyncio.sleep(4 * LEASE_MS / 1000 / module.MOVES_PER_LEASE)
            scene.consensus.away = False
            hold.frontier = Antichain(10)
            await scene.until(lambda: scene.sinces() == [9])
            assert not is_lost(hold, scene.state)
            scene.consensus.away = True
        scene.consensus.away = False
        assert scene.sinces() == [9], "a hold that cannot be given back lapses by itself"

    stage(act)
