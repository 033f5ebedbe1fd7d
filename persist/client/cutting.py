"""Taking cuts over many shards, and truncating by them: shard by shard, a few at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from typing import Any, TypeVar

from persist.client.arguments import checked
from persist.client.changes import Named
from persist.client.cut import CURSORS, SHARDS_MAX, TIMESTAMP, UPPER, Cut, check_belongs
from persist.client.past import HandleSettings
from persist.client.retry import send
from persist.client.rewriting import RETRIES_MAX
from persist.client.telling import Info, info_bytes
from persist.client.transport import OneShard, Transport
from persist.client.truncate import Truncated, Truncating
from persist.client.wall_clock import instant_ms, resolved
from persist.commit.location import all_names
from persist.core import commands as c
from persist.core.antichain import TIME_MAX, Antichain, meet
from persist.core.errors import InvalidUsage, PersistError, UnknownShard, UpperMismatch
from persist.core.history_commands import CURSORS_MAX
from persist.core.ids import ShardId, check_shard_name, critical_reader_id_of, incarnation_of
from persist.core.phases import dropped
from persist.core.view import ShardView, ViewRequest

ASKED_AT_ONCE = 8  # shards, unless the caller says otherwise
TRUNCATED_AT_ONCE = 2  # each takes as much memory as a snapshot
AT_ONCE_MAX = 64
_T = TypeVar("_T")


@dataclass(frozen=True)
class ShardTruncated:
    """What a truncation by a cut came to in one shard: `done`, or the `error` that refused it."""

    shard: str
    done: Truncated | None
    error: PersistError | None

    def to_json(self) -> dict[str, Any]:
        """The same for JSON: what `Truncated.to_json` gives, or `kind`, `detail` and `details` of the error."""
        if self.error is not None:
            return {"shard": self.shard, "error": error_json(self.error)}
        assert self.done is not None
        return {"shard": self.shard, **self.done.to_json()}


@dataclass(frozen=True)
class CutTruncated:
    """What a truncation by a cut came to: an outcome for each of its shards, by name."""

    outcomes: tuple[ShardTruncated, ...]

    @property
    def complete(self) -> bool:
        """Whether every shard is truncated that far. Otherwise the same call again completes the rest."""
        return all(outcome.error is None for outcome in self.outcomes)

    @property
    def failed(self) -> tuple[ShardTruncated, ...]:
        """The outcomes of the shards that refused."""
        return tuple(outcome for outcome in self.outcomes if outcome.error is not None)

    def to_json(self) -> dict[str, Any]:
        """The same for JSON."""
        return {"complete": self.complete, "shards": [outcome.to_json() for outcome in self.outcomes]}


@dataclass(frozen=True)
class Asked:
    """Which cut is asked for: of the shards `names`, or of those whose names begin with `prefix`."""

    names: tuple[str, ...] | None
    prefix: str | None
    at: datetime | None = None
    cursors: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises InvalidUsage where it is no question."""
        if (self.names is None) == (self.prefix is None):
            raise InvalidUsage("give either the names of the shards to cut, or a prefix of names")
        if self.at is not None and self.cursors:
            raise InvalidUsage("at and cursors are both given; give one of them")
        if self.at is not None:
            checked("at", self.at, datetime)
            instant_ms("at", self.at)
        if len(self.cursors) > CURSORS_MAX:
            raise InvalidUsage(f"a cut is by at most {CURSORS_MAX} cursors, not {len(self.cursors)}")
        for name in self.names or ():
            check_shard_name(name)
        if self.names is not None and not 0 < len(set(self.names)) <= SHARDS_MAX:
            raise InvalidUsage(f"a cut has 1 to {SHARDS_MAX} shards, not {len(set(self.names))}")
        checked("prefix", self.prefix, str, type(None))

    @property
    def kind(self) -> str:
        """The kind of the cut that it asks for."""
        return TIMESTAMP if self.at is not None else CURSORS if self.cursors else UPPER


