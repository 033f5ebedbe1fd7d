"""Counters of maintenance, and a blob store that counts and throttles merges, so that they do not starve writers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from blob import Blob
from persist.commit.clocks_and_ids import Clock
from persist.copies.throttled_blob import PacedBlob
from persist.core.state import State

SHARDS_MAX = 10_000  # shards with figures; the least recently merged are dropped first


@dataclass(slots=True)
class ShardFigures:
    """Bytes of one shard in this process. `ingested`: inputs that were not written by a merge."""

    ingested: int = 0
    written: int = 0
    rows: int = 0
    rows_left: int = 0  # the estimated number of rows after full consolidation: the sum of the diffs

    @property
    def write_amplification(self) -> float:
        """Bytes written, by writers and by merges, for each byte that writers wrote."""
        return (self.ingested + self.written) / self.ingested if self.ingested else 1.0

    @property
    def space_amplification(self) -> float:
        """Rows kept for each row that full consolidation would leave."""
        return self.rows / self.rows_left if self.rows_left else 1.0


def _counter(text: str) -> Any:
    """A counter and the help text of its metric."""
    return field(default=0, metadata={"text": text})


@dataclass(slots=True)
class Counters:
    bytes_read: int = _counter("Bytes read by merges")
    bytes_written: int = _counter("Bytes written by merges")
    merges_applied: int = _counter("Merges whose result replaced their inputs")
    merges_refused: int = _counter("Merges refused because an input or the claim was gone")
    merges_failed: int = _counter("Merges that failed because of a store; retried later")
    merges_resumed: int = _counter("Merges resumed from the output of another worker")
    chunks_saved: int = _counter("Chunks saved as progress of merges")
    crowded_keys: int = _counter("Keys with more than one row found by merges in shards with unique keys")
    claims_refused: int = _counter("Claims refused because another worker had them")
    gc_runs: int = _counter("Runs of garbage collection")
    gc_blobs_deleted: int = _counter("Blobs deleted by garbage collection")
    gc_entries_truncated: int = _counter("Log entries deleted by garbage collection")
    gc_rollups_made: int = _counter("Rollups made by garbage collection")
    gc_failed: int = _counter("Runs of garbage collection that failed; retried later")
    orphans_found: int = _counter("Orphans found by the sweep")
    orphans_deleted: int = _counter("Orphans deleted by the sweep")
    orphan_bytes: int = _counter("Bytes of orphans found")
    shards_finalised: int = _counter("Dropped shards that were deleted completely")
    retention_cuts: int = _counter("Instants kept for retention policies of rows")
    retention_runs: int = _counter("Truncations by retention policies of rows")
    retention_rows: int = _counter("Rows deleted by them, as far as known")
    retention_overran: int = _counter("Truncations that passed a consumer")
    retention_failed: int = _counter("Runs of retention policies that failed; retried later")
    verify_runs: int = _counter("Samples verified completely")
    verify_findings: int = _counter("Faults found in samples")
    verify_bytes: int = _counter("Bytes read for samples")


@dataclass
class MaintenanceMetrics:
    """Counters of one process. Thread-safe."""

    counters: Counters = field(default_factory=Counters)
    shards: OrderedDict[str, ShardFigures] = field(default_factory=OrderedDict)
    verified_ms: int = 0  # when the last sample ended, wall clock; 0: never
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)  # guards everything

    def add(self, **counts: int) -> None:
        """Increment counters: `add(merges_applied=1)`."""
        with self.lock:
            for name, count in counts.items():
                setattr(self.counters, name, getattr(self.counters, name) + count)

    def count_merge(self, shard: str, ingested: int, written: int) -> None:
        with self.lock:
            figures = self._figures(shard)
            figures.ingested += ingested
            figures.written += written

    def record_size(self, state: State) -> None:
        """Record how many rows the shard has."""
        diff_sums = (batch.rows if batch.diff_sum is None else batch.diff_sum for batch in state.trace.batches)
        rows_left = abs(sum(diff_sums))
        with self.lock:
            figures = self._figures(state.name)
            figures.rows, figures.rows_left = state.trace.rows, rows_left

    def to_json(self) -> dict[str, Any]:
        """All figures, for a log line or an endpoint."""
        with self.lock:
            shards: Mapping[str, Any] = {
                name: {
                    **asdict(figures),
                    "write_amplification": round(figures.write_amplification, 3),
                    "space_amplification": round(figures.space_amplification, 3),
                }
                for name, figures in self.shards.items()
            }
            return {**asdict(self.counters), "shards": shards}

    def _figures(self, shard: str) -> ShardFigures:
        figures = self.shards.setdefault(shard, ShardFigures())
        self.shards.move_to_end(shard)
        if len(self.shards) > SHARDS_MAX:
            self.shards.popitem(last=False)
        return figures


class MergeBlob(PacedBlob):
    """The blob store of merges: reads and writes are counted, and limited to `rate` bytes a second together."""

    def __init__(self, inner: Blob, metrics: MaintenanceMetrics, rate: int | None, clock: Clock) -> None:
        super().__init__(inner, rate, clock, count=lambda size: metrics.add(bytes_read=size))
        self._metrics = metrics

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._throttle.spend(len(data))
        super().put(key, data)
        self._metrics.add(bytes_written=len(data))
