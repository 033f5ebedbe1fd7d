"""What is published in the blob store: by processes that commit, and by maintenance for those that did not."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from blob import BlobUnavailable
from persist import Corruption, Indeterminate, InvalidUsage, ReadOnly
from persist.commit.state_loader import rolled_up
from persist.copies.blob_store_scan import BlobStoreScan
from persist.core import commands as c
from persist.core.batch import trace_of
from persist.core.blob_keys import BEATS, CATALOGUES, JOURNALS, is_journal_key, is_rollup_key
from persist.core.ids import SeqNo
from persist.core.record import replace
from persist.formats.state_frames import decode_catalogue, decode_diff, decode_journal
from persist.maintenance.journal_keeper import BEATS_KEPT, CATALOGUES_KEPT, Published
from persist.maintenance.journal_writer import FAILED_TRIES_MAX, Publisher, PublishSettings
from tests.support.maintained import NAME, World

SETTINGS = PublishSettings(every_s=5.0)


@pytest.fixture
def world() -> World:
    return World()


def publisher(world: World, settings: PublishSettings = SETTINGS) -> Publisher:
    user = world.process()
    return Publisher(user.blob, user.identity, world.clock, user.ids, settings)


def entry(world: World, seqno: int) -> bytes:
    return world.consensus.scan(NAME, seqno, 1)[0].data


def publish_entries(world: World, seqnos: Iterable[int]) -> None:
    """A process publishes these, and is gone."""
    one = publisher(world)
    for seqno in seqnos:
        one.add(NAME, entry(world, seqno))
    one.publish()


def visit(world: World, maintenance: Published, times: int = 3) -> None:
    """Maintenance looks at the shard at intervals."""
    for _ in range(times):
        looked(world, maintenance)
        world.clock.advance_ms(6_000)


def append(world: World, count: int = 1) -> None:
    for _ in range(count):
        upper = world.state().upper.element
        world.append([(f"k{upper}", upper, upper, 1)], upper + 1)


def journals(world: World) -> list[str]:
    return [stat.key for stat in world.blob.list(JOURNALS) if is_journal_key(stat.key)]


def published(world: World) -> set[int]:
    """The versions of the shard of which a journal tells."""
    shards = [shard for key in journals(world) for shard in decode_journal(world.blob.get(key)).shards]
    return {decode_diff(data).seqno for shard in shards for data in shard.entries}


def rolled(world: World) -> None:
    assert rolled_up(world.user.versions, world.state(), world.user.machine(NAME).apply)


def newest(world: World) -> int:
    [found] = BlobStoreScan(world.blob).shards()
    assert found.state is not None, found.why
    return int(found.state.seqno)


# --- a process that commits


def test_entries_of_an_interval_are_one_blob(world: World) -> None:
    append(world, 3)
    one = publisher(world)
    for seqno in (1, 2, 3):
        one.add(NAME, entry(world, seqno))
    assert journals(world) == [], "adding calls no store"
    assert one.publish() is not None
    one.add(NAME, entry(world, 4))
    assert one.publish() is None, "the interval is not over"
    world.clock.advance_ms(5_000)
    assert one.publish() is not None
    assert one.publish() is None, "nothing is left"
    assert (published(world), len(journals(world))) == ({1, 2, 3, 4}, 2)


def test_a_queue_that_is_full_drops_and_tells_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    append(world, 3)
    monkeypatch.setattr("persist.maintenance.journal_writer.QUEUE_ENTRIES_MAX", 2)
    one = publisher(world)
    for seqno in (1, 2, 3):
        one.add(NAME, entry(world, seqno))
    one.publish()
    assert (one.dropped, one.published, published(world)) == (1, 2, {1, 2})


def test_what_the_store_refuses_is_tried_again_and_then_left(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    append(world)
    one = publisher(world)
    one.add(NAME, entry(world, 1))

    def away(key: str, data: bytes) -> None:
        raise BlobUnavailable("away")

    with monkeypatch.context() as patched:
        patched.setattr(world.blob, "put", away)
        for _ in range(FAILED_TRIES_MAX):
            with pytest.raises(BlobUnavailable):
                one.publish(now=True)
    assert (one.is_idle, one.dropped) == (True, 1)
    one.add(NAME, entry(world, 2))
    one.close()
    assert published(world) == {2}, "closing publishes what is left"


def test_a_process_of_an_older_epoch_publishes_nothing(world: World) -> None:
    append(world)
    one = publisher(world)
    user = world.process()
    user.identity.check()
    one.add(NAME, entry(world, 1))
    world.blob.put("epoch/2", b"another consensus store has taken over")
    user.identity._looks.forget()  # the last look was long ago
    with pytest.raises(ReadOnly, match="only reads"):
        user.identity.confirm()
    other = Publisher(user.blob, user.identity, world.clock, user.ids, SETTINGS)
    other.add(NAME, entry(world, 1))
    with pytest.raises(ReadOnly, match="only reads"):
        other.publish()
    assert journals(world) == []


@pytest.mark.parametrize("wrong", [0.0, 1e9, float("nan")])
def test_settings_that_make_no_sense(wrong: float) -> None:
    with pytest.raises(InvalidUsage, match="is between"):
        PublishSettings(every_s=wrong).check()


# --- maintenance


def looked(world: World, maintenance: Published) -> float | None:
    return maintenance.visit(NAME, world.state())


def test_journals_go_once_a_rollup_covers_them_and_not_before(world: World) -> None:
    append(world, 5)
    maintenance = Published(world.process(), SETTINGS)
    visit(world, maintenance)
    assert len(journals(world)) == 1
    world.clock.advance_ms(400_000)
    maintenance.round()
    assert len(journals(world)) == 1, "nothing but it has these versions"
    rolled(world)
    append(world)
    visit(world, maintenance)
    at = world.state().seqno
    world.clock.advance_ms(400_000)
    maintenance.round()
    assert newest(world) == at
    assert min(published(world)) > max(world.state().rollups) - 1


def test_a_journal_that_is_covered_in_part_is_written_anew(world: World) -> None:
    append(world, 2)
    first, last = 1, world.state().seqno
    rolled(world)
    append(world, 2)
    publish_entries(world, range(first, world.state().seqno + 1))
    [before] = journals(world)
    maintenance = Published(world.process(), SETTINGS)
    looked(world, maintenance)
    world.clock.advance_ms(400_000)
    maintenance.round()
    [after] = journals(world)
    assert after != before
    assert published(world) == set(range(last + 1, world.state().seqno + 1))


def test_a_journal_whose_read_is_damaged_is_not_written_anew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was deleted, with what is in no rollup: another read of it may be whole."""
    append(world, 2)
    rolled(world)
    append(world, 2)
    publish_entries(world, range(1, world.state().seqno + 1))
    before = published(world)
    [key] = journals(world)
    maintenance = Published(world.process(), SETTINGS)
    looked(world, maintenance)
    world.clock.advance_ms(400_000)
    with monkeypatch.context() as patched:
        get = world.blob.get
        patched.setattr(world.blob, "get", lambda asked: b"nonsense" if asked == key else get(asked))
        maintenance.round()
    assert (journals(world), published(world)) == ([key], before)


