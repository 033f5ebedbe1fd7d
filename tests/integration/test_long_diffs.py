"""A command that is too large for the store of the log goes to a blob: no shard is ever too large to be written,

merged, read by others, or dropped. The log refers to the blob, and it is collected once its log entry is cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from blob.memory_blobs import MemoryBlob
from compactor.on_demand import maintain
from compactor.orphans import Sweeper, SweepSettings
from compactor.worker import Worker
from consensus import Consensus, open_consensus
from consensus.memory_logs import MemoryConsensus
from persist import Client, Corruption, HandleSettings, InvalidUsage, LocationSettings, Shard, Token, WriteSettings
from persist.client.embedded import EmbeddedTransport
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.batch import Run
from persist.core.blob_keys import diff_key, part_key
from persist.core.blob_keys import shard_of as shard_id_of_key
from persist.core.ids import PartId, WriterId, mint
from persist.core.record import replace
from persist.core.state import Policy
from persist.maintenance.collector import Collector
from tests.support.location import AscendingIds, InlineBackground, TestClock, memory_location
from tests.support.shard import first_write

SCHEMA = pa.schema([pa.field("k", pa.int64())])
VALUE_BYTES = 2_000
PARTS = 24  # of about 200 bytes each in a state diff
MANY_PARTS = 60  # so many that their receipts are believed, and no blob is looked at
ETCD_PARTS = 8_000  # their state diff is longer than what etcd takes
HANDLES = HandleSettings(write=WriteSettings(part_bytes_target=64))


class Small(MemoryConsensus):
    """Takes little at once, as etcd does of a large shard."""

    value_bytes_max = VALUE_BYTES
    before: Callable[[], object] | None = None  # what happens before the next reference to a blob comes to the store

    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        if self.before is not None and b".diff" in data:
            happens, self.before = self.before, None
            happens()
        return super().compare_and_set(key, seqno, data, after)


class Killed(BaseException):
    """The end of a process."""


class NoBackground(InlineBackground):
    """Has no time for upkeep, so that a test counts what the commit alone does."""

    def submit(self, work: Callable[[], None]) -> bool:
        return False


class CountingBlob(MemoryBlob):
    """Counts what a commit asks of it."""

    def __init__(self, counted: Counter[str]) -> None:
        super().__init__("mem:")
        self._counted = counted

    def get(self, key: str) -> bytes:
        self._counted["blobs read"] += 1
        return super().get(key)

    def stat(self, key: str) -> Any:
        self._counted["blobs asked for"] += 1
        return super().stat(key)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._counted["blobs written"] += 1
        super().put(key, data)


WIDE = pa.schema([*SCHEMA, *[(f"column_number_{n:05}", pa.string()) for n in range(400)]])


def opened(of: Location | None = None, origin: int = 0, **options: object) -> Location:
    clock: Any = of.clock if of is not None else TestClock()
    blob = of.blob if of is not None else MemoryBlob("mem:", now_ms=clock.now_ms)
    consensus = of.consensus if of is not None else Small("mem:")
    policy = Policy(inline_part_bytes_max=0, rollup_every=1_000)
    ids = AscendingIds(origin)
    return memory_location(blob=blob, consensus=consensus, clock=clock, ids=ids, policy=policy, **options)  # type: ignore[arg-type]


def shard_of(location: Location) -> Shard:
    client = Client(EmbeddedTransport(location, maintain), HANDLES)
    return client.create_shard("orders", SCHEMA, ["k"])


def rows(start: int) -> pa.Table:
    return pa.table({"k": pa.array(range(start, start + 8 * PARTS), pa.int64())})


def keys(shard: Shard) -> list[int]:
    found: list[int] = sorted(shard.snapshot().to_arrow().column("k").to_pylist())
    return found


def long_blobs(location: Location) -> list[str]:
    return [stat.key for stat in location.blob.list("") if stat.key.endswith(".diff")]


def sweep(location: Location) -> None:
    location.clock.advance_ms(30 * 24 * 3_600_000)  # type: ignore[attr-defined]
    Sweeper(location, SweepSettings()).sweep("orders")


@pytest.fixture
def location() -> Location:
    return opened()


@pytest.fixture(params=["memory", "etcd"])
def log(request: pytest.FixtureRequest) -> Consensus:
    return Small("mem:") if request.param == "memory" else open_consensus(request.getfixturevalue("etcd_url"))


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
    sweep(location)
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
    with pytest.raises(Exception, match="was collected meanwhile; retry"):
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


def counting(counted: Counter[str], what: str, real: Callable[..., Any], is_meant: Callable[[Any], bool]) -> Any:
    """`real`, of which the calls are counted whose first argument is meant."""

    def called(*args: Any, **options: Any) -> Any:
        counted[what] += is_meant(args[0])
        return real(*args, **options)

    return called


def one_command(location: Location, shard: Shard, parts: int) -> c.Insert:
    """An insert of so many parts with receipts, as tasks stage them."""
    [run] = shard.open_writer().stage(pa.table({"k": [1]}), None)
    machine, writer = location.machine("orders"), mint(WriterId, location.ids)
    names = [mint(PartId, location.ids) for _ in range(parts)]
    life = machine.state().shard_id
    copies = [replace(run.parts[0], id=name, key=part_key(life, writer, name), receipt=b"") for name in names]
    runs = location.versions.receipts.sign(life, [Run((copy,)) for copy in copies])
    return c.Insert(writer, mint(Token, location.ids), runs)


def test_a_long_diff_is_planned_once(log: Consensus, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was planned a second time for its blob: a command of ten times the parts took etcd 16 times as long."""
    counted: Counter[str] = Counter()
    blob = CountingBlob(counted)
    options = {"settings": LocationSettings(Policy(inline_part_bytes_max=0)), "background": NoBackground()}
    location = Location(blob, log, **options)  # type: ignore[arg-type]
    command = one_command(location, shard_of(location), MANY_PARTS if isinstance(log, Small) else ETCD_PARTS)
    location.machine("orders").apply(first_write(mint(WriterId, location.ids)))  # a first commit writes more blobs
    seqno = location.machine("orders").state().seqno + 1
    for module, name, is_meant in (
        ("committer", "plan_commit", lambda base: True),
        ("state_loader", "encode_diff", lambda change: change.trace is not None),
        ("state_loader", "decode_diff", lambda data: len(data) > VALUE_BYTES),
        ("validation_receipts", "_digest", lambda key: True),
    ):
        path = f"persist.commit.{module}"
        real = getattr(__import__(path, fromlist=[name]), name)
        monkeypatch.setattr(f"{path}.{name}", counting(counted, name, real, is_meant))
    counted.clear()
    location.machine("orders").apply(command)
    assert counted == {
        "plan_commit": 1,
        "encode_diff": 2,  # the first shows that it is too long, the second tells of the blob
        "_digest": len(command.runs),
        "blobs written": 1,
    }
    state = location.machine("orders").state()
    assert state.long_diffs == {seqno: long_blobs(location)[0]}
    follower = Location(blob, log, **options).machine("orders").refresh()  # type: ignore[arg-type]
    assert follower == state
    location.close()