def take(transport: Transport, asked: Asked, settings: HandleSettings, at_once: int) -> Cut:
    """The cut. Raises what `Client.cut` says."""
    asked.check()
    check_at_once(at_once)
    names = tuple(sorted(set(asked.names))) if asked.names is not None else _named(transport, asked.prefix or "")
    location, epoch = transport.belongs()
    taken_ms, retry_s = transport.clock.now_ms(), settings.read.retry_s

    def one(name: str) -> tuple[ShardId, Antichain] | None:
        view = transport.view(name, ViewRequest(with_batches=False))
        if view.is_dropped:
            if asked.names is None:  # it went since it was listed
                return None
            raise UnknownShard(dropped(name))
        return view.shard_id, _frontier(OneShard(transport, view.shard_id), name, view, asked, retry_s)

    found = {name: told for name, told in zip(names, each(one, names, at_once), strict=True) if told is not None}
    if not found:
        raise InvalidUsage(f"there is no shard whose name begins with {asked.prefix!r}: a cut needs one at least")
    lives = {name: incarnation_of(name, shard) for name, (shard, _) in found.items()}
    return Cut(
        location,
        epoch,
        taken_ms,
        asked.kind,
        {name: upper for name, (_, upper) in found.items()},
        {name: life for name, life in lives.items() if life},
    )


@dataclass(frozen=True)
class Wanted:
    """How a truncation by a cut is done, as `Client.truncate` says."""

    dry_run: bool = False
    retries: int = 0
    info: Info | None = None
    at_once: int = TRUNCATED_AT_ONCE

    def check(self) -> None:
        """Raises InvalidUsage where that makes no sense."""
        checked("dry_run", self.dry_run, bool)
        checked("retries", self.retries, int)
        if not 0 <= self.retries <= RETRIES_MAX:
            raise InvalidUsage(f"retries is {self.retries}; it must be in [0, {RETRIES_MAX}]")
        check_at_once(self.at_once)


def truncate(transport: Transport, cut: Cut, settings: HandleSettings, wanted: Wanted) -> CutTruncated:
    """Truncate every shard of the cut. Raises what `Client.truncate` says."""
    checked("cut", cut, Cut)
    wanted.check()
    said = info_bytes("info", wanted.info)
    check_belongs(cut, *transport.belongs())

    def one(name: str) -> ShardTruncated:
        try:
            before = cut[name].element
            if before is None or before > TIME_MAX:
                raise UpperMismatch(
                    f"shard {name!r} was closed when the cut was taken: nothing can be truncated in it",
                    expected=None,
                    actual=[],
                )
            shard = OneShard(transport, cut.shard_id(name))
            truncating = Truncating.of(shard, name, Named(before, None), settings.write, settings.read)
            done = replace(truncating, info=said).run(None, wanted.retries, dry_run=wanted.dry_run)
        except PersistError as error:
            return ShardTruncated(name, None, error)
        return ShardTruncated(name, done, None)

    return CutTruncated(tuple(each(one, sorted(cut.shards), wanted.at_once)))


def error_json(error: PersistError) -> dict[str, Any]:
    """What refused one shard of many, for JSON."""
    return {"kind": error.kind, "detail": error.message, "details": dict(error.details)}


def check_at_once(at_once: int) -> None:
    """Raises InvalidUsage where no so many can be asked at once."""
    checked("at_once", at_once, int)
    if not 1 <= at_once <= AT_ONCE_MAX:
        raise InvalidUsage(f"at_once is {at_once}; it must be in [1, {AT_ONCE_MAX}]")


def each(work: Callable[[str], _T], names: Iterable[str], at_once: int) -> list[_T]:
    """What the work on each name returns, in their order. The first error ends it. 1 at once: on this thread."""
    if at_once == 1:
        return [work(name) for name in names]
    context = copy_context()  # the deadline of this call is theirs too
    with ThreadPoolExecutor(at_once, thread_name_prefix="persist-cut") as pool:
        try:
            return list(pool.map(lambda name: context.copy().run(work, name), names))
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _named(transport: Transport, prefix: str) -> tuple[str, ...]:
    names = tuple(islice(all_names(transport.names, prefix), SHARDS_MAX + 1))
    if len(names) > SHARDS_MAX:
        raise InvalidUsage(
            f"more than {SHARDS_MAX} shards begin with {prefix!r}; make several cuts, of longer prefixes"
        )
    return names


def _frontier(transport: OneShard, name: str, view: ShardView, asked: Asked, retry_s: float) -> Antichain:
    """The frontier of one shard."""
    if asked.at is not None:
        return resolved(transport, name, asked.at, 0.0, retry_s).upper
    if not asked.cursors:
        return view.upper
    readers = {critical_reader_id_of(cursor): cursor for cursor in asked.cursors}
    found = send(transport, name, c.ReadCriticalReaders(tuple(readers)), retry_s)
    assert isinstance(found, c.CriticalReadersAre)
    for reader, cursor in readers.items():
        if reader not in found.since:
            raise InvalidUsage(
                f"shard {name!r} has no critical reader {cursor!r}: nobody knows what it has read; give other cursors, "
                "or only shards that it reads"
            )
    return meet((view.upper, *found.since.values()))
