"""Retention by a timestamp column, and retention by tombstones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from persist.client.commit_info import info_bytes
from persist.client.contents_diff import Named
from persist.client.history_api import HandleSettings
from persist.client.idempotency import send
from persist.client.optimistic_loop import (
    Count,
    Rewriting,
    Step,
    check_complete,
    latest_of,
    read_facts,
)
from persist.client.rewrites import DROP, Dropping, Truncated
from persist.client.snapshot import Held, holding, kept, part_reader
from persist.client.timestamps import datetime_text, shown_instant
from persist.client.transport import OneShard
from persist.core import commands as c
from persist.core import record
from persist.core.errors import InvalidUsage, NotReadable, UpperMismatch
from persist.core.frontier import Antichain
from persist.core.ids import Token, mint
from persist.core.retention_plan import Due, Facts, behind, blocked_by_column, has_to_look, of_age_ms, passed, waiting
from persist.core.shard_settings import Looked, RowPolicy
from persist.core.shard_view import ShardView, ViewRequest
from persist.core.state import State
from persist.core.transitions.tombstones import drops_rows
from persist.core.truncation import check_droppable, check_not_erasing
from persist.parts import DIFF, PartReader, ShardSchema, consolidate, current_schema, negated
from persist.parts.row_age import AgeColumn, AgeFilter
from persist.parts.schema_evolution import current_for_names, valid_schemas

# Policies of rows by a column: rows go whose wall clock in that column is old enough, whenever they came.
#
# They are found in the contents as of the latest time. Row groups whose statistics tell that none of their rows is old
# enough are not read. What goes is staged in bounded memory, and is committed on the upper that was looked at. Where
# others write meanwhile, what they changed of it is added.
#
# With consumers only rows go that all of them have passed: as often as a row was there at that time, less what was
# retracted of it since. So an equal row that came later stays, and none turns negative.


TRIES = 5  # where others write meanwhile, before the next turn
READS_AT_ONCE = 5  # that share the memory: what was there, what went since, what is there, and two that compare
COLUMN = "column"  # as the commit history and `why` call it


@dataclass(frozen=True)
class ColumnRun:
    """The result of a retention policy by a column. `RetentionRun.by_column` has it.

    Rows went whose `column` was older than the wall clock `older_than`: `removed` of them, in the interval from `lower`
    to `upper`. These are equal where nothing was committed.
    """

    column: str
    older_than: datetime
    lower: Antichain
    upper: Antichain
    removed: int

    @property
    def changed(self) -> bool:
        """Whether anything was taken away."""
        return self.lower != self.upper

    def to_json(self) -> dict[str, Any]:
        """The same for JSON; the wall clock in RFC 3339. Raises nothing."""
        return {
            "column": self.column,
            "older_than": datetime_text(self.older_than),
            "lower": self.lower.to_json(),
            "upper": self.upper.to_json(),
            "removed": self.removed,
        }


@dataclass(frozen=True)
class RetentionOutcome:
    """What one run came to: `done` (None: it was not due), which consumers it passed, and what holds back the rest."""

    done: ColumnRun | None = None
    passes: tuple[str, ...] = ()
    held_by: tuple[str, ...] = ()


class _Search(Count):
    """What one reading of the shard finds. `waits_ms`: the first instant of which a row was over that has to wait."""

    def __init__(self, sieve: AgeFilter) -> None:
        super().__init__()
        self.sieve = sieve
        self.waits_ms: int | None = None
        self.overran = False

    def note_waiting(self, rows: pa.Table) -> None:
        """Note rows that are old enough, and that consumers have not passed."""
        first = self.sieve.first_ms(rows)
        if first is not None:
            self.waits_ms = first if self.waits_ms is None else min(first, self.waits_ms)


@dataclass(frozen=True, kw_only=True)
class TakingAged(Rewriting):
    """One run by the column. `facts` tell the policy and the consumers, `now_ms` is a checked clock."""

    what: ClassVar[str] = "retain"
    done: ClassVar[str] = "cleared of old rows"

    facts: Facts
    column: AgeColumn
    now_ms: int
    so_far: int | None = None  # before this time all consumers have read; None: there are none, 0: nobody can tell

    @classmethod
    def by(cls, transport: OneShard, name: str, settings: HandleSettings, facts: Facts, now_ms: int) -> TakingAged:
        """With settings by which it holds a bounded amount of memory. Raises InvalidUsage: the column tells no age."""
        policy = facts.policy
        assert policy is not None
        assert policy.column is not None
        column = AgeColumn.of(schema_now(transport, name), policy.column, policy.column_unit)
        more = {"info": info_bytes("info", {"retention": [COLUMN]}), "facts": facts, "column": column, "now_ms": now_ms}
        return cls.of(transport, name, Named(None), settings.write, settings.read, **more)

    @property
    def purpose(self) -> str:
        return "policy of rows"

    @property
    def policy(self) -> RowPolicy:
        assert self.facts.policy is not None
        return self.facts.policy

    @property
    def age_ms(self) -> int:
        """From which age on rows go."""
        assert self.policy.column_age_ms is not None
        return self.policy.column_age_ms

    @property
    def old_ms(self) -> int:
        """Rows whose wall clock was over at this instant are old enough."""
        return self.now_ms - self.age_ms

    @property
    def overdue_ms(self) -> int | None:
        """Those that were over at this one go although a consumer has not passed them; None: none do."""
        longest_ms = self.policy.consumers_max_age_ms
        return None if longest_ms is None else min(self.old_ms, self.now_ms - longest_ms)

    def run(self, *, dry_run: bool) -> RetentionOutcome:
        """Raises UpperMismatch (others wrote each time), Conflict (the settings changed), and what every call may."""
        view = self.transport.view(self.name, ViewRequest(with_batches=False))
        upper = check_complete(self.name, 0, view, "cleared")
        so_far = passed(self.facts)
        start = upper - 1 if so_far is None or not so_far else min(so_far, upper) - 1
        try:
            with self._held(start) as held:
                return replace(self, so_far=so_far)._tried(held, dry_run)
        except NotReadable:
            if so_far is None or start == upper - 1:
                raise
        # What the consumers had read by then cannot be told apart any more: as if they had read nothing.
        with self._held(upper - 1) as held:
            return replace(self, so_far=0)._tried(held, dry_run)

    def _tried(self, held: Held, dry_run: bool) -> RetentionOutcome:
        view = held.view
        if dry_run:
            search = self._begin(view)
            for _ in search.of(self._writable(latest_of(view), self._rows(held, search, None))):
                pass
            return self._said(view.upper, view.upper, search, dry_run=True)
        attempt = self._rewrite(held, mint(Token, self.transport.ids), TRIES + 1)
        found, upper, done = attempt.draft.count, attempt.draft.held.view.upper, attempt.done
        assert isinstance(found, _Search)
        return self._said(upper, upper, found) if done is None else self._said(done.lower, done.upper, found)

    @property
    def _commits_nothing(self) -> bool:
        return False

    def _begin(self, view: ShardView) -> _Search:
        return _Search(AgeFilter(self.column, self.old_ms))

    def _refreshed(self, held: Held) -> Held:
        """As for every plan. Raises UpperMismatch also where no row may go any more."""
        facts = read_facts(self.transport, self.name, self.read.retry_s).facts
        if (reason := blocked_by_column(facts)) is not None:
            raise UpperMismatch(
                f"rows of shard {self.name!r} do not go now: {reason}", expected=None, actual=facts.upper.to_json()
            )
        return super()._refreshed(held)

    def _step(self, before: Held, now: Held) -> Step:
        return Step.EXTEND if self.so_far is None else Step.REPLAN  # what waits is worked out anew

    # --- which rows go

    def _rows(self, held: Held, count: Count, low: int | None) -> Iterator[pa.Table]:
        """What takes away the rows that go, in tables with negative `__diff`; with `low`: what to add to that."""
        assert isinstance(count, _Search)
        search, so_far, high = count, self.so_far, latest_of(held.view)
        held = replace(held, as_of=high)
        if so_far is None or so_far > high:
            reader = self._reader(held, search.sieve)
            tables = (
                (_present(table) for table in reader.read_range(held.runs, as_of=high))
                if low is None
                else reader.read_changes(held.runs, low, high)
            )
            return _some(negated(search.sieve.rows(table)) for table in kept(tables, held.lease))
        shared = replace(held.settings, memory_bytes=max(1, held.settings.memory_bytes // READS_AT_ONCE))
        return self._passed_and_overdue(replace(held, settings=shared), search, so_far, high)

    def _passed_and_overdue(self, held: Held, search: _Search, so_far: int, high: int) -> Iterator[pa.Table]:
        yield from self._passed(held, search, so_far, high)
        overdue_ms = self.overdue_ms
        if overdue_ms is None or search.waits_ms is None or search.waits_ms > overdue_ms:
            return
        # Of what waits those rows go too that are older still: what is there, less what has gone by now.
        again = _Search(AgeFilter(self.column, overdue_ms))
        reader = self._reader(held, again.sieve)
        there = (again.sieve.rows(_present(table)) for table in reader.read_range(held.runs, as_of=high))
        gone = map(negated, self._passed(held, again, so_far, high))
        for table in _some(map(_present, kept(reader.difference(gone, there), held.lease))):
            search.overran = True
            yield negated(table)

    def _passed(self, held: Held, search: _Search, so_far: int, high: int) -> Iterator[pa.Table]:
        """What takes away the rows that all consumers have passed; the others are noted as those that wait."""
        sieve, reader = search.sieve, self._reader(held, search.sieve)
        if not so_far:  # nothing was passed, or nobody can tell what
            for table in kept(reader.read_range(held.runs, as_of=high), held.lease):
                search.note_waiting(sieve.rows(_present(table)))
            return
        before = (sieve.rows(_present(table)) for table in reader.read_range(held.runs, as_of=so_far - 1))
        since = self._retracted_since(held, search, so_far, high)
        left = reader.difference(before, since)
        yield from _some(table.filter(pc.less(table.column(DIFF), 0)) for table in kept(left, held.lease))

    def _retracted_since(self, held: Held, search: _Search, so_far: int, high: int) -> Iterator[pa.Table]:
        """How often each row was retracted from the time `so_far` on, in key order, whatever came of it besides."""
        reader = self._reader(held, search.sieve)
        parts = [part for run in held.runs for part in run.parts]
        for table in reader.read_updates(parts, Antichain(so_far), Antichain(high + 1)):
            old = search.sieve.rows(table)
            search.note_waiting(_present(old))
            gone = old.filter(pc.less(old.column(DIFF), 0))
            if len(gone):
                yield negated(consolidate([gone], reader.schema, since=high))

    def _reader(self, held: Held, sieve: AgeFilter) -> PartReader:
        return part_reader(held.transport, held.view, held.settings, keeps=sieve.keeps)[1]

    # --- what is told of it

    def _said(self, lower: Antichain, upper: Antichain, search: _Search, *, dry_run: bool = False) -> RetentionOutcome:
        removed = search.removed - search.added
        held = None if search.waits_ms is None else passed(self.facts)
        looked = Looked(self.facts.version, upper.element or 0, self.now_ms, removed, self._next_ms(search), held)
        if not dry_run:
            send(self.transport, self.name, c.NoteLooked(looked, search.overran), self.read.retry_s)
        passes = behind(self.facts, upper.element or 0) if search.overran else ()
        done = ColumnRun(self.column.name, shown_instant(max(0, self.old_ms)), lower, upper, removed)
        after = record.replace(self.facts, done=record.replace(self.facts.done, looked=looked))
        return RetentionOutcome(done, passes, waiting(after))

    def _next_ms(self, search: _Search) -> int | None:
        """From which instant on another row can go, if nobody writes."""
        longest_ms = self.policy.consumers_max_age_ms
        found = [] if search.sieve.next_ms is None else [search.sieve.next_ms + self.age_ms]
        if search.waits_ms is not None and longest_ms is not None:
            longest_ms = max(longest_ms, self.age_ms)
            found.append(max(self.now_ms + 1, search.waits_ms + longest_ms))
        return of_age_ms(*found)

    def _parts(self, view: ShardView | None) -> dict[str, Any]:
        return {"operation": c.TRUNCATE, "settings_version": self.facts.version}

    def _overtaken(self, error: UpperMismatch) -> UpperMismatch:
        return UpperMismatch(
            f"others wrote to shard {self.name!r} each of {TRIES + 1} times that its policy was about to take old rows "
            "away; nothing was changed, and the next turn tries again",
            **error.details,
        )


def run_by_column(
    transport: OneShard,
    name: str,
    settings: HandleSettings,
    found: c.RetentionIs,
    *,
    dry_run: bool = False,
    by_hand: bool = True,
) -> RetentionOutcome:
    """Take away what the policy says by its column, if it is due. Raises as `run_retention` says.

    `by_hand`: also where it was done less than `cut_every` ago. Where the column is none that tells a wall clock, the
    outcome says so.
    """
    facts, now_ms = found.facts, found.checked_ms
    assert now_ms is not None
    policy = facts.policy
    if policy is None or policy.column is None:
        return RetentionOutcome()
    if (reason := blocked_by_column(facts)) is not None:
        return RetentionOutcome(held_by=(reason,))
    if not dry_run and not has_to_look(facts, now_ms, by_hand=by_hand):
        return RetentionOutcome(held_by=waiting(facts))
    if not facts.upper.element:
        return RetentionOutcome()
    try:
        taking = TakingAged.by(transport, name, settings, facts, now_ms)
    except InvalidUsage as error:
        if not dry_run:
            looked = Looked(facts.version, facts.upper.element or 0, now_ms)
            send(transport, name, c.NoteLooked(looked), settings.write.retry_s)
        return RetentionOutcome(held_by=(error.message,))
    return taking.run(dry_run=dry_run)


def check_column(transport: OneShard, name: str, column: str, unit: str, known: int | None = None) -> None:
    """Raises InvalidUsage where the shard has no such column, or it tells no wall clock.

    Also where the name was another column's by the schema of the id `known` (None: that of now).
    """
    schemas = valid_schemas(transport.view(name, ViewRequest(with_batches=False)).schemas)
    AgeColumn.of(current_for_names(schemas, known, (column,)), column, unit)


def held_by_column(transport: OneShard, name: str, facts: Facts) -> tuple[str, ...]:
    """What holds back a policy by a column, in sentences."""
    policy = facts.policy
    if policy is None or policy.column is None:
        return ()
    if (reason := blocked_by_column(facts)) is not None:
        return (reason,)
    try:
        check_column(transport, name, policy.column, policy.column_unit)
    except InvalidUsage as error:
        return (error.message,)
    return waiting(facts)


def _present(table: pa.Table) -> pa.Table:
    """The rows that are there more than no times."""
    return table.filter(pc.greater(table.column(DIFF), 0))


def _some(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    return (table for table in tables if len(table))


def schema_now(transport: OneShard, name: str) -> ShardSchema:
    """The current schema of the shard."""
    return current_schema(transport.view(name, ViewRequest(with_batches=False)).schemas)[1]


# Policies of rows that truncate by a drop: the cut that is due, where a drop is allowed.


def dropped(
    transport: OneShard, name: str, due: Due, settings: HandleSettings, info: bytes, *, dry_run: bool
) -> Truncated | str:
    """What went by a drop, or in a sentence why a drop is refused. Raises what `Shard.truncate` says."""
    dropping = Dropping.of(transport, name, Named(due.cut.upper, None), settings.write, settings.read)
    try:
        if dry_run:
            return _counted(dropping, due.cut.upper)
        return replace(dropping, info=info, passes=passed_cut(due)).run(None, dry_run=False)
    except InvalidUsage as error:
        return error.message


def passed_cut(due: Due) -> c.PassedCut:
    """What the commit that takes rows away before the cut that is due notes of it."""
    return c.PassedCut(due.cut_ms, bool(due.passes))


def _counted(dropping: Dropping, cut: int) -> Truncated:
    """How many rows a drop before a cut of the policy would take away. They are told apart, and read as they are now.

    Raises InvalidUsage where it is refused.
    """
    with holding(dropping.transport, dropping.name, None, dropping.purpose, 0.0, dropping.read) as held:
        upper, removed = dropping.counted(held, cut)
        return Truncated(cut, None, upper, upper, removed, DROP)


def refused_drop(transport: OneShard, name: str, cut: int) -> str | None:
    """Why a drop before the cut is refused now, as far as a view tells; None: it is not."""
    view = transport.view(name, ViewRequest())
    return _refusal(lambda: check_not_erasing(name, view.upper, view.retracting)) or _refusal(
        lambda: check_droppable(name, view.batches, view.drops, cut)
    )


def is_refused(state: State, cut: int) -> bool:
    """Whether a drop before the cut is refused as of this State, so that it is not worth asking for."""
    return _refusal(lambda: drops_rows(state, cut)) is not None


def _refusal(check: Callable[[], object]) -> str | None:
    try:
        check()
    except (InvalidUsage, NotReadable) as error:
        return error.message
    return None


def count_dropped(transport: OneShard, name: str, upper: int, settings: HandleSettings) -> int:
    """How many rows a drop before `upper` would take away; 0 where it is refused."""
    dropping = Dropping.of(transport, name, Named(upper, None), settings.write, settings.read)
    try:
        return dropping.run(None, dry_run=True).removed or 0
    except (InvalidUsage, NotReadable):
        return 0
