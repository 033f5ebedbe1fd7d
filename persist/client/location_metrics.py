"""The metrics of a location and of its shards, as a server, a worker and an embedded program export them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from persist.commit.clocks_and_ids import ThreadBackground
from persist.commit.committer import Machine
from persist.commit.location import MACHINES_MAX, Location
from persist.core.frontier import Antichain
from persist.core.readable_times import held_since
from persist.core.state import State
from persist.formats.exposition import COUNTER, GAUGE, Family, Labelled, single_series
from persist.telemetry.metrics import retried, stores

COUNTED = {
    "commits": "Commits that won their compare-and-set",
    "commands": "Commands in these commits",
    "races_lost": "Compare-and-sets lost to another server",
    "retries": "Compare-and-sets repeated because the store gave no definite answer",
    "spills": "Commits whose inline rows went to one blob: they were many, or the State had no room for them",
    "flushes": "Small batches merged in the background, inline rows among them",
    "upkeep_bytes": "Bytes that small merges wrote",
    "upkeep_failed": "Rollups, flushes and small merges that could not be written",
    "upkeep_refused": "Small merges refused, because another had merged an input meanwhile",
}
OF_SHARDS = {
    "commits": "Commits of the shard that won their compare-and-set",
    "commands": "Commands in these commits",
    "races_lost": "Compare-and-sets of the shard lost to another server",
    "retries": "Compare-and-sets of the shard repeated for want of a definite answer",
    "queued_s": "Seconds that commands of the shard waited for their commit to begin",
    "commit_s": "Seconds that commits of the shard took",
    "upkeep_s": "Seconds that the upkeep of the shard took",
}
STATES: dict[str, tuple[str, Callable[[State], float]]] = {
    "upper": ("First time that is not complete (-1: closed)", lambda s: _time(s.upper)),
    "since": ("Earliest readable time (-1: closed)", lambda s: _time(s.since)),
    "batches": ("Batches", lambda s: len(s.trace.batches)),
    "rows": ("Updates in all batches", lambda s: sum(b.rows for b in s.trace.batches)),
    "bytes": ("Encoded bytes of all batches", lambda s: sum(b.size for b in s.trace.batches)),
    "inline_bytes": ("Bytes of rows inside the State", lambda s: sum(b.inline_size for b in s.trace.batches)),
    "readers": ("Leased readers", lambda s: len(s.leased_readers)),
    "writers": ("Registered writers", lambda s: len(s.writers)),
    "held_versions": ("Versions of the State that readers still hold", lambda s: s.seqno - s.seqno_since),
    "held_since": (
        "Earliest time that the history setting or a reader holds; since where nothing does (-1: closed)",
        lambda s: _time(held_since(s)),
    ),
}


def location_families(location: Location) -> Iterator[Family]:
    """Calls to the stores, commits, upkeep, caches and pools, of all shards together."""
    yield from stores(location.store_calls)
    counted = location.counted()
    for name, text in COUNTED.items():
        yield single_series(f"persist_{name}_total", COUNTER, text, getattr(counted, name))
    yield single_series("persist_group_commands_max", GAUGE, "Most commands in one commit", counted.group_max)
    sight = location.sight
    yield sight.commits.family("persist_commit_seconds", "Seconds that commits of a group took", ("outcome",))
    yield sight.queues.family("persist_queue_seconds", "Seconds that commands waited for their commit to begin", ())
    yield sight.upkeep.family("persist_upkeep_seconds", "Seconds that duties of upkeep took", ("kind",))
    yield from retried(sight.storms)
    yield single_series("persist_machines", GAUGE, "Shards with a cached State", len(location.machines()))
    yield from _caches(location)
    if isinstance(location.background, ThreadBackground):
        dropped = location.background.dropped
        yield single_series(
            "persist_background_dropped_total", COUNTER, "Pieces of upkeep dropped: too many waited", dropped
        )


def location_pools(location: Location) -> dict[str, tuple[int, int]]:
    """The pools of a location: how much is in use, and the size."""
    sizes = {"machines": (len(location.machines()), MACHINES_MAX)}
    if isinstance(location.background, ThreadBackground):
        sizes["background"] = (location.background.taken, location.background.queue_max)
    return sizes


def shard_families(location: Location, machines: Sequence[Machine]) -> Iterator[Family]:
    """The metrics of these shards, whose number the caller bounds: of their States, and of the work done here."""
    states = [(machine.name, state) for machine in machines if (state := machine.cached) is not None]
    now_ms = location.clock.now_ms()
    for name, (text, value) in STATES.items():
        samples: list[Labelled] = [((shard,), value(state)) for shard, state in states]
        yield Family(f"persist_shard_{name}", GAUGE, text, ("shard",), samples)
    lags: list[Labelled] = [((shard,), max(0.0, (now_ms - state.walltime_ms) / 1000)) for shard, state in states]
    yield Family("persist_shard_lag_seconds", GAUGE, "Seconds since the last commit", ("shard",), lags)
    queued: list[Labelled] = [((machine.name,), machine.queued) for machine in machines]
    yield Family(
        "persist_shard_commands_queued", GAUGE, "Commands that wait, or are being committed", ("shard",), queued
    )
    for name, text in OF_SHARDS.items():
        counts: list[Labelled] = [((machine.name,), getattr(machine.metrics, name)) for machine in machines]
        unit = f"{name[:-2]}_seconds" if name.endswith("_s") else name
        yield Family(f"persist_shard_{unit}_total", COUNTER, text, ("shard",), counts)


def newest(machines: Sequence[Machine], most: int) -> list[Machine]:
    """The `most` that were used last, of machines in the order of their use.

    Shards that do not exist do not count: clients may ask for any name.
    """
    existing = [machine for machine in machines if machine.cached is not None and not machine.cached.is_closed]
    return existing[-most:] if most > 0 else []


def _caches(location: Location) -> Iterator[Family]:
    nodes = location.nodes
    counts: dict[str, tuple[int, ...]] = {"nodes": (nodes.hits, nodes.reads, nodes.bytes_held, nodes.bytes_max)}
    if (blobs := location.blob_cache) is not None:
        counts["blobs"] = (blobs.hits, blobs.misses, blobs.cached_bytes, blobs.bytes_max)
    counts["states"] = (location.machines_found, location.machines_made)
    families = (
        ("hits_total", COUNTER, "Reads that a cache answered"),
        ("misses_total", COUNTER, "Reads that it did not"),
        ("bytes", GAUGE, "Bytes that a cache holds"),
        ("size_bytes", GAUGE, "Bytes that it may hold"),
    )
    for index, (name, kind, text) in enumerate(families):
        samples: list[Labelled] = [((cache,), of[index]) for cache, of in counts.items() if index < len(of)]
        yield Family(f"persist_cache_{name}", kind, text, ("cache",), samples)


def _time(frontier: Antichain) -> int:
    return -1 if frontier.element is None else frontier.element
