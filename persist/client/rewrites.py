"""Restore and truncation: rows computed from two times of a shard, committed at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, ClassVar, Final, Literal, Self, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from persist.client.contents_diff import READS_AT_ONCE, Between, DiffRequest, Named, Point, between, runs_of, within
from persist.client.dml_plans import Contents, GainedKeys
from persist.client.idempotency import after_commit, send
from persist.client.snapshot import Held, ReadSettings, check_lease, holding, kept, part_reader
from persist.client.timestamps import instant_ms, instant_text, resolved, shown_instant
from persist.client.transport import OneShard
from persist.client.write import WriteHandle, WriteSettings
from persist.core import commands as c
from persist.core.attribute import AttributeUpdate
from persist.core.audit_log import Caller
from persist.core.batch import Run
from persist.core.errors import (
    Conflict,
    Expired,
    InvalidUsage,
    NotReadable,
    PersistError,
    UnknownShard,
    UpperMismatch,
)
from persist.core.frontier import EMPTY, MINIMUM, TIME_MAX, Antichain, frontier
from persist.core.ids import Token, mint
from persist.core.shard_view import ShardView, ViewRequest
from persist.core.transitions.part_admission import DIFF_MAX
from persist.core.truncation import begins, check_droppable, check_not_erasing, clipped, contents, floor_at, runs_until
from persist.parts import DIFF, PartReader, ShardSchema, current_schema, negated
from persist.parts.constraint_checks import check_rows

# What a restore and a truncation have in common: rows that are worked out from two times of a shard, and committed
#
# at the next time on the condition that the upper is still the one that was looked at.


RETRIES_MAX = 1_000
READ_BYTES = 64 * 1024 * 1024  # memory of the reads: it writes at the same time
BUFFER_BYTES = 32 * 1024 * 1024  # rows that it buffers for a part

# These tell that nothing was changed, and are not told where another try of the token has landed.
REFUSED = (Expired, NotReadable, UnknownShard, UpperMismatch)
_Told = TypeVar("_Told")


class Count:
    """How many rows are added and removed."""

    def __init__(self) -> None:
        self.added = self.removed = 0

    def of(self, tables: Iterator[pa.Table]) -> Iterator[pa.RecordBatch]:
        """The rows, which are counted as they pass."""
        for table in tables:
            diffs = table.column(DIFF)
            added = pc.sum(pc.max_element_wise(diffs, 0)).as_py() or 0
            self.added += added
            self.removed += added - (pc.sum(diffs).as_py() or 0)
            yield from table.to_batches()


@dataclass(frozen=True)
class Rewriting(ABC):
    """One of them. `to` is the time that it is about."""

    what: ClassVar[str]  # "restore to 7"
    done: ClassVar[str]  # "restored to 7"

    transport: OneShard
    name: str
    to: Named
    write: WriteSettings
    read: ReadSettings
    info: bytes = b""  # what the commit history is to tell of it

    @classmethod
    def of(
        cls, transport: OneShard, name: str, to: Named, write: WriteSettings, read: ReadSettings, **more: Any
    ) -> Self:
        """With settings by which it holds a bounded amount of memory, and with `more` fields."""
        buffered = replace(write, part_bytes_target=min(BUFFER_BYTES, write.part_bytes_target))
        bounded = replace(read, memory_bytes=min(READ_BYTES, read.memory_bytes))
        return cls(transport, name, to, buffered, bounded, **more)

    @property
    def purpose(self) -> str:
        """What lists of readers and the commit history tell of it."""
        return f"{self.what} {self.to.time}"

    @property
    @abstractmethod
    def _parts(self) -> dict[str, Any]:
        """The operation, and the parts of the command that make it what it is."""

    def _commit(
        self,
        handle: WriteHandle,
        runs: tuple[Run, ...],
        expected: Antichain,
        token: Token | None,
        as_of: int | None = None,
        **more: Any,
    ) -> c.Appended:
        """Commit the staged rows, which were worked out from the contents before the upper that is expected."""
        return handle.commit_rewrite(runs, expected, as_of, token=token, **self._parts, **more)

    def _writable(self, as_of: int, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        """The rows. Raises InvalidUsage where one commit cannot write a multiplicity."""
        for table in tables:
            found = pc.min_max(table.column(DIFF)).as_py()
            if len(table) and (most := max(-found["min"], found["max"])) > DIFF_MAX:
                raise InvalidUsage(self._too_often(as_of, most))
            yield table

    def _committed(self, runs: tuple[Run, ...], view: ShardView, token: Token | None, left: int) -> c.Appended | None:
        """The commit of the staged rows; None: somebody else wrote since the view, and tries are `left`.

        Raises UpperMismatch where none is, or no time.
        """
        handle = self._writer(view)
        try:
            done = self._commit(handle, runs, view.upper, token)
        except UpperMismatch as error:
            if error.details.get("expected") is None:  # no time is left
                raise
            if not left:
                raise self._overtaken(error) from error
            return None
        with suppress(PersistError):
            handle.close()
        return done

    @abstractmethod
    def _too_often(self, as_of: int, most: int) -> str:
        """Why a row that is there so often cannot be written by one commit."""

    def _writable_upper(self) -> Antichain:
        """Raises UpperMismatch where nothing can be written."""
        view = self.transport.view(self.name, ViewRequest(with_batches=False))
        check_open(self.name, view, self.done.split()[0])
        return view.upper

    def _staged(self, view: ShardView, batches: Iterator[pa.RecordBatch]) -> tuple[Run, ...]:
        return self._writer(view).stage_for_one_commit(batches, None)

    def _writer(self, view: ShardView | None) -> WriteHandle:
        """A writer of rows as the view has them; None: of no rows."""

        def schema() -> tuple[int, ShardSchema]:
            return current_schema((view or self.transport.view(self.name, ViewRequest(with_batches=False))).schemas)

        caller = Caller(purpose=self.purpose, info=self.info)
        return WriteHandle(self.transport, self.name, schema, self.write, caller=caller)

    def _settled(self, token: Token | None, tried: Callable[[], _Told], told: Callable[[c.Appended], _Told]) -> _Told:
        """What a try comes to, or what is told of the commit of another try of the token."""
        if token is None:
            return tried()
        if (landed := self._landed(token)) is not None:
            return told(landed)
        try:
            return tried()
        except REFUSED:
            if (landed := self._landed(token)) is None:  # another try of the token may have landed meanwhile
                raise
            return told(landed)

    def _landed(self, token: Token) -> c.Appended | None:
        """Where it has happened already, the interval that it took. A dropped shard tells it too.

        It asks for a time that precedes no upper: so this changes nothing.
        """
        try:
            return self._commit(self._writer(None), (), MINIMUM, token, c.NEVER)
        except UpperMismatch:
            return None

    def _counted(self, done: c.Appended) -> Count | None:
        """The rows of the commit that it was, where that was written. None: they cannot be read any more."""
        count, time = Count(), done.lower.element or 0
        try:
            with between(self.transport, self.name, time - 1, time, DiffRequest(wait_s=0.0), self.read) as found:
                for _ in count.of(found.splits(1, None)[0].read(self.transport)):
                    pass
            found.held.lease.close()
        except PersistError:  # it has happened, whatever cannot be told of it
            return None
        return count

    def _timestamp(self, as_of: int) -> datetime | None:
        if self.to.timestamp is not None:
            return self.to.timestamp
        try:
            found = send(self.transport, self.name, c.TimeShown(as_of), self.read.retry_s)
        except PersistError:  # it has happened, whatever cannot be told of it
            return None
        assert isinstance(found, c.ShownFrom)
        return None if found.at_ms is None else shown_instant(found.at_ms)

    def _overtaken(self, error: UpperMismatch) -> UpperMismatch:
        return UpperMismatch(
            f"somebody else wrote to shard {self.name!r} while it was {self.done} {self.to.time}; nothing was changed: "
            f"look at the shard, then {self.what.split()[0]} it again, or give retries",
            **error.details,
        )


def check_complete(name: str, as_of: int | None, view: ShardView, done: str = "restored") -> int:
    """The upper of a shard in which that can be `done` of a time. Raises UpperMismatch, InvalidUsage."""
    if as_of is None:
        raise InvalidUsage("as_of is None; it must be a time, or a wall clock with its zone")
    upper = check_open(name, view, done)
    if view.upper.less_equal(as_of):
        raise InvalidUsage(
            f"time {as_of} of shard {name!r} is not complete: its upper is {view.upper}; give an earlier one"
        )
    return upper


def check_open(name: str, view: ShardView, done: str) -> int:
    """The upper of a shard in which something can be `done`. Raises UpperMismatch where no time is left."""
    if view.upper.element is None:
        raise UpperMismatch(f"shard {name!r} is closed: nothing can be {done} in it", expected=None, actual=[])
    if view.upper.element > TIME_MAX:
        raise UpperMismatch(
            f"shard {name!r} has no time left: its upper is {view.upper}", expected=None, actual=view.upper.to_json()
        )
    return view.upper.element


def check_readable(name: str, view: ShardView) -> None:
    """Raise NotReadable where the contents as of the latest complete time were forgotten: nothing follows from them."""
    last = (view.upper.element or 0) - 1
    if last >= 0 and not view.since.less_equal(last):
        raise NotReadable(
            f"shard {name!r} has forgotten the contents as of {last}, its latest complete time: its since is "
            f"{view.since}; nothing was changed: it can be read again once somebody has written",
            as_of=last,
            since=view.since.to_json(),
        )


def read_facts(transport: OneShard, name: str, retry_s: float, tried: c.ReadRetention | None = None) -> c.RetentionIs:
    """The policy of a shard and what it goes by. Raises what every call may."""
    found = send(transport, name, tried or c.ReadRetention(), retry_s)
    assert isinstance(found, c.RetentionIs)
    return found


# Restore: one commit after which the contents of a shard are those of an earlier time.
#
# The commit takes back what was written since. That is read and staged key range after key range, and committed on the
# condition that the upper is still the one that was compared with.


@dataclass(frozen=True)
class Restored:
    """What a restore came to.

    `as_of` is the time whose contents the shard has again, and `timestamp` the first wall clock that shows it (None:
    not known). `lower` and `upper` are the interval that the restore took, as for an insert; they are equal where
    nothing differed, so that nothing was committed. `added` and `removed` are how many rows it wrote and took away;
    None where it happened, and what it wrote cannot be read any more: it was forgotten, or the shard was dropped.
    `attributes` are the keys of those that it changed. All others were kept: a restore takes no attribute back.
    """

    as_of: int
    timestamp: datetime | None
    lower: Antichain
    upper: Antichain
    added: int | None
    removed: int | None
    attributes: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether any row differed."""
        return self.lower != self.upper

    def to_json(self) -> dict[str, Any]:
        """The same for JSON; the wall clock in RFC 3339. Raises nothing."""
        at = self.timestamp
        return {
            "as_of": self.as_of,
            "timestamp": None if at is None else instant_text(instant_ms("timestamp", at)),
            "lower": self.lower.to_json(),
            "upper": self.upper.to_json(),
            "added": self.added,
            "removed": self.removed,
            "attributes": {"changed": list(self.attributes), "others": "kept"},
        }


