"""Metrics of commits, stores and processes: counters, durations and retry storms; and the spans of commits.

A machine reports each commit of a group and each duty of upkeep. Without counts and a tracer that costs almost nothing.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from blob.metrics import Observe
from persist.core import commands as c
from persist.core.errors import Corruption, PersistError
from persist.formats.exposition import COUNTER, GAUGE, HISTOGRAM, Family, Labelled, Spread, single_series
from persist.telemetry.tracing import Tracer, TraceSpan, request_id


class StoreCalls:
    """Calls to the two stores of a location, by store, verb and outcome. Thread-safe.

    With a tracer each call is also a span, a child of the current one.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self.durations = Durations()
        self._tracer = tracer

    def observer(self, store: str) -> Observe:
        """The function that counts a call to `store`; takes verb, outcome (`ok` or the failure), seconds and bytes."""
        return partial(self._observe, store)

    def totals(self) -> dict[tuple[str, ...], tuple[int, float, int]]:
        """(store, verb, outcome) -> number of calls, their seconds and bytes."""
        return self.durations.totals()

    def _observe(self, store: str, verb: str, outcome: str, seconds: float, nbytes: int) -> None:
        self.durations.observe((store, verb, outcome), seconds, nbytes)
        if self._tracer is not None and self._tracer.current() is not None:  # background calls have no span
            attributes: dict[str, str | int] = {
                "persist.store": store,
                "persist.outcome": outcome,
                "persist.bytes": nbytes,
            }
            failed = "" if outcome in ("ok", "lost") else outcome
            self._tracer.passed(f"persist.{store}.{verb}", seconds, attributes, failed=failed)


class MachineMetrics:
    """Counters of one machine; read without locks, so a reader may see a partly counted commit."""

    def __init__(self) -> None:
        self.commits = 0
        self.commands = 0
        self.races_lost = 0
        self.retries = 0
        self.spills = 0
        self.flushes = 0
        self.upkeep_bytes = 0
        self.upkeep_failed = 0
        self.upkeep_refused = 0
        self.group_max = 0
        self.queued_s = 0.0
        self.commit_s = 0.0
        self.upkeep_s = 0.0

    def add(self, other: MachineMetrics) -> None:
        for name, count in vars(other).items():
            own = getattr(self, name)
            setattr(self, name, max(own, count) if name == "group_max" else own + count)

    def committed(self, commands: int) -> None:
        self.commits += 1
        self.commands += commands
        self.group_max = max(self.group_max, commands)

    def upkept(self, result: c.Result) -> None:
        if isinstance(result, c.MergeApplied):
            self.flushes += result.applied
            self.upkeep_refused += not result.applied


STORM_TRIES = 5
LOG_EVERY_S = 60.0
LOGGED_MAX = 1_000  # storms whose last log line is remembered; the oldest are dropped first
REASON_MAX = 2_000  # characters of an error message in the log
_log = logging.getLogger("persist.retries")
_corrupt = logging.getLogger("persist.corruption")