def test_a_long_diff_whose_committer_died_before_the_log_named_it_is_an_orphan(location: Location) -> None:
    shard = shard_of(location)
    shard.insert([{"k": -1}])
    log: Any = location.consensus

    def killed() -> None:
        assert len(long_blobs(location)) == 1, "a blob is durable before the log names it"
        raise Killed

    log.before = killed
    with pytest.raises(Killed):
        shard.insert(rows(0))
    after = opened(location, 1)
    assert keys(shard_of(after)) == [-1]
    shard_of(after).insert(rows(0))
    assert len(long_blobs(after)) == 2
    sweep(after)
    assert long_blobs(after) == list(after.machine("orders").refresh().long_diffs.values())
    assert keys(shard_of(opened(after, 2))) == [-1, *range(8 * PARTS)]


@pytest.mark.parametrize("build", ["this", "older"])
def test_a_life_begins_with_a_long_diff_beside_a_collector(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blob had the id of the life before, of whose tombstone a collector then deleted it with all the others.

    An older build may still write it so.
    """
    location = opened()
    shard = shard_of(location)
    shard.insert(rows(0))
    shard.drop(force=True)
    collecting = opened(location, 1)
    machine = collecting.machine("orders")
    ended = machine.refresh().shard_id
    while not machine.refresh().tombstone:
        machine.apply(c.Finalise(shard=ended))
    collector = Collector(collecting)
    real = collector._has_rollup
    if build == "older":
        monkeypatch.setattr("persist.commit.committer.diff_key", lambda shard, ids: diff_key(ended, ids))

    def begins(*args: Any) -> bool:  # after the collector has read the tombstone, before it lists its blobs
        Client(EmbeddedTransport(location, maintain), HANDLES).create_shard("orders", WIDE, ["k"])
        return real(*args)

    monkeypatch.setattr(collector, "_has_rollup", begins)
    collector.run("orders")
    state = location.machine("orders").refresh()
    [key] = [key for seqno, key in state.long_diffs.items() if state.seqno - seqno < 2]
    assert shard_id_of_key(key) == (ended if build == "older" else state.shard_id)
    assert {key for key in state.blob_keys() if location.blob.stat(key) is None} == set()
    monkeypatch.undo()
    wide = Client(EmbeddedTransport(opened(location, 2), maintain), HANDLES).shard("orders")
    assert len(wide.schema.arrow) == len(WIDE)
    wide.insert([{"k": 1}])
    for _ in range(4):
        Collector(location).run("orders")
        Worker(location).run("orders", idle=True)
    sweep(location)
    assert keys(Client(EmbeddedTransport(opened(location, 3), maintain), HANDLES).shard("orders")) == [1]


def test_a_first_schema_that_is_too_large_is_refused_with_a_way_to_go_on(location: Location) -> None:
    """It was told to write fewer rows at once."""
    client = Client(EmbeddedTransport(location, maintain), HANDLES)
    with pytest.raises(InvalidUsage, match=r"schema of shard 'wide' is too large: .* \d+ bytes .* 2000 are possible"):
        client.create_shard("wide", WIDE, ["k"])
    assert list(location.blob.list("s")) == [], "nothing is left behind"
    shard = client.create_shard("wide", SCHEMA, ["k"])
    shard.evolve_schema(WIDE)
    assert len(Client(EmbeddedTransport(opened(location, 1), maintain), HANDLES).shard("wide").schema.arrow) == len(
        WIDE
    )
