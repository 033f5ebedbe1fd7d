"""Workers share a shard through claims; whoever loses one has worked in vain and harmed nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from blob import BlobUnavailable
from compactor.engine import EngineSettings, Keep, LocalEngine, MergedChunk, MergeJob
from compactor.metering import MaintenanceMetrics
from compactor.worker import MergeOutcome, Worker
from persist.copies.throttled_blob import Throttle
from persist.core import commands as c
from persist.core.batch import Run
from persist.core.errors import Corruption, Unavailable
from persist.parts import ShardSchema
from tests.support.location import TestClock
from tests.support.maintained import LEASE_MS, NAME, SCHEMA, WORKER, World


class Pausing:
    """An engine that does something else before every chunk that it hands out."""

    def __init__(self, worker_of: World, meanwhile: object) -> None:
        self._inner = LocalEngine(worker_of.blob, worker_of.user.ids, WORKER.engine)
        self._meanwhile = meanwhile
        self.chunks = 0

    def merge(self, job: MergeJob, keep: Keep) -> Iterator[MergedChunk]:
        for chunk in self._inner.merge(job, keep):
            self.chunks += 1
            self._meanwhile(self.chunks)  # type: ignore[operator]
            keep()
            yield chunk


def due(world: World) -> c.MergeSpec:
    return world.worker().due(NAME, idle=True)[0]


def batches_of(world: World) -> int:
    return sum(1 for batch in world.state().trace.batches if batch.runs)


def test_merging_changes_nothing_that_can_be_seen() -> None:
    world = World()
    world.append_many(8, 20)
    world.forget_before(3)
    before = batches_of(world)
    assert world.worker().run(NAME, idle=True) >= 1
    assert batches_of(world) < before
    assert world.state().claims == {}
    world.check_reads()


def test_a_worker_that_is_to_end_begins_no_other_merge() -> None:
    """The merge that is under way is finished."""
    world = World()
    world.append_many(8, 20)
    merges: list[int] = []

    def meanwhile(chunk: int) -> None:
        merges.append(chunk)
        world.append_many(8, 20)

    worker = Worker(world.user, WORKER, engine=Pausing(world, meanwhile))
    assert worker.run(NAME, idle=True, ending=lambda: bool(merges)) == 1
    assert worker.run(NAME, idle=True, ending=lambda: True) == 0
    assert world.worker().run(NAME, idle=True) >= 1, "there was more to do"
    world.check_reads()


def test_a_worker_finds_nothing_to_do_twice() -> None:
    world = World()
    world.append_many(8, 20)
    world.worker().run(NAME, idle=True)
    seqno = world.state().seqno
    assert world.worker().run(NAME, idle=True) == 0
    assert world.state().seqno == seqno, "looking commits nothing"


def test_two_workers_do_not_do_the_same_merge() -> None:
    world = World()
    world.append_many(6, 20)
    spec = due(world)
    other = world.worker()

    def meanwhile(chunk: int) -> None:
        assert other.merge(NAME, spec) is MergeOutcome.BUSY
        assert other.due(NAME, idle=True) == []

    worker = Worker(world.process(), WORKER, engine=Pausing(world, meanwhile))
    assert worker.merge(NAME, spec) is MergeOutcome.APPLIED
    world.check_reads()


def test_a_refused_merge_leaves_no_claim_behind() -> None:
    world = World()
    world.append_many(4, 1)
    slow, quick = world.worker(), world.worker()
    [late, *_] = slow.due(NAME, idle=True)
    assert quick.run(NAME, idle=True) == 1
    assert slow.merge(NAME, late) is MergeOutcome.REFUSED
    assert world.state().claims == {}


def test_a_zombie_whose_claim_was_taken_over_changes_nothing() -> None:
    world = World()
    world.append_many(6, 40)
    spec = due(world)
    successor = world.worker()
    outcomes = []

    def meanwhile(chunk: int) -> None:
        if chunk == 3:
            assert successor.merge(NAME, spec) is MergeOutcome.BUSY
            world.clock.advance_ms(2 * LEASE_MS)
            outcomes.append(successor.merge(NAME, spec))

    zombie = Worker(world.process(), WORKER, engine=Pausing(world, meanwhile))
    assert zombie.merge(NAME, spec) is MergeOutcome.REFUSED
    assert outcomes == [MergeOutcome.APPLIED]
    assert successor.metrics.counters.merges_resumed == 1
    world.check_stores()
    world.check_reads()


def test_a_zombie_cannot_bring_back_parts_that_were_let_go() -> None:
    """Its first chunk left the State with its claim and was deleted; its result must not name that chunk again."""
    world = World()
    world.append_many(6, 40)
    spec = due(world)

    def meanwhile(chunk: int) -> None:
        if chunk == 2:
            for time in (6, 7):
                assert world.state().claims
                world.clock.advance_ms(6 * LEASE_MS)
                world.append([("k1", 1, time, 1)], time + 1)
            assert world.state().claims == {}, "a commit forgets the claim, and with it the first chunk"
            while not world.collector().run(NAME).done:
                pass

    zombie = Worker(world.process(), WORKER, engine=Pausing(world, meanwhile))
    assert zombie.merge(NAME, spec) is MergeOutcome.REFUSED
    world.check_stores()
    world.check_reads()


def test_a_zombie_that_has_saved_nothing_does_not_go_on_from_what_another_has_saved() -> None:
    """It renews a claim that has lapsed again, after a successor saved its first chunk and crashed."""
    world = World()
    world.append_many(6, 40)
    spec = due(world)

    def crash(chunk: int) -> None:
        if chunk == 2:
            raise KeyboardInterrupt

    def meanwhile(chunk: int) -> None:
        if chunk == 1:
            assert successor.merge(NAME, spec) is MergeOutcome.BUSY
            world.clock.advance_ms(2 * LEASE_MS)
            with pytest.raises(KeyboardInterrupt):
                successor.merge(NAME, spec)
            [claim] = process.machine(NAME).refresh().claims.values()
            assert claim.done
            world.clock.advance_ms(2 * LEASE_MS)

    successor, process = Worker(world.process(), WORKER, engine=Pausing(world, crash)), world.process()
    assert Worker(process, WORKER, engine=Pausing(world, meanwhile)).merge(NAME, spec) is MergeOutcome.REFUSED
    assert world.worker().merge(NAME, spec) is MergeOutcome.APPLIED
    world.check_reads()


def test_a_crash_loses_at_most_one_chunk() -> None:
    world = World()
    world.append_many(6, 90)
    spec = due(world)

    def meanwhile(chunk: int) -> None:
        if chunk == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Worker(world.process(), WORKER, engine=Pausing(world, meanwhile)).merge(NAME, spec)
    [claim] = world.state().claims.values()
    saved = len(claim.done)
    assert claim.resume_key > b""
    successor = Worker(world.process(), WORKER, engine=(engine := Pausing(world, lambda chunk: None)))
    assert successor.merge(NAME, spec) is MergeOutcome.BUSY
    world.clock.advance_ms(2 * LEASE_MS)
    assert successor.due(NAME, idle=True)[0].claim_key == spec.claim_key
    assert successor.merge(NAME, spec) is MergeOutcome.APPLIED
    held = [part.id for batch in world.state().trace.batches for part in batch.parts()]
    assert [part.id for part in claim.done] == held[:saved], "what was saved was not written again"
    assert engine.chunks >= 1
    world.check_reads()


def test_a_long_merge_renews_its_claim() -> None:
    world = World()
    world.append_many(6, 90)
    spec = due(world)
    other = world.worker()

    def meanwhile(chunk: int) -> None:
        world.clock.advance_ms(LEASE_MS // 2)
        assert other.merge(NAME, spec) is MergeOutcome.BUSY

    worker = Worker(world.process(), WORKER, engine=Pausing(world, meanwhile))
    assert worker.merge(NAME, spec) is MergeOutcome.APPLIED


def test_inputs_that_others_merged_and_collected_meanwhile_make_a_merge_fail_quietly() -> None:
    world = World()
    world.append_many(6, 20)
    spec = due(world)
    state = world.state()

    def meanwhile(chunk: int) -> None:
        if chunk == 1:  # one who claims nothing: such merges are refused by nobody
            outputs = merged_by_hand(world, spec)
            world.user.machine(NAME).apply(c.MergeResult(spec.inputs, outputs, state.since))
            while not world.collector().run(NAME).done:
                pass

    worker = Worker(world.process(), WORKER, engine=Pausing(world, meanwhile))
    assert worker.merge(NAME, spec) is MergeOutcome.REFUSED
    world.check_reads()


def merged_by_hand(world: World, spec: c.MergeSpec) -> tuple[Run, ...]:
    state = world.state()
    runs = tuple(run for batch in state.trace.batches for run in batch.runs)
    job = MergeJob(NAME, state.shard_id, runs, state.schemas, 0, b"")
    chunks = LocalEngine(world.blob, world.user.ids, WORKER.engine).merge(job, lambda: None)
    return (Run(tuple(part for chunk in chunks for part in chunk.parts)),)


def test_a_missing_input_that_the_state_still_names_is_corruption() -> None:
    world = World()
    world.append_many(6, 20)
    spec = due(world)
    key = next(iter(world.state().trace.blob_keys))
    world.blob.delete([key])
    with pytest.raises(Corruption, match="missing"):
        world.worker().merge(NAME, spec)


def test_a_store_that_does_not_answer_leaves_the_claim_to_lapse() -> None:
    world = World()
    world.append_many(6, 20)
    spec = due(world)

    def meanwhile(chunk: int) -> None:
        raise BlobUnavailable("away")

    worker = Worker(world.process(), WORKER, engine=Pausing(world, meanwhile))
    with pytest.raises(Unavailable):
        worker.merge(NAME, spec)
    other = world.worker()
    assert other.merge(NAME, spec) is MergeOutcome.BUSY
    world.clock.advance_ms(2 * LEASE_MS)
    assert other.merge(NAME, spec) is MergeOutcome.APPLIED


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads_writes_the_same_rows(threads: int) -> None:
    world = World()
    world.append_many(6, 90)
    settings = replace(WORKER, engine=EngineSettings(1 << 20, 1_000, threads))
    assert world.worker(settings=settings).run(NAME, idle=True) >= 1
    world.check_reads()
    for batch in world.state().trace.batches:
        for run in batch.runs:
            bounds = [(part.key_lower, part.key_upper) for part in run.parts]
            assert all(a[1] is not None and a[1] < b[0] for a, b in pairwise(bounds))


def test_rows_of_an_older_schema_are_written_in_the_current_one() -> None:
    world = World()
    world.append_many(6, 20)
    wider = ShardSchema(SCHEMA.append(SCHEMA.field("v").with_name("w")), ("k",))
    world.shard.evolve_schema(wider)
    world.worker().run(NAME)
    assert {part.schema_id for part in world.state().trace.parts()} == {2}
    world.check_reads()


def test_what_is_moved_stays_below_the_rate() -> None:
    clock = TestClock()
    start = clock.monotonic()
    throttle = Throttle(1_000, clock)
    for _ in range(100):
        throttle.spend(100)
    assert 8.5 <= clock.monotonic() - start <= 10.5
    Throttle(None, clock).spend(10**9)


def test_figures_tell_what_a_shard_costs() -> None:
    world = World()
    world.append_many(8, 20)
    metrics = MaintenanceMetrics()
    Worker(world.process(), WORKER, metrics=metrics).run(NAME, idle=True)
    figures = metrics.to_json()
    assert figures["merges_applied"] >= 1
    assert figures["bytes_read"] > 0
    assert figures["shards"][NAME]["write_amplification"] > 1
    assert figures["shards"][NAME]["space_amplification"] >= 1
