"""Maintenance of one shard on demand, and committers of maintenance: own machines or a server."""

from __future__ import annotations

from typing import Any

from compactor.metering import MaintenanceMetrics
from compactor.worker import Worker, WorkerSettings
from persist.client.idempotency import send
from persist.client.transport import Transport
from persist.commit.location import Location
from persist.commit.machine import CommitterOf
from persist.core import commands as c
from persist.core.errors import Indeterminate, Unavailable, UnknownShard
from persist.core.phases import dropped
from persist.core.state import State
from persist.maintenance.collector import Collector

# Maintenance of one shard because somebody asks for it: what `Shard.optimize` and `Shard.vacuum` do.
#
# `compactor.embedded` injects it into transports. Each call does a bounded piece, and tells whether more is to be done.


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
    metrics = MaintenanceMetrics()
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


# How maintenance commits: by its own machines, or through the server that commits for the writers.
#
# A process beside a busy writer loses most races against it, and every race that it wins makes the writer repeat its
# commit. Through the server its commands join the writers' group commit, and nobody repeats anything. States are read
# straight from the stores, and so are blobs, either way. While the server is away, maintenance commits by itself.


RETRY_S = 2.0  # how long a server that does not answer is waited for


def through_server(location: Location, transport: Transport) -> CommitterOf:
    """Committers of the shards of a location that send their commands to a server of that location."""
    return lambda name: _ThroughServer(name, location, transport)


class _ThroughServer:
    def __init__(self, name: str, location: Location, transport: Transport) -> None:
        self._name = name
        self._machine = location.machine(name)
        self._transport = transport

    @property
    def name(self) -> str:
        return self._name

    def state(self) -> State:
        return self._machine.state()

    def refresh(self) -> State:
        return self._machine.refresh()

    def apply(self, command: c.Command) -> c.Result:
        try:
            result = send(self._transport, self._name, command, RETRY_S)
        except (Unavailable, Indeterminate):
            return self._machine.apply(command)  # a server that is away commits nothing with which this could race
        self._machine.refresh()
        return result
