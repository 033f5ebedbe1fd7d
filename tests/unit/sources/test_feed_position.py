"""Shards with a feed, of which others take times: no record is lost, none comes twice, whoever takes which time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from unittest.mock import patch

import pyarrow as pa
import pytest

from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist.bindings import Bindings, Ingester, Minter
from persist.client.client import Client
from persist.client.shard import Shard
from persist.commit.location import Location
from persist.copies.recovery import RecoveryRequest, run_recovery
from persist.core.errors import Conflict, Indeterminate
from persist.maintenance.journal_keeper import Published
from persist.maintenance.journal_writer import PublishSettings
from persist.regions.failover import OldHome, promote
from persist.sources import ingest
from persist.sources.internal_shards import FeedFollower
from persist.sources.wal import FrontEnd, Replica
from tests.support.examples import walks
from tests.support.location import AscendingIds, client_of, memory_location

ROWS = pa.schema([("id", pa.int64())])
STEPS = 40


class Numbers:
    """A source whose records are their positions."""

    def __init__(self) -> None:
        self.last = -1

    def watermarks(self) -> dict[str, int]:
        return {"": self.last} if self.last >= 0 else {}

    def read(self, partition: str, after: int, upto: int) -> Iterator[pa.Table]:
        found = pa.array(range(after + 1, upto + 1), pa.int64())
        yield pa.table({"id": found, "position": found})


class Fed:
    """A shard `fed`, its feed, and how to add to the feed. `kind`: "bindings" or "log"."""

    def __init__(self, client: Client, kind: str, source: Numbers) -> None:
        self.client, self.source = client, source
        if kind == "bindings":
            self.feed = Bindings.open(client, "feed")
            self.minter = Minter(self.feed, source.watermarks)
            shard = client.create_shard("fed", ROWS, ["id"])
            self.step: FeedFollower = Ingester(self.feed, source, shard)
        else:
            self.log = client.create_shard("feed", ROWS, ["id"], history="forever")
            self.step = Replica.open(client, "feed", "fed")
        self.kind = kind

    def add(self) -> None:
        """One more record in the feed: a number, in order."""
        if self.kind == "bindings":
            self.source.last += 1
            self.minter.tick()
            return
        front = FrontEnd(self.log, "front")
        front.write([{"id": front.acknowledged}])
        self.source.last = front.acknowledged - 1

    def drain(self) -> None:
        while self.step.step():
            pass

    @property
    def shard(self) -> Shard:
        return self.client.shard("fed")

    def numbers(self) -> list[int]:
        return sorted(row["id"] for row in self.shard.snapshot().to_arrow(expand=True).to_pylist())


@pytest.fixture(params=["bindings", "log"])
def fed(request: pytest.FixtureRequest) -> Iterator[Fed]:
    with client_of(memory_location()) as client:
        found = Fed(client, request.param, Numbers())
        for _ in range(3):
            found.add()
        found.drain()
        yield found


def erases(shard: Shard) -> None:
    shard.erase(keys=[(1,)], reason="asked for", force=True)


def inserts(shard: Shard) -> None:
    shard.insert([{"id": 1, "__diff": -1}])


@pytest.mark.parametrize("verb", [erases, inserts])
@pytest.mark.parametrize("is_fresh", [False, True])
def test_what_the_feed_has_at_a_time_that_was_taken_comes_at_the_next_one(
    fed: Fed, verb: Callable[[Shard], None], is_fresh: bool
) -> None:
    verb(fed.shard)
    taken = fed.shard.upper()
    for _ in range(3):
        fed.add()
        if is_fresh:
            fed.step = Fed(fed.client, fed.kind, fed.source).step
        fed.drain()
    assert fed.numbers() == [0, 2, 3, 4, 5]
    later = [
        row
        for event in fed.shard.listen(taken.element - 1, until=fed.shard.upper())
        for row in event.updates.to_pylist()
    ]  # type: ignore[operator]
    assert sorted(row["id"] for row in later) == [3, 4, 5]
    assert fed.client.shard("feed").upper() == fed.shard.upper()  # so the next times are the same in both again


def test_the_history_tells_which_times_of_the_feed_came_later(fed: Fed) -> None:
    inserts(fed.shard)
    fed.add()
    fed.drain()
    [info] = [entry.info for entry in fed.shard.history() if entry.info]
    assert info == {"feed_times": [3, 4]}


def appends(shard: Shard) -> None:
    shard.append([{"id": 77}], 3, 5)


def advances(shard: Shard) -> None:
    shard.advance_upper(5)


@pytest.mark.parametrize(("verb", "foreign"), [(appends, [77]), (advances, [])])
def test_times_that_others_have_written_are_a_conflict_until_it_is_to_go_on(
    fed: Fed, verb: Callable[[Shard], None], foreign: list[int]
) -> None:
    """They were taken for a rival's work, and the records of these times never came."""
    verb(fed.shard)
    fed.add()
    for step in (fed.step, Fed(fed.client, fed.kind, fed.source).step):
        with pytest.raises(Conflict, match=r"times \[3, 5\) of shard 'fed'"):
            step.step()
    fed.step.rebind()
    fed.drain()
    assert fed.numbers() == [0, 1, 2, 3, *foreign]
    fed.add()
    fed.drain()
    assert fed.numbers() == [0, 1, 2, 3, 4, *foreign]


def test_a_shard_that_has_rows_of_before_gets_all_of_its_feed() -> None:
    with client_of(memory_location()) as client:
        client.create_shard("fed", ROWS, ["id"]).insert([{"id": 100}])
        found = Fed(client, "bindings", Numbers())
        found.add()
        found.drain()
        assert found.numbers() == [0, 100]


