"""Cache, metrics and faults around a store."""

from __future__ import annotations

import pytest

from blob import BlobMisconfigured, BlobNotFound
from blob.cache import ENTRY_OVERHEAD_BYTES, RECENT_MAX, RECENT_S, CachedBlob, RecentPuts
from blob.memory_blobs import MemoryBlob
from blob.metrics import MeteredBlob
from consensus import ConsensusIndeterminate
from consensus.memory_logs import MemoryConsensus
from consensus.metrics import MeteredConsensus
from tests.support.blob_faults import FaultPlan
from tests.support.consensus_faults import FaultyConsensus

Observed = list[tuple[str, str, float, int]]


class Ticks:
    """A clock that moves one second per look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_the_cache_reads_once_and_serves_ranges_of_whole_blobs() -> None:
    seen: Observed = []
    cached = CachedBlob(MeteredBlob(MemoryBlob(), lambda *call: seen.append(call)), bytes_max=10_000)
    cached.put("k", b"0123456789")
    assert [cached.get("k"), cached.get("k")] == [b"0123456789"] * 2
    assert cached.get_range("k", 2, 3) == b"234"
    with pytest.raises(BlobNotFound):
        cached.get_range("k", 8, 3)
    assert [call[0] for call in seen] == ["put", "get"]
    assert (cached.hits, cached.misses) == (3, 1)


def test_the_cache_stays_within_its_bytes_and_drops_the_least_recently_used() -> None:
    seen: Observed = []
    cost = 100 + ENTRY_OVERHEAD_BYTES
    cached = CachedBlob(MeteredBlob(MemoryBlob(), lambda *call: seen.append(call)), bytes_max=cost * 5)
    for name in "abcdefg":
        cached.put(name, name.encode() * 100)
    for name in "abcde":
        cached.get(name)
    cached.get("a")
    cached.get("f")
    assert cached.cached_bytes == cost * 5
    seen.clear()
    for name in "acdef":
        cached.get(name)
    assert seen == [], "b was the one to go"
    cached.get("b")
    assert len(seen) == 1


def test_the_cache_passes_through_what_would_evict_all_else() -> None:
    cached = CachedBlob(MemoryBlob(), bytes_max=1000)
    cached.put("large", b"x" * 900)
    assert cached.get("large") == b"x" * 900
    assert cached.cached_bytes == 0


def test_a_cache_of_nothing_still_reads() -> None:
    cached = CachedBlob(MemoryBlob(), bytes_max=0)
    cached.put("k", b"x")
    assert cached.get("k") == b"x"
    with pytest.raises(BlobMisconfigured):
        CachedBlob(MemoryBlob(), bytes_max=-1)


def test_deleting_empties_the_cache_of_the_key_and_of_its_ranges() -> None:
    cached = CachedBlob(MemoryBlob(), bytes_max=10_000)
    cached.put("k", b"0123456789")
    cached.get_range("k", 0, 4)
    cached.get_range("k", 4, 4)
    cached.delete(["k"])
    assert cached.cached_bytes == 0
    with pytest.raises(BlobNotFound):
        cached.get_range("k", 0, 4)


def test_blob_metrics_tell_operation_outcome_seconds_and_bytes() -> None:
    seen: Observed = []
    blob = MeteredBlob(MemoryBlob(), lambda *call: seen.append(call), clock=Ticks())
    blob.put("k", memoryview(b"12345"))
    blob.get_range("k", 1, 2)
    with pytest.raises(BlobNotFound):
        blob.get("none")
    assert [found.key for found in blob.list("")] == ["k"]
    blob.delete(["k"])
    assert seen == [
        ("put", "ok", 1.0, 5),
        ("get_range", "ok", 1.0, 2),
        ("get", "BlobNotFound", 1.0, 0),
        ("list", "ok", 1.0, 0),
        ("delete", "ok", 1.0, 0),
    ]


def test_consensus_metrics_tell_a_lost_race_from_an_error() -> None:
    seen: Observed = []
    plan = FaultPlan(1, {"fail_after": 1.0})
    log = MeteredConsensus(MemoryConsensus(), lambda *call: seen.append(call), clock=Ticks())
    assert log.compare_and_set("k", 1, b"123")
    assert not log.compare_and_set("k", 1, b"1234")
    log.scan("k", 0, 10)
    failing = MeteredConsensus(FaultyConsensus(MemoryConsensus(), plan), lambda *call: seen.append(call), clock=Ticks())
    with pytest.raises(ConsensusIndeterminate):
        failing.compare_and_set("k", 1, b"")
    assert seen == [
        ("compare_and_set", "ok", 1.0, 3),
        ("compare_and_set", "lost", 1.0, 4),
        ("scan", "ok", 1.0, 3),
        ("compare_and_set", "ConsensusIndeterminate", 1.0, 0),
    ]


# --- what a process has just put is known for a minute, unless it deletes it again


def test_a_put_is_known_for_a_minute() -> None:
    now = [100.0]
    recent = RecentPuts(lambda: now[0])
    assert recent.size("a") is None
    recent.add("a", 0)
    assert recent.size("a") == 0
    now[0] += RECENT_S - 1
    recent.add("b", 3)
    assert (recent.size("a"), recent.size("b")) == (0, 3)
    now[0] += 1
    assert (recent.size("a"), recent.size("b")) == (None, 3)


def test_what_is_deleted_is_not_known() -> None:
    recent = RecentPuts(lambda: 0.0)
    recent.add("a", 1)
    recent.forget(["a", "never put"])
    assert recent.size("a") is None


def test_the_oldest_makes_room() -> None:
    recent = RecentPuts(lambda: 0.0)
    for number in range(RECENT_MAX + 1):
        recent.add(str(number), number)
    assert recent.size("0") is None
    assert recent.size(str(RECENT_MAX)) == RECENT_MAX


def test_a_store_that_is_near_remembers_nothing() -> None:
    blob = MemoryBlob("mem:")
    blob.put("a", b"a")
    assert blob.put_here("a") is None