@dataclass(frozen=True)
class Restoring(Rewriting):
    """One restore of a shard."""

    what: ClassVar[str] = "restore to"
    done: ClassVar[str] = "restored to"

    attributes: tuple[AttributeUpdate, ...] = ()

    def run(self, token: Token | None, retries: int) -> Restored:
        """Raises what `Shard.restore` says."""
        as_of = self.to.time
        assert as_of is not None
        return self._settled(token, lambda: self._tried(as_of, token, retries), lambda done: self._told(as_of, done))

    def check(self) -> None:
        """Raise what refuses the rows that a restore would write; nothing is written."""
        as_of = self.to.time
        assert as_of is not None
        asked = DiffRequest(wait_s=0.0, purpose=self.purpose)
        with between(self.transport, self.name, as_of, None, asked, self.read) as found:
            try:
                schema = current_schema(found.held.view.schemas)[1]
                gained = GainedKeys(schema) if schema.details.unique else None
                back = replace(found, start=found.end, end=as_of).splits(1, None)[0]
                rows = self._writable(as_of, back.read(self.transport))
                for table in rows if gained is None else gained.of(rows):
                    check_rows(schema.conform(table, 0), schema)
                if gained is not None:
                    gained.check(Contents(schema, replace(found.held, as_of=as_of), as_of), are_changed=True)
            finally:
                found.held.lease.close()

    def _tried(self, as_of: int, token: Token | None, retries: int) -> Restored:
        check_complete(self.name, as_of, self.transport.view(self.name, ViewRequest(with_batches=False)))
        asked = DiffRequest(wait_s=0.0, purpose=self.purpose)
        with between(self.transport, self.name, as_of, None, asked, self.read) as found:
            try:
                return self._restored(found, token, retries)
            finally:
                found.held.lease.close()

    def _restored(self, found: Between, token: Token | None, retries: int) -> Restored:
        as_of, view, count = found.start, found.held.view, Count()
        schema = current_schema(view.schemas)[1]
        gained = GainedKeys(schema) if schema.details.unique else None
        runs: tuple[Run, ...] = ()
        lead_to = as_of  # what is staged leads there, from the latest time that was looked at
        for left in range(retries, -1, -1):
            latest = found.end
            back = replace(found, start=latest, end=lead_to).splits(1, None)[0]
            rows = self._writable(as_of, back.read(self.transport))
            runs = (*runs, *self._staged(view, count.of(rows if gained is None else gained.of(rows))))
            first_try = lead_to == as_of
            if not runs or not (first_try or self._differs(found)):
                if not self.attributes:
                    return self._unchanged(as_of, view, token)
                runs = ()
            if gained is not None:  # a time of before the constraint may come back
                gained.check(Contents(schema, replace(found.held, as_of=as_of), as_of), are_changed=True)
            done = self._committed(runs, view, token, left)
            if done is not None:
                if not first_try or done.lower != view.upper:  # other rows landed than those of one comparison
                    return self._told(as_of, done)
                return self._said(as_of, done, count)
            lead_to, view = latest, self.transport.view(self.name, ViewRequest())
            check_complete(self.name, as_of, view)
            check_lease(view, as_of, found.held.lease)
            if not view.since.less_equal(lead_to):  # a lease on a tag holds that time alone: begin anew
                runs, lead_to, count = (), as_of, Count()
            found = replace(found, held=replace(found.held, view=view), end=(view.upper.element or 0) - 1)
        raise AssertionError("the last try returns or raises")

    def _differs(self, found: Between) -> bool:
        """Whether the contents at the two times differ. What was staged in several tries may cancel out."""
        return any(table.num_rows for table in found.splits(1, None)[0].read(self.transport))

    def _unchanged(self, as_of: int, view: ShardView, token: Token | None) -> Restored:
        """What is told where nothing differs: maybe since another try of the token has landed meanwhile."""
        if token is not None and (landed := self._landed(token)) is not None:
            return self._told(as_of, landed)
        return self._said(as_of, c.Appended(view.upper, view.upper), Count())

    def _told(self, as_of: int, done: c.Appended) -> Restored:
        """What is told of a restore that has happened. Its rows are counted where they were written."""
        return self._said(as_of, done, Count() if done.lower == done.upper else self._counted(done))

    def _said(self, as_of: int, done: c.Appended, count: Count | None) -> Restored:
        added, removed = (None, None) if count is None else (count.added, count.removed)
        keys = tuple(dict.fromkeys(update.key for update in self.attributes))
        return Restored(as_of, self._timestamp(as_of), done.lower, done.upper, added, removed, keys)

    @property
    def _parts(self) -> dict[str, Any]:
        return {"operation": c.RESTORE, "undoes": self.to.time, "attributes": self.attributes}

    def _too_often(self, as_of: int, most: int) -> str:
        return (
            f"a row of shard {self.name!r} was {most} times more or less there at time {as_of}, and one "
            f"commit can write at most {DIFF_MAX} of it; restore in steps, to times between, or insert the "
            "difference in several inserts"
        )


