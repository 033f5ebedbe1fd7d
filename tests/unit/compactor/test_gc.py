"""The collector deletes what no live version names, and nothing that anybody holds."""

from __future__ import annotations

from itertools import pairwise

import pytest

from persist.core import commands as c
from persist.core import record
from persist.core.blob_keys import COMPACTOR, is_rollup_key, part_key
from persist.core.errors import Corruption
from persist.core.frontier import Antichain
from persist.core.ids import PartId, ReaderId, SeqNo
from persist.core.state import Policy
from persist.core.transitions.lease_expiry import CLAIM_KEPT_LEASES
from persist.maintenance.collector import Collector
from tests.support.crashing import Fuse
from tests.support.examples import thinned
from tests.support.maintained import AGE_MS, LEASE_MS, NAME, World


def collect(world: World, collector: Collector | None = None) -> int:
    deleted = 0
    collector = collector or world.collector()
    for _ in range(10):
        report = collector.run(NAME)
        deleted += report.deleted
        if report.done:
            return deleted
    raise AssertionError("collecting finds no end")


def merged() -> World:
    world = World()
    world.append_many(8, 20)
    world.worker().run(NAME, idle=True)
    return world


def data(world: World) -> set[str]:
    return {key for key in world.blobs() if not is_rollup_key(key)}


def test_merged_parts_are_deleted_and_the_log_begins_at_a_rollup() -> None:
    world = merged()
    assert collect(world) > 0
    assert data(world) == set(world.state().trace.blob_keys)
    world.check_stores()
    world.check_reads()


def test_a_shard_at_rest_costs_no_commit() -> None:
    world = merged()
    collect(world)
    seqno = world.state().seqno
    collect(world)
    assert world.state().seqno == seqno


def test_a_claim_whose_owner_died_is_forgotten_though_nobody_commits_any_more() -> None:
    """It stood in the State of a shard at rest for ever, and so did the parts that it keeps."""
    world = merged()
    collect(world)
    [batch] = world.state().trace.batches
    inputs = tuple(part.id for part in batch.parts())
    worker = world.process().machine(NAME)
    worker.apply(c.HoldClaim("merge:[0]", "died", LEASE_MS, inputs))
    part, id_ = next(iter(batch.parts())), PartId(f"p{world.clock.now_ms():012x}{'0' * 20}")
    key = part_key(world.state().shard_id, COMPACTOR, id_)
    kept = record.replace(part, id=id_, key=key)
    world.blob.put(key, world.blob.get(part.key or ""))
    worker.apply(c.HoldClaim("merge:[0]", "died", LEASE_MS, inputs, (kept,), b"key", batch.desc.since))
    watching = world.collector()
    collect(world, watching)
    world.clock.advance_ms(CLAIM_KEPT_LEASES * LEASE_MS)
    collect(world, watching)
    assert world.state().claims, "another may take it over, with what it kept"
    world.clock.advance_ms(2)
    collect(world, watching)
    assert not world.state().claims
    assert key not in world.blobs()
    world.check_stores()


def test_a_reader_with_a_live_lease_keeps_every_blob_that_it_may_read() -> None:
    world = World()
    world.append_many(8, 20)
    snapshot = world.shard.snapshot(5)
    expected = world.expected(5)
    world.worker().run(NAME, idle=True)
    world.append_many(30, 1)
    collect(world)
    rows = snapshot.to_arrow()
    assert rows.num_rows == len(expected)
    collect(world)
    assert data(world) == set(world.state().trace.blob_keys), "the snapshot was closed: nothing is held any more"


def test_a_lapsed_lease_holds_nothing_even_when_nobody_commits() -> None:
    world = World()
    world.append_many(8, 20)
    reader = ReaderId("r" + "0" * 32)
    world.user.machine(NAME).apply(c.RegisterReader(reader, Antichain(0), LEASE_MS))
    world.worker().run(NAME, idle=True)
    watching = world.collector()
    collect(world, watching)
    held = data(world)
    world.clock.advance_ms(LEASE_MS + 1)
    collect(world, watching)
    assert reader not in world.state().leased_readers
    assert data(world) < held
    assert data(world) == set(world.state().trace.blob_keys)


