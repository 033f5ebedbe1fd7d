"""Restore and truncation: rows computed from two times of a shard, committed at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, ClassVar, Literal, Self

import pyarrow as pa
import pyarrow.compute as pc

from persist.client.contents_diff import READS_AT_ONCE, HeldInterval, NamedTime, Point, runs_in_interval, runs_of
from persist.client.dml_plans import Contents, Count, GainedKeys
from persist.client.idempotency import after_commit, landed_or_none
from persist.client.optimistic_loop import CommitResult, Draft, RewriteOperation, Step, check_complete, read_facts
from persist.client.snapshot import Held, hold_time, part_reader, with_renewal
from persist.client.timestamps import latest_of, resolve_time, to_datetime
from persist.client.transport import OneShard
from persist.core import commands as c
from persist.core import truncations_and_drops
from persist.core.attribute import AttributeUpdate
from persist.core.batch import Run
from persist.core.errors import InvalidUsage, NotReadable, TokenReused, UnknownShard, UpperMismatch, shown
from persist.core.frontier import EMPTY, MINIMUM, TIME_MAX, Antichain, frontier
from persist.core.ids import Token, mint
from persist.core.shard_settings import DROP as DROP
from persist.core.shard_settings import RETRACT as RETRACT
from persist.core.shard_view import ShardView
from persist.core.transitions.part_admission import DIFF_MAX
from persist.core.truncations_and_drops import clipped, contents, floor_at, runs_until
from persist.parts import DIFF, PartReader, current_schema, negated
from persist.parts.constraint_checks import check_rows

# Restore: one commit after which the contents of a shard are those of an earlier time.
#
# The commit takes back what was written since. The difference is read and staged one key range after the other, and
# committed on the condition that the upper has not moved.


@dataclass(frozen=True)
class Restored(CommitResult):
    """The result of a restore.

    `as_of` is the time whose contents the shard has again, and `timestamp` the first wall clock that shows it (None:
    not known). `lower` and `upper` are the interval that the restore took, as for an insert; they are equal if nothing
    differed, so that nothing was committed. `added` and `removed` are how many rows it wrote and retracted; None if it
    has landed and its rows cannot be read any more: they were forgotten, or the shard was dropped. `attributes` are
    the keys of those that it changed. A restore reverts no other attribute.
    """

    as_of: int
    timestamp: datetime | None
    lower: Antichain
    upper: Antichain
    added: int | None
    removed: int | None
    attributes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The same for JSON; the wall clock in RFC 3339. Raises nothing."""
        return {**super().to_json(), "attributes": {"changed": list(self.attributes), "others": "kept"}}


@dataclass(frozen=True)
class RestoreOperation(RewriteOperation):
    """One restore of a shard."""

    what: ClassVar[str] = "restore to"
    done: ClassVar[str] = "restored to"

    attributes: tuple[AttributeUpdate, ...] = ()

    def run(self, token: Token | None, retries: int) -> Restored:
        """Raises what `Shard.restore` says."""
        return self._settled(token, lambda: self._attempt(token, retries), self._landed_outcome)

    def check(self) -> None:
        """Raise if the rows that a restore would write are refused; nothing is written."""
        with self._held(self.time) as held:
            schema, count = current_schema(held.view.schemas)[1], self._begin(held.view)
            for table in self._writable(self.time, self._rows(held, count, None)):
                check_rows(schema.conform(table, 0), schema)
            self._check_gained(held, count)

    def _attempt(self, token: Token | None, retries: int) -> Restored:
        check_complete(self.name, self.time, self._view())
        with self._held(self.time) as held:
            attempt = self._rewrite(held, token, retries + 1)
            draft, done = attempt.draft, attempt.done
            if done is None:
                upper = draft.held.view.upper
                return self._result(c.Appended(upper, upper), Count())
            if draft.is_extended or not attempt.is_fresh:  # other rows landed than those of one comparison
                return self._landed_outcome(done)
            return self._result(done, draft.count)

    def _begin(self, view: ShardView) -> Count:
        schema = current_schema(view.schemas)[1]
        return Count(GainedKeys(schema) if schema.details.unique else None)

    def _rows(self, held: Held, count: Count, low: int | None) -> Iterator[pa.Table]:
        """What leads back from the latest time: to `low`, from which the staged rows lead on, or all the way."""
        lead_to = held.as_of if low is None else low
        [split] = HeldInterval(held, latest_of(held.view), lead_to).splits(1, None)
        rows = split.read(self.transport)
        return rows if count.gained is None else count.gained.of(rows)

    def _drafted(self, held: Held, before: Draft | None) -> Draft:
        draft = super()._drafted(held, before)
        if draft.is_extended:  # rows staged in several tries may cancel out
            [split] = HeldInterval(held, held.as_of, latest_of(held.view)).splits(1, None)
            if not any(table.num_rows for table in split.read(self.transport)):
                draft = replace(draft, runs=())
        if draft.runs or self.attributes:
            self._check_gained(held, draft.count)  # the time may precede the constraint
        return draft

    def _check_gained(self, held: Held, count: Count) -> None:
        if count.gained is not None:
            schema = current_schema(held.view.schemas)[1]
            count.gained.check(Contents(schema, held, held.as_of), are_changed=True)

    def _is_cancelled(self, count: Count, added: int) -> bool:
        return False  # extensions may revert staged rows

    @property
    def _commits_nothing(self) -> bool:
        return bool(self.attributes)

    def _landed_outcome(self, done: c.Appended) -> Restored:
        """The result of another try that has landed; its rows are read to count them."""
        return self._result(done, Count() if done.lower == done.upper else self._counted(done))

    def _result(self, done: c.Appended, count: Count | None) -> Restored:
        added, removed = (None, None) if count is None else (count.added, count.removed)
        keys = tuple(dict.fromkeys(update.key for update in self.attributes))
        return Restored(self.time, self._timestamp(), done.lower, done.upper, added, removed, keys)

    def _parts(self, view: ShardView | None) -> dict[str, Any]:
        return {"operation": c.RESTORE, "undoes": self.to.time, "attributes": self.attributes}

    def _too_often(self, as_of: int, most: int) -> str:
        return (
            f"a row of shard {self.name!r} was {most} times more or less there at time {self.to.time}, and one "
            f"commit can write at most {DIFF_MAX} of it; restore in steps, to times between, or insert the "
            "difference in several inserts"
        )


