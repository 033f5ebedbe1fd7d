"""Metrics of commits, stores and processes: counters, durations, storms of retries; and the spans of commits.

A machine reports when a group is committed and when a duty of upkeep is done. Without counts and a tracer both cost
next to nothing.
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
from functools import partial
from typing import Protocol

from blob.metrics import Observe
from persist.core import commands as c
from persist.core.errors import Corruption, PersistError
from persist.formats.exposition import COUNTER, GAUGE, HISTOGRAM, Family, Labelled, Spread, one
from persist.telemetry.tracing import Place, Tracer, TraceSpan, request_id


class StoreCalls:
    """Calls to the two stores of a location, by store, verb and outcome. Thread-safe.

    With a tracer each call is a span as well, below the one under way.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self.durations = Durations()
        self._tracer = tracer

    def observer(self, store: str) -> Observe:
        """What counts one call to `store`: called with its verb, its outcome (`ok`, or why not), seconds and bytes."""
        return partial(self._observe if self._tracer is None else self._traced, store)

    def totals(self) -> dict[tuple[str, ...], tuple[int, float, int]]:
        """(store, verb, outcome) -> calls, their seconds, the bytes that they moved."""
        return self.durations.totals()

    def _observe(self, store: str, verb: str, outcome: str, seconds: float, nbytes: int) -> None:
        self.durations.observe((store, verb, outcome), seconds, nbytes)

    def _traced(self, store: str, verb: str, outcome: str, seconds: float, nbytes: int) -> None:
        self._observe(store, verb, outcome, seconds, nbytes)
        if self._tracer is not None and self._tracer.current() is not None:  # background looks are nobody's
            told: dict[str, str | int] = {"persist.store": store, "persist.outcome": outcome, "persist.bytes": nbytes}
            failed = "" if outcome in ("ok", "lost") else outcome
            self._tracer.passed(f"persist.{store}.{verb}", seconds, told, failed=failed)


class MachineMetrics:
    """Counters of one machine; read without locks, so a reader may see one commit half counted."""

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
        """Count also what `other` has counted."""
        for name, count in vars(other).items():
            mine = getattr(self, name)
            setattr(self, name, max(mine, count) if name == "group_max" else mine + count)

    def committed(self, commands: int) -> None:
        self.commits += 1
        self.commands += commands
        self.group_max = max(self.group_max, commands)

    def upkept(self, result: c.Result) -> None:
        if isinstance(result, c.MergeApplied):
            self.flushes += result.applied
            self.upkeep_refused += not result.applied


# One log line for a storm of retries, not one for each, and no flood of such lines; and one for what is damaged.
#
# A storm is: one command, or one commit, was tried again more than `STORM_TRIES` times in a row. The same trouble of
# the same shard is logged once in `TOLD_EVERY_S` seconds, however many callers have it; the next line says how many
# storms it stands for.


STORM_TRIES = 5
TOLD_EVERY_S = 60.0
TROUBLES_MAX = 1_000  # shards and kinds of which it is remembered when they were told; the oldest go first
REASON_MAX = 2_000  # characters of an error's sentence in the log
_log = logging.getLogger("persist.retries")
_corrupt = logging.getLogger("persist.corruption")


