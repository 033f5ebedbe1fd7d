"""Inline rows leave the State: nothing changes but where they are."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pyarrow as pa
import pytest

from persist.client.shard import Shard
from persist.commit.commit_plan import BatchMerge
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.errors import Corruption
from tests.support.flushing import flushed
from tests.support.location import client_of, memory_location

SCHEMA = pa.schema([("id", pa.string()), ("amount", pa.int64())])


@pytest.fixture
def location() -> Iterator[Location]:
    """A process that merges nothing by itself."""
    opened = memory_location(small_merges=False)
    yield opened
    opened.close()


@pytest.fixture
def shard(location: Location) -> Shard:
    shard = client_of(location).create_shard("orders", SCHEMA, ["id"])
    for n in range(20):
        shard.insert([{"id": f"k{n % 5}", "amount": n}])
    shard.insert([{"id": "k0", "amount": 0, "__diff": -1}])
    return shard


def contents(shard: Shard, as_of: int) -> list[dict[str, object]]:
    return shard.snapshot(as_of).to_arrow().to_pylist()


def test_every_read_answers_as_before(location: Location, shard: Shard) -> None:
    before = [contents(shard, as_of) for as_of in range(21)]
    machine = location.machine("orders")
    command = flushed(machine.state(), location.blob, location.ids)
    assert command is not None
    assert machine.apply(command) == c.MergeApplied(True)
    assert machine.state().trace.inline_bytes == 0
    assert [contents(shard, as_of) for as_of in range(21)] == before


def test_what_another_process_has_merged_and_deleted_is_no_damage(location: Location) -> None:
    """A process that was stopped told of a corrupt shard, as the blobs that it wanted to merge were gone."""
    shard = client_of(location).create_shard("big", SCHEMA, ["id"])
    random = Random(0)
    for _ in range(2):
        shard.insert([{"id": random.randbytes(100).hex(), "amount": 1} for _ in range(2_000)])
    machine = location.machine("big")
    task = BatchMerge(machine.state(), [batch for batch in machine.state().trace.batches if batch.runs])
    command = machine._blobs.finish(task, machine.state())
    assert command is not None
    for part in [part for batch in task.batches for part in batch.parts()]:
        assert part.key is not None
        assert not part.is_inline
        location.blob.delete([part.key])
    with pytest.raises(Corruption):
        machine._blobs.finish(task, task.state, machine.refresh)
    assert machine.apply(command) == c.MergeApplied(True)
    assert machine._blobs.finish(task, task.state, machine.refresh) is None