def test_a_reader_that_renews_in_time_is_not_taken_for_lapsed() -> None:
    world = World()
    world.append_many(8, 20)
    reader = ReaderId("r" + "0" * 32)
    machine = world.user.machine(NAME)
    machine.apply(c.RegisterReader(reader, Antichain(0), LEASE_MS))
    world.worker().run(NAME, idle=True)
    for _ in range(3):
        world.clock.advance_ms(LEASE_MS // 2)
        machine.apply(c.DowngradeSince(reader, None, world.state().seqno))
        collect(world)
    assert reader in world.state().leased_readers


def test_a_missing_rollup_leaves_the_log_as_it_is() -> None:
    world = merged()
    world.append_many(40, 1)
    state = world.state()
    for seqno, rollup in state.rollups.items():
        if seqno > 1:
            world.blob.delete([rollup.key])
    first = world.consensus.scan(NAME, 1, 1)
    with pytest.raises(Corruption, match="rollup"):
        collect(world)
    assert world.consensus.scan(NAME, 1, 1) == first


@pytest.mark.parametrize("first", thinned(range(1, 5), 4))
def test_a_log_that_another_collector_truncates_meanwhile_is_no_harm(first: int) -> None:
    world = merged()
    world.append_many(20, 1)
    for at in range(first, 60, 4):  # at every step of the one, another does everything
        fuse = Fuse()
        original = fuse.step

        def step(work, at=at, fuse=fuse, original=original):  # type: ignore[no-untyped-def]
            if fuse.steps + 1 == at:
                collect(world)
            return original(work)

        fuse.step = step  # type: ignore[method-assign]
        collector = world.collector(fuse)
        while not collector.run(NAME).done:
            pass
        world.check_stores()
        world.append_many(1, 3)
    world.check_reads()


def test_one_run_is_bounded_but_every_run_gets_somewhere() -> None:
    world = World(policy=Policy(inline_part_bytes_max=0, rollup_every=8))
    world.append_many(60, 1)
    collector = world.collector()
    collector._entries_max = 10
    lengths = []
    for _ in range(20):
        lengths.append(len(world.consensus.scan(NAME, 1, 1_000)))
        if collector.run(NAME).done:
            break
    assert all(0 < before - after <= 26 for before, after in pairwise(lengths[:-1]))
    assert lengths[-1] < 20


def test_orphans_are_swept_when_no_write_can_still_be_about_to_name_them() -> None:
    world = merged()
    collect(world)
    writer = world.shard.open_writer()
    staged = writer.stage([{"k": "k1", "v": 1}], 100)
    orphans = {part.key for run in staged for part in run.parts}
    assert orphans <= world.blobs()
    assert world.sweeper().sweep(NAME).orphans == 0, "too young"
    world.clock.advance_ms(AGE_MS + 1)
    report = world.sweeper(dry_run=True).sweep(NAME)
    assert orphans <= set(report.keys)
    assert report.deleted == 0
    assert orphans <= world.blobs(), "a dry run deletes nothing"
    assert world.sweeper().sweep(NAME).deleted == report.orphans
    assert data(world) == set(world.state().trace.blob_keys)
    world.check_reads()


def test_parts_of_a_registered_writer_are_not_swept() -> None:
    world = World()
    writer = world.shard.open_writer()
    writer.insert([{"k": "k1", "v": 1}])
    staged = writer.stage([{"k": "k2", "v": 2}], None)
    world.clock.advance_ms(AGE_MS - 1)
    writer.insert([{"k": "k3", "v": 3}])  # keeps its registration
    world.clock.advance_ms(2)
    world.sweeper().sweep(NAME)
    writer.commit_insert(staged)
    world.check_stores()


def test_what_was_named_by_a_version_that_can_still_be_loaded_is_not_swept() -> None:
    world = merged()
    reader = world.shard.open_reader(0)
    world.clock.advance_ms(AGE_MS + 1)
    gone = {key for diff in world.user.versions.diffs(NAME, SeqNo(1), 1_000) for key in diff.gone}
    assert gone
    world.sweeper().sweep(NAME)
    assert gone <= world.blobs()
    reader.close()


def test_what_is_left_of_shards_that_never_came_to_be_is_swept() -> None:
    world = merged()
    stray = "s" + "ab" * 16 + f"/v{1:020d}/r" + "0" * 32 + ".rollup"
    foreign = "s" + "ab" * 15 + "ff/w" + "0" * 32 + "/p" + "0" * 32 + ".parquet"
    world.blob.put(stray, b"x")
    world.blob.put(foreign, b"x")
    assert world.sweeper().sweep_unborn().orphans == 0
    world.clock.advance_ms(AGE_MS + 1)
    assert world.sweeper().sweep_unborn().keys == [stray]
    assert world.blob.stat(foreign) is not None, "rows are never taken for what is left of nothing"
    world.check_stores()


def test_a_process_that_the_truncated_log_has_left_behind_commits_like_any_other() -> None:
    """Its compare-and-set definitely lost: that the log entry is not to be read any more makes nothing uncertain."""
    world = World()
    world.append_many(2, 5)
    behind = world.process().machine(NAME)
    behind.state()
    world.append_many(20, 1)
    collect(world)
    upper = world.state().upper.element
    assert upper is not None
    assert world.consensus.scan(NAME, 1, 1)[0].seqno > behind.state().seqno + 1
    assert behind.apply(c.AdvanceUpper(Antichain(upper + 1))) == c.Appended(Antichain(upper), Antichain(upper + 1))
