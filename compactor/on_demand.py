"""Embedded transports, and maintenance of one shard on demand: `Shard.optimize` and `Shard.vacuum`.

`persist.connect` finds `open_transport` by the name of this module. Each call of `maintain` does a bounded amount of
work and reports whether more is due. Workers and collectors are imported when they are first used, because most
programs never call it.
"""

from __future__ import annotations

from typing import Any

from persist.client.embedded import OPTIMIZE, VERBS, EmbeddedTransport
from persist.client.row_retention import maintained_transport
from persist.commit.location import Location
from persist.core.errors import InvalidUsage, UnknownShard
from persist.core.ids import check_shard_name
from persist.core.shard_phases import dropped
from persist.core.state import State

MERGES_PER_CALL = 8
EPOCHS_PER_CALL = 8


def open_transport(location: Location) -> EmbeddedTransport:
    """The transport of an embedded program. Its users close it, and the location with it."""
    return maintained_transport(location, maintain)


def maintain(location: Location, name: str, verb: str) -> dict[str, Any]:
    """Do a bounded amount of work; the result is JSON, and `more` says whether to call it again. Retrying is safe.

    Raises InvalidUsage, UnknownShard, ReadOnly and the errors of the stores.
    """
    if verb not in VERBS:
        raise InvalidUsage(f"maintenance is {' or '.join(VERBS)}, not {verb!r:.100}")
    return (_optimize if verb == OPTIMIZE else _vacuum)(location, check_shard_name(name))


def _optimize(location: Location, name: str) -> dict[str, Any]:
    """Merge as for an idle shard."""
    from compactor.worker import Worker, WorkerSettings

    before = _live_state(location, name)
    worker = Worker(location, WorkerSettings())
    merges = worker.run(name, idle=True, merges_max=MERGES_PER_CALL)
    due = worker.due(name, idle=True)
    return {
        "merges": merges,
        "before": _size(before),
        "after": _size(location.machine(name).state()),
        "more": bool(merges and due),
        "complete": not due,
    }


def _vacuum(location: Location, name: str) -> dict[str, Any]:
    """Run epochs of the collector."""
    from compactor.metering import MaintenanceMetrics
    from persist.maintenance.collector import Collector

    _live_state(location, name)
    metrics = MaintenanceMetrics()
    collector = Collector(location, count=metrics.add)
    is_done = any(collector.run(name).done for _ in range(EPOCHS_PER_CALL))
    return {
        "blobs": metrics.counters.gc_blobs_deleted,
        "entries": metrics.counters.gc_entries_truncated,
        "more": not is_done,
        "complete": is_done,
    }


def _live_state(location: Location, name: str) -> State:
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
