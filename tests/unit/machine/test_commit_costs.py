"""What was slow: each commit, insert or read below cost more than it had to."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, closing, nullcontext

import pyarrow as pa

from blob.memory_blobs import MemoryBlob
from compactor.embedded import maintain
from consensus.memory_logs import MemoryConsensus
from consensus.turns import Turn
from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.blob_keys import is_rollup_key
from persist.core.frontier import Antichain
from persist.core.state import Policy
from rpc.concurrency_limits import Work
from rpc.settings import Limits
from tests.support.location import memory_location

SCHEMA = pa.schema([("id", pa.int64())])


def test_a_thousand_moves_of_a_frontier_write_the_state_at_most_once() -> None:
    """They cost 31 PUTs of the whole State."""

    class Counting(MemoryBlob):
        puts = 0

        def put(self, key: str, data: bytes | memoryview) -> None:
            self.puts += is_rollup_key(key)
            super().put(key, data)

    blob = Counting("mem:")
    with closing(memory_location(blob=blob, policy=Policy())) as location:
        shard = Client(EmbeddedTransport(location, maintain)).create_shard("orders", SCHEMA, ["id"])
        blob.puts = 0
        for upper in range(1, 1_001):
            shard.advance_upper(upper)
        assert blob.puts <= 1


def test_what_comes_in_one_turn_of_the_event_loop_is_committed_together() -> None:
    """A commit began with the first command, and found one or two."""
    with closing(memory_location()) as location, closing(Work(Limits())) as work:
        Client(EmbeddedTransport(location, maintain)).create_shard("orders", SCHEMA, ["id"])
        machine = location.machine("orders")
        before = machine.metrics.commits

        async def moved() -> list[c.Result]:
            return await asyncio.gather(*(work.apply(machine, c.AdvanceUpper(Antichain(n))) for n in range(1, 9)))

        assert asyncio.run(moved()) == [c.Appended(Antichain(n - 1), Antichain(n)) for n in range(1, 9)]
        assert machine.metrics.commits == before + 1


class Queued(MemoryConsensus):
    """A store that tells everybody who wants to commit that others had their turn before."""

    told = Turn.WAITED

    def turn(self, key: str, wait_s: float) -> AbstractContextManager[Turn]:
        return nullcontext(self.told)


def test_who_waited_for_its_turn_plans_on_what_others_have_committed() -> None:
    """Each process planned on what it knew, and lost. 16 of them got 130 commits a second, one of them two."""
    blob, log = MemoryBlob("mem:"), Queued("mem:")
    with closing(Location(blob, log)) as one, closing(Location(blob, log)) as other:
        first = Client(EmbeddedTransport(one, maintain)).create_shard("orders", SCHEMA, ["id"])
        second = Client(EmbeddedTransport(other, maintain)).shard("orders")
        for number in range(20):
            first.insert([{"id": number}])
            second.insert([{"id": number}])
        lost = [location.machine("orders").metrics.races_lost for location in (one, other)]
        assert sum(lost) <= 2, "but for those with upkeep, which commits beside them"
        log.told = Turn.NONE  # nobody relies on turns
        for number in range(20):
            first.insert([{"id": number}])
            second.insert([{"id": number}])
        assert sum(first.snapshot().to_arrow()["__diff"].to_pylist()) == 80