# Truncation: one commit that removes the rows that were there before a time and still are.
#
# By retractions, or by a drop: a drop reads and writes no row; the State remembers which rows count.
#
# Each row is removed min(multiplicity before the cut, multiplicity now) times, so none becomes negative. Rows that
# truncations have removed since the cut do not count as there before it. This is computed in key order, holding only
# a part of the contents: the rows before the cut, minus what truncations removed since, minus what else was removed
# since, as far as that is positive.

FORCED_TRIES_MAX = 100  # each failed one means that the writer has appended meanwhile


@dataclass(frozen=True)
class Truncated(CommitResult):
    """The result of a truncation.

    `before` is the cut: rows that were there at the time before it were removed, if they still were there; `timestamp`
    is the wall clock that named it (None: a time did). `lower` and `upper` are the interval that the truncation took,
    as for an insert; they are equal if nothing was committed. `removed` is how many rows it removed, or would remove
    in a dry run; None for a drop, which counts nothing, and if it has landed and its rows cannot be read any more.
    `mode` is "retract" or "drop". `pending`: the shard is fed by `append`, and the rows go with the next commit of its
    writer, at the time `lower`.
    """

    before: int
    timestamp: datetime | None
    lower: Antichain
    upper: Antichain
    removed: int | None
    mode: str = RETRACT
    pending: bool = False


