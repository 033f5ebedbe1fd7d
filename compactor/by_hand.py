"""Maintenance of one shard because somebody asks for it: what `Shard.optimize` and `Shard.vacuum` do.

`compactor.embedded` injects it into transports. Each call does a bounded piece, and tells whether
more is to be done.
"""

from __future__ import annotations

from typing import Any

from compactor.metering import Metrics
from compactor.worker import Worker, WorkerSettings
from persist.commit.collector import Collector
from persist.commit.location import Location
from persist.core.errors import UnknownShard
from persist.core.phases import dropped
from persist.core.state import State

MERGES_AT_ONCE = 8
EPOCHS_AT_ONCE = 8


def optimize(location: Location, name: str) -> dict[str, Any]:
    """Some merges, as for a shard at rest. May be repeated. Raises UnknownShard, ReadOnly, and what the stores do."""
    before = _there(location, name)
    worker = Worker(location, WorkerSettings())
    merges = worker.run(name, idle=True, merges_max=MERGES_AT_ONCE)
    due = worker.due(name, idle=True)
    return {
        "merges": merges,
        "before": _size(before),
        "after": _size(location.machine(name).state()),
        "more": bool(merges and due),
        "complete": not due,
    }


def vacuum(location: Location, name: str) -> dict[str, Any]:
    """Some epochs of the collector. It may be repeated. Raises UnknownShard, ReadOnly, and what the stores do."""
    _there(location, name)
    metrics = Metrics()
    collector = Collector(location, metrics=metrics)
    is_done = False
    for _ in range(EPOCHS_AT_ONCE):
        if is_done := collector.run(name).done:
            break
    told = metrics.to_json()
    return {
        "blobs": told["gc_blobs_deleted"],
        "entries": told["gc_entries_truncated"],
        "more": not is_done,
        "complete": is_done,
    }


def _there(location: Location, name: str) -> State:
    location.identity.check_writable()
    state = location.machine(name).refresh()
    if state.is_closed:
        raise UnknownShard(dropped(name))
    return state


def _size(state: State) -> dict[str, int]:
    parts = [part for batch in state.trace.batches for part in batch.parts()]
    return {
        "batches": len(state.trace.batches),
        "parts": len(parts),
        "updates": sum(part.rows for part in parts),
        "bytes": sum(part.size for part in parts),
    }
