"""Counting what maintenance does, and keeping it below a rate, so that it never starves writers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from blob import Blob, BlobStat
from persist.copies.throttled_blob import Throttle
from persist.core.state import State

SHARDS_MAX = 10_000  # shards whose figures are kept; the least recently merged go first


@dataclass(slots=True)
class ShardFigures:
    """Bytes of one shard as this process saw them. `ingested` are inputs that no merge had written before."""

    ingested: int = 0
    written: int = 0
    rows: int = 0
    rows_left: int = 0  # estimate of what full consolidation would leave: the sum of the diffs

    @property
    def write_amplification(self) -> float:
        """Bytes written, by writers and by merges, for each byte that writers wrote."""
        return (self.ingested + self.written) / self.ingested if self.ingested else 1.0

    @property
    def space_amplification(self) -> float:
        """Rows kept for each row that full consolidation would leave."""
        return self.rows / self.rows_left if self.rows_left else 1.0


@dataclass(slots=True)
class Counters:
    bytes_read: int = 0
    bytes_written: int = 0
    merges_applied: int = 0
    merges_refused: int = 0  # an input or the claim was gone
    merges_failed: int = 0  # a store did not answer; tried again later
    merges_resumed: int = 0  # taken over with what another had written
    chunks_saved: int = 0
    crowded_keys: int = 0  # with more than one row, in shards that ask for one: once for each merge that met them
    claims_refused: int = 0
    gc_runs: int = 0
    gc_blobs_deleted: int = 0
    gc_entries_truncated: int = 0
    gc_rollups_made: int = 0
    gc_failed: int = 0
    orphans_found: int = 0
    orphans_deleted: int = 0
    orphan_bytes: int = 0
    shards_finalised: int = 0
    retention_cuts: int = 0  # instants that were kept for policies of rows
    retention_runs: int = 0  # truncations by policies
    retention_rows: int = 0  # that went by them, as far as that is known
    retention_overran: int = 0  # truncations that passed a consumer
    retention_failed: int = 0  # somebody wrote each time, or a store did not answer; tried again later
    verify_runs: int = 0  # samples that were looked at to their end
    verify_findings: int = 0  # of the checker, in samples
    verify_bytes: int = 0  # read for samples


@dataclass
class MaintenanceMetrics:
    """Counters of one process. Thread-safe."""

    counters: Counters = field(default_factory=Counters)
    shards: OrderedDict[str, ShardFigures] = field(default_factory=OrderedDict)
    verified_ms: int = 0  # when the last sample ended, by the wall clock; 0: none did
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)  # guards all of it

    def add(self, **counts: int) -> None:
        """Count: `add(merges_applied=1)`."""
        with self.lock:
            for name, count in counts.items():
                setattr(self.counters, name, getattr(self.counters, name) + count)

    def merged(self, shard: str, ingested: int, written: int) -> None:
        with self.lock:
            figures = self._figures(shard)
            figures.ingested += ingested
            figures.written += written

    def seen(self, state: State) -> None:
        """Take note of how much the shard holds."""
        left = 0
        for batch in state.trace.batches:
            known = batch.diff_sum
            left += batch.rows if known is None else known
        with self.lock:
            figures = self._figures(state.name)
            figures.rows, figures.rows_left = state.trace.rows, abs(left)

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


class MeteredBlobs:
    """The blob store as merges see it: counted and throttled. Not more than the three operations that they need."""

    def __init__(self, inner: Blob, metrics: MaintenanceMetrics, throttle: Throttle) -> None:
        self._inner = inner
        self._metrics = metrics
        self._throttle = throttle

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self._throttle.spend(length)
        self._metrics.add(bytes_read=length)
        return self._inner.get_range(key, start, length)

    def stat(self, key: str) -> BlobStat | None:
        return self._inner.stat(key)

    def put(self, key: str, data: bytes) -> None:
        self._throttle.spend(len(data))
        self._inner.put(key, data)
        self._metrics.add(bytes_written=len(data))