@dataclass(frozen=True)
class TruncateOperation(RewriteOperation):
    """One truncation of a shard. `to` is the cut."""

    what: ClassVar[str] = "truncate before"
    done: ClassVar[str] = "truncated before"

    def run(
        self, token: Token | None, retries: int, *, dry_run: bool, force: bool = False, derived: Token | None = None
    ) -> Truncated:
        """Raises what `Shard.truncate` says. `force` as for a drop.

        `derived` is the token of a drop that may wait, without a caller's token: a repetition learns from it whether
        the drop was withdrawn.
        """

        def attempt() -> Truncated:
            facts = read_facts(self.transport, self.name, self.read.retry_s).facts
            if facts.done.appended:  # only its writer chooses times, so the truncation has to be a drop
                drop, is_new = self.as_drop(), facts.pending > 0 or facts.truncated.before < self.time
                if token is None and derived is not None and is_new and not dry_run:
                    done = drop.run(derived, dry_run=False, force=force)
                    if done.pending or done.changed:
                        return done  # otherwise perhaps a restore has undone it since
                return drop.run(token, dry_run=dry_run, force=force)
            return self._attempt(token, retries, dry_run=dry_run, repeats=self.time <= facts.truncated.before)

        try:  # a dry run asks what it would remove now, and not for the outcome of the token
            return self._settled(None if dry_run else token, attempt, self._landed_outcome)
        except TokenReused:  # perhaps it has landed as a drop, when the shard was fed by `append`
            return self.as_drop().run(token, dry_run=False, force=force)

    def as_drop(self) -> DropOperation:
        """The same truncation by a drop."""
        return DropOperation(self.transport, self.name, self.to, self.write, self.read, self.info, self.passes)

    def _attempt(self, token: Token | None, retries: int, *, dry_run: bool, repeats: bool) -> Truncated:
        """`repeats`: the shard was truncated that far, so the time before the cut may be forgotten."""
        before, view = self.time, self._view()
        check_complete(self.name, before - 1, view, "truncated", before)
        if repeats and (dry_run or (token is None and self.passes is None)):
            return self._result(c.Appended(view.upper, view.upper), 0)
        if repeats and (landed := self._repeated(token)) is not None:
            return self._landed_outcome(landed)
        with _naming(before, self.name), self._held(before - 1, self.read.shared_by(READS_AT_ONCE)) as held:
            if dry_run:
                count, upper = Count(), held.view.upper
                count.read(self._writable(before - 1, self._rows(held, count, None)))
                return self._result(c.Appended(upper, upper), count.removed)
            attempt = self._rewrite(held, token, retries + 1)
            done = attempt.done
            assert done is not None
            if attempt.is_fresh and done.lower != done.upper:
                return self._result(done, attempt.draft.count.removed)
            return self._landed_outcome(done)

    def _repeated(self, token: Token | None) -> c.Appended | None:
        """Commit that nothing is left to remove. None: a restore has undone the earlier truncation meanwhile.

        The command expects a time that precedes every upper, so it lands only if the shard was truncated that far.
        """
        own = token or mint(Token, self.transport.ids)
        return landed_or_none(lambda: self._writer(None).commit_rewrite((), MINIMUM, token=own, **self._parts(None)))

    def _rows(self, held: Held, count: Count, low: int | None) -> Iterator[pa.Table]:
        """The retractions of the rows to remove, in key order."""
        removed = _RemovedRows.of(self.transport, held)
        held.lease.check()
        for table in with_renewal(removed.tables(), held.lease):
            yield table.filter(pc.less(table.column(DIFF), 0))

    def _step(self, before: Held, now: Held) -> Step:
        return Step.REPLAN

    def _landed_outcome(self, done: c.Appended) -> Truncated:
        """The result of another try that has landed; an empty interval: the shard was already truncated that far."""
        if done.lower == done.upper:
            return self._result(done, 0)
        count = self._counted(done)
        return self._result(done, None if count is None else count.removed)

    def _result(self, done: c.Appended, removed: int | None) -> Truncated:
        return Truncated(self.time, self.to.timestamp, done.lower, done.upper, removed)

    def _parts(self, view: ShardView | None) -> dict[str, Any]:
        return {"operation": c.TRUNCATE, "truncates": self.to.time, "passes": self.passes}


