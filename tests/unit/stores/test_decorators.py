"""Cache, metrics and faults around a store."""

from __future__ import annotations

from collections import Counter

import pytest

from blob import BlobError, BlobMisconfigured, BlobNotFound, BlobUnavailable
from blob.cache import ENTRY_OVERHEAD_BYTES, CachedBlob
from blob.memory_blobs import MemoryBlob
from blob.metrics import MeteredBlob
from consensus import ConsensusError, ConsensusIndeterminate, ConsensusUnavailable
from consensus.memory_logs import MemoryConsensus
from consensus.metrics import MeteredConsensus
from tests.support.blob_faults import FaultPlan, FaultyBlob
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


def test_a_put_that_fails_before_did_not_happen_and_one_that_fails_after_did() -> None:
    inner = MemoryBlob()
    with pytest.raises(BlobUnavailable, match="before"):
        FaultyBlob(inner, FaultPlan(1, {"fail_before": 1.0})).put("k", b"x")
    assert inner.stat("k") is None
    with pytest.raises(BlobUnavailable, match="after"):
        FaultyBlob(inner, FaultPlan(1, {"fail_after": 1.0})).put("k", b"x")
    assert inner.get("k") == b"x"


def test_reads_come_back_short_or_with_one_bit_flipped_and_the_store_stays_whole() -> None:
    inner = MemoryBlob()
    data = bytes(range(256))
    inner.put("k", data)
    for seed in range(20):
        short = FaultyBlob(inner, FaultPlan(seed, {"truncate": 1.0})).get("k")
        assert len(short) < len(data)
        assert data.startswith(short)
        flipped = FaultyBlob(inner, FaultPlan(seed, {"flip": 1.0})).get_range("k", 0, 256)
        wrong = [index for index in range(256) if flipped[index] != data[index]]
        assert len(wrong) == 1
        assert (flipped[wrong[0]] ^ data[wrong[0]]).bit_count() == 1
    assert inner.get("k") == data


def test_delays_go_through_the_given_sleep() -> None:
    slept: list[float] = []
    plan = FaultPlan(1, {"delay": 1.0}, delay_s=0.25, sleep=slept.append)
    blob = FaultyBlob(MemoryBlob(), plan)
    blob.put("k", b"x")
    blob.get("k")
    assert slept == [0.25, 0.25]
    assert plan.counts == Counter(delay=2)


def _faults_of_a_run(seed: int) -> tuple[list[str], Counter[str]]:
    plan = FaultPlan(seed, {"fail_before": 0.2, "fail_after": 0.2, "fail_unknown": 0.1, "flip": 0.3})
    blob, log = FaultyBlob(MemoryBlob(), plan), FaultyConsensus(MemoryConsensus(), plan)
    outcomes = []
    for number in range(100):
        for call in (lambda: blob.put(f"k{number}", b"x"), lambda: log.compare_and_set(f"k{number}", 1, b"x")):  # noqa: B023
            try:
                outcomes.append(str(call()))
            except (BlobError, ConsensusError) as error:
                outcomes.append(str(error))
    return outcomes, plan.counts


def test_one_seed_makes_one_run_and_the_counts_show_that_faults_struck() -> None:
    first, counts = _faults_of_a_run(7)
    assert _faults_of_a_run(7) == (first, counts)
    assert _faults_of_a_run(8)[0] != first
    assert all(counts[kind] > 0 for kind in ("fail_before", "fail_after", "fail_unknown"))


def test_a_healed_plan_strikes_no_more_until_it_resumes() -> None:
    plan = FaultPlan(1, {"fail_before": 1.0})
    blob = FaultyBlob(MemoryBlob(), plan)
    plan.heal()
    blob.put("k", b"x")
    plan.resume()
    with pytest.raises(BlobUnavailable):
        blob.get("k")


@pytest.mark.parametrize("rates", [{"explode": 0.1}, {"flip": 1.5}, {"flip": -0.1}])
def test_a_senseless_plan_is_refused(rates: dict[str, float]) -> None:
    with pytest.raises(BlobMisconfigured, match="fault"):
        FaultPlan(1, rates)


@pytest.mark.parametrize(
    ("kind", "error", "happened"),
    [
        ("fail_before", ConsensusUnavailable, False),
        ("fail_unknown", ConsensusIndeterminate, False),
        ("fail_after", ConsensusIndeterminate, True),
    ],
)
def test_what_a_failed_append_may_mean(kind: str, error: type[Exception], happened: bool) -> None:
    inner = MemoryConsensus()
    log = FaultyConsensus(inner, FaultPlan(1, {kind: 1.0}))
    with pytest.raises(error):
        log.compare_and_set("k", 1, b"x")
    assert (inner.head("k") is not None) is happened


def test_dropped_pushes_are_dropped() -> None:
    heard: list[str] = []
    inner = MemoryConsensus()
    plan = FaultPlan(1, {"drop_push": 1.0})
    unsubscribe = FaultyConsensus(inner, plan).subscribe(heard.append)
    assert unsubscribe is not None
    inner.compare_and_set("k", 1, b"x")
    while not plan.counts["drop_push"]:
        pass
    unsubscribe()
    assert heard == []
