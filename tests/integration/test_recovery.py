"""Recovery from the blob store alone: what was published is there, exact; no time is given out twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist
from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist import Conflict, Corruption, InvalidUsage, PersistError, ReadOnly, UpperMismatch
from persist.commit.location import Location
from persist.commit.location_identity import LOG_KEY
from persist.copies.recovery import GAP, SEQNO_GAP, RecoveryRequest, plan, run_recovery
from persist.copies.verify import Depth, verify_shards
from persist.core.blob_keys import COMPACTOR, is_part_key, part_key
from persist.core.ids import PartId, mint, shard_id_of
from persist.maintenance.journal_writer import PublishSettings
from rpc.cli.program import main
from tests.support.crashing import Crash, CrashingBlob, CrashingConsensus, Fuse
from tests.support.embedded import client_of
from tests.support.examples import thinned
from tests.support.location import AscendingIds, memory_location
from tests.support.maintained import NAME, SCHEMA, World
from tests.support.pages import error_rows
from tests.support.regions import publish as publish_all

SETTINGS = PublishSettings(every_s=5.0)
SOON = 100  # a gap for tests that look at every time


@pytest.fixture
def world() -> World:
    world = World()
    world.append_many(5, 4)
    return world


def upper_of(world: World) -> Any:
    return world.state().upper.element


def append(world: World) -> None:
    upper = upper_of(world)
    world.append([(f"k{upper}", upper, upper, 1)], upper + 1)


def publish(world: World) -> None:
    publish_all(world.process(), SETTINGS)


def empty(world: World, fuse: Fuse | None = None, consensus: MemoryConsensus | None = None, ids: int = 90) -> Location:
    """The location with a consensus store that has nothing."""
    log = consensus or MemoryConsensus("mem:new")
    return memory_location(
        blob=world.blob if fuse is None else CrashingBlob(world.blob, fuse),
        consensus=log if fuse is None else CrashingConsensus(log, fuse),
        clock=world.clock,
        ids=AscendingIds(ids),
        policy=world.policy,
        small_merges=False,
    )


def whole(world: World, location: Location, upper: int) -> None:
    """The shard shows at every time before `upper` what it should, and is sound."""
    since: Any = location.machine(NAME).refresh().since.element
    for as_of in range(since, upper):
        assert world.contents(as_of, location) == world.expected(as_of), as_of
    [verdict] = verify_shards(location, iter([NAME]), Depth(deep=True))
    assert verdict.is_sound, verdict.faults


def test_everything_that_was_published_is_there_and_no_time_is_given_out_twice(world: World) -> None:
    publish(world)
    upper = upper_of(world)
    location = empty(world)
    found = run_recovery(location)
    [told] = found.shards
    assert (told.name, told.upper, told.resumes) == (NAME, [upper], [upper + GAP])
    assert (told.is_whole, found.epoch) == (True, 2)
    whole(world, location, upper)
    shard = client_of(location).shard(NAME)
    assert location.machine(NAME).refresh().seqno >= world.state().seqno + SEQNO_GAP
    with pytest.raises(UpperMismatch):
        shard.compare_and_append([], upper, upper + 1)
    assert shard.snapshot(upper + 5).to_arrow().num_rows == shard.snapshot(upper - 1).to_arrow().num_rows
    assert shard.insert([{"k": "new", "v": 1}]).upper.element > upper + GAP  # type: ignore[operator]


def test_an_append_that_touches_the_gap_is_a_conflict(world: World) -> None:
    """It was acknowledged as a replica's, and its rows were left out: also the retry of one that was lost."""
    publish(world)
    upper = upper_of(world)
    location = empty(world)
    run_recovery(location)
    shard = client_of(location).shard(NAME)
    trace = location.machine(NAME).refresh().trace
    ends = [(upper, upper + 1), (upper + 5, upper + 6), (upper - 1, upper + 1), (upper, upper + GAP + 1)]
    for lower, end in ends:
        with pytest.raises(UpperMismatch):
            shard.append([{"k": "gap", "v": 1, "__time": end - 1}], lower, end)
    assert location.machine(NAME).refresh().trace == trace
    shard.append([{"k": "after", "v": 1, "__time": upper + GAP}], upper + GAP, upper + GAP + 1)
    assert "after" in shard.snapshot().to_arrow().column("k").to_pylist()


def test_what_was_not_published_is_lost_and_nothing_of_it_is_half_there(world: World) -> None:
    publish(world)
    upper = upper_of(world)
    published = world.state().seqno
    for _ in range(3):
        append(world)
    location = empty(world)
    [told] = run_recovery(location).shards
    assert (told.upper, told.version, told.known) == ([upper], published, published)
    assert told.to_json()["unknown_after"] == published
    world.rows = [row for row in world.rows if row[2] < upper]
    whole(world, location, upper)