@dataclass(frozen=True)
class _RemovedRows:
    """The rows that a truncation removes: each min(multiplicity before the cut, multiplicity at `end`) times.

    `start` is the time before the cut. Rows that truncations removed since then do not count: by retractions at the
    times `taken_at`, and by drops before `floor`. Truncations that a restore has undone removed nothing.
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
        wrote = {mark.at: mark.wrote for mark in view.truncations if start < mark.at <= end}
        floor = max((drop.cut for drop in view.drops if wrote.get(drop.at) is False), default=0)
        taken_at = tuple(sorted(at for at in wrote if wrote[at]))
        settings = held.settings.shared_by(1 + bool(taken_at))  # there are two more reads then
        _, reader = part_reader(transport, view, settings)
        return cls(reader, view, start, end, taken_at, max(floor, floor_at(view.drops, start)))

    def tables(self) -> Iterator[pa.Table]:
        """The rows to remove, with negative `__diff`. Others, with positive `__diff`, may come with them."""
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
        """The rows before the cut, without what truncations removed since."""
        runs = runs_until(clipped(runs_of(self.view), self.floor), self.start + 1)
        rows = self.reader.read_range(runs, as_of=self.start)
        if not self.taken_at:
            return rows
        taken, _ = self.reader.read_changes_at(self._since(), self.start, self.end, self.taken_at)
        return self.reader.difference(map(negated, taken), rows)

    def _since(self) -> tuple[Run, ...]:
        return runs_in_interval(clipped(runs_of(self.view), self.floor), self.start, self.end)


@dataclass(frozen=True)
class DropOperation(RewriteOperation):
    """One truncation of a shard by a drop. `to` is the cut."""

    what: ClassVar[str] = "drop before"
    done: ClassVar[str] = "dropped before"

    def run(self, token: Token | None, *, dry_run: bool, force: bool = False) -> Truncated:
        """Raises what `Shard.truncate` says. `force`: take the next time at once, even if fed by `append`."""
        before = self.time
        if dry_run:
            upper, count = self._dry_run()
            return Truncated(before, self.to.timestamp, upper, upper, count, DROP)
        own = token or mint(Token, self.transport.ids)
        done = self._settled(token, lambda: self._forced(own), lambda done: done) if force else self._drop(EMPTY, own)
        pending, removed = False, (None if before else 0)
        if before and done.lower == done.upper:
            with after_commit(f"the truncation of shard {self.name!r} before {before}"):
                pending, removed = self._fate(done.lower, own)
        return Truncated(before, self.to.timestamp, done.lower, done.upper, removed, DROP, pending)

    def _forced(self, token: Token) -> c.Appended:
        """The drop at the current upper, which the writer of the shard may move meanwhile."""
        for left in range(FORCED_TRIES_MAX, 0, -1):
            try:
                return self._drop(self._view().upper, token)
            except UpperMismatch as error:
                if left == 1 or not error.details.get("actual"):
                    raise
        raise AssertionError("the last try returns or raises")

    def _fate(self, requested: Antichain, token: Token) -> tuple[bool, int | None]:
        """Whether a drop that took no time is still pending, and how many rows it removed, if that is known.

        For a repeated token, `requested` is the upper at the first call. Raises Conflict: it was withdrawn since.
        """
        try:
            facts = read_facts(self.transport, self.name, self.read.retry_s).facts
        except UnknownShard:  # it was dropped since
            return False, None
        if facts.pending >= self.time:
            return True, None
        if facts.truncated.before < self.time:  # perhaps it was withdrawn after the answer
            self._drop(EMPTY, token)
        return False, 0 if facts.upper == requested else None

    def _dry_run(self) -> tuple[Antichain, int]:
        """The upper, and how many rows would be removed. Raises InvalidUsage if a drop is refused."""
        before = self.time
        check_complete(self.name, before - 1, self._view(), "truncated", before)
        if before <= read_facts(self.transport, self.name, self.read.retry_s).facts.truncated.before:
            return self._view().upper, 0
        with (
            _naming(before, self.name),
            hold_time(self.transport, self.name, before - 1, self.purpose, 0.0, self.read) as held,
        ):
            return self.counted(held)

    def counted(self, held: Held) -> tuple[Antichain, int]:
        """As `_dry_run` for a time that is held, whose lease it closes."""
        try:
            view, count = held.view, Count()
            truncations_and_drops.check_not_erasing(self.name, view.upper, view.retracting)
            truncations_and_drops.check_droppable(self.name, view.batches, view.drops, self.time)
            _, reader = part_reader(self.transport, view, self.read)
            runs = runs_until(contents(runs_of(view), view.drops, view.upper.element or 0), self.time)
            count.read(with_renewal(map(negated, reader.read_range(runs, as_of=self.time - 1)), held.lease))
            return view.upper, count.removed
        finally:
            held.lease.close()

    def _drop(self, expected: Antichain, token: Token) -> c.Appended:
        return self._writer(None).commit_rewrite((), expected, token=token, **self._parts(None))

    def _parts(self, view: ShardView | None) -> dict[str, Any]:
        return {"operation": c.DROP_BEFORE, "tombstone": frontier(self.to.time), "passes": self.passes}


def mode_of(mode: object) -> Literal["retract", "drop"]:
    """Return the mode. Raises InvalidUsage unless it is "retract" or "drop"."""
    if mode not in (RETRACT, DROP):
        raise InvalidUsage(f"mode is {shown(mode)}; it must be {RETRACT!r} or {DROP!r}")
    return "drop" if mode == DROP else "retract"


def cut_of(transport: OneShard, name: str, before: Point, retry_s: float) -> NamedTime:
    """The cut that a caller named; a wall clock names the upper that the shard had then. Raises as `resolved`."""
    if not isinstance(before, datetime):
        return NamedTime.of("before", before, transport, name, (0.0, retry_s))
    resolution = resolve_time(transport, name, before, 0.0, retry_s)
    upper = resolution.upper.element
    return NamedTime(TIME_MAX if upper is None else upper, to_datetime(resolution.at_ms))


@contextmanager
def _naming(before: int, name: str) -> Iterator[None]:
    """Raise NotReadable of the time before a cut with a message that names the cut, which the caller gave."""
    try:
        yield
    except NotReadable as error:
        if error.details.get("as_of") != [before - 1]:
            raise
        raise NotReadable(
            f"shard {name!r} is readable from {error.details.get('since')} on: rows written before {before} can no "
            "longer be distinguished from later ones",
            **error.details,
        ) from error