@pytest.mark.parametrize("waits", [False, True])
def test_a_clone_of_an_earlier_time_has_its_contents_and_a_feed_continues_there(fed: Fed, waits: bool) -> None:
    if waits:
        fed.shard.truncate(1)  # asked of the writer of the source, which does not write to the clone
    fed.shard.tag("first", at=0)
    for name, as_of, tag in (("by-time", 0, None), ("by-tag", None, "first")):
        made = fed.client.clone("fed", name, as_of=as_of, tag=tag)
        assert made.snapshot().to_arrow()["id"].to_pylist() == [0]
        assert not made.retention().held_by
    if fed.kind == "bindings":
        step: FeedFollower = Ingester(fed.feed, fed.source, fed.client.shard("by-time"))
    else:
        step = Replica.open(fed.client, "feed", "by-time")
    fed.add()
    while step.step():
        pass
    ids = fed.client.shard("by-time").snapshot().to_arrow()["id"].to_pylist()
    assert sorted(ids) == [0, 3], "the position is that of now: what came since is not written again"


# --- stories


class Story:
    """A feed, rivals who apply it, those who erase and insert in its shard, and homes that are lost.

    What is there in the end: each record of the source once, less those that were erased, and what was inserted.
    """

    def __init__(self, seed: int, kind: str) -> None:
        self.chosen, self.kind, self.source = random.Random(seed), kind, Numbers()
        self.blob, self.consensus = MemoryBlob("mem:"), MemoryConsensus("mem:")
        self.opened = 0
        self.fed = self.process()
        self.rival = self.process()
        self.expected: Counter[int] = Counter()
        self.inserted = 0

    def location(self) -> Location:
        self.opened += 1
        return memory_location(blob=self.blob, consensus=self.consensus, ids=AscendingIds(self.opened))

    def client(self) -> Client:
        return client_of(self.location())

    def process(self) -> Fed:
        return Fed(self.client(), self.kind, self.source)

    def act(self) -> None:
        match self.chosen.choice(["add", "add", "add", "step", "step", "rival", "kill", "erase", "insert", "home"]):
            case "add":
                self.fed.add()
            case "step":
                self.fed.step.step()
            case "rival":
                self.between(lambda: self.rival.step.step())
            case "kill":
                self.fed, self.rival = self.rival, self.process()
            case "erase":
                self.erase()
            case "insert":
                self.inserted += 1
                self.fed.shard.insert([{"id": -self.inserted}])
            case "home":
                self.move()

    def between(self, step: Callable[[], object]) -> None:
        """A step, in which the other one is quicker, somebody takes a time, or the answer is lost."""
        writer, append = self.rival.step._writer, self.rival.step._writer.append
        before = self.chosen.choice([self.fed.step.step, self.erase, lambda: None])
        lost = self.chosen.choice([None, "request", "answer"])

        def appended(*args: object, **more: object) -> None:
            writer.append = append  # type: ignore[method-assign]
            before()
            if lost != "request":
                append(*args, **more)  # type: ignore[arg-type]
            if lost is not None:
                raise Indeterminate("nobody knows")

        writer.append = appended  # type: ignore[method-assign, assignment]
        with suppress(Indeterminate):
            step()
        writer.append = append  # type: ignore[method-assign]

    def erase(self) -> None:
        there = [number for number in self.fed.numbers() if number >= 0]
        if there:
            gone = self.chosen.choice(there)
            force = self.chosen.random() < 0.5  # else it is pending until the feed comes again
            self.expected[gone] -= self.fed.shard.erase(keys=[(gone,)], force=force).removed or 0

    def move(self) -> None:
        """The home is lost: its blobs are recovered, or a copy of them is promoted."""
        self.publish()
        blob, self.blob = self.blob, self.copied()
        self.consensus = MemoryConsensus(f"mem:{self.opened}")
        gap = self.chosen.choice([1, 5, 1_000])
        if self.chosen.random() < 0.5:
            run_recovery(self.location(), RecoveryRequest(gap=gap))
        else:
            promote(self.location(), f"r{self.opened}", "eu", OldHome(blob=blob), RecoveryRequest(gap=gap))
        self.fed, self.rival = self.process(), self.process()

    def publish(self) -> None:
        location = self.location()
        published = Published(location, PublishSettings(every_s=5.0), at_once=True)
        names = location.all_names(with_dropped=True)
        for name in names:
            published.visit(name, location.machine(name).refresh())
        published.round(dict.fromkeys(names, False))
        published.close()

    def copied(self) -> MemoryBlob:
        copy = MemoryBlob("mem:")
        for stat in self.blob.list(""):
            copy.put(stat.key, self.blob.get(stat.key))
        return copy

    def check(self) -> None:
        last = self.process()
        last.drain()
        self.inserted += 1
        last.shard.insert([{"id": -self.inserted}])  # no erasure is pending any more
        expected = self.expected
        expected.update(range(self.source.last + 1))
        expected.update(-number for number in range(1, self.inserted + 1))
        assert last.numbers() == sorted(expected.elements())


def check(seed: int, kind: str) -> None:
    story = Story(seed, kind)
    with patch.object(ingest, "POSITIONS_MAX", story.chosen.choice([1, 3, 100])):
        for _ in range(STEPS):
            story.act()
        story.check()


@pytest.mark.parametrize("kind", ["bindings", "log"])
@pytest.mark.parametrize("seeds", walks(range(6), 54, every=2))
def test_what_is_there_is_the_source_less_what_was_erased(seeds: Iterable[int], kind: str) -> None:
    for seed in seeds:
        check(seed, kind)