def copy_of(log: MemoryConsensus, url: str = "mem:older") -> MemoryConsensus:
    """A copy of this consensus store as it is now."""
    copy = MemoryConsensus(url)
    for key in [LOG_KEY, *log.keys()]:
        entries = log.scan(key, 1, 10_000)
        copy.begin(key, entries[0].seqno, entries[0].data)
        for entry in entries[1:]:
            assert copy.compare_and_set(key, entry.seqno, entry.data)
    return copy


def test_an_older_copy_with_which_somebody_went_on_adds_nothing_from_there(world: World) -> None:
    """Its commits have the seqnos of others that were published: neither of the two histories is made up of both."""
    older = copy_of(world.consensus)
    upper = upper_of(world)
    append(world)
    publish(world)
    gone_on = empty(world, consensus=older, ids=70)
    client_of(gone_on).shard(NAME).insert([{"k": "other", "v": 9}])
    with pytest.raises(Corruption, match="is incomplete"):
        run_recovery(empty(world), RecoveryRequest(older=older))
    location = empty(world)
    [told] = run_recovery(location, RecoveryRequest(gap=SOON, older=older, accept_loss=True)).shards
    assert (told.is_whole, told.upper) == (False, [upper])
    assert any("two histories" in why for why in told.why)
    world.rows = [row for row in world.rows if row[2] < upper]
    whole(world, location, upper)


def test_a_blob_store_that_is_older_than_the_log(world: World) -> None:
    """The log that is there is given as an older copy: what it tells of lacks blobs, and is told as lost."""
    world.append_in_parts(3, 6)
    publish(world)
    upper, held = upper_of(world), {stat.key for stat in world.blob.list("")}
    world.append_in_parts(3, upper + 1)
    for _ in range(40):
        append(world)
    publish(world)
    world.blob.delete([stat.key for stat in world.blob.list("") if stat.key not in held])
    with pytest.raises(Corruption, match="is incomplete"):
        run_recovery(empty(world), RecoveryRequest(older=world.consensus))
    location = empty(world)
    [told] = run_recovery(location, RecoveryRequest(gap=SOON, older=world.consensus, accept_loss=True)).shards
    assert (told.upper, told.is_whole, told.known) == ([upper], False, world.state().seqno)
    assert told.lost > 40
    world.rows = [row for row in world.rows if row[2] < upper]
    whole(world, location, upper)


def test_until_it_has_ended_nobody_opens_the_location(world: World) -> None:
    publish(world)
    log = MemoryConsensus("mem:new")
    tries = 0
    while log.head("\x7fbinding") is None:
        tries += 1
        assert tries < 100, "it never ends"
        with suppress(Crash):  # each try may leave a rollup that the next one reads
            run_recovery(empty(world, Fuse(3 * tries), log, ids=1000 + tries), RecoveryRequest(gap=SOON))
        if log.head("\x7fbinding") is None:
            with pytest.raises(InvalidUsage, match="do not belong together"):
                empty(world, None, log, ids=3000 + tries).machine(NAME).refresh()
    assert tries > 5
    assert empty(world, None, log, ids=90).machine(NAME).refresh().upper.element is not None


@pytest.mark.parametrize("at", thinned(range(1, 40), 8))
@pytest.mark.parametrize("after", [False, True])
def test_a_recovery_that_was_killed_is_repeated(world: World, at: int, after: bool) -> None:
    publish(world)
    upper = upper_of(world)
    log = MemoryConsensus("mem:new")
    with suppress(Crash):
        run_recovery(empty(world, Fuse(at, after=after), log, ids=91), RecoveryRequest(gap=SOON))
    again = empty(world, None, log, ids=92)
    if log.head("\x7fbinding") is None:
        [told] = run_recovery(again, RecoveryRequest(gap=SOON)).shards
        assert (told.is_whole, told.upper, told.resumes) == (True, [upper], [upper + SOON])
    else:
        with pytest.raises(InvalidUsage, match="is complete, at epoch 2"):
            run_recovery(again, RecoveryRequest(gap=SOON))
    whole(world, again, upper)
    assert again.machine(NAME).refresh().upper.element == upper + SOON


def test_where_blobs_are_missing_somebody_decides(world: World) -> None:
    world.append_in_parts(3, 6)
    publish(world)
    held = {stat.key for stat in world.blob.list("")}
    upper = upper_of(world)
    world.append_in_parts(3, upper + 1)
    publish(world)
    [lost] = [s.key for s in world.blob.list("") if s.key not in held and is_part_key(s.key)][:1]
    world.blob.delete([lost])
    log = MemoryConsensus("mem:new")
    before = {stat.key for stat in world.blob.list("")}
    with pytest.raises(Corruption, match="the newest version of 1 shards is incomplete: orders"):
        run_recovery(empty(world, None, log))
    assert {stat.key for stat in world.blob.list("")} == before
    assert log.head("\x7frecovery") is None
    location = empty(world, None, log)
    [told] = run_recovery(location, RecoveryRequest(accept_loss=True)).shards
    assert (told.is_whole, told.upper, told.missing) == (False, [upper], (lost,))
    world.rows = [row for row in world.rows if row[2] < upper]
    whole(world, location, upper)


