"""Processes that sleep, between writing a blob and naming it, for longer than the orphan sweep waits."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from blob.memory_blobs import MemoryBlob
from compactor.orphans import Sweeper
from consensus.memory_logs import MemoryConsensus
from consensus.metrics import ForwardingConsensus
from persist import AttributeUpdate, Corruption, PipelineSettings, Shard, WriteHandle
from persist.attributes.attribute_index import AttributeIndex
from persist.attributes.node_store import NodeCache
from persist.commit.clocks_and_ids import SystemClock, SystemIds
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.record import replace
from tests.support.embedded import client_of
from tests.support.flushing import flushed

SCHEMA = pa.schema([pa.field("k", pa.string()), pa.field("v", pa.int64())])
A_DAY_AND_MORE_MS = 25 * 3600 * 1000
NAME = "orders"
KEY = bytes(range(16))


class SleepyClock(SystemClock):
    """The machine's clock, and how long everybody has slept."""

    slept_ms = 0

    def now_ms(self) -> int:
        return super().now_ms() + self.slept_ms


class SleepyIds(SystemIds):
    """Ids that tell the time of that clock."""

    def __init__(self, clock: SleepyClock) -> None:
        super().__init__()
        self._clock = clock

    def uuid7(self) -> str:
        return f"{self._clock.now_ms():012x}{super().uuid7()[12:]}"


@pytest.fixture
def clock() -> SleepyClock:
    return SleepyClock()


@pytest.fixture
def location(clock: SleepyClock) -> Iterator[Location]:
    location = Location(
        MemoryBlob("mem:", now_ms=clock.now_ms), MemoryConsensus("mem:"), clock=clock, ids=SleepyIds(clock)
    )
    yield location
    location.close()


@pytest.fixture
def shard(location: Location) -> Shard:
    return client_of(location).create_shard(NAME, SCHEMA, ["k"])


def elsewhere(location: Location) -> Shard:
    """The shard as a process sees it that has read nothing yet."""
    other = Location(location.blob, location.consensus, clock=location.clock)
    return client_of(other).shard(NAME)


def test_a_pipelined_append_whose_part_was_swept_is_staged_again(
    shard: Shard, location: Location, clock: SleepyClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part was sent until the time for retries had passed, and then the writer stopped."""
    commit = WriteHandle.commit_insert

    def sleep_first(self: WriteHandle, *args: Any, **given: Any) -> Any:
        if not clock.slept_ms:
            clock.slept_ms = A_DAY_AND_MORE_MS
            assert Sweeper(location).sweep(NAME).deleted == 1
        return commit(self, *args, **given)

    monkeypatch.setattr(WriteHandle, "commit_insert", sleep_first)
    large = Random(1).randbytes(100_000).hex()  # as inline bytes it would not be swept
    with shard.pipelined_writer("w", PipelineSettings(retry_s=5)) as writer:
        writer.append([{"k": large, "v": 1}])
    assert elsewhere(location).snapshot().to_arrow().to_pylist() == [{"k": large, "v": 1, "__diff": 1}]


def test_a_merge_is_refused_once_its_output_was_swept(shard: Shard, location: Location, clock: SleepyClock) -> None:
    """A claim of a day kept a merge alive whose output, not saved with the claim, was swept."""
    for key in "abc":
        shard.insert([{"k": key, "v": 1}])
    machine = location.machine(NAME)
    merge: Any = flushed(machine.refresh(), location.blob, location.ids)
    claim = c.HoldClaim("merge:[0]", "worker", A_DAY_AND_MORE_MS - 3600_000, merge.inputs)
    machine.apply(claim)
    clock.slept_ms = A_DAY_AND_MORE_MS
    assert Sweeper(location).sweep(NAME).deleted == 1
    saved = machine.apply(replace(claim, done=merge.outputs[0].parts))
    assert isinstance(saved, c.Claimed)
    assert not saved.granted
    late = c.MergeResult(merge.inputs, merge.outputs, merge.since, "merge:[0]", "worker")
    assert machine.apply(late) == c.MergeApplied(False)
    assert elsewhere(location).snapshot().to_arrow().column("k").to_pylist() == ["a", "b", "c"]


def test_attributes_whose_chunk_was_swept_stay(shard: Shard, location: Location, clock: SleepyClock) -> None:
    """A flush of attributes wrote its chunk and slept; the chunk was swept, and then the index was made of it."""
    shard.attributes.update(AttributeUpdate.replace(KEY, 7))
    machine = location.machine(NAME)
    command = AttributeIndex(location.blob, location.ids, NodeCache()).flush(machine.refresh())
    clock.slept_ms = A_DAY_AND_MORE_MS
    assert Sweeper(location).sweep(NAME).deleted == 1
    assert machine.apply(command) == c.Flushed(False)
    assert elsewhere(location).attributes.get(KEY) == 7


def test_a_shard_whose_first_rollup_was_swept_can_be_opened(location: Location, clock: SleepyClock) -> None:
    """A creator slept between the first rollup and the first commit; the rollup of a shard unborn was swept."""

    class Asleep(ForwardingConsensus):
        """Its caller falls asleep before its first compare-and-set."""

        swept = 0

        def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
            if not clock.slept_ms:
                clock.slept_ms = A_DAY_AND_MORE_MS
                Asleep.swept = Sweeper(location).sweep_unborn().deleted
            return super().compare_and_set(key, seqno, data, after)

    location.identity.check()
    location.consensus = Asleep(location.consensus)
    location.versions.consensus = location.consensus
    created = client_of(location).create_shard(NAME, SCHEMA, ["k"])
    assert Asleep.swept == 1
    assert elsewhere(location).schema == created.schema
    created.insert([{"k": "a", "v": 1}])
    assert elsewhere(location).snapshot().to_arrow().column("k").to_pylist() == ["a"]


def test_a_log_that_lacks_its_rollup_beyond_the_first_is_corrupt(shard: Shard, location: Location) -> None:
    """Only the first entry of a log can stand for a rollup; nothing is guessed where a later one is gone."""
    machine = location.machine(NAME)
    shard.insert([{"k": "a", "v": 1}])
    machine.apply(c.AddRollup(machine.state().seqno, *location.versions.write_rollup(machine.state())))
    location.blob.delete([stat.key for stat in location.blob.list("") if stat.key.endswith(".rollup")])
    with pytest.raises(Corruption, match="rollup"):
        elsewhere(location)
