"""An embedded program keeps its location small by itself: 100 live rows had 193 blobs and 1,725 log entries."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from persist.client.embedded import EmbeddedTransport
from persist.commit.location import Location
from persist.core.ids import SeqNo, family_of, shard_id_of
from persist.core.state import ROLLUP_LEAST, Policy
from tests.support.waiting import WAIT_S, wait_until

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.string())])
SINCE_EVERY = 50
INSERTS = 1_200
LIVE_ROWS = 100
BLOBS_MAX = 20  # 26 if nothing is collected
ENTRIES_MAX = 450
assert Policy().rollup_every < INSERTS - ENTRIES_MAX // 4
ROLLUP = ROLLUP_LEAST  # commits that bring LARGE rows, after which one is due
LARGE = "x" * 20_000


def location_of(client: persist.Client) -> Location:
    assert isinstance(client.transport, EmbeddedTransport)
    return client.transport.location


def kept(client: persist.Client) -> tuple[int, int]:
    """Blobs and log entries."""
    location = location_of(client)
    blobs = sum(1 for _ in location.blob.list(family_of(shard_id_of("orders"))))
    return blobs, len(location.versions.diffs("orders", SeqNo(1), 10_000))


def small(client: persist.Client) -> Callable[[], bool]:
    def holds() -> bool:
        blobs, entries = kept(client)
        return blobs < BLOBS_MAX and entries < ENTRIES_MAX

    return holds


def insert_and_replace(shard: persist.Shard) -> None:
    """Row by row: `LIVE_ROWS` are left, the others were taken away again."""
    for number in range(INSERTS):
        key = number % LIVE_ROWS
        rows = [{"k": key, "v": f"value {number}", "__diff": 1}]
        if number >= LIVE_ROWS:
            rows.append({"k": key, "v": f"value {number - LIVE_ROWS}", "__diff": -1})
        shard.insert(rows)
        if number % SINCE_EVERY == SINCE_EVERY - 1:
            shard.downgrade_since(number)


def test_a_program_that_only_writes_keeps_its_location_small(tmp_path: Path) -> None:
    with persist.connect(f"persist://{tmp_path}/data") as client:
        shard = client.create_shard("orders", SCHEMA, ["k"])
        insert_and_replace(shard)
        wait_until(small(client), "the background has let go what nobody needs")
        assert shard.snapshot().to_arrow().num_rows == LIVE_ROWS


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    with persist.connect(f"persist://{tmp_path}/data", collect=False) as client:
        shard = client.create_shard("orders", SCHEMA, ["k"])
        for number in range(3 * ROLLUP):
            shard.insert([{"k": number, "v": LARGE}])
        assert kept(client)[1] > 3 * ROLLUP


def test_a_dropped_shard_is_deleted_by_who_dropped_it(tmp_path: Path) -> None:
    with persist.connect(f"persist://{tmp_path}/data") as client:
        shard = client.create_shard("orders", SCHEMA, ["k"])
        for _ in range(3):
            shard.insert(pa.table({"k": range(5_000), "v": ["before"] * 5_000}))
        assert kept(client)[0] > 1
        shard.drop()
        wait_until(lambda: kept(client)[0] == 1, "the blobs of what was dropped are gone")


def test_collections_keep_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that deletes slowly: commits go on meanwhile."""
    with persist.connect(f"persist://{tmp_path}/data") as client:
        shard = client.create_shard("orders", SCHEMA, ["k"])
        location = location_of(client)
        begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()
        real = location.consensus.truncate

        def truncate(key: str, seqno: int) -> int:
            begun.set()
            may_end.wait(WAIT_S)
            ended.set()
            return real(key, seqno)

        monkeypatch.setattr(location.consensus, "truncate", truncate)
        try:
            for number in range(5 * ROLLUP):
                shard.insert([{"k": number, "v": LARGE}])
                assert number < 3 * ROLLUP or begun.wait(WAIT_S)
            assert shard.upper().element == 5 * ROLLUP
            assert not ended.is_set(), "commits waited until it ended"
        finally:
            may_end.set()
