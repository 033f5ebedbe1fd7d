"""A command that is too large for the store of the log goes to a blob: no shard is ever too large to be written,

merged, read by others, or dropped. The log refers to the blob, and it is collected once its log entry is cut.
"""

from __future__ import annotations

import pyarrow as pa
import pytest

from blob.memory import MemoryBlob
from compactor.orphans import Sweeper, SweepSettings
from compactor.worker import Worker
from consensus.memory import MemoryConsensus
from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import HandleSettings, Shard
from persist.client.write import WriteSettings
from persist.commit.collector import Collector
from persist.commit.location import Location
from persist.core.errors import Corruption, InvalidUsage
from persist.core.state import Policy
from persist.formats.state_frames import Build
from tests.support.location import AscendingIds, memory_location

SCHEMA = pa.schema([pa.field("k", pa.int64())])
VALUE_BYTES = 4_000
PARTS = 60  # of about 200 bytes each in a state diff
HANDLES = HandleSettings(write=WriteSettings(part_bytes_target=64))


class Small(MemoryConsensus):
    """Takes little at once, as etcd does of a large shard."""

    value_bytes_max = VALUE_BYTES


def opened(of: Location | None = None, origin: int = 0, **options: object) -> Location:
    blob, consensus = (of.blob, of.consensus) if of is not None else (MemoryBlob("mem:"), Small("mem:"))
    policy = Policy(inline_part_bytes_max=0, rollup_every=1_000)
    return memory_location(blob=blob, consensus=consensus, ids=AscendingIds(origin), policy=policy, **options)  # type: ignore[arg-type]


def shard_of(location: Location) -> Shard:
    client = Client(EmbeddedTransport(location), HANDLES)
    return client.create_shard("orders", SCHEMA, ["k"])


def rows(start: int) -> pa.Table:
    return pa.table({"k": pa.array(range(start, start + 8 * PARTS), pa.int64())})


def keys(shard: Shard) -> list[int]:
    found: list[int] = sorted(shard.snapshot().to_arrow().column("k").to_pylist())
    return found


def long_blobs(location: Location) -> list[str]:
    return [stat.key for stat in location.blob.list("") if stat.key.endswith(".diff")]


@pytest.fixture
def location() -> Location:
    return opened()


def test_a_write_of_many_parts_lands_and_everybody_reads_it(location: Location) -> None:
    shard = shard_of(location)
    follower = opened(location, 1)
    follower.machine("orders").refresh()
    shard.insert(rows(0))
    shard.insert([{"k": -1}])
    assert len(location.machine("orders").state().trace.blob_keys) > PARTS // 2
    assert len(long_blobs(location)) == 1
    for reader in (shard, shard_of(follower), shard_of(opened(location, 2))):
        assert keys(reader) == [-1, *range(8 * PARTS)]


def test_what_is_large_can_be_merged_collected_and_dropped(location: Location) -> None:
    shard = shard_of(location)
    for start in range(3):
        shard.insert(rows(start * 8 * PARTS))
    Worker(location).run("orders", idle=True)
    assert len(location.machine("orders").refresh().trace.blob_keys) < 5, "one long diff says which parts are gone"
    assert len(long_blobs(location)) >= 4
    for _ in range(4):
        Collector(location).run("orders")
    assert long_blobs(location) == [], "their log entries are cut"
    assert keys(shard) == list(range(3 * 8 * PARTS))
    for _ in range(3):
        shard.insert(rows(0))
    shard.drop(force=True)
    for _ in range(6):
        Collector(location).run("orders")
    assert location.machine("orders").refresh().tombstone
    left = [stat.key.rpartition(".")[2] for stat in location.blob.list("s")]
    assert left in (["rollup"], ["diff", "rollup"]), "of the log only the entry at the rollup lives"


def test_a_sweep_leaves_the_blob_of_a_live_log_entry(location: Location) -> None:
    shard = shard_of(location)
    shard.insert(rows(0))
    location.clock.advance_ms(30 * 24 * 3_600_000)  # type: ignore[attr-defined]
    Sweeper(location, SweepSettings()).sweep("orders")
    assert len(long_blobs(location)) == 1
    assert keys(shard_of(opened(location, 1))) == list(range(8 * PARTS))


def test_a_process_that_was_away_while_the_blob_was_collected_loads_anew(location: Location) -> None:
    shard, sleeper = shard_of(location), opened(location, 1)
    behind = sleeper.machine("orders").refresh()
    shard.insert(rows(0))
    entries = sleeper.versions.diffs("orders", behind.seqno, 100)
    for _ in range(4):
        Worker(location).run("orders", idle=True)
        Collector(location).run("orders")
        shard.insert([{"k": -1}])
    assert sleeper.machine("orders").refresh().upper == shard.upper()
    long = next(change for change in entries if change.elsewhere is not None)
    with pytest.raises(Exception, match="was collected meanwhile; look again"):
        sleeper.versions.whole("orders", long)


def test_a_blob_that_is_missing_while_its_entry_lives_is_corruption(location: Location) -> None:
    shard = shard_of(location)
    shard.insert(rows(0))
    location.blob.delete(long_blobs(location))
    with pytest.raises(Corruption, match=r"state diff v\d+ of shard 'orders' is missing: s.*\.diff"):
        shard_of(opened(location, 1))


def test_in_a_group_only_what_is_large_goes_to_a_blob(location: Location) -> None:
    shard = shard_of(location)
    machine = location.machine("orders")
    writer = shard.open_writer()
    writer.insert([{"k": -1}])
    runs = writer.stage(rows(0), None)
    assert len(runs[0].parts) + len(runs) > PARTS // 2
    before = machine.state().seqno
    writer.commit_insert(runs)
    assert machine.state().seqno == before + 1
    assert list(machine.state().long_diffs) == [before + 1]


def test_a_location_of_level_2_refuses_what_is_too_large() -> None:
    old = opened(build=Build(levels=(2,)))
    shard_of(old)
    shard = shard_of(opened(old, 1))
    with pytest.raises(InvalidUsage, match="long_diffs needs level 3, and this location has level 2: run `persist upg"):
        shard.insert(rows(0))
    shard.insert([{"k": 1}])
    assert keys(shard) == [1]
