"""Restore and truncation: rows computed from two times of a shard, committed at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, ClassVar, Final, Literal, Self

import pyarrow as pa
import pyarrow.compute as pc

from persist.client.contents_diff import READS_AT_ONCE, Between, Named, Point, runs_of, within
from persist.client.dml_plans import Contents, GainedKeys
from persist.client.idempotency import after_commit
from persist.client.optimistic_loop import (
    Count,
    Draft,
    Rewriting,
    Step,
    check_complete,
    latest_of,
    read_facts,
)
from persist.client.snapshot import Held, holding, kept, part_reader
from persist.client.timestamps import datetime_text, resolved, shown_instant
from persist.client.transport import OneShard
from persist.core import commands as c
from persist.core.attribute import AttributeUpdate
from persist.core.batch import Run
from persist.core.errors import (
    Conflict,
    InvalidUsage,
    UnknownShard,
    UpperMismatch,
)
from persist.core.frontier import EMPTY, TIME_MAX, Antichain, frontier
from persist.core.ids import Token, mint
from persist.core.shard_view import ShardView, ViewRequest
from persist.core.transitions.part_admission import DIFF_MAX
from persist.core.truncation import begins, check_droppable, check_not_erasing, clipped, contents, floor_at, runs_until
from persist.parts import DIFF, PartReader, current_schema, negated
from persist.parts.constraint_checks import check_rows

# Restore: one commit after which the contents of a shard are those of an earlier time.
#
# The commit takes back what was written since. That is read and staged key range after key range, and committed on the
# condition that the upper is still the one that was compared with.


@dataclass(frozen=True)
class Restored:
    """The result of a restore.

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
        return {
            "as_of": self.as_of,
            "timestamp": datetime_text(self.timestamp),
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
        with self._held(as_of) as held:
            schema, count = current_schema(held.view.schemas)[1], self._begin(held.view)
            for table in self._writable(as_of, self._rows(held, count, None)):
                check_rows(schema.conform(table, 0), schema)
            self._check_gained(held, count)

    def _tried(self, as_of: int, token: Token | None, retries: int) -> Restored:
        check_complete(self.name, as_of, self.transport.view(self.name, ViewRequest(with_batches=False)))
        with self._held(as_of) as held:
            attempt = self._rewrite(held, token, retries + 1)
            draft, done = attempt.draft, attempt.done
            if done is None:
                return self._unchanged(as_of, draft.held.view, token)
            if draft.is_extended or not attempt.is_fresh:  # other rows landed than those of one comparison
                return self._told(as_of, done)
            return self._said(as_of, done, draft.count)

    def _begin(self, view: ShardView) -> Count:
        schema = current_schema(view.schemas)[1]
        return Count(GainedKeys(schema) if schema.details.unique else None)

    def _rows(self, held: Held, count: Count, low: int | None) -> Iterator[pa.Table]:
        """What leads back from the latest time: to `low`, from which what is staged leads on, or all the way."""
        lead_to = held.as_of if low is None else low
        [split] = Between(held, latest_of(held.view), lead_to).splits(1, None)
        rows = split.read(self.transport)
        return rows if count.gained is None else count.gained.of(rows)

    def _drafted(self, held: Held, before: Draft | None) -> Draft:
        draft = super()._drafted(held, before)
        if draft.is_extended and not self._differs(held):
            draft = replace(draft, runs=())
        if draft.runs or self.attributes:
            self._check_gained(held, draft.count)  # a time of before the constraint may come back
        return draft

    def _check_gained(self, held: Held, count: Count) -> None:
        if count.gained is not None:
            schema = current_schema(held.view.schemas)[1]
            count.gained.check(Contents(schema, held, held.as_of), are_changed=True)

    def _is_cancelled(self, count: Count, added: int) -> bool:
        return False  # rows of both signs go back step by step

    @property
    def _commits_nothing(self) -> bool:
        return bool(self.attributes)

    def _differs(self, held: Held) -> bool:
        """Whether the contents at the two times differ. What was staged in several tries may cancel out."""
        [split] = Between(held, held.as_of, latest_of(held.view)).splits(1, None)
        return any(table.num_rows for table in split.read(self.transport))

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

    def _parts(self, view: ShardView | None) -> dict[str, Any]:
        return {"operation": c.RESTORE, "undoes": self.to.time, "attributes": self.attributes}

    def _too_often(self, as_of: int, most: int) -> str:
        return (
            f"a row of shard {self.name!r} was {most} times more or less there at time {self.to.time}, and one "
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
    """The result of a truncation.

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
        return {
            "before": self.before,
            "timestamp": datetime_text(self.timestamp),
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
            return replace(dropping, info=self.info, passes=self.passes).run(token, dry_run=dry_run, force=force)
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
        with self._held(before - 1, shared) as held:
            if dry_run:
                count, upper = Count(), held.view.upper
                for _ in count.of(self._writable(before - 1, self._rows(held, count, None))):
                    pass
                return self._said(c.Appended(upper, upper), count.removed)
            attempt = self._rewrite(held, token, retries + 1)
            done = attempt.done
            assert done is not None
            fresh = attempt.is_fresh and done.lower != done.upper
            return self._said(done, attempt.draft.count.removed) if fresh else self._told(done)

    def _rows(self, held: Held, count: Count, low: int | None) -> Iterator[pa.Table]:
        """What takes away the rows that go, in key order, with negative `__diff`."""
        going = _Going.of(self.transport, held)
        held.lease.check()
        for table in kept(going.tables(), held.lease):
            yield table.filter(pc.less(table.column(DIFF), 0))

    def _step(self, before: Held, now: Held) -> Step:
        return Step.REPLAN

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

    def _parts(self, view: ShardView | None) -> dict[str, Any]:
        return {"operation": c.TRUNCATE, "truncates": self.to.time, "passes": self.passes}


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
    def of(cls, transport: OneShard, held: Held) -> Self:
        view, start, end = held.view, held.as_of, latest_of(held.view)
        wrote = {one.at: one.wrote for one in view.truncations if start < one.at <= end}
        floor = max((drop.cut for drop in view.drops if wrote.get(drop.at) is False), default=0)
        taken_at = tuple(sorted(at for at in wrote if wrote[at]))
        memory_bytes = held.settings.memory_bytes // (1 + bool(taken_at))  # there are two more reads then
        _, reader = part_reader(transport, view, replace(held.settings, memory_bytes=max(1, memory_bytes)))
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
        own = token or mint(Token, self.transport.ids)
        done = self._forced(own) if force else self._drop(EMPTY, own)
        pending, went = False, None
        if done.lower == done.upper:
            with after_commit(f"the truncation of shard {self.name!r} before {before}"):
                pending, went = self._came_to(before, done.lower)
        return Truncated(before, self.to.timestamp, done.lower, done.upper, went, DROP, pending)

    def _forced(self, token: Token) -> c.Appended:
        """The drop at the very upper, wherever the writer of the shard has moved it by then."""
        for left in range(FORCED_TRIES_MAX, 0, -1):
            try:
                return self._drop(self._view().upper, token)
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

    def _drop(self, expected: Antichain, token: Token) -> c.Appended:
        return self._writer(None).commit_rewrite((), expected, token=token, **self._parts(None))

    def _parts(self, view: ShardView | None) -> dict[str, Any]:
        return {"operation": c.DROP_BEFORE, "tombstone": frontier(self.to.time), "passes": self.passes}


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