# Truncation: one commit that takes away the rows that were there before a time and still are.
#
# By retractions, or by a drop: then no row is read or written, and the State remembers which rows count.
#
# As often as a row was there before the cut and is there still, it is taken away: the smaller of the two
# multiplicities. So none turns negative. What truncations have taken away since the cut was there before it, and does
# not count as there. That is worked out in key order, without holding more than a part of it: what was there before the
# cut, less what truncations took since, less what else was removed since, and of that what is more than nothing.


RETRACT: Final = "retract"
DROP: Final = "drop"
FORCED_TRIES_MAX = 100  # each failed one means that the writer has appended meanwhile


@dataclass(frozen=True)
class Truncated:
    """What a truncation came to.

    `before` is the cut: rows that were there at the time before it were taken away, if they still were there;
    `timestamp` is the wall clock that named it (None: a time did). `lower` and `upper` are the interval that the
    truncation took, as for an insert; they are equal where nothing was committed. `removed` is how many rows it took
    away, or would take away where that was only asked; None where it happened, and what it wrote cannot be read any
    more, and where a drop did it, which counts nothing. `mode` is "retract" or "drop". `pending`: the shard is fed by
    `append`, and the rows go with the next commit of its writer, at the time `lower`.
    """

    before: int
    timestamp: datetime | None
    lower: Antichain
    upper: Antichain
    removed: int | None
    mode: str = RETRACT
    pending: bool = False

    @property
    def changed(self) -> bool:
        """Whether anything was taken away."""
        return self.lower != self.upper

    def to_json(self) -> dict[str, Any]:
        """The same for JSON; the wall clock in RFC 3339. Raises nothing."""
        at = self.timestamp
        return {
            "before": self.before,
            "timestamp": None if at is None else instant_text(instant_ms("timestamp", at)),
            "lower": self.lower.to_json(),
            "upper": self.upper.to_json(),
            "removed": self.removed,
            "mode": self.mode,
            "pending": self.pending,
        }


