"""What a process lets others see of its commits: durations, storms of retries, spans. One for each location.

A machine tells it when a group is committed and when a duty of upkeep is done. Where it does not count and has no
tracer, both cost next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from persist.commit.counters import MachineMetrics
from persist.commit.durations import Durations
from persist.commit.origin import request_id
from persist.commit.storms import Storms
from persist.commit.tracing import Place, Tracer
from persist.core.errors import PersistError

COMMITTED, UNCHANGED, FAILED = "committed", "unchanged", "failed"
LINKS_MAX = 128  # of one commit's span; a group may have more commands


class Queued(Protocol):
    """A queued command, as far as it is told of here."""

    @property
    def origin(self) -> Origin | None: ...


class Sight:
    """Thread-safe. `now_s` is a monotonic clock; `counts`: whether durations are measured."""

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

    def commit(self, shard: str, group: Sequence[Queued], metrics: MachineMetrics) -> CommitWatch:
        """Watch the commit of a group, in a `with`."""
        return CommitWatch(self, shard, group, metrics)

    def duty(self, shard: str, kind: str, metrics: MachineMetrics) -> DutyWatch:
        """Watch a duty of upkeep, in a `with`."""
        return DutyWatch(self, shard, kind, metrics)


class Origin:
    """Where a queued command comes from."""

    __slots__ = ("place", "queued_s", "request_id")

    def __init__(self, queued_s: float, request_id: str, place: Place | None) -> None:
        self.queued_s = queued_s
        self.request_id = request_id
        self.place = place


class CommitWatch:
    """The commit of one group. Who commits says what came of it (`ended`); else it failed."""

    def __init__(self, sight: Sight, shard: str, group: Sequence[Queued], metrics: MachineMetrics) -> None:
        self._outcome = FAILED
        self._seqno = 0
        self._sight = sight
        self._shard = shard
        self._group = group
        self._metrics = metrics
        self._begun_s = 0.0
        self._span: Any = None

    @property
    def request_id(self) -> str:
        """Of the first request in the group that has one."""
        return next((one.origin.request_id for one in self._group if one.origin and one.origin.request_id), "")

    def ended(self, seqno: int, is_changed: bool) -> None:
        """The shard has this seqno now; `is_changed`: by this commit."""
        self._outcome, self._seqno = COMMITTED if is_changed else UNCHANGED, seqno

    def __enter__(self) -> Self:
        sight = self._sight
        if sight.counts:
            self._begun_s = sight.now_s()
            for pending in self._group:
                if pending.origin is not None:
                    waited_s = self._begun_s - pending.origin.queued_s
                    sight.queues.observe((), waited_s)
                    self._metrics.queued_s += waited_s
        if sight.tracer is not None:
            places = [
                one.origin.place for one in self._group if one.origin is not None and one.origin.place is not None
            ]
            self._span = sight.tracer.span(
                "persist.commit",
                {"persist.shard": self._shard, "persist.commands": len(self._group)},
                below=places[0] if places else None,
                links=places[:LINKS_MAX],
            )
            self._told = self._span.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        sight = self._sight
        if sight.counts:
            seconds = sight.now_s() - self._begun_s
            sight.commits.observe((self._outcome,), seconds)
            self._metrics.commit_s += seconds
        if self._span is not None:
            self._told.tell("persist.outcome", self._outcome)
            if self._outcome == COMMITTED:
                self._told.tell("persist.seqno", self._seqno)
            _end(self._span, self._told, kind, error, tb)


class DutyWatch:
    """A duty of upkeep."""

    def __init__(self, sight: Sight, shard: str, kind: str, metrics: MachineMetrics) -> None:
        self._sight = sight
        self._shard = shard
        self._kind = kind
        self._metrics = metrics
        self._begun_s = 0.0
        self._span: Any = None

    def __enter__(self) -> Self:
        sight = self._sight
        if sight.counts:
            self._begun_s = sight.now_s()
        if sight.tracer is not None:
            attributes = {"persist.shard": self._shard, "persist.duty": self._kind}
            self._span = sight.tracer.span("persist.upkeep", attributes)
            self._told = self._span.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._sight.counts:
            seconds = self._sight.now_s() - self._begun_s
            self._sight.upkeep.observe((self._kind,), seconds)
            self._metrics.upkeep_s += seconds
        if self._span is not None:
            _end(self._span, self._told, kind, error, tb)


def _end(
    span: Any, told: Any, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
) -> None:
    if error is not None:
        told.failed(error.kind if isinstance(error, PersistError) else type(error).__name__, str(error))
    span.__exit__(kind, error, tb)
