"""Makes the sample of the storage format: `python -m tests.compat.generate`.

Until the first release the sample is made anew after each change of durable bytes; with the release it is frozen. To
change durable bytes:

1. Let the story below use what is new, by the commands that users and maintenance have.
2. Run `python -m tests.compat.generate`, then `pytest tests/compat`, which names every field that the sample lacks.
3. Repeat both until nothing is missing.
4. See that nothing of it lapses: what a test reads of it must be the same in years.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa

from blob import open_blob
from compactor.engine import EngineSettings
from compactor.worker import Worker, WorkerSettings
from consensus import Consensus, open_consensus
from consensus.metrics import ForwardingConsensus
from persist.client.client import Client
from persist.client.idempotency import digest_of
from persist.commit.location import Location, LocationSettings, directory_urls
from persist.core import commands as c
from persist.core.attribute import AttributeUpdate, named_key
from persist.core.ids import Token, token_of_key, writer_of
from persist.core.merge_plan import MergePolicy
from persist.core.record import replace as with_fields
from persist.core.spill import OUTCOMES
from persist.core.state import Policy
from persist.core.transitions import part_admission
from persist.formats.records import encoded
from persist.formats.state_frames import NEWEST_FORMAT
from persist.maintenance.collector import Collector
from persist.parts import ShardSchema
from persist.parts.read_plan import read_bundle
from persist.parts.schema_changes import AddColumn, DropColumn, MoveColumn, RelaxColumn, RenameColumn, WidenColumn
from rpc.cli.program import main as persist_command
from tests.compat import history_story, sample
from tests.compat.sample import HERE, LOCATION, STAGED, Write
from tests.support.epochs import raise_epoch
from tests.support.location import InlineBackground, client_of

HOUR_MS = 3_600_000
V1 = pa.schema([pa.field("k", pa.string()), pa.field("v", pa.int64())])
V2 = V1.append(pa.field("note", pa.string()))
SMALL = Policy(inline_part_bytes_max=600, rollup_every=8, overlay_flush_at=4)  # so that little data shows everything
BLOBS = Policy(inline_part_bytes_max=0)
BUNDLES = with_fields(BLOBS, plain_parts_max=0)
SHORT_LOG_BYTES = 700  # a value of a log that is too small for the state diff of thirty attributes


class ShortValues(ForwardingConsensus):
    """A log that takes short values only, as etcd's are short beside SQLite's."""

    @property
    def value_bytes_max(self) -> int:
        return SHORT_LOG_BYTES


class Killed(BaseException):
    """Stands for the end of a process, which nothing catches."""


@dataclass
class Story:
    """The location that comes about, and the writes with tokens of which it remembers the answers."""

    directory: Path
    writes: list[Write] = field(default_factory=list)

    @contextmanager
    def process(self, policy: Policy, *, merges: bool = True, short: bool = False) -> Iterator[tuple[Location, Client]]:
        """A process of its own, which closes no handle when it ends. Its background work is done at once."""
        blob_url, consensus_url = directory_urls(f"persist://{self.directory}")
        consensus: Consensus = open_consensus(consensus_url)
        location = Location(
            open_blob(blob_url),
            ShortValues(consensus) if short else consensus,
            settings=LocationSettings(policy, check_all=True, small_merges=merges),
            background=InlineBackground(),
        )
        with closing(location):
            yield location, client_of(location)

    def write(self, client: Client, shard: str, verb: str, token: Token, **given: Any) -> Write:
        """Write under a token, and remember the answer."""
        given["attributes"] = [list(encodable(change)) for change in given.get("attributes", ())]
        done = Write(shard, verb, token, given)
        done = replace(done, answer=done.again(client))
        assert not isinstance(done.answer, str), done
        self.writes.append(done)
        return done


def encodable(change: AttributeUpdate) -> tuple[str, str, int, int | None]:
    return change.key, change.verb, change.value, change.expected


def attribute(number: int) -> AttributeUpdate:
    return AttributeUpdate.replace(named_key(f"attribute {number}"), number)


@patch.object(part_admission, "LEFT_PARTS_MAX", 2)  # so that some are forgotten
def make(directory: Path) -> list[Write]:
    story = Story(directory)
    for chapter in (orders, copies, tags, constrained, reshaped, names, many, long_diff, staged):
        chapter(story)
    past = history_story.Past(directory)
    for of_history in history_story.CHAPTERS:
        of_history(past)
    with story.process(Policy()) as (location, client):
        client.clone("orders", "orders-clone")
        raise_epoch(location)
        for name in location.names():
            roll_up(location, name)
        moved = location.machine("orders-clone")
        moved.apply(c.HandOver(0, 3))
        location.versions.write_rollup(moved.refresh())  # as a switch does: nobody names it
        moved.apply(c.HandOver(3, 0))
    return story.writes


def roll_up(location: Location, name: str) -> None:
    """Name a rollup of the State as it is now; the log before it stays."""
    machine = location.machine(name)
    state = machine.refresh()
    if state.seqno in state.rollups:  # a clone begins with one
        return
    key, size = location.versions.write_rollup(state)
    assert machine.apply(c.AddRollup(state.seqno, key, size)) == c.RollupAdded(True)


def orders(story: Story) -> None:
    """Inline and Parquet parts, merges, a schema that grew, tokens in a file and in the State, an attribute index."""
    with story.process(SMALL) as (location, client):
        shard = client.create_shard("orders", V1, ["k"])
        shard.open_reader(purpose="kept")
        for step in range(3):
            shard.insert([{"k": f"k{step}", "v": step}, {"k": "x", "v": 0, "__diff": (-1) ** step}])
            shard.insert([{"k": f"big{n}", "v": step} for n in range(40)])
        shard.close()  # its writer is retired
        story.write(client, "orders", "insert", client.new_token(), updates=[{"k": "token", "v": 1}])
        story.write(client, "orders", "insert", token_of_key("free-form"), updates=[{"k": "token", "v": 2}])
        for first in (0, 4):  # the second flush of the index leaves nothing at its beginning
            changes = [attribute(number) for number in range(first, first + 4)]
            story.write(client, "orders", "update_attributes", client.new_token(), attributes=changes)
        upper = shard.upper().element
        assert upper is not None
        given = {"updates": [{"k": "token", "v": 3}], "expected_upper": upper, "new_upper": upper + 1}
        story.write(client, "orders", "compare_and_append", client.new_token(), **given, attributes=[attribute(8)])
        state = location.machine("orders").state()
        assert state.files_of(OUTCOMES)
        assert state.attribute_chunks
        Worker(location).run("orders", idle=True)  # what was staged leaves the State
        shard.evolve_schema(ShardSchema(V2, ("k",)))
        shard.insert([{"k": "new", "v": 1, "note": "a column more"}])
        given = {"updates": [{"k": "token", "v": 4, "note": "in the State"}]}
        story.write(client, "orders", "insert", client.new_token(), **given, attributes=[attribute(9)])
        shard.critical_reader("passing", "of a job that ended").expire()
        shard.critical_reader("job", "the job's own").downgrade_since(upper)
        location.machine("orders").apply(c.ForgetLapsed(staged_before_ms=location.clock.now_ms() - 13 * HOUR_MS))


def copies(story: Story) -> None:
    """Replicas, one of which came late, and a merge whose worker died half way."""
    with story.process(BLOBS, merges=False) as (location, client):
        shard = client.create_shard("eu/copies", V1, ["k"])
        rows = [{"k": f"k{n:03}", "v": n, "__time": n // 20} for n in range(60)]
        shard.append(rows[:20], 0, 1)
        shard.append(rows[20:40], 1, 2)
        late = {"updates": rows[20:], "lower": 1, "upper": 3}
        story.write(client, "eu/copies", "append", client.new_token(), **late)
        shard.downgrade_since(1)

        def dies(shard: str, done: int, total: int) -> None:
            raise Killed

        settings = WorkerSettings(MergePolicy(fan_in=2), EngineSettings(1 << 20, 200))
        try:
            Worker(location, settings, progress=dies).run("eu/copies", idle=True)
        except Killed:
            shard.advance_upper(4)
        claims = location.machine("eu/copies").state().claims.values()
        assert any(claim.done for claim in claims), "the worker ended before it had saved anything"


def tags(story: Story) -> None:
    """Times before since that tags keep, and one that only a reader of a tag keeps, in a batch that was merged."""
    with story.process(BLOBS, merges=False) as (location, client):
        shard = client.create_shard("tagged", V1, ["k"])
        for time in range(8):
            old = [{"k": "x", "v": time - 1, "__diff": -1}] if time else []
            shard.insert([*old, {"k": "x", "v": time}])
        shard.tag("kept", 1)
        shard.tag("for-a-while", 3, keep="30000d")
        shard.tag("gone", 5)
        with shard.snapshot(tag="gone"):
            shard.untag("gone")
            shard.forget(6)
            Worker(location).run("tagged", idle=True)
            assert any(batch.desc.kept == (1, 3, 5) for batch in location.machine("tagged").state().trace.batches)


def constrained(story: Story) -> None:
    """Constraints that came after rows: what was staged before is committed no more."""
    with story.process(BLOBS) as (_, client):
        shard = client.create_shard("constrained", V1, ["k"], checks={"not-less": "v >= 0"})
        shard.insert([{"k": "a", "v": 1}, {"k": "b", "v": None}])
        shard.delete("v is null")
        shard.set_constraints(unique=True, not_null=["v"])
        shard.insert([{"k": "c", "v": 3}])


def reshaped(story: Story) -> None:
    """Columns that changed in every way, with rows of each schema in blobs and inline, some by a writer from before."""
    with story.process(BLOBS) as (_, blobs), story.process(SMALL) as (_, inline):
        pair = pa.struct([("x", pa.int8())])
        given = pa.schema(
            [
                pa.field("k", pa.string()),
                pa.field("n", pa.int8(), nullable=False),
                *[
                    ("f", pa.float32()),
                    ("d", pa.decimal128(4, 1)),
                    ("day", pa.date32()),
                    ("pair", pair),
                    ("v", pa.int64()),
                ],
            ]
        )
        shard = blobs.create_shard("reshaped", given, ["k"])
        first = {"n": 1, "f": 0.5, "d": Decimal("1.5"), "day": date(2024, 2, 29), "pair": {"x": 1}}
        shard.insert([{"k": key, **first, "v": number} for number, key in enumerate("aabb")])
        before = inline.shard("reshaped")
        shard.alter(RenameColumn("k", "key"), AddColumn("note", pa.string(), False, "none", "n"), DropColumn("v"))
        shard.insert([{"key": "c", **first, "note": "new"}, {"key": "c", **first}])
        shard.alter(
            WidenColumn("n", pa.int64()),
            WidenColumn("f", pa.float64()),
            WidenColumn("d", pa.decimal128(20, 3)),
            WidenColumn("day", pa.timestamp("ms")),
            WidenColumn("pair", pa.struct([("x", pa.int16()), ("y", pa.string())])),
        )
        shard.alter(RelaxColumn("n"), MoveColumn("note"), AddColumn("v", pa.string()))
        shard.insert([{"key": "d", "n": None, "pair": {"x": 300, "y": "y"}, "v": "another v"}])
        before.insert([{"k": "e", **first, "v": 7}])  # by a writer that knows none of it


def names(story: Story) -> None:
    """A name that has ended, and one that was used again: the tokens of its first life are not for the second."""
    with story.process(BLOBS) as (location, client):
        gone = client.create_shard("gone", V1, ["k"])
        gone.insert([{"k": "a", "v": 1}])
        gone.drop()
        collector = Collector(location)
        while not collector.run("gone").done:
            pass
        first = client.create_shard("again", V1, ["k"])
        known = story.write(client, "again", "insert", client.new_token(), updates=[{"k": "first life", "v": 1}])
        ahead = Token(f"i{location.clock.now_ms() + HOUR_MS:012x}{client.new_token()[13:]}")  # of a clock that is ahead
        carried = story.write(client, "again", "insert", ahead, updates=[{"k": "first life", "v": 2}])
        for write in (known, carried):
            story.writes[story.writes.index(write)] = replace(write, answer="outcome_forgotten")
        first.drop()
        client.create_shard("again", V1, ["k"])
        story.write(client, "again", "insert", client.new_token(), updates=[{"k": "second life", "v": 1}])


def many(story: Story) -> None:
    """A batch that names its parts by bundles, out of one of which a part was taken and replaced by its copy."""
    with story.process(BUNDLES, merges=False) as (location, client):
        shard = client.create_shard("many", V1, ["k"])
        with closing(shard.open_writer()) as writer:
            runs = [run for n in range(5) for run in writer.stage([{"k": f"k{n}", "v": n}], 0)]
            writer.commit_compare_and_append(runs, 0, 1)
        bundle = next(part for part in location.machine("many").state().trace.parts() if part.bundle is not None)
        part = read_bundle(bundle, location.blob)[0].parts[0]
        assert part.key is not None
        copy = story.directory.with_name("copy.parquet")
        copy.write_bytes(location.blob.get(part.key))
    repair = ["check", "many", "--repair", "--dir", str(story.directory), "--replace", part.id, str(copy), "--yes"]
    assert persist_command(repair) == 0
    copy.unlink()


def long_diff(story: Story) -> None:
    """A command that takes more room than a value of the log has."""
    with story.process(BLOBS, merges=False, short=True) as (location, client):
        changes = [attribute(number) for number in range(30)]
        story.write(client, "many", "update_attributes", client.new_token(), attributes=changes)
        assert location.machine("many").state().long_diffs


def staged(story: Story) -> None:
    """A command with receipts that was prepared and not sent: rows of a job whose driver was interrupted."""
    with story.process(Policy()) as (_, client):
        shard = client.shard("orders")
        token = client.new_token()
        runs = shard.open_writer().stage([{"k": "staged", "v": 1}, {"k": "staged", "v": 1}], None)
        command = c.Insert(writer_of(token), token, runs)
        command = with_fields(command, digest=digest_of(command))
        story.directory.with_name(STAGED).write_bytes(encoded(command))


def main() -> None:
    target = HERE / f"v{NEWEST_FORMAT}"
    shutil.rmtree(target, ignore_errors=True)
    with ExitStack() as failed:
        failed.callback(shutil.rmtree, target, ignore_errors=True)
        target.mkdir()
        writes = make(target / LOCATION)
        tidy(target / LOCATION)
        found = read(target, writes)
        (target / sample.EXPECTED).write_text(json.dumps(found, separators=(",", ":")) + "\n")
        failed.pop_all()


def tidy(location: Path) -> None:
    """Leave only what git keeps: no empty directories, and one file of the log."""
    with closing(sqlite3.connect(location / "consensus.db")) as database:
        database.execute("VACUUM")
    for leftover in location.glob("consensus.db-*"):
        leftover.unlink()
    shutil.rmtree(location / "blob" / "~tmp", ignore_errors=True)


def read(target: Path, writes: list[Write]) -> dict[str, Any]:
    """What this code reads, of a copy: reading takes holds, which are commits."""
    copy = target / "copy"
    try:
        with closing(sample.opened_copy(target, copy)) as location:
            client = client_of(location)
            return {
                "contents": sample.contents(client),
                "attributes": sample.attributes(client),
                "cursors": sample.cursors(location),
                "dropped": sample.dropped(location),
                "epoch": location.identity.check().epoch,
                "writes": [asdict(write) for write in writes],
                "told": history_story.told(client),
            }
    finally:
        shutil.rmtree(copy)


if __name__ == "__main__":
    main()
