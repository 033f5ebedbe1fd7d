"""The optimistic loop: compute rows from the contents of a shard, and commit them if nothing relevant has changed.

An operation computes its rows from the contents as of the latest time. The commit expects the upper that was read. If
others have written meanwhile, the operation decides what to do with the rows (`Step`): a lost race costs one commit,
and more only if the new writes concern the operation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from typing import Any, ClassVar, Self, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from persist.client.contents_diff import DiffRequest, NamedTime, hold_interval
from persist.client.dml_plans import Count
from persist.client.idempotency import landed_or_none, send_for
from persist.client.read_leases import HandleSettings
from persist.client.snapshot import Held, ReadSettings, check_lease
from persist.client.timestamps import instant_of, latest_of, record_json
from persist.client.transport import OneShard, Transport
from persist.client.write import WriteHandle, WriteSettings
from persist.core import commands as c
from persist.core.audit_log import Caller
from persist.core.batch import Run
from persist.core.errors import Expired, InvalidUsage, NotReadable, PersistError, SchemaMismatch, UpperMismatch
from persist.core.frontier import MINIMUM, TIME_MAX, Antichain, last_time
from persist.core.ids import Token, mint
from persist.core.shard_view import ShardView, ViewRequest
from persist.core.transitions.part_admission import DIFF_MAX
from persist.parts import DIFF, ShardSchema, current_schema

RETRIES_MAX = 1_000
READ_BYTES = 64 * 1024 * 1024  # memory of the reads: the operation writes at the same time
BUFFER_BYTES = 32 * 1024 * 1024  # rows that it buffers for a part

# Refusals, which say that nothing was changed. They are not raised if another try of the token has landed.
REFUSED = (Expired, InvalidUsage, NotReadable, UpperMismatch)
LATEST = NamedTime(None)
_T = TypeVar("_T")


class CommitResult:
    """The base of results: the interval `[lower, upper)` that the commit took, empty if nothing was committed."""

    lower: Antichain
    upper: Antichain

    @property
    def time(self) -> int | None:
        """The time of its commit: a snapshot as of it shows the result. None: nothing was committed."""
        return last_time(self.lower, self.upper)

    @property
    def changed(self) -> bool:
        """Whether anything changed, so that it was committed."""
        return self.lower != self.upper

    def to_json(self) -> dict[str, Any]:
        """The same for JSON; wall clocks in RFC 3339. Raises nothing."""
        return record_json(self)


class Step(Enum):
    """What to do with computed rows if others have written before their commit."""

    KEEP = "keep"  # the writes do not concern them: the same rows are committed at the new time
    EXTEND = "extend"  # stage the rows that the new writes add
    REPLAN = "replan"  # compute all rows anew


@dataclass(frozen=True)
class Draft:
    """Staged rows, computed as of the latest time of `held`. `is_extended`: after several reads."""

    held: Held
    runs: tuple[Run, ...]
    count: Count
    is_extended: bool = False


@dataclass(frozen=True)
class Attempt:
    """The result of the loop: the commit, if there was one, the draft, and how often it was computed anew."""

    done: c.Appended | None
    draft: Draft
    replans: int

    @property
    def is_fresh(self) -> bool:
        """Whether the commit is of the rows of this draft, and not of another try of its token."""
        return self.done is not None and self.done.lower == self.draft.held.view.upper


@dataclass(frozen=True)
class RewriteOperation(ABC):
    """An operation that rewrites rows. `to` is the time that it is about."""

    what: ClassVar[str]  # "restore to 7"
    done: ClassVar[str]  # "restored to 7"

    transport: OneShard
    name: str
    to: NamedTime
    write: WriteSettings
    read: ReadSettings
    info: bytes = b""  # for the commit history
    passes: c.PassedCut | None = None  # the cut of a retention policy

    @classmethod
    def of(cls, transport: OneShard, name: str, settings: HandleSettings, to: NamedTime = LATEST, **more: Any) -> Self:
        """With settings that bound its memory, and with `more` fields."""
        write = replace(settings.write, part_bytes_target=min(BUFFER_BYTES, settings.write.part_bytes_target))
        read = replace(settings.read, memory_bytes=min(READ_BYTES, settings.read.memory_bytes))
        return cls(transport, name, to, write, read, **more)

    @property
    def time(self) -> int:
        """The time that it is about, unless that is the latest one."""
        assert self.to.time is not None
        return self.to.time

    @property
    def purpose(self) -> str:
        """What lists of readers and the commit history show for it."""
        return f"{self.what} {self.to.time}"

    @abstractmethod
    def _parts(self, view: ShardView | None) -> dict[str, Any]:
        """The operation, and the parts of the command that are specific to it. None: only to look up an outcome."""

    def _begin(self, view: ShardView) -> Count:
        """The counter for one computation of the rows."""
        return Count()

    def _rows(self, held: Held, count: Count, low: int | None) -> Iterator[pa.Table]:
        """The rows to write, as of the latest time of the view. With `low`: what to add to those as of that time."""
        raise AssertionError(f"{self.what} computes no rows")

    def _step(self, before: Held, now: Held) -> Step:
        """What to do with the rows that were computed before, if others have written."""
        return Step.EXTEND

    def _is_cancelled(self, count: Count, added: int) -> bool:
        """Whether an extension, before which `added` rows were added, cancels staged rows.

        Such rows would be written once more, possibly after an erasure has rewritten everything that shows them.
        """
        return count.added > added

    @property
    def _commits_nothing(self) -> bool:
        """Whether the command is sent if there is no row to write. With a caller's token it always is."""
        return True

    @property
    def _is_conditional(self) -> bool:
        """Whether the caller expects an upper, so that a lost race is not retried."""
        return False

    @contextmanager
    def _held(self, start: int, settings: ReadSettings | None = None) -> Iterator[Held]:
        """A lease on all times from `start` on, for the block."""
        request = DiffRequest(wait_s=0.0, purpose=self.purpose)
        with hold_interval(self.transport, self.name, start, None, request, settings or self.read) as interval:
            try:
                yield interval.held
            finally:
                interval.held.lease.close()

    def _rewrite(self, held: Held, token: Token | None, tries: int, replans_max: int = RETRIES_MAX) -> Attempt:
        """Compute the rows and commit them, in at most `tries` commits.

        Raises UpperMismatch: others wrote before each of them, or the rows were computed anew `replans_max` times.
        """
        draft, lost, replans = self._drafted(held, None), 0, 0
        while draft.runs or token is not None or self._commits_nothing:
            try:
                return Attempt(self._commit(draft.runs, draft.held.view, token), draft, replans)
            except (UpperMismatch, SchemaMismatch) as error:
                refused = error
            is_overtaken = isinstance(refused, UpperMismatch)
            if is_overtaken and (refused.details.get("expected") is None or self._is_conditional):
                raise refused  # no time is left, or none but the expected one
            lost += 1
            if lost < tries:
                now = self._refreshed(draft.held)
                is_kept = is_overtaken and not is_recast(draft.held.view, now.view)
                step = self._step(draft.held, now) if is_kept else Step.REPLAN
                replans += step is Step.REPLAN
            if lost == tries or replans > replans_max:
                if isinstance(refused, UpperMismatch):
                    raise self._overtaken(refused) from refused
                raise refused
            if step is Step.KEEP:
                draft = replace(draft, held=now)
            else:
                draft = self._drafted(now, draft if step is Step.EXTEND else None)
        return Attempt(None, draft, replans)

    def _drafted(self, held: Held, before: Draft | None) -> Draft:
        """The rows as of the latest time of the view; after an earlier draft, its rows and what was written since."""
        low = None if before is None else latest_of(before.held.view)
        count, runs = (self._begin(held.view), ()) if before is None else (before.count, before.runs)
        added = count.added
        rows = self._writable(latest_of(held.view), self._rows(held, count, low))
        more = self._staged(held.view, count.of(rows))
        if before is not None and self._is_cancelled(count, added):
            return self._drafted(held, None)
        return Draft(held, (*runs, *more), count, is_extended=before is not None)

    def _refreshed(self, held: Held) -> Held:
        """The shard as of now. Raises UpperMismatch or Expired if the operation cannot continue."""
        view = self.transport.view(self.name, ViewRequest())
        check_open(self.name, view, self.done.split()[0])
        check_lease(view, held.as_of, held.lease)
        held.lease.keep()
        return replace(held, view=view)

    def _commit(self, runs: tuple[Run, ...], view: ShardView, token: Token | None) -> c.Appended:
        """Commit the staged rows, which were computed from the view. Without a token it mints one.

        A token is remembered without a writer, which would have to be registered and retired.
        """
        own = token or mint(Token, self.transport.ids)
        return self._writer(view).commit_rewrite(runs, view.upper, token=own, **self._parts(view))

    def _writable(self, as_of: int, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        """The rows. Raises InvalidUsage if one commit cannot write a multiplicity."""
        for table in tables:
            diffs = pc.min_max(table.column(DIFF)).as_py()
            if len(table) and (most := max(-diffs["min"], diffs["max"])) > DIFF_MAX:
                raise InvalidUsage(self._too_often(as_of, most))
            yield table

    def _too_often(self, as_of: int, most: int) -> str:
        """The error for a row that exists so often that one commit cannot write it."""
        return (
            f"a row of shard {self.name!r} is there {most} times at time {as_of}, and one commit can change at most "
            f"{DIFF_MAX} of it; remove some by inserts with a negative __diff first"
        )

    def _view(self) -> ShardView:
        return self.transport.view(self.name, ViewRequest(with_batches=False))

    def _staged(self, view: ShardView, batches: Iterator[pa.RecordBatch]) -> tuple[Run, ...]:
        return self._writer(view).stage_for_one_commit(batches, None)

    def _writer(self, view: ShardView | None) -> WriteHandle:
        """A writer of rows by the schema of the view; None: of no rows."""

        def schema() -> tuple[int, ShardSchema]:
            return current_schema((view or self._view()).schemas)

        caller = Caller(purpose=self.purpose, info=self.info)
        return WriteHandle(self.transport, self.name, schema, self.write, caller=caller)

    def _settled(self, token: Token | None, attempt: Callable[[], _T], outcome: Callable[[c.Appended], _T]) -> _T:
        """The result of `attempt`, or the `outcome` of the commit of another try of the token."""
        if token is None:
            return attempt()
        if (landed := self._landed(token)) is not None:
            return outcome(landed)
        try:
            return attempt()
        except REFUSED:
            if (landed := self._landed(token)) is None:  # another try of the token may have landed meanwhile
                raise
            return outcome(landed)

    def _landed(self, token: Token) -> c.Appended | None:
        """The interval that it took, if it has landed already; also for a dropped shard."""
        return find_landed_rewrite(self._writer(None), token, **self._parts(None))

    def _counted(self, done: c.Appended) -> Count | None:
        """Count the rows of the commit that took this interval. None: they cannot be read any more."""
        count, time, request = Count(), done.lower.element or 0, DiffRequest(wait_s=0.0)
        try:
            with hold_interval(self.transport, self.name, time - 1, time, request, self.read) as interval:
                count.read(interval.splits(1, None)[0].read(self.transport))
            interval.held.lease.close()
        except PersistError:  # it has landed, whether or not its rows can be read
            return None
        return count

    def _timestamp(self) -> datetime | None:
        if self.to.timestamp is not None:
            return self.to.timestamp
        try:
            return instant_of(self.transport, self.name, self.time, self.read.retry_s)
        except PersistError:  # it has landed, whether or not its wall clock is known
            return None

    def _overtaken(self, error: UpperMismatch) -> UpperMismatch:
        """The error if the last try was refused."""
        return UpperMismatch(
            f"others wrote to shard {self.name!r} while it was {self.done} {self.to.time}; nothing was changed: look "
            f"at the shard, then {self.what.split()[0]} it again, or give retries",
            **error.details,
        )


def find_landed_rewrite(handle: WriteHandle, token: Token, **parts: Any) -> c.Appended | None:
    """The interval of the rewrite of this token, if it has landed; `parts` are those of `Rewrite`. Changes nothing.

    The command expects a time that precedes every upper, so it can never land. Raises what every write may.
    """
    return landed_or_none(lambda: handle.commit_rewrite((), MINIMUM, c.NEVER, token=token, **parts))


def is_recast(before: ShardView, now: ShardView) -> bool:
    """Whether the shard changed in a way that no change of rows shows, or the changes between were forgotten.

    That is a drop, or an erasure that is or was pending. A lease on a tag holds only one time.
    """
    is_other = (before.drops, before.erasing, before.retracting) != (now.drops, now.erasing, now.retracting)
    return is_other or not now.since.less_equal(latest_of(before))


def check_complete(
    name: str, as_of: int | None, view: ShardView, done: str = "restored", before: int | None = None
) -> int:
    """The upper of a shard in which the time can be `done`, such as "restored". Raises UpperMismatch, InvalidUsage.

    `before`: the caller gave this cut, whose last time before it is `as_of`.
    """
    if as_of is None:
        raise InvalidUsage("as_of is None; it must be a time, or a wall clock with its zone")
    upper = check_open(name, view, done)
    if not upper and as_of >= 0:
        raise InvalidUsage(f"nothing was written to shard {name!r} yet, so nothing can be {done}")
    if view.upper.less_equal(as_of):
        what = f"time {as_of}" if before is None else f"a time before {before}"
        raise InvalidUsage(f"{what} of shard {name!r} is not complete: its upper is {view.upper}; give an earlier one")
    return upper


def check_open(name: str, view: ShardView, done: str) -> int:
    """The upper of a shard in which something can be `done`. Raises UpperMismatch if no time is left."""
    if view.upper.element is None:
        raise UpperMismatch(f"shard {name!r} is closed: nothing can be {done} in it", expected=None, actual=[])
    if view.upper.element > TIME_MAX:
        raise UpperMismatch(
            f"shard {name!r} has no time left: its upper is {view.upper}", expected=None, actual=view.upper.to_json()
        )
    return view.upper.element


def read_facts(transport: Transport, name: str, retry_s: float, trial: c.ReadRetention | None = None) -> c.RetentionIs:
    """The retention policy of a shard and the facts that it depends on. Raises what every call may."""
    return send_for(c.RetentionIs, transport, name, trial or c.ReadRetention(), retry_s)