@dataclass(frozen=True)
class Truncating(Rewriting):
    """One truncation of a shard. `to` is the cut."""

    what: ClassVar[str] = "truncate before"
    done: ClassVar[str] = "truncated before"

    def run(self, token: Token | None, retries: int, *, dry_run: bool, force: bool = False) -> Truncated:
        """Raises what `Shard.truncate` says. `force` as for a drop."""
        before = self.to.time
        assert before is not None
        if not before:  # nothing was there before the first time
            upper = self._writable_upper()
            return self._said(c.Appended(upper, upper), 0)
        # A dry run asks whether the shard was truncated that far, and not what the token came to.
        if self._is_fed():  # the times are its writer's, so it has to be a drop
            dropping = Dropping.of(self.transport, self.name, self.to, self.write, self.read)
            return replace(dropping, info=self.info).run(token, dry_run=dry_run, force=force)
        asking = mint(Token, self.transport.ids) if token is None or dry_run else token
        return self._settled(asking, lambda: self._tried(before, token, retries, dry_run), self._told)

    def _is_fed(self) -> bool:
        """Whether the shard is fed by `append`. One that was dropped only answers tokens."""
        with suppress(UnknownShard):
            return read_facts(self.transport, self.name, self.read.retry_s).facts.done.appended
        return False

    def _tried(self, before: int, token: Token | None, retries: int, dry_run: bool) -> Truncated:
        check_complete(
            self.name, before - 1, self.transport.view(self.name, ViewRequest(with_batches=False)), "truncated"
        )
        shared = replace(self.read, memory_bytes=max(1, self.read.memory_bytes // READS_AT_ONCE))
        asked = DiffRequest(wait_s=0.0, purpose=self.purpose)
        with between(self.transport, self.name, before - 1, None, asked, shared) as found:
            try:
                if dry_run:
                    count, upper = Count(), found.held.view.upper
                    for _ in count.of(self._writable(found.start, self._going(found))):
                        pass
                    return self._said(c.Appended(upper, upper), count.removed)
                return self._truncated(found, token, retries)
            finally:
                found.held.lease.close()

    def _truncated(self, found: Between, token: Token | None, retries: int) -> Truncated:
        as_of = found.start
        for left in range(retries, -1, -1):
            count, view = Count(), found.held.view
            runs = self._staged(view, count.of(self._writable(as_of, self._going(found))))
            # What finds nothing is remembered too; its token stands alone, so that no writer is registered for it.
            known = mint(Token, self.transport.ids) if token is None and not runs else token
            done = self._committed(runs, view, known, left)
            if done is not None:
                fresh = done.lower == view.upper and done.lower != done.upper
                return self._said(done, count.removed) if fresh else self._told(done)
            view = self.transport.view(self.name, ViewRequest())
            check_complete(self.name, as_of, view, "truncated")
            check_lease(view, as_of, found.held.lease)
            found = replace(found, held=replace(found.held, view=view), end=(view.upper.element or 0) - 1)
        raise AssertionError("the last try returns or raises")

    def _going(self, found: Between) -> Iterator[pa.Table]:
        """What takes away the rows that go, in key order, with negative `__diff`."""
        going = _Going.of(self.transport, found)
        found.held.lease.check()
        for table in kept(going.tables(), found.held.lease):
            yield table.filter(pc.less(table.column(DIFF), 0))

    def _told(self, done: c.Appended) -> Truncated:
        """What is told of one that has happened, with rows counted where they were written, or that had nothing to do.

        An empty interval: the shard was truncated that far already.
        """
        if done.lower == done.upper:
            return self._said(done, 0)
        count = self._counted(done)
        return self._said(done, None if count is None else count.removed)

    def _said(self, done: c.Appended, removed: int | None) -> Truncated:
        assert self.to.time is not None
        return Truncated(self.to.time, self.to.timestamp, done.lower, done.upper, removed)

    @property
    def _parts(self) -> dict[str, Any]:
        return {"operation": c.TRUNCATE, "truncates": self.to.time}

    def _too_often(self, as_of: int, most: int) -> str:
        return (
            f"a row of shard {self.name!r} was there {most} times at time {as_of}, and one commit can take away at "
            f"most {DIFF_MAX} of it; take some away by inserts with a negative __diff first"
        )


@dataclass(frozen=True)
class _Going:
    """What a truncation takes away: the smaller of what was there before the cut, and of what is there at `end`.

    `start` is the time before the cut. What truncations took away since then does not count as there: at the times
    `taken_at` by retractions, and before `floor` by drops. Those that a restore has undone took nothing away.
    """

    reader: PartReader
    view: ShardView
    start: int
    end: int
    taken_at: tuple[int, ...]
    floor: int

    @classmethod
    def of(cls, transport: OneShard, found: Between) -> Self:
        view, start, end = found.held.view, found.start, found.end
        wrote = {one.at: one.wrote for one in view.truncations if start < one.at <= end}
        floor = max((drop.cut for drop in view.drops if wrote.get(drop.at) is False), default=0)
        taken_at = tuple(sorted(at for at in wrote if wrote[at]))
        memory_bytes = found.held.settings.memory_bytes // (1 + bool(taken_at))  # there are two more reads then
        _, reader = part_reader(transport, view, replace(found.held.settings, memory_bytes=max(1, memory_bytes)))
        return cls(reader, view, start, end, taken_at, max(floor, floor_at(view.drops, start)))

    def tables(self) -> Iterator[pa.Table]:
        """Rows with a negative `__diff`, by as much as they go. Others, with a positive one, may come with them."""
        if self.floor != floor_at(self.view.drops, self.end):  # a drop was undone: the changes do not show that
            now = self.reader.read_range(contents(runs_of(self.view), self.view.drops, self.end), as_of=self.end)
            changed = self.reader.difference(self._before(), now)
        elif self.taken_at:
            _, changed = self.reader.read_changes_at(self._since(), self.start, self.end, self.taken_at)
        else:
            changed = self.reader.read_changes(self._since(), self.start, self.end)
        removed = (negated(table.filter(pc.less(table.column(DIFF), 0))) for table in changed)
        return self.reader.difference(self._before(), removed)

    def _before(self) -> Iterator[pa.Table]:
        """What was there before the cut, without what truncations took away since."""
        runs = runs_until(clipped(runs_of(self.view), self.floor), self.start + 1)
        there = self.reader.read_range(runs, as_of=self.start)
        if not self.taken_at:
            return there
        taken, _ = self.reader.read_changes_at(self._since(), self.start, self.end, self.taken_at)
        return self.reader.difference(map(negated, taken), there)

    def _since(self) -> tuple[Run, ...]:
        return within(clipped(runs_of(self.view), self.floor), self.start, self.end)


@dataclass(frozen=True)
class Dropping(Rewriting):
    """One truncation of a shard by a drop. `to` is the cut."""

    what: ClassVar[str] = "drop before"
    done: ClassVar[str] = "dropped before"

    def run(self, token: Token | None, *, dry_run: bool, force: bool = False) -> Truncated:
        """Raises what `Shard.truncate` says. `force`: at once, also in a shard that is fed by `append`."""
        before = self.to.time
        assert before is not None
        if dry_run or not before:
            upper, removed = self._counting(before) if before else (self._writable_upper(), 0)
            return Truncated(before, self.to.timestamp, upper, upper, removed, DROP)
        handle = self._writer(None)
        alone = mint(Token, self.transport.ids) if token is None else token  # so that no writer is registered
        done = self._forced(handle, alone) if force else self._commit(handle, (), EMPTY, alone)
        with suppress(PersistError):
            handle.close()
        pending, went = False, None
        if done.lower == done.upper:
            with after_commit(f"the truncation of shard {self.name!r} before {before}"):
                pending, went = self._came_to(before, done.lower)
        return Truncated(before, self.to.timestamp, done.lower, done.upper, went, DROP, pending)

    def _forced(self, handle: WriteHandle, token: Token) -> c.Appended:
        """The drop at the very upper, wherever the writer of the shard has moved it by then."""
        for left in range(FORCED_TRIES_MAX, 0, -1):
            try:
                return self._commit(handle, (), self._view().upper, token)
            except UpperMismatch as error:
                if left == 1 or not error.details.get("actual"):
                    raise
        raise AssertionError("the last try returns or raises")

    def _came_to(self, before: int, asked: Antichain) -> tuple[bool, int | None]:
        """Whether a drop that took no time still waits, and how many rows it took away, if that is known.

        Where a token is repeated it was asked for at the upper `asked`. Raises Conflict: it was withdrawn since.
        """
        try:
            facts = read_facts(self.transport, self.name, self.read.retry_s).facts
            if facts.pending >= before:
                return True, None
            went = 0 if facts.upper == asked else None
            if facts.truncated.before >= before:
                return False, went
            view = self.transport.view(self.name, ViewRequest())
        except UnknownShard:  # it was dropped since
            return False, None
        took = any(drop.at == asked.element and drop.cut >= before for drop in view.drops)  # and was undone
        there = contents(runs_of(view), view.drops, view.upper.element or TIME_MAX)
        if took or not any(begins(part) < before for run in there for part in run.parts):
            return False, went
        raise Conflict(
            f"the truncation of shard {self.name!r} before {before} was withdrawn: at time {asked}, where it was "
            "pending, rows are retracted perhaps from before the cut. Nothing was truncated; ask again with another "
            "token, for a cut after that time",
            before=before,
            at=asked.to_json(),
        )

    def _counting(self, before: int) -> tuple[Antichain, int]:
        """How many rows would go, and the upper where that was found. Raises InvalidUsage where a drop is refused."""
        check_complete(self.name, before - 1, self._view(), "truncated")
        if before <= read_facts(self.transport, self.name, self.read.retry_s).facts.truncated.before:
            return self._view().upper, 0
        with holding(self.transport, self.name, before - 1, self.purpose, 0.0, self.read) as held:
            return self.counted(held, before)

    def counted(self, held: Held, before: int) -> tuple[Antichain, int]:
        """As `_counting`, where the rows are held already. Gives the hold back."""
        try:
            view, count = held.view, Count()
            check_not_erasing(self.name, view.upper, view.retracting)
            check_droppable(self.name, view.batches, view.drops, before)
            _, reader = part_reader(self.transport, view, self.read)
            going = runs_until(contents(runs_of(view), view.drops, view.upper.element or 0), before)
            for _ in count.of(kept(map(negated, reader.read_range(going, as_of=before - 1)), held.lease)):
                pass
            return view.upper, count.removed
        finally:
            held.lease.close()

    def _view(self) -> ShardView:
        return self.transport.view(self.name, ViewRequest(with_batches=False))

    @property
    def _parts(self) -> dict[str, Any]:
        return {"operation": c.DROP_BEFORE, "tombstone": frontier(self.to.time)}

    def _too_often(self, as_of: int, most: int) -> str:
        raise AssertionError("a drop writes no rows")


def mode_of(mode: object) -> Literal["retract", "drop"]:
    """The mode as it is. Raises InvalidUsage where there is no such mode."""
    if mode == RETRACT:
        return RETRACT
    if mode == DROP:
        return DROP
    raise InvalidUsage(f"mode is {mode!r:.100}; it must be {RETRACT!r} or {DROP!r}")


def cut_of(transport: OneShard, name: str, before: Point, retry_s: float) -> Named:
    """The cut that a caller named; by a wall clock it is the upper that the shard had by then. Raises as `resolved`."""
    if not isinstance(before, datetime):
        return Named.of("before", before, transport, name, (0.0, retry_s))
    found = resolved(transport, name, before, 0.0, retry_s)
    upper = found.upper.element
    return Named(TIME_MAX if upper is None else upper, shown_instant(found.at_ms))
