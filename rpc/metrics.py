"""What /metrics tells, in Prometheus' text format: requests, commits, calls to the stores, and each shard's state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from persist.commit.location import Location
from persist.core.state import State, held_since
from persist.regions.replica import Replica

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LATENCIES_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_COUNTERS = {
    "commits": "Commits that won their compare-and-set",
    "commands": "Commands in these commits",
    "races_lost": "Compare-and-sets lost to another server",
    "retries": "Compare-and-sets repeated because the store gave no definite answer",
    "spills": "Commands whose inline rows found no room in the State",
    "flushes": "Small batches merged in the background, inline rows among them",
    "reliefs": "Such merges that a commit took along, because the background had fallen behind",
    "upkeep_bytes": "Bytes that small merges wrote",
    "upkeep_failed": "Rollups, flushes and small merges that could not be written",
    "upkeep_refused": "Small merges refused, because another had merged an input meanwhile",
}


Gauges = Callable[[], Mapping[str, tuple[str, int]]]  # a count of this moment, by name: what it counts, and how many


class Metrics:
    """The counters of one server. `observe` is called once a request."""

    def __init__(self, location: Location, gauges: Gauges, shards_max: int) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("persist_requests", "Requests answered", ["verb", "status"], registry=self.registry)
        self.errors = Counter("persist_errors", "Requests refused or failed", ["verb", "kind"], registry=self.registry)
        self.seconds = Histogram(
            "persist_request_seconds", "Time to the answer", ["verb"], buckets=_LATENCIES_S, registry=self.registry
        )
        self.registry.register(_Server(location, gauges))
        self._location = location
        self._shards_max = shards_max
        self._children: dict[tuple[str, int], tuple[Any, Any]] = {}

    def observe(self, verb: str, status: int, seconds: float) -> None:
        """Count a request. `verb` comes from a fixed set, so that clients cannot make up series."""
        found = self._children.get((verb, status))
        if found is None:
            found = self.requests.labels(verb, str(status)), self.seconds.labels(verb)
            self._children[verb, status] = found
        found[0].inc()
        found[1].observe(seconds)

    def failed(self, verb: str, kind: str) -> None:
        self.errors.labels(verb, kind).inc()

    def text(self, sees: Callable[[str], bool]) -> bytes:
        """All of the server, and the gauges of those shards of which the caller sees the name."""
        shards = CollectorRegistry()
        shards.register(_Shards(self._location, sees, self._shards_max))
        return generate_latest(self.registry) + generate_latest(shards)


class _Server(Collector):
    """Reads the counters of all machines and stores when it is asked."""

    def __init__(self, location: Location, gauges: Gauges) -> None:
        self._location = location
        self._gauges = gauges

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        machines = self._location.machines()
        for name, text in _COUNTERS.items():
            total = sum(getattr(machine.metrics, name) for machine in machines)
            yield CounterMetricFamily(f"persist_{name}", text, value=total)
        most = max((machine.metrics.group_max for machine in machines), default=0)
        yield _gauge("persist_group_commands_max", "Most commands in one commit", most)
        yield _gauge("persist_machines", "Shards with a cached State", len(machines))
        for name, (text, count) in self._gauges().items():
            yield _gauge(f"persist_{name}", text, count)
        yield from self._stores()
        if isinstance(self._location, Replica):
            yield from _region(self._location)

    def _stores(self) -> Iterator[Metric]:
        labels = ["store", "verb", "outcome"]
        calls: Any = CounterMetricFamily("persist_store_calls", "Calls to the stores", labels=labels)
        seconds: Any = CounterMetricFamily("persist_store_seconds", "Seconds that these calls took", labels=labels)
        moved: Any = CounterMetricFamily("persist_store_bytes", "Bytes that these calls moved", labels=labels)
        for key, totals in self._location.store_calls.totals().items():
            for family, value in zip((calls, seconds, moved), totals, strict=True):
                family.add_metric(key, value)
        return iter((calls, seconds, moved))


class _Shards(Collector):
    """Reads cached States when it is asked; at most `shards_max` shards have gauges."""

    def __init__(self, location: Location, sees: Callable[[str], bool], shards_max: int) -> None:
        self._location = location
        self._sees = sees
        self._shards_max = shards_max

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        seen = [machine for machine in self._location.machines() if self._sees(machine.name)]
        if isinstance(self._location, Replica):
            yield from self._copied([machine.name for machine in seen[-self._shards_max :]], self._location)
        kept = [(m.name, s) for m in seen[-self._shards_max :] if (s := m.cached) is not None]
        gauges: dict[str, tuple[str, Callable[[State], float]]] = {
            "upper": ("First time that is not complete (-1: closed)", lambda s: _time(s.upper.element)),
            "since": ("Earliest readable time (-1: closed)", lambda s: _time(s.since.element)),
            "lag_seconds": ("Seconds since the last commit", self._lag_s),
            "batches": ("Batches", lambda s: len(s.trace.batches)),
            "rows": ("Updates in all batches", lambda s: sum(b.rows for b in s.trace.batches)),
            "bytes": ("Encoded bytes of all batches", lambda s: sum(b.size for b in s.trace.batches)),
            "inline_bytes": ("Bytes of rows inside the State", lambda s: sum(b.inline_size for b in s.trace.batches)),
            "readers": ("Leased readers", lambda s: len(s.leased_readers)),
            "writers": ("Registered writers", lambda s: len(s.writers)),
            "held_since": ("Earliest time that a reader holds (-1: none)", lambda s: _time(held_since(s).element)),
        }
        for name, (text, value) in gauges.items():
            family: Any = GaugeMetricFamily(f"persist_shard_{name}", text, labels=["shard"])
            for shard, state in kept:
                family.add_metric([shard], value(state))
            yield family

    def _copied(self, names: list[str], replica: Replica) -> Iterator[Metric]:
        lag: Any = GaugeMetricFamily(
            "persist_region_lag_seconds", "For how long a copy may lack what home has", labels=["shard"]
        )
        lacking: Any = GaugeMetricFamily(
            "persist_region_missing_blobs", "Blobs for which newer versions wait, the first 20", labels=["shard"]
        )
        version: Any = GaugeMetricFamily("persist_region_accepted_seqno", "The version that is shown", labels=["shard"])
        for name in names:
            found = replica.follower.followed(name)
            if found is not None:
                lag.add_metric([name], replica.behind_s(name))
                lacking.add_metric([name], len(found.lacking))
                version.add_metric([name], found.seqno)
        return iter((lag, lacking, version))

    def _lag_s(self, state: State) -> float:
        return max(0.0, (self._location.clock.now_ms() - state.walltime_ms) / 1000)


def _region(replica: Replica) -> Iterator[Metric]:
    """How far a copy is, of each shard that somebody reads here."""
    follower = replica.follower
    age_s = max(0.0, (replica.clock.now_ms() - follower.published_ms) / 1000)
    yield _gauge("persist_region_published_age_seconds", "Seconds since home said something", age_s)
    yield _gauge(
        "persist_region_link_up", "Whether the last look at the copy succeeded", float(follower.failed is None)
    )
    yield CounterMetricFamily("persist_region_bad_blobs", "Blobs of publications that could not be read",
                              value=follower.bad_blobs)  # fmt: skip


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _time(element: int | None) -> int:
    return -1 if element is None else element
