"""Retention by a timestamp column, and retention by drops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc

from persist.client.commit_info import info_bytes
from persist.client.dml_plans import Count
from persist.client.idempotency import send
from persist.client.optimistic_loop import CommitResult, RewriteOperation, Step, check_complete, read_facts
from persist.client.read_leases import HandleSettings
from persist.client.restore_and_truncate import DROP, DropOperation, Truncated
from persist.client.snapshot import Held, hold_time, part_reader, with_renewal
from persist.client.timestamps import latest_of, to_datetime
from persist.client.transport import OneShard
from persist.core import commands as c
from persist.core import record
from persist.core.errors import InvalidUsage, NotReadable, UpperMismatch
from persist.core.frontier import Antichain
from persist.core.retention_plan import Facts, behind, blocked_by_column, has_to_look, of_age_ms, passed, waiting
from persist.core.shard_settings import Looked, RowPolicy
from persist.core.shard_view import ShardView, ViewRequest
from persist.core.state import State
from persist.core.transitions.row_drops import drops_rows
from persist.core.truncations_and_drops import check_droppable, check_not_erasing
from persist.parts import DIFF, PartReader, consolidate, current_schema, negated
from persist.parts.row_age import AgeColumn, AgeFilter
from persist.parts.schema_evolution import current_for_names, valid_schemas

# Retention by a column: rows are removed whose wall clock in that column is old enough, whenever they were written.
#
# They are found in the contents as of the latest time. Row groups whose statistics show that none of their rows is old
# enough are not read. The retractions are staged in bounded memory, and committed on the upper that was read. If others
# write meanwhile, the effect of their changes is added.
#
# With consumers, only rows are removed that all of them have passed: min(multiplicity at that time minus retractions
# since, 0 or more). So an equal row that was added later stays, and no row becomes negative.

TRIES = 5  # if others write meanwhile, before the next turn
READS_AT_ONCE = 5  # that share the memory: earlier contents, retractions since, contents now, and two comparisons
COLUMN = "column"  # its name in the commit history and in `why`


@dataclass(frozen=True)
class ColumnRun(CommitResult):
    """The result of retention by a column. `RetentionRun.by_column` has it.

    Rows were removed whose `column` was older than the wall clock `older_than`: `removed` of them, in the interval from
    `lower` to `upper`. These are equal if nothing was committed.
    """

    column: str
    older_than: datetime
    lower: Antichain
    upper: Antichain
    removed: int


@dataclass(frozen=True)
class RetentionOutcome:
    """The result of a run: `done` (None: it was not due), the consumers that it passed, and why the rest is held."""

    done: ColumnRun | None = None
    passes: tuple[str, ...] = ()
    held_by: tuple[str, ...] = ()


class _Search(Count):
    """The result of one pass. `waits_ms`: the earliest end of the wall clock of a row that is old but has to wait."""

    def __init__(self, sieve: AgeFilter) -> None:
        super().__init__()
        self.sieve = sieve
        self.waits_ms: int | None = None
        self.overran = False

    def note_waiting(self, rows: pa.Table) -> None:
        """Note rows that are old enough, but that consumers have not passed."""
        first = self.sieve.first_ms(rows)
        if first is not None:
            self.waits_ms = first if self.waits_ms is None else min(first, self.waits_ms)


@dataclass(frozen=True, kw_only=True)
class ColumnRetention(RewriteOperation):
    """One run by the column. `facts` have the policy and the consumers, `now_ms` is a checked clock."""

    what: ClassVar[str] = "retain"
    done: ClassVar[str] = "cleared of old rows"

    facts: Facts
    policy: RowPolicy
    column: AgeColumn
    age_ms: int  # from which rows are removed
    now_ms: int
    so_far: int | None = None  # all consumers have read before it; None: there are no consumers, 0: it is not known

    @classmethod
    def by(cls, transport: OneShard, name: str, settings: HandleSettings, facts: Facts, now_ms: int) -> ColumnRetention:
        """With settings that bound its memory. Raises InvalidUsage: the column holds no wall clocks."""
        policy = facts.policy
        assert policy is not None
        assert policy.column is not None
        assert policy.column_age_ms is not None
        schema = current_schema(transport.view(name, ViewRequest(with_batches=False)).schemas)[1]
        column = AgeColumn.of(schema, policy.column, policy.column_unit)
        info = info_bytes("info", {"retention": [COLUMN]})
        more: dict[str, Any] = {"column": column, "age_ms": policy.column_age_ms, "now_ms": now_ms}
        return cls.of(transport, name, settings, info=info, facts=facts, policy=policy, **more)

    @property
    def purpose(self) -> str:
        return "policy of rows"

    @property
    def old_ms(self) -> int:
        """Rows whose wall clock had passed at this instant are old enough."""
        return self.now_ms - self.age_ms

    @property
    def overdue_ms(self) -> int | None:
        """Rows that had passed at this instant are removed even if a consumer has not read them; None: none are."""
        longest_ms = self.policy.consumers_max_age_ms
        return None if longest_ms is None else min(self.old_ms, self.now_ms - longest_ms)

    def run(self, *, dry_run: bool) -> RetentionOutcome:
        """Raises UpperMismatch (others wrote each time), Conflict (the settings changed), and what every call may."""
        upper = check_complete(self.name, 0, self._view(), "cleared")
        so_far = passed(self.facts)
        start = upper - 1 if so_far is None or not so_far else min(so_far, upper) - 1
        try:
            with self._held(start) as held:
                return replace(self, so_far=so_far)._attempt(held, dry_run)
        except NotReadable:
            if so_far is None or start == upper - 1:
                raise
        # What the consumers had read by then can no longer be determined: assume that they have read nothing.
        with self._held(upper - 1) as held:
            return replace(self, so_far=0)._attempt(held, dry_run)

    def _attempt(self, held: Held, dry_run: bool) -> RetentionOutcome:
        view = held.view
        if dry_run:
            search = self._begin(view)
            search.read(self._writable(latest_of(view), self._rows(held, search, None)))
            return self._result(view.upper, view.upper, search, dry_run=True)
        attempt = self._rewrite(held, None, TRIES + 1)
        count, upper, done = attempt.draft.count, attempt.draft.held.view.upper, attempt.done
        assert isinstance(count, _Search)
        return self._result(upper, upper, count) if done is None else self._result(done.lower, done.upper, count)

    @property
    def _commits_nothing(self) -> bool:
        return False

    def _begin(self, view: ShardView) -> _Search:
        return _Search(AgeFilter(self.column, self.old_ms))

    def _refreshed(self, held: Held) -> Held:
        """As for every operation. Raises UpperMismatch also if the policy is blocked now."""
        facts = read_facts(self.transport, self.name, self.read.retry_s).facts
        if (reason := blocked_by_column(facts)) is not None:
            raise UpperMismatch(
                f"shard {self.name!r} removes no rows now: {reason}", expected=None, actual=facts.upper.to_json()
            )
        return super()._refreshed(held)

    def _step(self, before: Held, now: Held) -> Step:
        return Step.EXTEND if self.so_far is None else Step.REPLAN  # rows that wait have to be found anew

    # --- which rows are removed

    def _rows(self, held: Held, count: Count, low: int | None) -> Iterator[pa.Table]:
        """The retractions of the rows to remove; with `low`: what to add to those as of that time."""
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
            return _non_empty(negated(search.sieve.rows(table)) for table in with_renewal(tables, held.lease))
        shared = held.settings.shared_by(READS_AT_ONCE)
        return self._passed_and_overdue(replace(held, settings=shared), search, so_far, high)

    def _passed_and_overdue(self, held: Held, search: _Search, so_far: int, high: int) -> Iterator[pa.Table]:
        yield from self._passed(held, search, so_far, high)
        overdue_ms = self.overdue_ms
        if overdue_ms is None or search.waits_ms is None or search.waits_ms > overdue_ms:
            return
        # Rows that wait are removed, too, if they are overdue: the contents, minus what is removed already.
        again = _Search(AgeFilter(self.column, overdue_ms))
        reader = self._reader(held, again.sieve)
        rows = (again.sieve.rows(_present(table)) for table in reader.read_range(held.runs, as_of=high))
        removed = map(negated, self._passed(held, again, so_far, high))
        for table in _non_empty(map(_present, with_renewal(reader.difference(removed, rows), held.lease))):
            search.overran = True
            yield negated(table)

    def _passed(self, held: Held, search: _Search, so_far: int, high: int) -> Iterator[pa.Table]:
        """The retractions of the rows that all consumers have passed; the others are noted as waiting."""
        sieve, reader = search.sieve, self._reader(held, search.sieve)
        if not so_far:  # the consumers have passed nothing, or what they have passed is not known
            for table in with_renewal(reader.read_range(held.runs, as_of=high), held.lease):
                search.note_waiting(sieve.rows(_present(table)))
            return
        before = (sieve.rows(_present(table)) for table in reader.read_range(held.runs, as_of=so_far - 1))
        left = reader.difference(before, self._retracted_since(held, search, so_far, high))
        yield from _non_empty(table.filter(pc.less(table.column(DIFF), 0)) for table in with_renewal(left, held.lease))

    def _retracted_since(self, held: Held, search: _Search, so_far: int, high: int) -> Iterator[pa.Table]:
        """The retractions since the time `so_far`, in key order, with positive `__diff`, whatever was added besides."""
        reader = self._reader(held, search.sieve)
        parts = [part for run in held.runs for part in run.parts]
        for table in reader.read_updates(parts, Antichain(so_far), Antichain(high + 1)):
            old = search.sieve.rows(table)
            search.note_waiting(_present(old))
            retractions = old.filter(pc.less(old.column(DIFF), 0))
            if len(retractions):
                yield negated(consolidate([retractions], reader.schema, since=high))

    def _reader(self, held: Held, sieve: AgeFilter) -> PartReader:
        return part_reader(held.transport, held.view, held.settings, keeps=sieve.keeps)[1]

    # --- the result

    def _result(
        self, lower: Antichain, upper: Antichain, search: _Search, *, dry_run: bool = False
    ) -> RetentionOutcome:
        removed = search.removed - search.added
        held = None if search.waits_ms is None else passed(self.facts)
        looked = Looked(self.facts.version, upper.element or 0, self.now_ms, removed, self._next_ms(search), held)
        if not dry_run:
            send(self.transport, self.name, c.NoteLooked(looked, search.overran), self.read.retry_s)
        passes = behind(self.facts, upper.element or 0) if search.overran else ()
        done = ColumnRun(self.column.name, to_datetime(max(0, self.old_ms)), lower, upper, removed)
        after = record.replace(self.facts, done=record.replace(self.facts.done, looked=looked))
        return RetentionOutcome(done, passes, waiting(after))

    def _next_ms(self, search: _Search) -> int | None:
        """The instant from which another row can be removed if nothing is written."""
        longest_ms = self.policy.consumers_max_age_ms
        instants = [] if search.sieve.next_ms is None else [search.sieve.next_ms + self.age_ms]
        if search.waits_ms is not None and longest_ms is not None:
            longest_ms = max(longest_ms, self.age_ms)
            instants.append(max(self.now_ms + 1, search.waits_ms + longest_ms))
        return of_age_ms(*instants)

    def _parts(self, view: ShardView | None) -> dict[str, Any]:
        return {"operation": c.TRUNCATE, "settings_version": self.facts.version}

    def _overtaken(self, error: UpperMismatch) -> UpperMismatch:
        return UpperMismatch(
            f"others wrote to shard {self.name!r} each of {TRIES + 1} times that its policy was about to remove old "
            "rows; nothing was changed, and the next turn tries again",
            **error.details,
        )


def run_by_column(
    transport: OneShard, name: str, settings: HandleSettings, answer: c.RetentionIs, *, dry_run: bool, by_hand: bool
) -> RetentionOutcome:
    """Remove the rows that the policy selects by its column, if it is due. Raises as `run_retention` says.

    `by_hand`: also if the last run was less than `cut_every` ago. If the column holds no wall clocks, the outcome says
    so.
    """
    facts, now_ms = answer.facts, answer.checked_ms
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
        retention = ColumnRetention.by(transport, name, settings, facts, now_ms)
    except InvalidUsage as error:
        if not dry_run:
            looked = Looked(facts.version, facts.upper.element or 0, now_ms)
            send(transport, name, c.NoteLooked(looked), settings.write.retry_s)
        return RetentionOutcome(held_by=(error.message,))
    return retention.run(dry_run=dry_run)


def check_column(transport: OneShard, name: str, column: str, unit: str, known: int | None = None) -> None:
    """Raises InvalidUsage if the shard has no such column, or it holds no wall clocks.

    Also if the name was another column's by the schema of the id `known` (None: the current one).
    """
    schemas = valid_schemas(transport.view(name, ViewRequest(with_batches=False)).schemas)
    AgeColumn.of(current_for_names(schemas, known, (column,)), column, unit)


def held_by_column(transport: OneShard, name: str, facts: Facts) -> tuple[str, ...]:
    """The reasons why a policy by a column is held back, in sentences."""
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
    """The rows with a positive multiplicity."""
    return table.filter(pc.greater(table.column(DIFF), 0))


def _non_empty(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    return (table for table in tables if len(table))


def dropped(drop: DropOperation, *, dry_run: bool) -> Truncated | tuple[str, ...]:
    """The result of a drop, or why it is refused, in a sentence. Raises what `Shard.truncate` says.

    A dry run counts the rows in the contents as of now: the cut is one of a policy, whose time may be forgotten.
    """
    try:
        if not dry_run:
            return drop.run(None, dry_run=False)
        with hold_time(drop.transport, drop.name, None, drop.purpose, 0.0, drop.read) as held:
            upper, removed = drop.counted(held)
            return Truncated(drop.time, None, upper, upper, removed, DROP)
    except InvalidUsage as error:
        return (error.message,)


def refused_drop(transport: OneShard, name: str, cut: int) -> str | None:
    """Why a drop before the cut is refused now, as far as a view shows; None: it is not refused."""
    view = transport.view(name, ViewRequest())
    try:
        check_not_erasing(name, view.upper, view.retracting)
        check_droppable(name, view.batches, view.drops, cut)
    except (InvalidUsage, NotReadable) as error:
        return error.message
    return None


def is_refused(state: State, cut: int) -> bool:
    """Whether a drop before the cut is refused as of this State, so that it is not worth a try."""
    try:
        drops_rows(state, cut)
    except (InvalidUsage, NotReadable):
        return True
    return False
