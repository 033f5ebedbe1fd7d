"""A shard in a directory, through the client: what users rely on, and what they are told when they err."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from persist.client.client import Client
from persist.client.shard import Shard
from persist.core.errors import Expired, InvalidUsage, ShardExists, UnknownShard, UpgradeNeeded
from persist.core.frontier import Antichain

SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), ("name", pa.string())])


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"persist://{tmp_path}/location"


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with persist.connect(url) as client:
        yield client


@pytest.fixture
def shard(client: Client) -> Shard:
    return client.create_shard("orders", SCHEMA, ["id"])


def rows_of(shard: Shard, as_of: int | None = None, **options: object) -> list[dict[str, object]]:
    return shard.snapshot(as_of, **options).to_arrow(expand=True).to_pylist()  # type: ignore[arg-type]


def test_an_iterator_of_batches_is_written_in_bounded_pieces(shard: Shard) -> None:
    batches = (pa.record_batch({"id": pa.array(range(n, n + 100)), "name": ["x"] * 100}) for n in range(0, 2000, 100))
    shard.insert(batches)
    assert shard.snapshot().to_arrow().num_rows == 2000


def test_a_reader_that_was_closed_is_told_so(shard: Shard) -> None:
    shard.insert([{"id": 1, "name": "a"}])
    snapshot = shard.snapshot()
    snapshot.close()
    with pytest.raises(Expired, match="is gone"):
        list(snapshot.batches())


# --- bad input: one clear sentence, and nothing is lost


def test_bad_input_is_told_in_one_sentence_and_changes_nothing(client: Client, shard: Shard, tmp_path: Path) -> None:
    shard.insert([{"id": 1, "name": "a"}])
    cases = [
        (lambda: client.shard("nothing"), UnknownShard, "there is no shard 'nothing'"),
        (lambda: client.shard("../etc"), InvalidUsage, "shard name"),
        (lambda: client.create_shard("orders", pa.schema([("x", pa.int64())]), ["x"]), ShardExists, "another schema"),
        (lambda: client.create_shard("new", SCHEMA, ["nokey"]), InvalidUsage, "nokey"),
        (lambda: shard.insert(pa.table({"id": ["x"], "name": ["a"]})), InvalidUsage, "id"),
        (lambda: shard.compare_and_append([{"id": 2, "__time": 9}], 1, 5), InvalidUsage, r"times in \[9, 9\]"),
        (lambda: shard.snapshot("2026-11-28"), InvalidUsage, "datetime"),
        (lambda: persist.connect("ftp://user:secret@x"), InvalidUsage, "'ftp://…@x' is neither"),
        (lambda: persist.connect("persist://user:secret@x"), InvalidUsage, "not 'persist://…@x'"),
        (lambda: persist.connect("persist://host/path"), InvalidUsage, "persist:///absolute/path"),
        (lambda: persist.connect(), InvalidUsage, "give a url"),
    ]
    for act, kind, sentence in cases:
        with pytest.raises(kind, match=sentence):
            act()
    assert rows_of(shard) == [{"id": 1, "name": "a"}]
    assert shard.upper() == Antichain(1)


def test_a_directory_with_other_files_is_not_taken_for_a_location(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(InvalidUsage, match=r"is not a persist location: it has files but no persist\.json"):
        persist.connect(f"persist://{tmp_path}")
    assert os.listdir(tmp_path) == ["precious.txt"]


def test_a_damaged_or_newer_marker_is_told(tmp_path: Path, url: str) -> None:
    persist.connect(url).close()
    marker = tmp_path / "location" / "persist.json"
    marker.write_text('{"version": 99}')
    with pytest.raises(UpgradeNeeded, match="format 99"):
        persist.connect(url)
    marker.write_text("{")
    with pytest.raises(InvalidUsage, match="is damaged"):
        persist.connect(url)