def test_a_journal_of_a_shard_at_rest_goes_though_nobody_looks_at_the_shard(world: World) -> None:
    append(world)
    publish_entries(world, range(1, world.state().seqno + 1))
    rolled(world)
    maintenance = Published(world.process(), SETTINGS)
    maintenance.round()
    world.clock.advance_ms(400_000)
    maintenance.round()
    assert published(world) <= {world.state().seqno}


def test_a_damaged_journal_is_told_and_the_rest_goes_on(world: World) -> None:
    append(world)
    world.blob.put(f"{JOURNALS}{'0' * 32}/j{1:012d}.journal", b"nonsense")
    maintenance = Published(world.process(), SETTINGS)
    visit(world, maintenance)
    assert maintenance.bad_journals == 1
    bucket = BlobStoreScan(world.blob)
    [found] = bucket.shards()
    assert found.state == world.state()
    assert len(bucket.problems) == 1


def test_heartbeats_and_names(world: World) -> None:
    maintenance = Published(world.process(), SETTINGS)
    for number in range(5):
        assert maintenance.round({NAME: False, f"other{number}": True})
        assert not maintenance.round({NAME: False}), "at most once a heartbeat"
        world.clock.advance_ms(60_000)
    assert len(list(world.blob.list(BEATS))) == BEATS_KEPT
    listed = [stat.key for stat in world.blob.list(CATALOGUES)]
    assert len(listed) == CATALOGUES_KEPT
    assert decode_catalogue(world.blob.get(listed[-1])) == {NAME: str(world.state().shard_id), "other4": ""}
    maintenance.round({NAME: False, "other4": True})
    assert [stat.key for stat in world.blob.list(CATALOGUES)] == listed, "the same names are not written again"


# --- rollups


def test_who_loses_the_race_for_a_rollup_leaves_nothing(world: World) -> None:
    append(world)
    state = world.state()
    versions, apply = world.user.versions, world.user.machine(NAME).apply
    assert rolled_up(versions, state, apply)
    before = [stat.key for stat in world.blob.list("s")]
    assert not rolled_up(versions, state, apply), "another rollup of this State is named"
    append(world)
    rolled(world)
    assert not rolled_up(versions, state, apply), "a newer one is named"
    assert set(before) < {stat.key for stat in world.blob.list("s")}

    def silent(command: c.Command) -> c.Result:
        raise Indeterminate("nobody knows")

    there = len(list(world.blob.list("s")))
    with pytest.raises(Indeterminate):
        rolled_up(versions, world.state(), silent)
    assert len(list(world.blob.list("s"))) == there + 1, "it may be named"


# --- they are read back before the log is cut


def test_a_rollup_that_cannot_be_read_back_leaves_the_log_as_it_is(world: World) -> None:
    append(world, 3)
    rolled(world)
    newest_rollup = max(stat.key for stat in world.blob.list("s") if is_rollup_key(stat.key))
    data = bytearray(world.blob.get(newest_rollup))
    data[len(data) // 2] ^= 1
    world.blob.delete([newest_rollup])
    world.blob.put(newest_rollup, bytes(data))
    log = [found.seqno for found in world.consensus.scan(NAME, 1, 100)]
    world.forget_before(2)
    with pytest.raises(Corruption):
        world.collector().run(NAME)
    assert [found.seqno for found in world.consensus.scan(NAME, 1, 100)][: len(log)] == log


def test_a_rollup_that_holds_another_state_than_the_log_makes_is_not_taken(world: World) -> None:
    append(world, 2)
    state = world.state()
    wrong = state.trace.batches[:-1]
    assert rolled_up(world.user.versions, replace(state, trace=trace_of(wrong)), world.user.machine(NAME).apply)
    log = [found.seqno for found in world.consensus.scan(NAME, 1, 100)]
    with pytest.raises(Corruption, match="differs from the State that its log"):
        world.collector().run(NAME)
    assert [found.seqno for found in world.consensus.scan(NAME, 1, 100)][: len(log)] == log
    assert log[0] == SeqNo(1)
