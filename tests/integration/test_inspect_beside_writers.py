"""A look beside writers, merges and collections: one State is told, and what was taken away meanwhile is no damage."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa

import persist
from persist.copies.shard_facts import newest
from persist.core.attribute import AttributeUpdate
from persist.core.batch import Part
from persist.core.errors import Unavailable
from persist.inspect.part_listing import PartRow
from persist.inspect.queries import Query, answer
from persist.inspect.readonly_location import ReadOnlyLocation, look_at_directory
from tests.support.clones import Shards

SCHEMA = pa.schema([("id", pa.int64())])
WHATS = ("state", "log", "parts", "holds", "usage", "attributes", "digest")
ROUNDS = 12


def test_a_look_beside_writers_and_collections_finds_no_damage(tmp_path: Path) -> None:
    url, done, failed = f"persist://{tmp_path}/location", threading.Event(), []

    def work() -> None:
        try:
            with persist.connect(url, collect=False) as client:
                shard, number = client.shard("orders"), 0
                while not done.is_set():
                    number += 1
                    shard.insert(pa.table({"id": range(number, number + 200)}))
                    shard.attributes.update(AttributeUpdate.replace(f"{number % 50 + 1:02x}" * 16, number))
                    if number % 7 == 0:
                        shard.optimize()
                        shard.vacuum()
        except Exception as error:
            failed.append(error)

    with persist.connect(url, collect=False) as client:
        client.create_shard("orders", SCHEMA, ["id"], history="none").insert([{"id": 1}])
    thread = threading.Thread(target=work)
    thread.start()
    try:
        look = look_at_directory(tmp_path / "location")
        for _ in range(ROUNDS):
            for what in WHATS:
                try:
                    document = answer(look, Query(what, "orders", whole=True))
                    assert list(document.pieces()) or what == "log"
                except Unavailable:  # it has moved on too often meanwhile
                    continue
                assert document.findings == [], what
        look.close()
    finally:
        done.set()
        thread.join()
    assert failed == []


def looked_late(shards: Shards) -> tuple[ReadOnlyLocation, list[Part]]:
    """A look, and the parts that were taken away after their State was read."""
    look = ReadOnlyLocation(shards.blob, shards.consensus, clock=shards.clock)
    return look, list(newest(look, "a").known().trace.parts())


def test_parts_that_were_merged_and_collected_after_the_state_was_read_are_no_damage() -> None:
    shards = Shards()
    shards.create("a", inserts=4)
    look, before = looked_late(shards)
    document = answer(look, Query("parts", "a"))
    shards.client.shard("a").optimize()
    shards.blob.delete([part.key or "" for part in before])
    rows = [row for row in document.rows if isinstance(row, PartRow)]
    assert [row.there for row in rows] == [False] * len(before)
    assert document.findings == []


def test_parts_that_the_newest_state_names_are_missing_however_far_the_shard_has_moved() -> None:
    shards = Shards()
    shards.create("a", inserts=2)
    look, before = looked_late(shards)
    document = answer(look, Query("parts", "a"))
    shards.write("a")
    shards.blob.delete([before[0].key or ""])
    assert list(document.rows)
    assert [finding.key for finding in document.findings] == [before[0].key]


def test_what_is_still_named_is_told_of_the_newest_state() -> None:
    shards = Shards()
    shards.create("a", inserts=2)
    look = ReadOnlyLocation(shards.blob, shards.consensus, clock=shards.clock)
    facts = newest(look, "a")
    keys = list(facts.known().blob_keys())
    assert all(facts.is_named(key) for key in keys)
    shards.client.shard("a").optimize()
    assert not any(facts.is_named(part.key or "") for part in facts.known().trace.parts())