def test_a_shard_whose_first_commit_was_not_published_is_told_and_holds_nothing_up(world: World) -> None:
    publish(world)
    client_of(world.user).create_shard("young", SCHEMA, ["k"]).insert([{"k": "a", "v": 1}])
    location = empty(world)
    found = {shard.name: shard for shard in run_recovery(location).shards}
    assert (found["young"].unborn, found["young"].upper, found[NAME].unborn) == (True, None, False)
    back = client_of(location)
    assert back.shards() == [NAME]
    again = back.create_shard("young", SCHEMA, ["k"])
    again.insert([{"k": "b", "v": 2}])
    assert again.snapshot().to_arrow().column("k").to_pylist() == ["b"]


def test_two_recoveries_at_once(world: World) -> None:
    """Into two stores: the one that fences second wins, and the other one is told."""
    publish(world)
    one, two = empty(world, ids=91), empty(world, ids=92)
    run_recovery(one, RecoveryRequest(gap=SOON))
    run_recovery(two, RecoveryRequest(gap=SOON))
    world.clock.advance_ms(60_000)
    with pytest.raises(ReadOnly, match="only reads"):
        one.identity.confirm()


def test_dropped_shards_stay_so_and_their_names_live_again(world: World) -> None:
    client = client_of(world.user)
    client.create_shard("gone", SCHEMA, ["k"]).insert([{"k": "a", "v": 1}])
    client.shard("gone").drop()
    for _ in range(6):
        world.clock.advance_ms(100_000)
        world.collector().run("gone")
    publish(world)
    location = empty(world)
    found = {shard.name: shard for shard in run_recovery(location).shards}
    assert (found["gone"].dropped, found[NAME].dropped) == (True, False)
    back = client_of(location)
    assert back.shards() == [NAME]
    again = back.create_shard("gone", SCHEMA, ["k"])
    again.insert([{"k": "b", "v": 2}])
    assert again.snapshot().to_arrow().column("k").to_pylist() == ["b"]


@pytest.mark.parametrize("gap", [1, SOON])
def test_an_erasure_that_is_pending_stays_so(world: World, gap: int) -> None:
    """At the time at which the shard goes on."""
    shard = client_of(world.process()).shard(NAME)
    upper = upper_of(world)
    shard.append([{"k": "gone", "v": 1}, {"k": "kept", "v": 1}], upper, upper + 1)
    told = shard.erase(where="k = 'gone'")
    publish(world)
    location = empty(world)
    run_recovery(location, RecoveryRequest(gap=gap))
    other = client_of(location).shard(NAME)
    resumes = other.upper().element
    assert resumes == upper + 1 + gap
    assert (other.erased(told.id).phase, other.erased(told.id).at) == ("pending", resumes)
    assert {"gone", "kept"} <= set(other.snapshot().to_arrow()["k"].to_pylist())
    other.append((), resumes, resumes + 1)
    assert other.erased(told.id).phase == "retracted"
    assert {"gone", "kept"} & set(other.snapshot().to_arrow()["k"].to_pylist()) == {"kept"}
    [verdict] = verify_shards(location, iter([NAME]), Depth(deep=True))
    assert verdict.is_sound, verdict.faults


def stranger(world: World) -> Location:
    log = MemoryConsensus("mem:other")
    log.compare_and_set("stranger", 1, b"x")
    return empty(world, consensus=log)


def half_lost(world: World) -> Location:
    world.append_in_parts(3, 6)
    publish(world)
    world.blob.delete([next(stat.key for stat in world.blob.list("") if is_part_key(stat.key))])
    return empty(world)


def overtaken(world: World) -> Location:
    """Killed after the mark was written; another recovery ended meanwhile."""
    log = MemoryConsensus("mem:new")
    for at in range(1, 60):
        with suppress(Crash):
            run_recovery(empty(world, Fuse(at), log, ids=100 + at), RecoveryRequest(gap=SOON))
        if log.head("\x7frecovery") is not None:
            break
    run_recovery(empty(world, ids=98), RecoveryRequest(gap=SOON))
    return empty(world, None, log, ids=99)


def foreign() -> MemoryConsensus:
    log = MemoryConsensus("mem:foreign")
    location = memory_location(blob=MemoryBlob(), consensus=log, ids=AscendingIds(7000))
    client_of(location).create_shard(NAME, SCHEMA, ["k"])
    return log


