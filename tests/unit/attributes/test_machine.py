"""Attributes through committers: two processes with caches of their own, flushes, and chunks that are collected."""

from __future__ import annotations

import threading
from contextlib import suppress

import pyarrow as pa
import pytest

from blob.errors import BlobUnavailable
from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist.commit.committer import Machine
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.attribute import AttributeKey, AttributeUpdate, attribute_key
from persist.core.errors import Corruption, Overloaded
from persist.core.ids import Token, WriterId, mint
from persist.core.state import Policy, initial_state
from tests.support.location import AscendingIds, TestClock, client_of, memory_location
from tests.support.shard import SCHEMA, numbered

NAME = "orders"
POLICY = Policy(overlay_flush_at=8, rollup_every=20)


class World:
    """Two processes over the same stores. Background work is done at once, so flushes follow commits."""

    def __init__(self) -> None:
        blob, consensus, clock = MemoryBlob(), MemoryConsensus(), TestClock()
        self.clock = clock
        self.blob = blob
        self.locations: list[Location] = [
            memory_location(blob=blob, consensus=consensus, clock=clock, ids=AscendingIds(origin), policy=POLICY)
            for origin in (1, 2)
        ]
        self.machines: list[Machine] = [location.machine(NAME) for location in self.locations]
        self.machines[0].create(initial_state(NAME, SCHEMA, clock.now_ms()))
        self.machines[1].refresh()
        self.writers = [WriterId(numbered("w", number)) for number in (1, 2)]

    def update(self, process: int, *updates: AttributeUpdate) -> None:
        token = mint(Token, self.locations[process].ids)
        self.machines[process].apply(c.UpdateAttributes(self.writers[process], token, updates))

    def read(self, process: int, *keys: AttributeKey) -> dict[AttributeKey, int | None]:
        result = self.machines[process].apply(c.ReadAttributes(keys))
        assert isinstance(result, c.AttributeValues)
        return dict(result.values)

    def scan(self, process: int, limit: int) -> dict[AttributeKey, int | None]:
        found: dict[AttributeKey, int | None] = {}
        lower: AttributeKey | None = key(0)
        while lower is not None:
            result = self.machines[process].apply(c.ScanAttributes(lower, None, limit))
            assert isinstance(result, c.AttributeValues)
            assert list(result.values) == sorted(result.values)
            assert len(result.values) <= limit
            found.update(result.values)
            lower = result.following
        return found

    def collect(self) -> None:
        """Delete every blob that the newest State does not name, however old the other process's cache is."""
        named = set(self.machines[0].refresh().blob_keys())
        for location in self.locations:
            location.nodes.clear()  # nothing is found in a cache that the store has lost
        self.blob.delete([stat.key for stat in self.blob.list("") if stat.key not in named])


def key(number: int) -> AttributeKey:
    return attribute_key((number << 32).to_bytes(16, "big"))


@pytest.fixture
def world() -> World:
    return World()


def test_the_overlay_stays_small(world: World) -> None:
    for number in range(200):
        world.update(number % 2, AttributeUpdate.replace(key(number + 1), number))
        assert len(world.machines[0].refresh().attributes) <= POLICY.overlay_flush_at
    state = world.machines[0].refresh()
    assert state.attribute_root.count + len(state.attributes) == 200


def test_commands_that_wait_together_with_a_flush_see_what_it_moved(world: World) -> None:
    """Whatever is committed around a flush, a sum that every command adds to loses nothing."""
    machine, ids = world.machines[0], world.locations[0].ids
    writers = [mint(WriterId, ids) for _ in range(8)]

    def work(writer: WriterId, number: int) -> None:
        for turn in range(40):
            updates = (
                AttributeUpdate.accumulate(key(1), 1),
                AttributeUpdate.replace(key(1_000 + 40 * number + turn), turn),
            )
            command = c.UpdateAttributes(writer, mint(Token, ids), updates)
            while True:  # as callers do, where values come faster than they can be flushed
                with suppress(Overloaded):
                    machine.apply(command)
                    break

    threads = [threading.Thread(target=work, args=(writer, n)) for n, writer in enumerate(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert world.read(1, key(1)) == {key(1): 320}
    assert len(world.scan(1, 1000)) == 321


def test_every_write_reads_the_values_that_it_changes_in_the_index() -> None:
    client = client_of(memory_location(policy=POLICY))
    shard = client.create_shard("orders", pa.schema([("k", pa.int64())]), ["k"], unique=True)
    for number in range(1, 2 * POLICY.overlay_flush_at):  # the first ones leave the State
        shard.attributes.update(AttributeUpdate.replace(key(number), 0))
    one = AttributeUpdate.accumulate(key(1), 1)
    shard.insert([{"k": 1}], attributes=one)
    shard.upsert([{"k": 2}], attributes=one)
    shard.delete("k = 1", attributes=one)
    shard.restore(0, attributes=one)
    assert shard.attributes.get(key(1)) == 4


def test_a_chunk_that_the_newest_state_names_must_be_there(world: World) -> None:
    for number in range(20):
        world.update(0, AttributeUpdate.replace(key(number + 1), number))
    chunks = [chunk.key for chunk in world.machines[0].refresh().attribute_chunks.values()]
    assert chunks
    world.blob.delete(chunks)
    world.locations[1].nodes.clear()
    with pytest.raises(Corruption, match="lost a blob of its metadata"):
        world.read(1, key(1))


def test_a_full_state_is_flushed_once_the_store_is_back() -> None:
    class Broken(MemoryBlob):
        broken = True

        def put(self, key: str, data: bytes | memoryview) -> None:
            if self.broken and key.endswith(".nodes"):
                raise BlobUnavailable("the store is away")
            super().put(key, data)

    blob = Broken()
    location = memory_location(blob=blob, policy=Policy(overlay_flush_at=5))
    machine, writer = location.machine(NAME), WriterId(numbered("w", 1))
    machine.create(initial_state(NAME, SCHEMA, 0))

    def set_attribute(number: int) -> None:
        updates = (AttributeUpdate.replace(key(number), number),)
        machine.apply(c.UpdateAttributes(writer, mint(Token, location.ids), updates))

    for number in range(1, 26):
        set_attribute(number)
    for _ in range(2):
        with pytest.raises(Overloaded):
            set_attribute(26)
    blob.broken = False
    with pytest.raises(Overloaded):
        set_attribute(26)  # this refusal asks for the flush
    set_attribute(26)
    assert machine.refresh().attribute_root.count == 25


def test_dropping_a_shard_lets_its_index_go(world: World) -> None:
    for number in range(20):
        world.update(0, AttributeUpdate.replace(key(number + 1), number))
    machine = world.machines[0]
    named = {chunk.key for chunk in machine.refresh().attribute_chunks.values()}
    assert named
    machine.apply(c.Drop(force=True))
    while not machine.apply(c.Finalise()).done:  # type: ignore[union-attr]
        pass
    assert not named & set(machine.refresh().blob_keys())
