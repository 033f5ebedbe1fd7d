"""The sums of `persist inspect usage` are those of a listing of both stores, whatever lies there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from blob.memory_blobs import MemoryBlob
from compactor.on_demand import maintain
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.core.blob_keys import FLUSHER, part_key
from persist.core.ids import PartId, ShardId, mint
from persist.core.state import Policy
from persist.inspect.queries import Query, answer
from persist.inspect.readonly_location import ReadOnlyLocation, open_readonly_directory
from persist.inspect.usage import DAY_MS, HOUR_MS, NOTHING, LocationUsage, Room, ShardUsage
from tests.support.clones import ClockedIds
from tests.support.inspected import copied
from tests.support.location import TestClock, memory_location
from tests.support.maintained import EagerCollector

SCHEMA = pa.schema([("id", pa.int64())])
STAGED = Policy(inline_part_bytes_max=0, rollup_every=4)
RUNS = 4  # of a collector: later ones find nothing more
START_MS = 1_795_521_600_000
KINDS = ("live", "history", "index", "merging", "rollups", "lent", "held", "waiting", "unknown")


class Place:
    """A location in memory, and a look at it."""

    def __init__(self) -> None:
        self.clock = TestClock(START_MS)
        self.blob = MemoryBlob(now_ms=self.clock.now_ms)
        self.ids = ClockedIds(self.clock, 1)
        self.location = memory_location(
            blob=self.blob, clock=self.clock, ids=self.ids, policy=STAGED, small_merges=False
        )
        self.client = Client(EmbeddedTransport(self.location, maintain))
        self.look = ReadOnlyLocation(self.blob, self.location.consensus, clock=self.clock)

    def usage(self, pattern: str = "") -> tuple[LocationUsage, dict[str, ShardUsage]]:
        """What is told, once it is found to agree with a listing."""
        return checked(self.look, pattern)

    def collect(self, name: str) -> None:
        collector = EagerCollector(self.location)
        for _ in range(RUNS):
            collector.run(name)


def checked(look: ReadOnlyLocation, pattern: str = "") -> tuple[LocationUsage, dict[str, ShardUsage]]:
    document = answer(look, Query("usage", pattern))
    about, rows = document.about, list(document.rows)
    assert isinstance(about, LocationUsage)
    told = {row.shard or "": row for row in rows if isinstance(row, ShardUsage)}
    assert document.findings == []
    for row in told.values():
        kinds = sum((getattr(row, kind) for kind in KINDS), NOTHING)
        assert row.total == kinds + row.orphans.hour + row.orphans.day + row.orphans.older, row
        assert row.log_entries == len(look.consensus.scan(row.shard or "", 1, 10_000))
        assert row.log_bytes == sum(len(entry.data) for entry in look.consensus.scan(row.shard or "", 1, 10_000))
    assert about.of_shards == sum((row.total for row in told.values()), NOTHING)
    if not pattern:
        listed = list(look.blob.list(""))
        assert about.listed == Room(len(listed), sum(stat.size for stat in listed))
        assert sorted(told) == list(look.names())
    return about, told


@pytest.fixture
def place() -> Iterator[Place]:
    made = Place()
    yield made
    made.location.close()


def test_sums_of_a_frozen_location_are_those_of_a_listing(tmp_path: Path) -> None:
    look = open_readonly_directory(copied(tmp_path / "location"))
    about, _ = checked(look)
    assert about.of_no_shard == about.other == NOTHING
    look.close()


def test_what_a_reader_holds_is_told_with_who_holds_it(place: Place) -> None:
    shard = place.client.create_shard("orders", SCHEMA, ["id"], history="none")
    for number in range(6):
        shard.insert([{"id": number}])
    reader = shard.open_reader(purpose="report")
    shard.optimize()
    _, told = place.usage()
    assert told["orders"].held.blobs == 6
    assert [(one.purpose, one.blobs) for one in told["orders"].holders] == [("report", 6)]
    assert told["orders"].waiting == NOTHING
    reader.close()
    _, told = place.usage()
    assert (told["orders"].held, told["orders"].holders) == (NOTHING, [])
    assert told["orders"].waiting.blobs >= 6
    place.collect("orders")
    _, told = place.usage()
    assert told["orders"].live.blobs == 1
    assert told["orders"].waiting.blobs <= 2, "old rollups fall to a later collection"


def test_rows_that_were_dropped_count_as_history_while_an_earlier_time_can_be_read(place: Place) -> None:
    shard = place.client.create_shard("orders", SCHEMA, ["id"], history="forever")
    for number in range(3):
        shard.insert([{"id": number}])
    _, told = place.usage()
    assert (told["orders"].live.blobs, told["orders"].history) == (3, NOTHING)
    shard.overwrite([{"id": 9}])
    _, told = place.usage()
    assert (told["orders"].live.blobs, told["orders"].history.blobs) == (1, 3)


def test_what_a_clone_may_name_counts_once(place: Place) -> None:
    shard = place.client.create_shard("orders", SCHEMA, ["id"], history="none")
    for number in range(4):
        shard.insert([{"id": number}])
    place.client.clone("orders", "copy")
    _, told = place.usage()
    assert (told["orders"].live.blobs, told["orders"].lent) == (4, NOTHING)
    assert told["copy"].borrowed == told["orders"].live
    assert told["copy"].live == NOTHING
    shard.optimize()
    place.collect("orders")
    _, told = place.usage()
    assert told["orders"].lent.blobs == 4, "they left the State, and the clone names them"


def test_a_dropped_shard_counts_until_it_is_collected(place: Place) -> None:
    shard = place.client.create_shard("orders", SCHEMA, ["id"], history="none")
    shard.insert([{"id": 1}])
    shard.drop()
    _, told = place.usage()
    assert told["orders"].total.blobs >= 2
    place.collect("orders")
    _, told = place.usage()
    assert told["orders"].live == NOTHING
    assert told["orders"].rollups.blobs == 1
    place.client.create_shard("orders", SCHEMA, ["id"], history="none").insert([{"id": 2}])
    _, told = place.usage()
    assert told["orders"].live.blobs == 1, "the next life of the name counts with the one before"


def test_orphans_are_told_by_their_age(place: Place) -> None:
    shard = place.client.create_shard("orders", SCHEMA, ["id"], history="none")
    shard.open_writer().stage([{"id": 1}], None)
    for age_ms, kind in ((0, "hour"), (2 * HOUR_MS, "day"), (2 * DAY_MS, "older")):
        place.clock.advance_ms(age_ms)
        _, told = place.usage()
        assert getattr(told["orders"].orphans, kind).blobs == 1, kind


def test_what_belongs_to_no_shard_is_told_apart(place: Place) -> None:
    place.client.create_shard("orders", SCHEMA, ["id"], history="none")
    before, _ = place.usage()
    place.blob.put(part_key(ShardId(f"s{'7' * 32}"), FLUSHER, mint(PartId, place.ids)), b"12345")
    place.blob.put("notes/a.txt", b"123")
    about, _ = place.usage()
    assert about.of_no_shard == Room(1, 5)
    assert about.other == Room(1, 3)
    assert before.bindings == about.bindings != NOTHING


def test_a_blob_under_no_key_of_a_shard_is_unknown(place: Place) -> None:
    shard = place.client.create_shard("orders", SCHEMA, ["id"], history="none")
    place.blob.put(f"{shard.view().shard_id}/notes.txt", b"1234")
    _, told = place.usage()
    assert told["orders"].unknown == Room(1, 4)


def test_a_pattern_sums_what_it_matches(place: Place) -> None:
    for name in ("eu/a", "eu/b", "us/a"):
        place.client.create_shard(name, SCHEMA, ["id"], history="none").insert([{"id": 1}])
    about, told = place.usage("eu/*")
    assert sorted(told) == ["eu/a", "eu/b"]
    assert (about.shards, about.published, about.of_no_shard) == (2, None, None)
    assert sorted(place.usage("*/a")[1]) == ["eu/a", "us/a"]


def test_what_puts_have_left_is_told_and_is_in_no_sum(tmp_path: Path) -> None:
    directory = copied(tmp_path / "location")
    (directory / "blob" / "~tmp").mkdir(exist_ok=True)
    shutil.copy(directory / "persist.json", directory / "blob" / "~tmp" / "s1-2-3-4")
    look = open_readonly_directory(directory)
    about, _ = checked(look)
    assert about.unfinished is not None
    assert about.unfinished.blobs == 1
    look.close()
