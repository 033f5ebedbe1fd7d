"""Every finding of a check, provoked for real: how a location comes to it, and what is to be told of it."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pyarrow as pa

import persist
from persist.check import maintenance_checks
from persist.check.check_runner import Report, run_check
from persist.check.findings import CheckThresholds
from persist.check.location_checks import ExternalState, list_backups, server_facts
from persist.client.shard import Shard
from persist.commit import background_duties
from persist.commit.clocks_and_ids import SystemClock
from persist.commit.location import Location, LocationSettings
from persist.commit.location_identity import LOG_KEY
from persist.copies.verify import QUICK, Depth
from persist.core import commands as c
from persist.core.ids import ReaderId, WriterId
from persist.core.record import replace
from persist.core.state import Policy
from persist.inspect.readonly_location import ReadOnlyLocation, open_readonly_directory
from persist.maintenance.journal_keeper import Published
from rpc.auth import read_tokens, tokens_for_check
from rpc.cli.program import main
from tests.support.blob_faults import FaultPlan, FaultyBlob
from tests.support.clocks import DAY_MS, HOUR_MS, Clock, Ids, Machine, World
from tests.support.damaged import Damaged, healthy
from tests.support.inspected import PART, copied, everything, spoil_entry
from tests.support.location import InlineBackground, client_of
from tests.support.shard import first_write

SCHEMA = pa.schema([("id", pa.int64()), ("note", pa.string())])
CALM = CheckThresholds(free_percent=0)  # whatever else fills the disk of the machine on which tests run
NAME = "orders"
FEW = 200  # entries, in the place of the thousands after which a finding is told
SHARED = ("-shm",)  # memory that all connections to one SQLite file share
AILMENTS: dict[str, list[Ailment]] = {}


@dataclass(frozen=True, slots=True)
class Told:
    """What an examination told, and which words are to be in the finding that was provoked. `shard`: which it is of."""

    report: Report
    words: tuple[str, ...]
    shard: str | None = NAME


Ailment = Callable[[Path], Told]


def of(found: str) -> Callable[[Ailment], Ailment]:
    """Says that a function provokes the finding of this id."""

    def noted(ailment: Ailment) -> Ailment:
        AILMENTS.setdefault(found, []).append(ailment)
        return ailment

    return noted


# --- two kinds of places: stores in memory with clocks of their own, and directories


def examine(world: World, limits: CheckThresholds = CALM, around: ExternalState | None = None) -> Report:
    """By a machine whose clock is right. Both stores are the same after it."""
    before = stored(world)
    look = ReadOnlyLocation(world.blob, world.consensus, clock=Clock(world, 0))
    found = run_check(look, None, limits, around or ExternalState())
    assert stored(world) == before, "nothing is written"
    return found


def stored(world: World) -> dict[str, object]:
    """All that both stores hold."""
    found: dict[str, object] = {stat.key: (stat, world.blob.get(stat.key)) for stat in world.blob.list("")}
    keys = [*world.consensus.keys("", "", 1_000, True), LOG_KEY]
    return found | {f"log of {key}": world.consensus.scan(key, 1, 10_000) for key in keys}


def at(place: Path, limits: CheckThresholds = CALM, around: ExternalState | None = None, how: Depth = QUICK) -> Report:
    """Of a directory, which is byte for byte the same after it."""
    before = everything(place)
    look = open_readonly_directory(place)
    try:
        return run_check(look, None, limits, around or ExternalState(), how)
    finally:
        look.close()
        assert everything(place, but=SHARED) == {key: told for key, told in before.items() if not key.endswith(SHARED)}


def made(machine: Machine, rows: int = 3, history: str | None = "forever") -> Shard:
    """A shard into which rows came, a minute apart."""
    shard = machine.client.create_shard(NAME, SCHEMA, key=["id"], history=history)
    return filled(machine, shard, rows)


def filled(machine: Machine, shard: Shard, rows: int) -> Shard:
    for number in range(rows):
        shard.insert([{"id": number, "note": "x"}])
        machine.world.pass_ms(60_000)
    return shard


def bare(world: World, policy: Policy | None = None) -> Location:
    """A process that commits, and does nothing besides: as one whose background has no time."""
    clock = Clock(world, 0)
    world.machines += 1
    return Location(
        world.blob,
        world.consensus,
        settings=LocationSettings(policy or Policy(), small_merges=False),
        clock=clock,
        ids=Ids(clock, world.machines),
        background=InlineBackground(),
    )


# --- damage


@of("shard-unreadable")
def unreadable(place: Path) -> Told:
    copied(place)
    shutil.rmtree(place / "blob" / PART.split("/")[0])
    spoil_entry(place, NAME, 1)
    return Told(at(place), ("the shard can be neither read nor written", "ends at v32"))


@of("log-damaged")
def spoilt_entry(place: Path) -> Told:
    spoil_entry(copied(place), NAME, 20)
    return Told(at(place), ("v20 cannot be read",))


@of("log-damaged")
def entries_gone(place: Path) -> Told:
    connection = sqlite3.connect(copied(place) / "consensus.db")
    with connection:
        connection.execute("DELETE FROM consensus_log WHERE key = ? AND seqno IN (7, 8)", (NAME,))
    connection.close()
    return Told(at(place), ("entries v7 to v8 are missing",))


@of("blob-missing")
def part_gone(place: Path) -> Told:
    (copied(place) / "blob" / PART).unlink()
    return Told(at(place), ("1 blob that the shard needs is missing", PART))


@of("blob-missing")
def part_gone_before_the_shard_moved_on(place: Path) -> Told:
    world = World(policy=Policy(inline_part_bytes_max=0))
    shard = made(world.machine())
    part = next(stat.key for stat in world.blob.list("") if stat.key.endswith(".parquet"))
    world.blob.delete([part])
    shard.insert([{"id": 9, "note": "x"}])
    return Told(examine(world), ("is missing", part))


@of("blob-damaged")
def part_cut(place: Path) -> Told:
    blob = copied(place) / "blob" / PART
    blob.write_bytes(blob.read_bytes()[:-7])
    return Told(at(place), ("has 2224 bytes, not 2231",))


@of("blob-damaged")
def rollup_flipped(place: Path) -> Told:
    newest = max((copied(place) / "blob" / PART.split("/")[0]).rglob("*.rollup"))
    newest.write_bytes(b"x" * newest.stat().st_size)
    return Told(at(place), ("cannot be read",))


# --- the location


@of("stores-mispaired")
def other_blobs(place: Path) -> Told:
    copied(place)
    other = place.parent / "other"
    with persist.connect(f"persist://{other}", collect=False) as client:
        client.create_shard("elsewhere", SCHEMA, ["id"])
    shutil.rmtree(place / "blob")
    shutil.copytree(other / "blob", place / "blob")
    return Told(at(place), ("store",), None)


@of("marker-wrong")
def no_marker(place: Path) -> Told:
    (copied(place) / "persist.json").unlink()
    return Told(at(place), ("persist.json is missing",), None)


@of("format-newer")
def later_format(place: Path) -> Told:
    formats = copied(place) / "blob" / "format"
    formats.mkdir()
    for version in range(2, 100):
        (formats / str(version)).touch()
    return Told(at(place), ("this location has format version 99",), None)


@of("disk-full")
def full(place: Path) -> Told:
    """Every disk has less than all of it free: so the system is asked for real, and only the limit is another one."""
    persist.connect(f"persist://{place}", collect=False).close()
    return Told(
        at(place, CheckThresholds(free_percent=100)), ("the blob store and the consensus store has", "% free"), None
    )


@of("files-open")
def opened_to_others(place: Path) -> Told:
    with TemporaryDirectory(dir="/tmp") as away:  # what pytest gives lies in directories that are closed
        Path(away).chmod(0o755)
        persist.connect(f"persist://{away}", collect=False).close()
        Path(away, "blob").chmod(0o755)
        return Told(at(Path(away)), (f"every user of this machine can read {away}/blob",), None)


@of("maintenance-away")
def nobody_maintains(place: Path) -> Told:
    world = World()
    machine = world.machine()
    shard = made(machine)
    assert Published(machine.location).round()
    world.pass_ms(5 * HOUR_MS)
    shard.insert([{"id": 9, "note": "x"}])
    return Told(examine(world), ("shards were written 5 hours after that",), None)


@of("clock-off")
def writer_ahead(place: Path) -> Told:
    world = World(policy=Policy(inline_part_bytes_max=0))
    made(world.machine(off_ms=3 * HOUR_MS))
    return Told(examine(world), ("a writer's clock is 3 hours ahead of the blob store's",))


@of("clock-off")
def commit_in_the_future(place: Path) -> Told:
    world = World()
    made(world.machine(off_ms=3 * HOUR_MS))
    return Told(examine(world), ("a commit is 2 hours in the future",))


@of("clock-off")
def store_ahead(place: Path) -> Told:
    world = World(policy=Policy(inline_part_bytes_max=0))
    world.store_off_ms = HOUR_MS
    made(world.machine(), rows=1)
    return Told(examine(world), ("the blob store's clock is 59 minutes ahead of this machine's",))


@of("clock-off")
def server_off(place: Path) -> Told:
    world = World()
    machine = world.machine(off_ms=-HOUR_MS)
    made(machine)
    told = examine(world, around=ExternalState(served=server_facts(machine.location)))
    return Told(told, ("the clocks of this server and of the blob store differ",), None)


# --- who holds


@of("since-held")
def reader_left(place: Path) -> Told:
    world = World()
    machine = world.machine()
    shard = made(machine, history="none")
    shard.open_reader(0, purpose="billing")
    world.pass_ms(3 * DAY_MS)
    filled(machine, shard, 2)
    return Told(examine(world), ("reader 'billing'", "from time 0 on", "which is 3 days old", "would begin at 4"))


@of("since-held")
def cursor_left(place: Path) -> Told:
    world = World()
    shard = made(world.machine(), history="none")
    shard.critical_reader("nightly")
    world.pass_ms(2 * DAY_MS)
    return Told(examine(world), ("critical reader 'nightly'", "holds all history", "is 2 days old"))


@of("gc-held")
def old_version(place: Path) -> Told:
    world = World(policy=Policy(inline_part_bytes_max=0))
    machine = world.machine()
    shard = made(machine)
    shard.open_reader(purpose="export")
    filled(machine, shard, 10)  # small merges take parts away
    world.pass_ms(2 * DAY_MS)
    return Told(examine(world), ("reader 'export'", "has read v", "for 2 days", "log entries"))


@of("cursor-still")
def cursor_stands(place: Path) -> Told:
    world = World()
    machine = world.machine()
    shard = made(machine)
    cursor = shard.critical_reader("nightly")
    cursor.downgrade_since(1)
    filled(machine, shard, 2)
    world.pass_ms(9 * DAY_MS)
    return Told(examine(world), ("critical reader 'nightly'", "has been at time 1 for 9 days, 3 times behind"))


@of("readers-many")
def readers(place: Path) -> Told:
    location, world = crowded()
    machine = location.machine(NAME)
    for number in range(1_000):
        machine.apply(c.RegisterReader(ReaderId(f"r{number:032x}"), None, 900_000, "test"))
    return Told(examine(world), ("1,000 registered readers",))


@of("writers-many")
def writers(place: Path) -> Told:
    location, world = crowded()
    machine = location.machine(NAME)
    for number in range(1_000):
        machine.apply(first_write(WriterId(f"w{number:032x}"), 900_000))
    return Told(examine(world), ("1,000 registered writers",))


def crowded() -> tuple[Location, World]:
    world = World()
    location = bare(world)
    client_of(location).create_shard(NAME, SCHEMA, key=["id"])
    return location, world


@of("lease-lapses")
def lapsing(place: Path) -> Told:
    world = World()
    machine = world.machine()
    shard = made(machine)
    for _ in range(6):
        shard.open_reader(purpose="cron")
        world.pass_ms(30 * 60_000)
        machine.location.machine(NAME).apply(c.ForgetLapsed())
        world.pass_ms(30 * 60_000)
        filled(machine, shard, 2)
    return Told(examine(world), ("leases have lapsed since", "of reader 'cron'"))


@of("loan-stuck")
def clone_dropped(place: Path) -> Told:
    world = World(policy=Policy(inline_part_bytes_max=0))
    machine = world.machine()
    made(machine)
    machine.client.clone(NAME, "copy").drop()
    world.pass_ms(2 * DAY_MS)
    return Told(examine(world), ("lent to 'copy' since", "needs none of them"))


# --- what should be gone


def written_daily(history: str, days: int) -> Report:
    """What is found of a shard that was written to every day, and that nobody maintains."""
    world = World()
    machine = world.machine()
    shard = made(machine, history=history)
    for _ in range(days):
        world.pass_ms(DAY_MS)
        filled(machine, shard, 1)
    return examine(world)


@of("retention-behind")
def history_kept(place: Path) -> Told:
    return Told(
        written_daily("7d", 12), ("history should be kept for 7 days", "the oldest readable time, 0, is 12 days old")
    )


@of("retention-behind")
def history_of_none(place: Path) -> Told:
    world = World()
    made(world.machine(), history="none")
    world.pass_ms(3 * DAY_MS)
    return Told(examine(world), ("only as long as readers need it", "is 3 days old"))


@of("retention-behind")
def history_of_none_while_it_is_written(place: Path) -> Told:
    """A shard that is written to every day was never told: it was never idle."""
    return Told(written_daily("none", 4), ("only as long as readers need it", "is 4 days old"))


@of("retention-behind")
def rows_kept(place: Path) -> Told:
    world = World()
    machine = world.machine()
    shard = made(machine)
    world.pass_ms(2 * HOUR_MS)
    shard.retain({"age": "1d", "cut_every": "1h"})
    shard.run_retention()
    world.pass_ms(4 * DAY_MS)
    return Told(examine(world), ("the row retention policy is behind", "should have been deleted by its age"))


@of("retention-behind")
def no_cuts(place: Path) -> Told:
    world = World()
    machine = world.machine()
    shard = made(machine)
    world.pass_ms(2 * HOUR_MS)
    shard.retain({"rows": 1_000, "cut_every": "1h"})
    shard.run_retention()
    world.pass_ms(3 * DAY_MS)
    filled(machine, shard, 1)
    world.pass_ms(2 * DAY_MS)
    return Told(examine(world), ("no cut was taken since",))


@of("retention-held")
def consumer_behind(place: Path) -> Told:
    world = World()
    machine = world.machine()
    shard = made(machine)
    shard.critical_reader("billing")
    world.pass_ms(2 * HOUR_MS)
    shard.retain({"age": "1d", "cut_every": "1h", "consumers": ["billing"]})
    shard.run_retention()
    world.pass_ms(4 * DAY_MS)
    shard.run_retention()
    return Told(examine(world), ("deletes nothing", "consumer 'billing' is at [0]"))


@of("erasure-late")
def deadline_passed(place: Path) -> Told:
    world = World()
    machine = world.machine()
    made(machine).erase(keys=[1], deadline="2d")
    world.pass_ms(3 * DAY_MS)
    return Told(examine(world), ("was due by", "1 day ago"))


@of("erasure-late")
def no_writer_comes(place: Path) -> Told:
    world = World()
    shard = made(world.machine())
    shard.append([{"id": 9}], shard.upper(), shard.upper().element + 1)
    shard.erase(keys=[1])
    world.pass_ms(9 * DAY_MS)
    return Told(examine(world), ("is pending for 9 days",))


# --- maintenance


@of("compaction-behind")
def never_merged(place: Path) -> Told:
    world = World()
    location = bare(world, Policy(inline_part_bytes_max=0))
    shard = client_of(location).create_shard(NAME, SCHEMA, key=["id"])
    for number in range(140):
        shard.insert([{"id": number, "note": "x"}])
    world.pass_ms(2 * DAY_MS)
    return Told(examine(world), ("on a shard of 140 batches", "the last commit was 2 days ago"))


@of("claim-stuck")
def worker_killed(place: Path) -> Told:
    world = World(policy=Policy(inline_part_bytes_max=0))
    machine = world.machine()
    made(machine)
    committer = machine.location.machine(NAME)
    parts = tuple(part.id for part in committer.state().trace.parts())
    committer.apply(c.HoldClaim("merge:[0]", "compactor-1", 60_000, parts))
    world.pass_ms(2 * HOUR_MS)
    return Told(examine(world), ("the worker compactor-1 has not renewed its claim", "3 parts", "for 2 hours"))


@of("rollup-old")
def no_rollups(place: Path) -> Told:
    world = World()
    location = bare(world, Policy(rollup_every=100_000))
    shard = client_of(location).create_shard(NAME, SCHEMA, key=["id"])
    with patch.object(background_duties, "ROLLUP_BYTES", 1 << 40):
        for upper in range(1, FEW + 4):
            shard.advance_upper(upper)
    with patch.object(maintenance_checks, "ROLLUP_ENTRIES_MAX", FEW):
        return Told(examine(world), ("opening the shard reads", "the newest rollup is v1"))


@of("log-long")
def never_collected(place: Path) -> Told:
    world = World()
    location = bare(world, Policy(rollup_every=FEW // 4))
    shard = client_of(location).create_shard(NAME, SCHEMA, key=["id"])
    for upper in range(1, 2 * FEW):
        shard.advance_upper(upper)
    with patch.object(maintenance_checks, "LOG_ENTRIES_LONG", FEW):
        return Told(examine(world), ("entries of", "are not needed"))


@of("orphans-many")
def failed_writes(place: Path) -> Told:
    world = World(policy=Policy(inline_part_bytes_max=0))
    machine = world.machine()
    shard = made(machine)
    writer = shard.open_writer()
    for number in range(120):  # staged, and never committed
        writer.stage(pa.table({"id": [number], "note": ["x"]}), None)
    world.pass_ms(2 * DAY_MS)
    return Told(examine(world), ("120 blobs of", "no State names them"))


# --- beside the stores


def backed_up(place: Path, *names: str) -> str:
    persist_dir = f"persist://{place}"
    with persist.connect(persist_dir, collect=False) as client:
        for name in ("eu/one", "eu/two"):
            client.create_shard(name, SCHEMA, ["id"]).insert([{"id": 1, "note": "x"}])
    url = f"file://{place.parent}/backups"
    assert main(["backup", "create", "--to", url, "--dir", str(place), *names]) == 0
    return url


def with_backups(place: Path, url: str, limits: CheckThresholds = CALM) -> Report:
    return at(place, limits, ExternalState(backups=list_backups(url, SystemClock())))


@of("backup-old")
def backup_of_long_ago(place: Path) -> Told:
    url = backed_up(place)
    limits = CheckThresholds(backup_ms=-1, free_percent=0)  # younger than now: none is
    return Told(with_backups(place, url, limits), ("the newest backup, ", "old"), None)


@of("backup-old")
def no_backup(place: Path) -> Told:
    url = backed_up(place)
    shutil.rmtree(place.parent / "backups" / "backups")
    return Told(with_backups(place, url), ("there is no readable backup in",), None)


@of("backup-unreadable")
def manifest_damaged(place: Path) -> Told:
    url = backed_up(place)
    [manifest] = (place.parent / "backups").rglob("manifest.json")
    manifest.write_text("{")
    return Told(with_backups(place, url), ("cannot be read",), None)


@of("backup-lacks")
def shard_left_out(place: Path) -> Told:
    url = backed_up(place, "eu/one")
    return Told(with_backups(place, url), ("1 shard is in no backup: eu/two",), None)


@of("token-expires")
def token_ends(place: Path) -> Told:
    persist.connect(f"persist://{place}", collect=False).close()
    file = place.parent / "tokens.json"
    made = [
        "token", "create", "etl", "--file", str(file), "--expires", "2099-01-31", "--scope", "write", "--prefix",
        "eu/",
    ]  # fmt: skip
    assert main(made) == 0
    file.write_text(file.read_text().replace("2099", "2020"))  # years go by
    ending = tokens_for_check(read_tokens(str(file)))
    assert [(one.scope, one.prefixes) for one in ending] == [("write", ("eu/",))]
    assert json.loads(file.read_text())["tokens"][0]["id"] == "etl"
    return Told(at(place, around=ExternalState(tokens=ending)), ("the token 'etl' expired 2020-01-31T00:00:00Z",), None)


@of("state-damaged")
def batch_gone(place: Path) -> Told:
    damaged = Damaged(healthy(place))
    damaged.edit_batches(NAME, lambda batches: [batches[0], *batches[2:]])
    return Told(at(place, how=Depth()), ("do not tile",))


@of("loan-broken")
def loan_forgotten(place: Path) -> Told:
    Damaged(healthy(place)).commit(NAME, lambda state: replace(state, loans={}))
    return Told(at(place, how=Depth()), ("which has not lent it",), "copy")


@of("races-lost")
def rivals(place: Path) -> Told:
    world = World()
    first, second = world.machine(), world.machine()
    mine = made(first)
    others = second.shard(NAME)
    for number in range(30):
        others.insert([{"id": number, "note": "x"}])
        mine.insert([{"id": number, "note": "x"}])
    told = examine(world, around=ExternalState(served=server_facts(first.location)))
    return Told(told, ("this server has lost", "races to commit"))


@of("store-failing")
def store_away(place: Path) -> Told:
    world = World()
    made(world.machine())
    faulty = FaultyBlob(world.blob, FaultPlan(1, {"fail_before": 0.3}))
    clock = Clock(world, 0)
    location = Location(
        faulty,
        world.consensus,
        settings=LocationSettings(Policy(inline_part_bytes_max=0), metered=True),
        clock=clock,
        ids=Ids(clock, 7),
        background=InlineBackground(),
    )
    client = client_of(location)
    for number in range(30):
        with suppress(persist.Unavailable):
            client.shard(NAME).insert([{"id": number, "note": "x"}])
    told = examine(world, around=ExternalState(served=server_facts(location)))
    return Told(told, ("calls of 'put' to the blob store have failed", "BlobUnavailable"), None)