class Storms:
    """Tells of storms, and of what is damaged. Thread-safe. `now_s` is a monotonic clock.

    `storms` and `corruptions` count them, `retries` every try after the first.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.storms = 0
        self.corruptions = 0
        self._now_s = now_s
        self._lock = threading.Lock()
        self._retries: dict[str, int] = {}
        self._told: OrderedDict[tuple[str, str, str], tuple[float, int]] = OrderedDict()

    @property
    def retries(self) -> dict[str, int]:
        """How often each of `who` tried again."""
        with self._lock:
            return dict(self._retries)

    def again(self, who: str, shard: str, tries: int, error: BaseException, request_id: str = "") -> None:
        """`who` (`client`, `committer`) has failed `tries` times in a row, last with `error`, and tries again."""
        kind = error.kind if isinstance(error, PersistError) else type(error).__name__
        key = (who, shard, kind)
        with self._lock:
            self._retries[who] = self._retries.get(who, 0) + 1
            if tries != STORM_TRIES + 1:
                return
            self.storms += 1
            now_s = self._now_s()
            told_s, left_out = self._told.get(key, (now_s - TOLD_EVERY_S, 0))
            if now_s - told_s < TOLD_EVERY_S:
                self._told[key] = (told_s, left_out + 1)
                return
            self._told[key] = (now_s, 0)
            self._told.move_to_end(key)
            if len(self._told) > TROUBLES_MAX:
                self._told.popitem(last=False)
        reason = str(error)[:REASON_MAX]
        fields = {"who": who, "shard": shard or None, "kind": kind, "tries": tries, "reason": reason}
        more = {"request_id": request_id or None, "left_out": left_out}
        about = f" of shard {shard!r}" if shard else ""
        _log.warning("retry storm: try %d of the %s%s: %s", tries, who, about, reason, extra={**fields, **more})

    def corrupted(self, shard: str, error: BaseException, doing: str) -> None:
        """Count, and log, that a shard or a part of it is damaged, where no answer tells of it. `doing`: what met it.

        Other errors are not told.
        """
        if isinstance(error, Corruption):
            self.count_corruption()
            reason = str(error)[:REASON_MAX]
            fields = {"shard": shard, "kind": error.kind, "reason": reason, "doing": doing}
            _corrupt.error("corruption, met by %s: %s", doing, reason, extra=fields)

    def count_corruption(self) -> None:
        """Count one that is told elsewhere."""
        with self._lock:
            self.corruptions += 1


# How long things took, counted in buckets: what Prometheus calls a histogram, without its library.


BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
SERIES_MAX = 1_000  # of one family; what comes later is counted as OTHER
OTHER = "other"


class Durations:
    """Seconds by the values of labels, at most `SERIES_MAX` of them. Thread-safe.

    `observe` also adds up bytes, where a thing moves some.
    """

    def __init__(self, bounds_s: tuple[float, ...] = BOUNDS_S) -> None:
        self._bounds = bounds_s
        self._lock = threading.Lock()
        self._series: dict[tuple[str, ...], _Series] = {}

    def observe(self, key: tuple[str, ...], seconds: float, nbytes: int = 0) -> None:
        """Count one thing that took so long."""
        place = bisect_left(self._bounds, seconds)
        with self._lock:
            series = self._series.get(key)
            if series is None:
                series = self._made(key)
            series.counts[place] += 1
            series.seconds += seconds
            series.nbytes += nbytes

    def totals(self) -> dict[tuple[str, ...], tuple[int, float, int]]:
        """By labels: how many there were, their seconds, the bytes that they moved."""
        with self._lock:
            return {key: (sum(series.counts), series.seconds, series.nbytes) for key, series in self._series.items()}

    def family(self, name: str, text: str, labels: tuple[str, ...]) -> Family:
        """All of it, as a histogram."""
        with self._lock:
            if not labels:  # its one series is there from the beginning
                self._series.setdefault((), _Series(len(self._bounds) + 1))
            samples = [
                (key, Spread(self._bounds, tuple(series.counts), series.seconds))
                for key, series in self._series.items()
            ]
        return Family(name, HISTOGRAM, text, labels, samples)

    def _made(self, key: tuple[str, ...]) -> _Series:
        if len(self._series) >= SERIES_MAX:
            key = (OTHER,) * len(key)
        found = self._series.get(key)
        if found is None:
            found = self._series[key] = _Series(len(self._bounds) + 1)
        return found


class _Series:
    __slots__ = ("counts", "nbytes", "seconds")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.seconds = 0.0
        self.nbytes = 0


COMMITTED, UNCHANGED, FAILED = "committed", "unchanged", "failed"
LINKS_MAX = 128  # of one commit's span; a group may have more commands


class Queued(Protocol):
    """A queued command, as far as it is told of here."""

    @property
    def origin(self) -> Origin | None: ...


class Sight:
    """One for each location. Thread-safe. `now_s` is a monotonic clock; `counts`: whether durations are measured."""

    def __init__(self, now_s: Callable[[], float], *, counts: bool = True, tracer: Tracer | None = None) -> None:
        self.counts = counts
        self.tracer = tracer
        self.now_s = now_s
        self.commits = Durations()  # by what came of them
        self.queues = Durations()  # what each command waited for until its commit began
        self.upkeep = Durations()  # by kind
        self.storms = Storms(now_s)

    def origin(self) -> Origin | None:
        """For a command that is queued now: since when, for which request, below which span."""
        tracer, asked = self.tracer, request_id()
        if not self.counts and tracer is None and not asked:
            return None
        return Origin(self.now_s(), asked, None if tracer is None else tracer.current())

    @contextmanager
    def commit(self, shard: str, group: Sequence[Queued], metrics: MachineMetrics) -> Iterator[CommitWatch]:
        """Watch the commit of a group."""
        watch, begun_s = CommitWatch(group), self.now_s() if self.counts else 0.0
        origins = [queued.origin for queued in group if queued.origin is not None]
        if self.counts:
            for origin in origins:
                self.queues.observe((), begun_s - origin.queued_s)
                metrics.queued_s += begun_s - origin.queued_s
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
                seconds = self.now_s() - begun_s
                self.commits.observe((watch.outcome,), seconds)
                metrics.commit_s += seconds

    @contextmanager
    def duty(self, shard: str, kind: str, metrics: MachineMetrics) -> Iterator[None]:
        """Watch a duty of upkeep."""
        begun_s = self.now_s() if self.counts else 0.0
        try:
            with self._span("persist.upkeep", {"persist.shard": shard, "persist.duty": kind}):
                yield
        finally:
            if self.counts:
                seconds = self.now_s() - begun_s
                self.upkeep.observe((kind,), seconds)
                metrics.upkeep_s += seconds

    @contextmanager
    def _span(
        self, name: str, attributes: Mapping[str, str | int], places: Sequence[Place] = ()
    ) -> Iterator[TraceSpan | None]:
        """A span below the first of the places; None without a tracer."""
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


class Origin:
    """Where a queued command comes from."""

    __slots__ = ("place", "queued_s", "request_id")

    def __init__(self, queued_s: float, request_id: str, place: Place | None) -> None:
        self.queued_s = queued_s
        self.request_id = request_id
        self.place = place


class CommitWatch:
    """The commit of one group. Who commits says what came of it (`ended`); else it failed."""

    def __init__(self, group: Sequence[Queued]) -> None:
        self.outcome = FAILED
        self.seqno = 0
        self._group = group

    @property
    def request_id(self) -> str:
        """Of the first request in the group that has one."""
        return next((of.origin.request_id for of in self._group if of.origin and of.origin.request_id), "")

    def ended(self, seqno: int, is_changed: bool) -> None:
        """The shard has this seqno now; `is_changed`: by this commit."""
        self.outcome, self.seqno = COMMITTED if is_changed else UNCHANGED, seqno


# The metrics of every process: what it counts of stores and retries, its pools, and itself.


def stores(made: StoreCalls) -> Iterator[Family]:
    """Calls to the stores, how long they took, what they moved."""
    labels = ("store", "verb", "outcome")
    totals = made.totals().items()
    calls: list[Labelled] = [(key, count) for key, (count, _, _) in totals]
    moved: list[Labelled] = [(key, nbytes) for key, (_, _, nbytes) in totals]
    yield Family("persist_store_calls_total", COUNTER, "Calls to the stores", labels, calls)
    yield Family("persist_store_bytes_total", COUNTER, "Bytes that these calls moved", labels, moved)
    yield made.durations.family("persist_store_seconds", "Seconds that these calls took", labels)


def retried(storms: Storms) -> Iterator[Family]:
    """Tries after the first one, how often there were many in a row, and what was found damaged."""
    samples: list[Labelled] = [((who,), count) for who, count in storms.retries.items()]
    text = "Times that somebody tried again more than 5 times in a row"
    yield Family("persist_tries_again_total", COUNTER, "Tries after the first, by who tried again", ("who",), samples)
    yield one("persist_retry_storms_total", COUNTER, text, storms.storms)
    yield one("persist_corruption_total", COUNTER, "Times that something damaged was met", storms.corruptions)


def pools(pairs: dict[str, tuple[int, int]]) -> Iterator[Family]:
    """How much of each bounded pool or queue is in use, and its size."""
    used: list[Labelled] = [((name,), taken) for name, (taken, _) in pairs.items()]
    size: list[Labelled] = [((name,), most) for name, (_, most) in pairs.items()]
    yield Family("persist_pool_used", GAUGE, "What is in use of a bounded pool or queue", ("pool",), used)
    yield Family("persist_pool_size", GAUGE, "How much of it there is", ("pool",), size)


def of_process(version: str) -> Iterator[Family]:
    """CPU, memory, open files and the version. On systems without `/proc` the version alone."""
    yield Family("persist_build_info", GAUGE, "Which version this is", ("version",), [((version,), 1.0)])
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        files = len(os.listdir("/proc/self/fd"))
    except OSError:
        return
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    yield one("process_cpu_seconds_total", COUNTER, "Seconds of CPU", cpu_s)
    yield one("process_resident_memory_bytes", GAUGE, "Resident bytes", int(fields[21]) * os.sysconf("SC_PAGE_SIZE"))
    yield one("process_open_fds", GAUGE, "Open files and sockets", files)
    yield one("process_max_fds", GAUGE, "How many there may be", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