def nowhere(world: World) -> Location:
    return memory_location(blob=MemoryBlob(), consensus=MemoryConsensus(), clock=world.clock)


INCOMPLETE = "`recover`: the newest version of a shard is incomplete, and `--accept-loss` is not given"
REFUSED: list[tuple[str, type[PersistError], Callable[[World], Location], dict[str, Any]]] = [
    ("the consensus store is in use by a location", InvalidUsage, lambda world: world.process(), {}),
    ("the consensus store has shards, and no recovery was started there", InvalidUsage, stranger, {}),
    ("the blob store has no location", InvalidUsage, nowhere, {}),
    *(("`--gap` below 1, or beyond the most", InvalidUsage, empty, {"gap": gap}) for gap in (0, -1, 2**48 + 1)),
    (INCOMPLETE, Corruption, half_lost, {}),
    ("`recover`: resumed after another recovery has taken over", Conflict, overtaken, {}),
    ("`--older-consensus` is of another location", InvalidUsage, empty, {"older": foreign()}),
    ("`--older-consensus` is empty", InvalidUsage, empty, {"older": MemoryConsensus("mem:nothing")}),
]


def test_every_row_of_the_page_has_its_test() -> None:
    kinds = {row: kind.kind for row, kind, _, _ in REFUSED if kind is not InvalidUsage}
    assert error_rows("docs/backup.md", "recover") == kinds


@pytest.mark.parametrize(("row", "kind", "place", "asked"), REFUSED)
def test_what_is_refused_writes_nothing(
    world: World, row: str, kind: type[PersistError], place: Callable[[World], Location], asked: dict[str, Any]
) -> None:
    publish(world)
    location = place(world)
    before = {stat.key for stat in location.blob.list("")}
    names = location.consensus.keys("", "", 100)
    with pytest.raises(kind):
        run_recovery(location, RecoveryRequest(**asked))
    assert ({stat.key for stat in location.blob.list("")}, location.consensus.keys("", "", 100)) == (before, names)


def test_by_the_command_with_an_older_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing was published here: the older copy alone tells what came after the first rollup."""
    stores = ["--blob", f"file://{tmp_path}/blob", "--consensus", f"sqlite:///{tmp_path}/log.db"]
    schema = pa.schema([("id", pa.int64())])
    with persist.connect(blob=stores[1], consensus=stores[3]) as client:
        for number in range(3):
            client.create_shard("orders", schema, ["id"]).insert([{"id": number}])
    (tmp_path / "log.db").rename(tmp_path / "older.db")
    with (
        pytest.raises(PersistError, match="persist backup recover"),
        persist.connect(blob=stores[1], consensus=stores[3]) as c,
    ):
        c.shard("orders")
    older = ["--older-consensus", f"sqlite:///{tmp_path}/older.db"]
    assert main(["backup", "recover", *stores, *older, "--dry-run"]) == 0
    dry = capsys.readouterr().out
    assert main(["backup", "recover", *stores, *older]) == 0
    [told, total] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (told["whole"], total["not_whole"]) == (True, 0)
    assert told == json.loads(dry.splitlines()[0])
    with persist.connect(blob=stores[1], consensus=stores[3]) as client:
        assert sorted(client.shard("orders").snapshot().to_arrow().column("id").to_pylist()) == [0, 1, 2]
    assert main(["backup", "recover", *stores, "--older-consensus", "nonsense:"]) == 1
    assert "must start with" in capsys.readouterr().err


def test_blobs_of_a_shard_that_was_never_begun_hold_nothing_up(world: World) -> None:
    """A refused import, or blobs that were brought ahead, left parts under an id that no log was begun with."""
    publish(world)
    stray = part_key(shard_id_of("never"), COMPACTOR, mint(PartId, AscendingIds(70)))
    world.blob.put(stray, b"of an import that was refused")
    location = empty(world)
    told = [shard for shard in run_recovery(location).shards if shard.name != NAME]
    assert [(one.unborn, one.is_whole) for one in told] == [(True, True)]
    assert client_of(location).shards() == [NAME]


def test_without_a_catalogue_nothing_is_called_unborn(world: World) -> None:
    """Of a location that maintenance never visited nobody can say that a shard was not begun."""
    publish(world)
    stray = part_key(shard_id_of("never"), COMPACTOR, mint(PartId, AscendingIds(70)))
    world.blob.put(stray, b"of a shard, perhaps")
    world.blob.delete([stat.key for stat in world.blob.list("cat/")])
    with pytest.raises(Corruption, match="is incomplete"):
        run_recovery(empty(world))
    [told] = [shard for shard in plan(empty(world)).shards if shard.name != NAME]
    assert "no catalogue" in told.why[-1]
