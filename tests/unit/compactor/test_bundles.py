"""A batch of very many parts names them by bundles, and nothing else changes: reads, merges, collection, repair."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from unittest.mock import patch

import pytest

from blob.memory_blobs import MemoryBlob
from persist.client.snapshot import ReadSettings, part_reader
from persist.commit.blob_tasks import write_bundles
from persist.copies.shard_checks import byte_faults
from persist.core import commands as c
from persist.core.batch import HollowBatch, Part, Run
from persist.core.blob_keys import COMPACTOR, bundle_key, is_bundle_key, is_rollup_key
from persist.core.bundles import packed, to_bundle
from persist.core.errors import Corruption, InvalidUsage
from persist.core.frontier import Antichain
from persist.core.ids import PartId, mint
from persist.core.record import replace
from persist.core.shard_view import ViewRequest
from persist.core.state import Policy
from persist.parts import KeyRange, encode_key
from persist.parts.read_plan import expand_bundles, read_bundle
from tests.support.crashing import Crash, Fuse
from tests.support.examples import thinned
from tests.support.maintained import NAME, World

TINY = Policy(inline_part_bytes_max=0, rollup_every=16, plain_parts_max=1)
PLAIN = replace(TINY, plain_parts_max=10_000)


def bundled(count: int = 10) -> World:
    """A shard with one batch of so many parts."""
    world = World(policy=TINY)
    world.append_in_parts(count, 1)
    return world


def bundles(world: World) -> list[Part]:
    return [part for part in world.state().trace.parts() if part.bundle is not None]


def listed(world: World) -> list[Part]:
    runs = [run for batch in world.state().trace.batches for run in batch.runs]
    return [part for run in expand_bundles(runs, world.blob) for part in run.parts]


def collected(world: World) -> None:
    """Collect until nothing is left to do."""
    for _ in range(20):
        if world.collector().run(NAME).done:
            return
    raise AssertionError("collection finds no end")


def left_over(world: World) -> set[str]:
    return {key for key in world.blobs() - world.named() if not is_rollup_key(key)}


# --- what the State holds


def test_a_batch_of_many_parts_names_bundles() -> None:
    world = bundled(10)
    [batch] = world.state().trace.batches
    assert [part.bundle.parts for part in bundles(world) if part.bundle] == [4, 4, 2]
    assert (len(list(batch.parts())), batch.part_count, batch.run_count, batch.rows) == (3, 10, 10, 10)
    assert world.contents(0) == world.expected(0)
    world.check_stores()


def test_what_a_bundle_says_is_what_its_parts_say() -> None:
    world = bundled(10)
    for bundle in bundles(world):
        parts = [part for run in read_bundle(bundle, world.blob) for part in run.parts]
        assert (bundle.rows, bundle.size, bundle.diff_sum) == (
            sum(part.rows for part in parts), sum(part.size for part in parts), len(parts),
        )  # fmt: skip
        assert bundle.key_lower == min(part.key_lower for part in parts)
        assert bundle.key_upper == max(part.key_upper or b"" for part in parts)


def test_a_long_run_is_cut_into_bundles_of_one_run() -> None:
    world = World(policy=TINY)
    parts = [part for number in range(9) for part in _one(world, number)]
    [runs] = packed([Run(tuple(parts))], 4)
    assert [len(each.parts) for held in runs for each in held] == [4, 4, 1]
    assert [part for held in runs for each in held for part in each.parts] == parts


def _one(world: World, number: int) -> list[Part]:
    world.append_in_parts(1, number + 1, first=number)
    return list(world.state().trace.batches[-1].parts())


def test_an_old_batch_is_bundled_by_the_next_commit() -> None:
    world = World(policy=PLAIN)
    world.append_in_parts(10, 1)
    assert bundles(world) == []
    world.policy = TINY
    world.reopen()
    world.append([], 2)
    assert len(bundles(world)) == 3
    world.check_reads()


def test_dying_while_bundles_are_written_loses_nothing() -> None:
    steps = 0
    while True:
        world = World(policy=PLAIN)
        world.append_in_parts(6, 1)
        world.policy = TINY
        fuse = Fuse(steps + 1)
        try:
            world.process(fuse).machine(NAME).apply(c.AdvanceUpper(Antichain(2)))
        except Crash:
            world.reopen()
            world.check_stores()
            world.check_reads()
            steps += 1
            continue
        break
    assert len(bundles(world)) == 2
    assert steps > 5


# --- reads


@contextmanager
def reads_of_bundles() -> Iterator[list[str]]:
    seen: list[str] = []
    real = MemoryBlob.get_range

    def get_range(self: MemoryBlob, key: str, start: int, length: int) -> bytes:
        if is_bundle_key(key):
            seen.append(key)
        return real(self, key, start, length)

    with patch.object(MemoryBlob, "get_range", get_range):
        yield seen


def test_a_read_of_few_keys_reads_the_bundles_of_these() -> None:
    world = bundled(16)
    transport = world.client.transport
    view = transport.view(NAME, ViewRequest())
    schema, reader = part_reader(transport, view, ReadSettings())
    runs = [run for batch in view.batches for run in batch.runs]
    narrow = KeyRange(encode_key(schema, ("k00005",)), encode_key(schema, ("k00006",)))
    with reads_of_bundles() as seen:
        [table] = reader.read_range(runs, as_of=0, key_range=narrow)
    assert table.column("k").to_pylist() == ["k00005"]
    assert len(seen) == 1


def test_opening_and_appending_read_no_bundle() -> None:
    world = bundled(16)
    with reads_of_bundles() as seen:
        world.reopen()
        world.append([("new", 1, 1, 1)], 2)
    assert seen == []


def test_listening_gives_what_bundles_list() -> None:
    world = bundled(10)
    listener = world.shard.listen(0)
    world.append_in_parts(6, 2, first=20)
    [event] = list(listener.next_events(0.0))
    assert sorted(event.updates.column("k").to_pylist()) == [f"k{number:05}" for number in range(20, 26)]


def test_a_damaged_bundle_is_told_with_its_shard() -> None:
    world = bundled(10)
    broken = bundles(world)[1]
    assert broken.key is not None
    data = world.blob.get(broken.key)
    _overwrite(world, broken.key, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(Corruption, match=f"{NAME}.*{broken.key}"):
        world.contents(0)
    [fault] = byte_faults(world.state(), world.blob)
    assert fault.named is not None
    assert (fault.key, fault.named.part) == (broken.key, broken)


def _overwrite(world: World, key: str, data: bytes) -> None:
    world.blob.delete([key])
    world.blob.put(key, data)


# --- what else names parts


def test_a_writer_brings_no_bundle() -> None:
    world = bundled(10)
    with closing(world.shard.open_writer()) as writer, pytest.raises(InvalidUsage, match="bundle"):
        writer.commit_insert((Run((bundles(world)[0],)),))


def test_a_bundle_that_lists_other_parts_is_refused() -> None:
    world = World(policy=PLAIN)
    world.append_in_parts(6, 1)
    state = world.state()
    [batch] = state.trace.batches
    half = HollowBatch(batch.desc, batch.runs[:3], 3)
    made = write_bundles(world.user.versions, world.user.ids, TINY, state, half)
    assert made is not None
    others = [part.id for run in batch.runs[3:] for part in run.parts]
    with pytest.raises(InvalidUsage, match="does not list"):
        world.user.machine(NAME).apply(c.BundleParts(tuple(others), made.outputs))
    assert world.user.machine(NAME).apply(made) == c.Bundled(True)
    assert world.user.machine(NAME).apply(made) == c.Bundled(False)
    world.check_reads()


def test_parts_at_which_a_merge_is_at_work_are_not_bundled() -> None:
    world = World(policy=PLAIN)
    world.append_in_parts(6, 1)
    machine = world.user.machine(NAME)
    made = write_bundles(world.user.versions, world.user.ids, TINY, world.state(), world.state().trace.batches[0])
    assert made is not None
    machine.apply(c.HoldClaim("merge:[0]", "somebody", 60_000, made.inputs[:1]))
    assert machine.apply(made) == c.Bundled(False)
    machine.apply(c.ReleaseClaim("merge:[0]", "somebody"))
    assert machine.apply(made) == c.Bundled(True)


# --- merges and collection


@pytest.mark.parametrize("first", thinned(range(3), 3))
def test_the_parts_of_a_bundle_go_before_it(first: int) -> None:
    """A collector that dies between any two steps leaves nothing for ever."""
    steps = first
    while True:
        world = World(policy=replace(TINY, rollup_every=4))
        world.append_in_parts(3, 1)
        world.append_in_parts(3, 2)
        world.worker().run(NAME, idle=True)
        world.append_many(5, 1)
        fuse = Fuse(steps + 1)
        try:
            world.collector(fuse).run(NAME)
        except Crash:
            world.check_stores()
            collected(world)
            assert left_over(world) == set()
            world.check_reads()
            steps += 3
            continue
        break
    assert steps > 20


def test_a_reader_keeps_what_its_bundles_list() -> None:
    world = bundled(10)
    snapshot = world.shard.snapshot(0)
    world.append_in_parts(10, 2)
    world.worker().run(NAME, idle=True)
    world.append_many(20, 1)
    collected(world)
    assert snapshot.to_arrow().num_rows == 10
    world.append_many(20, 1)
    collected(world)
    assert left_over(world) == set()


def test_a_dropped_shard_leaves_nothing_of_its_bundles() -> None:
    world = bundled(10)
    world.shard.drop(force=True)
    collected(world)
    assert left_over(world) == set()


def test_the_sweep_keeps_what_bundles_list_and_takes_other_bundles() -> None:
    world = bundled(10)
    machine = world.user.machine(NAME)
    lost = bundle_key(machine.state().shard_id, COMPACTOR, mint(PartId, world.user.ids))
    world.blob.put(lost, b"never named")
    world.clock.advance_ms(48 * 3_600_000)
    report = world.sweeper().sweep(NAME)
    assert report.keys == [lost]
    world.check_stores()
    world.check_reads()


def test_the_sweep_keeps_what_a_reader_of_an_earlier_version_needs() -> None:
    world = bundled(10)
    named = world.named()
    world.append_in_parts(10, 2)
    world.worker().run(NAME, idle=True)
    world.clock.advance_ms(48 * 3_600_000)
    world.sweeper().sweep(NAME)
    assert {key for key in named if not is_rollup_key(key)} <= world.blobs()


def test_nothing_is_swept_where_a_bundle_cannot_be_read() -> None:
    world = bundled(10)
    lost = bundles(world)[0].key
    assert lost is not None
    world.blob.delete([lost])
    world.clock.advance_ms(48 * 3_600_000)
    before = world.blobs()
    with pytest.raises(Corruption, match="nothing is swept"):
        world.sweeper().sweep(NAME)
    assert world.blobs() == before


# --- repair


def test_a_part_in_a_bundle_is_taken_out_and_the_others_stay() -> None:
    world = bundled(10)
    bundle = bundles(world)[1]
    runs = read_bundle(bundle, world.blob)
    [bad] = runs[2].parts
    command = c.ReplacePart(bad.id, within=bundle.id, listed=runs)
    assert world.user.machine(NAME).apply(command) == c.PartReplaced(bad)
    world.rows = [row for row in world.rows if row[0] != "k00006"]
    assert world.contents(0) == world.expected(0)
    world.append_many(40, 1)
    collected(world)
    world.check_stores()
    world.check_reads()
    assert left_over(world) == set()


def test_a_repair_that_lists_other_parts_is_refused() -> None:
    world = bundled(10)
    first, second, _ = bundles(world)
    runs = read_bundle(first, world.blob)
    with pytest.raises(InvalidUsage, match="does not list"):
        world.user.machine(NAME).apply(c.ReplacePart(runs[0].parts[0].id, within=second.id, listed=runs))
    world.check_reads()


def test_a_bundle_is_replaced_by_a_copy_and_its_parts_stay() -> None:
    world = bundled(10)
    bundle = bundles(world)[1]
    assert bundle.key is not None
    data = world.blob.get(bundle.key)
    world.blob.delete([bundle.key])
    fresh = mint(PartId, world.user.ids)
    key = bundle_key(world.state().shard_id, COMPACTOR, fresh)
    world.blob.put(key, data)
    world.user.machine(NAME).apply(c.ReplacePart(bundle.id, replace(bundle, id=fresh, key=key)))
    world.append_many(40, 1)
    collected(world)
    world.check_stores()
    world.check_reads()


def test_a_bundle_that_is_lost_is_taken_out_and_collection_goes_on() -> None:
    world = bundled(10)
    bundle = bundles(world)[1]
    assert bundle.key is not None
    world.blob.delete([bundle.key])
    world.user.machine(NAME).apply(c.ReplacePart(bundle.id))
    world.rows = [row for row in world.rows if row[0] not in {f"k{n:05}" for n in range(4, 8)}]
    world.append_many(40, 1)
    collected(world)
    world.check_reads()
    world.clock.advance_ms(48 * 3_600_000)
    world.sweeper().sweep(NAME)
    assert left_over(world) == set()


def test_damage_in_a_bundle_that_left_stops_no_collection() -> None:
    world = bundled(10)
    key = bundles(world)[0].key
    assert key is not None
    world.append_in_parts(10, 2)
    world.worker().run(NAME, idle=True)
    _overwrite(world, key, b"damaged")
    world.append_many(20, 1)
    collected(world)
    assert key not in world.blobs()
    world.check_reads()
    world.clock.advance_ms(48 * 3_600_000)
    world.sweeper().sweep(NAME)
    assert left_over(world) == set()


def test_runs_with_inline_parts_stay() -> None:
    world = World(policy=replace(TINY, inline_part_bytes_max=10_000))
    world.append_in_parts(5, 1)
    [batch] = world.state().trace.batches
    assert all(part.is_inline for part in batch.parts())
    assert not to_bundle(batch, TINY, world.state().shard_id)