class Storms:
    """Logs and counts retry storms and corruption. Thread-safe. `now_s` is a monotonic clock.

    A storm is a command or commit that is retried more than `STORM_TRIES` times in a row. The same kind of storm of the
    same shard is logged once in `LOG_EVERY_S` seconds for all callers; the next line counts those left out. `storms`
    and `corruptions` count them, `retries` every try after the first.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.storms = 0
        self.corruptions = 0
        self._now_s = now_s
        self._lock = threading.Lock()
        self._retries: dict[str, int] = {}
        self._logged: OrderedDict[tuple[str, str, str], tuple[float, int]] = OrderedDict()  # when; left out since

    @property
    def retries(self) -> dict[str, int]:
        """The number of retries by `who`."""
        with self._lock:
            return dict(self._retries)

    def again(self, who: str, shard: str, tries: int, error: BaseException, request_id: str = "") -> None:
        """Count a retry: `who` (`client`, `committer`) has failed `tries` times in a row, last with `error`."""
        kind = error.kind if isinstance(error, PersistError) else type(error).__name__
        key = (who, shard, kind)
        with self._lock:
            self._retries[who] = self._retries.get(who, 0) + 1
            if tries != STORM_TRIES + 1:
                return
            self.storms += 1
            now_s = self._now_s()
            logged_s, left_out = self._logged.get(key, (now_s - LOG_EVERY_S, 0))
            if now_s - logged_s < LOG_EVERY_S:
                self._logged[key] = (logged_s, left_out + 1)
                return
            self._logged[key] = (now_s, 0)
            self._logged.move_to_end(key)
            if len(self._logged) > LOGGED_MAX:
                self._logged.popitem(last=False)
        reason = str(error)[:REASON_MAX]
        fields = {
            "who": who,
            "shard": shard or None,
            "kind": kind,
            "tries": tries,
            "reason": reason,
            "request_id": request_id or None,
            "left_out": left_out,
        }
        of_shard = f" of shard {shard!r}" if shard else ""
        _log.warning("retry storm: try %d of the %s%s: %s", tries, who, of_shard, reason, extra=fields)

    def corrupted(self, shard: str, error: BaseException, doing: str) -> None:
        """Count and log corruption that no response reports. `doing`: the operation. Other errors are ignored."""
        if isinstance(error, Corruption):
            self.count_corruption()
            reason = str(error)[:REASON_MAX]
            fields = {"shard": shard, "kind": error.kind, "reason": reason, "doing": doing}
            _corrupt.error("corruption found by %s: %s", doing, reason, extra=fields)

    def count_corruption(self) -> None:
        """Count corruption that is logged elsewhere."""
        with self._lock:
            self.corruptions += 1


BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
SERIES_MAX = 1_000  # of one family; further ones are counted as OTHER
OTHER = "other"


class Durations:
    """A histogram of seconds by label values, with at most `SERIES_MAX` series, and sums of bytes. Thread-safe."""

    def __init__(self, bounds_s: tuple[float, ...] = BOUNDS_S) -> None:
        self._bounds = bounds_s
        self._lock = threading.Lock()
        self._series: dict[tuple[str, ...], _Series] = {}

    def observe(self, key: tuple[str, ...], seconds: float, nbytes: int = 0) -> None:
        bucket = bisect_left(self._bounds, seconds)
        with self._lock:
            series = self._series.get(key)
            if series is None:
                if len(self._series) >= SERIES_MAX:
                    key = (OTHER,) * len(key)
                series = self._series.setdefault(key, _Series([0] * (len(self._bounds) + 1)))
            series.counts[bucket] += 1
            series.seconds += seconds
            series.nbytes += nbytes

    def totals(self) -> dict[tuple[str, ...], tuple[int, float, int]]:
        """By label values: the number of operations, their seconds and bytes."""
        with self._lock:
            return {key: (sum(series.counts), series.seconds, series.nbytes) for key, series in self._series.items()}

    def family(self, name: str, text: str, labels: tuple[str, ...]) -> Family:
        """All series, as a histogram."""
        with self._lock:
            if not labels:  # the only series exists from the start
                self._series.setdefault((), _Series([0] * (len(self._bounds) + 1)))
            samples = [
                (key, Spread(self._bounds, tuple(series.counts), series.seconds))
                for key, series in self._series.items()
            ]
        return Family(name, HISTOGRAM, text, labels, samples)


@dataclass(slots=True)
class _Series:
    counts: list[int]  # by bucket
    seconds: float = 0.0
    nbytes: int = 0


COMMITTED, UNCHANGED, FAILED = "committed", "unchanged", "failed"
LINKS_MAX = 128  # of the span of a commit; a group may have more commands


class Queued(Protocol):
    """A queued command."""

    @property
    def origin(self) -> Origin | None: ...


class Sight:
    """The telemetry of a location. Thread-safe. `now_s` is a monotonic clock; `counts`: measure durations."""

    def __init__(self, now_s: Callable[[], float], *, counts: bool = True, tracer: Tracer | None = None) -> None:
        self.counts = counts
        self.tracer = tracer
        self.now_s = now_s
        self.commits = Durations()  # by outcome
        self.queues = Durations()  # how long each command waited for its commit
        self.upkeep = Durations()  # by kind
        self.storms = Storms(now_s)

    def origin(self) -> Origin | None:
        """The time, the request and the parent span of a command that is queued now."""
        tracer, current_request = self.tracer, request_id()
        if not self.counts and tracer is None and not current_request:
            return None
        return Origin(self.now_s(), current_request, None if tracer is None else tracer.current())

    @contextmanager
    def commit(self, shard: str, group: Sequence[Queued], metrics: MachineMetrics) -> Iterator[CommitWatch]:
        watch, started_s = CommitWatch(group), self.now_s() if self.counts else 0.0
        origins = [queued.origin for queued in group if queued.origin is not None]
        if self.counts:
            for origin in origins:
                self.queues.observe((), started_s - origin.queued_s)
                metrics.queued_s += started_s - origin.queued_s
        places = [origin.place for origin in origins if origin.place is not None]
        attributes: dict[str, str | int] = {"persist.shard": shard, "persist.commands": len(group)}
        try:
            with self._span("persist.commit", attributes, places) as span:
                try:
                    yield watch
                finally:
                    if span is not None:
                        span.tell("persist.outcome", watch.outcome)
                        if watch.outcome == COMMITTED:
                            span.tell("persist.seqno", watch.seqno)
        finally:
            if self.counts:
                seconds = self.now_s() - started_s
                self.commits.observe((watch.outcome,), seconds)
                metrics.commit_s += seconds

    @contextmanager
    def duty(self, shard: str, kind: str, metrics: MachineMetrics) -> Iterator[None]:
        started_s = self.now_s() if self.counts else 0.0
        try:
            with self._span("persist.upkeep", {"persist.shard": shard, "persist.duty": kind}):
                yield
        finally:
            if self.counts:
                seconds = self.now_s() - started_s
                self.upkeep.observe((kind,), seconds)
                metrics.upkeep_s += seconds

    @contextmanager
    def _span(
        self, name: str, attributes: Mapping[str, str | int], places: Sequence[Any] = ()
    ) -> Iterator[TraceSpan | None]:
        """A child span of the first of the places; None without a tracer."""
        if self.tracer is None:
            yield None
            return
        below = places[0] if places else None
        with self.tracer.span(name, attributes, below=below, links=places[:LINKS_MAX]) as span:
            try:
                yield span
            except BaseException as error:
                kind = error.kind if isinstance(error, PersistError) else type(error).__name__
                span.failed(kind, str(error))
                raise


@dataclass(slots=True)
class Origin:
    """When a command was queued, for which request ("": none), and in which span."""

    queued_s: float
    request_id: str
    place: Any  # of the tracer


class CommitWatch:
    """The commit of one group. Its outcome is `failed` unless the committer calls `ended`."""

    def __init__(self, group: Sequence[Queued]) -> None:
        self.outcome = FAILED
        self.seqno = 0
        self._group = group

    @property
    def request_id(self) -> str:
        """The id of the first request in the group that has one, else ""."""
        origins = (queued.origin for queued in self._group)
        return next((origin.request_id for origin in origins if origin and origin.request_id), "")

    def ended(self, seqno: int, is_changed: bool) -> None:
        """Report that the shard has this seqno now; `is_changed`: by this commit."""
        self.outcome, self.seqno = COMMITTED if is_changed else UNCHANGED, seqno


def stores(store_calls: StoreCalls) -> Iterator[Family]:
    """The calls to the stores, their durations and bytes."""
    labels = ("store", "verb", "outcome")
    totals = store_calls.totals().items()
    calls: list[Labelled] = [(key, count) for key, (count, _, _) in totals]
    transferred: list[Labelled] = [(key, nbytes) for key, (_, _, nbytes) in totals]
    yield Family("persist_store_calls_total", COUNTER, "Calls to the stores", labels, calls)
    yield Family("persist_store_bytes_total", COUNTER, "Bytes transferred by these calls", labels, transferred)
    yield store_calls.durations.family("persist_store_seconds", "Seconds that these calls took", labels)


def retried(storms: Storms) -> Iterator[Family]:
    """Retries, retry storms and corruption."""
    samples: list[Labelled] = [((who,), count) for who, count in storms.retries.items()]
    text = "Operations that were retried more than 5 times in a row"
    yield Family("persist_tries_again_total", COUNTER, "Retries by who retried", ("who",), samples)
    yield single_series("persist_retry_storms_total", COUNTER, text, storms.storms)
    yield single_series("persist_corruption_total", COUNTER, "Times that corruption was found", storms.corruptions)


def pools(pairs: dict[str, tuple[int, int]]) -> Iterator[Family]:
    """The use and the size of each bounded pool or queue."""
    used: list[Labelled] = [((name,), in_use) for name, (in_use, _) in pairs.items()]
    size: list[Labelled] = [((name,), capacity) for name, (_, capacity) in pairs.items()]
    yield Family("persist_pool_used", GAUGE, "Units in use of a bounded pool or queue", ("pool",), used)
    yield Family("persist_pool_size", GAUGE, "Its capacity", ("pool",), size)


def of_process(version: str) -> Iterator[Family]:
    """CPU, memory, open files and the version. On systems without `/proc` only the version."""
    yield Family("persist_build_info", GAUGE, "The version of persist", ("version",), [((version,), 1.0)])
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        files = len(os.listdir("/proc/self/fd"))
    except OSError:
        return
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    yield single_series("process_cpu_seconds_total", COUNTER, "Seconds of CPU", cpu_s)
    yield single_series(
        "process_resident_memory_bytes", GAUGE, "Resident bytes", int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    )
    yield single_series("process_open_fds", GAUGE, "Open files and sockets", files)
    yield single_series(
        "process_max_fds", GAUGE, "The limit of open files", resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    )
