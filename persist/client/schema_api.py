"""Changes of a shard's columns and constraints, including those that must check the contents first."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from persist.client.dml_plans import Contents, with_keys
from persist.client.history_api import HandleSettings
from persist.client.idempotency import after_commit, send
from persist.client.optimistic_loop import check_readable
from persist.client.snapshot import Held, ReadSettings, check_lease, holding, leased_blobs, part_reader
from persist.client.transport import OneShard
from persist.core import commands as c
from persist.core.errors import InvalidUsage, SchemaMismatch, UpperMismatch
from persist.core.frontier import MINIMUM, Antichain
from persist.core.shard_view import ShardView, ViewRequest
from persist.parts import DIFF, ShardSchema, consolidate, current_schema
from persist.parts.constraint_checks import (
    KEYS_SHOWN_MAX,
    UNIQUE,
    BreakingRows,
    Constraining,
    Crowds,
    ask_more,
    breaking,
    check_sound,
    count_text,
    keys_shown,
    told,
    violation,
)
from persist.parts.key_encoding import distinct_keys, key_schema
from persist.parts.schema_changes import (
    AddColumn,
    Change,
    DropColumn,
    MoveColumn,
    RelaxColumn,
    RenameColumn,
    WidenColumn,
    altered,
)
from persist.parts.schema_evolution import by_names, of_days

# Changes of a schema for which what the shard holds is looked at first: they land only if nobody wrote since.


RACES_MAX = 1_000  # lost, by one change; each means that somebody else wrote


@dataclass(frozen=True)
class LookedFirst(ABC):
    """One change of one shard, whose newest schema has the id `expected_id`."""

    transport: OneShard
    name: str
    expected_id: int
    read: ReadSettings
    retry_s: float

    @abstractmethod
    def _command(self, after: ShardSchema, upper: Antichain | None) -> c.Command:
        """It gives the shard this schema, if its upper is that one still (None: whatever it is)."""

    def _send(self, after: ShardSchema, upper: Antichain | None) -> int:
        """The id of the schema. Raises SchemaMismatch where others changed it, UpperMismatch where they wrote."""
        found = send(self.transport, self.name, self._command(after, upper), self.retry_s)
        assert isinstance(found, c.SchemaRegistered)
        return found.schema_id

    def _landed(self, after: ShardSchema, upper: Antichain) -> int | None:
        """The id of the schema; None: somebody wrote."""
        try:
            return self._send(after, upper)
        except UpperMismatch:
            return None

    def _lost(self, what: str, upper: Antichain) -> UpperMismatch:
        """What is told after RACES_MAX lost races: what was tried, and the upper that was seen last."""
        return UpperMismatch(
            f"others wrote to shard {self.name!r} before each of {RACES_MAX} tries to {what}; nothing was changed: try "
            "again",
            expected=upper.to_json(),
            actual=upper.to_json(),
            stays=False,
        )


# A change of columns by which days become moments in microseconds, which far days do not: these are looked for first.
#
# What the shard holds is looked at, at all times, and what nobody can read any more too: merges still do. The change
# lands only if nobody has written since. It also ends what was staged by the columns of before, as stricter constraints
# do: rows that are staged anew are looked at as they are cast.


@dataclass(frozen=True)
class Evolving(LookedFirst):
    """One change of the columns of one shard, whose newest schema has the id `expected_id`."""

    def run(self, before: ShardSchema, after: ShardSchema) -> int:
        """The id of the schema that comes of it.

        Raises InvalidUsage (a day has no room), SchemaMismatch, UpperMismatch (others write all the time), and what
        reading may. Nothing was changed then.
        """
        columns = of_days(before, after)
        if not columns:
            return self._send(after, None)
        view = self.transport.view(self.name, ViewRequest(with_batches=False))
        if view.upper == MINIMUM and (number := self._landed(after, view.upper)) is not None:
            return number  # nothing was there
        check_readable(self.name, view)
        with holding(self.transport, self.name, None, "widen columns", 0.0, self.read) as held:
            try:
                seen: frozenset[str] = frozenset()
                for _ in range(RACES_MAX):
                    view = self.transport.view(self.name, ViewRequest())
                    with leased_blobs(held.lease):
                        seen = self._look(view, columns, after, seen)
                    if (number := self._landed(after, view.upper)) is not None:
                        return number
                    held.lease.keep()
            finally:
                held.lease.close()
        raise self._lost("widen its columns", view.upper)

    def _look(
        self, view: ShardView, columns: dict[str, str], after: ShardSchema, seen: frozenset[str]
    ) -> frozenset[str]:
        """Look at the parts that were not `seen`, by their ids; those that are seen then. Raises InvalidUsage."""
        _, reader = part_reader(self.transport, view, self.read)
        parts = [part for run in reader.expanded(run for b in view.batches for run in b.runs) for part in run.parts]
        for part in parts:
            if part.id in seen:
                continue
            for name, widened in columns.items():
                kind = after.arrow.field(widened).type
                for values in reader.as_written(part, name):
                    _check_room(values, name, kind, self.name)
        return frozenset(part.id for part in parts)

    def _command(self, after: ShardSchema, upper: Antichain | None) -> c.Command:
        return c.EvolveSchema(self.expected_id, after.to_record(), upper)


def _check_room(days: pa.ChunkedArray, column: str, kind: pa.DataType, shard: str) -> None:
    try:
        days.cast(kind)
    except pa.ArrowInvalid as error:
        raise InvalidUsage(
            f"column {column!r} of shard {shard!r} has, or had, a day for which {kind} has no room ({error}); nothing "
            "was changed: widen it to timestamp[ms]"
        ) from error


# What a shard handle has for changing the columns of its shard.


ALTER_TRIES = 16  # while others change the columns meanwhile


class Shaping:
    """The base of shard handles that change columns. Every verb gives the schema as of then."""

    name: str
    _transport: OneShard
    _settings: HandleSettings

    def evolve_schema(self, schema: ShardSchema | pa.Schema) -> ShardSchema:
        """Add columns to the shard, all columns given by their names. Repeating it is safe.

        Args:
            schema: all columns: those that there are, unchanged and in their order, and new ones that may be null.
        Returns: the schema afterwards.
        Raises: InvalidUsage (the shard cannot evolve so), SchemaMismatch (somebody else evolved it: refresh, retry).
        """
        newest, known = self._newest_schema()
        new = by_names(known, schema if isinstance(schema, ShardSchema) else ShardSchema(schema, known.key))
        return self._evolve(newest, known, new)

    def alter(self, *changes: Change) -> ShardSchema:
        """Change columns, all in one commit or not at all. `persist.parts.schema_changes` has the changes.

        Readers see old rows by the new columns at once; no row is rewritten. Writers that know the columns as they were
        go on: their rows are read by the new ones too. Where others change columns meanwhile, the changes are made on
        top of theirs, unless a name that this handle knows means another column by now.

        Args:
            changes: made one after the other.
        Returns: the schema afterwards, which this handle uses from here on.
        Raises: InvalidUsage (a change cannot be made, or a name that this handle knows means another column by now:
            nothing was changed), SchemaMismatch (others changed columns all the time).
        """
        for left in range(ALTER_TRIES, 0, -1):
            newest, found = self._changing()
            new = altered(found[1], changes)
            if new == found[1]:
                return self._changed(newest, found)
            try:
                return self._evolve(newest, found[1], new)
            except SchemaMismatch:
                if left == 1:
                    raise
        raise AssertionError("unreachable")

    def add_column(
        self, name: str, kind: pa.DataType, *, nullable: bool = True, default: Any = None, after: str | None = None
    ) -> ShardSchema:
        """Add a value column. Rows that are there have its default, or null; so have rows that are written without it.

        Args:
            name: of the column.
            kind: the type of its values.
            nullable: whether it may hold nulls. Where it may not, it needs a default.
            default: a value, which is fixed from here on.
            after: the column that it stands after (None: it is the last one).
        Returns: the schema afterwards.
        Raises: InvalidUsage (there is such a column, or it cannot be kept, or the default does not fit).
        """
        return self.alter(AddColumn(name, kind, nullable, default, after))

    def rename_column(self, name: str, to: str) -> ShardSchema:
        """Call a column, also one of the key, by another name.

        Args:
            name: of the column.
            to: its name from here on.
        Returns: the schema afterwards.
        Raises: InvalidUsage (there is no column `name`, or there is one called `to`).
        """
        return self.alter(RenameColumn(name, to))

    def drop_column(self, name: str) -> ShardSchema:
        """Drop a value column with all its values: no read at any time shows them again.

        Rows that differed in nothing else are one row then, as often as they were together. Compaction takes the bytes
        away.

        Args:
            name: of the column.
        Returns: the schema afterwards.
        Raises: InvalidUsage (there is no such column, or it is one of the key).
        """
        return self.alter(DropColumn(name))

    def move_column(self, name: str, *, after: str | None = None) -> ShardSchema:
        """Show a column in another place. Nothing else changes.

        Args:
            name: of the column.
            after: the column that it stands after (None: it is the first one).
        Returns: the schema afterwards.
        Raises: InvalidUsage (there is no such column).
        """
        return self.alter(MoveColumn(name, after))

    def widen_column(self, name: str, kind: pa.DataType) -> ShardSchema:
        """Give a column a type that holds every value that it could hold before.

        Args:
            name: of the column.
            kind: a wider whole number, float or decimal; timestamp("ms") or ("us") of date32, which is midnight; a
                struct with more fields that may be null, at any depth.
        Returns: the schema afterwards.
        Raises: InvalidUsage (the type does not hold every value, or keys would be encoded in another way; of
            microseconds: the column has or had a day for which they have no room), UpperMismatch (others write all the
            time while its days are looked at).
        """
        return self.alter(WidenColumn(name, kind))

    def allow_nulls(self, name: str) -> ShardSchema:
        """Let a column hold nulls from here on.

        Args:
            name: of the column.
        Returns: the schema afterwards.
        Raises: InvalidUsage (there is no such column).
        """
        return self.alter(RelaxColumn(name))

    # --- what a handle gives

    @abstractmethod
    def _changing(self) -> tuple[int, tuple[int, ShardSchema]]:
        """The id of the newest schema as of now, and the current one. Raises InvalidUsage."""

    @abstractmethod
    def _changed(self, newest_id: int, found: tuple[int, ShardSchema]) -> ShardSchema:
        """The schema that came of a change by this handle, which it uses from here on."""

    @abstractmethod
    def _newest_schema(self) -> tuple[int, ShardSchema]:
        """The id of the newest schema, and the one in use, as the handle knows them."""

    def _evolve(self, newest: int, known: ShardSchema, new: ShardSchema) -> ShardSchema:
        read, retry_s = self._settings.read, self._settings.write.retry_s
        number = Evolving(self._transport, self.name, newest, read, retry_s).run(known, new)
        with after_commit(f"the change of columns of shard {self.name!r}"):
            return self._changed(number, (number, new))


# Setting the constraints of a shard: what it holds is looked at first, and the change lands if it obeys them.
#
# Whoever stages rows looks at them by the constraints that he knows. So the change also ends what was staged by weaker
# ones: such rows are refused at their commit, and staged anew.


@dataclass(frozen=True)
class ConstraintChange(LookedFirst):
    """One change of the constraints of one shard."""

    def run(self, before: ShardSchema, given: Constraining) -> tuple[int, ShardSchema] | None:
        """The schema that comes of it, with its id; None: the one before has it. Raises as `Shard.set_constraints`."""
        try:
            after = given.applied(before)
            check_sound(after)
        except InvalidUsage:
            if self.transport.view(self.name, ViewRequest(with_batches=False)).schema_id != self.expected_id:
                self._send(before, None)  # which others have changed: it raises SchemaMismatch
            raise
        if after == before:
            return None
        return self._changed(before, after), after

    def _changed(self, before: ShardSchema, after: ShardSchema) -> int:
        if not ask_more(after, before):
            return self._send(after, None)
        view = self.transport.view(self.name, ViewRequest(with_batches=False))
        if view.upper == MINIMUM and (number := self._landed(after, MINIMUM)) is not None:
            return number  # nothing was there
        return self._tighten(before, after)

    def _tighten(self, before: ShardSchema, after: ShardSchema) -> int:
        """Look at the contents, and then at what came meanwhile, until nobody writes between a look and the change."""
        check_readable(self.name, self.transport.view(self.name, ViewRequest(with_batches=False)))
        new = _new(before, after)
        with holding(self.transport, self.name, None, "set constraints", 0.0, self.read) as held:
            try:
                seen: int | None = None
                for _ in range(RACES_MAX):
                    if held.view.schema_id != self.expected_id:  # it has landed before, or raises SchemaMismatch
                        return self._send(after, None)
                    contents = _contents(held)
                    look = SchemaLook(new, self.name)
                    look.at_all(contents) if seen is None else look.at_added(contents, seen)
                    look.check()
                    if (number := self._landed(after, held.view.upper)) is not None:
                        return number
                    seen = contents.time
                    view = self.transport.view(self.name, ViewRequest())
                    check_lease(view, held.as_of, held.lease)
                    held.lease.keep()
                    held = replace(held, view=view)
            finally:
                held.lease.close()
        raise self._lost("set its constraints", held.view.upper)

    def _command(self, after: ShardSchema, upper: Antichain | None) -> c.Command:
        return c.Constrain(self.expected_id, after.to_record(), upper)


class Constrained(ABC):
    """How a shard's constraints change, as a method of it."""

    name: str
    _transport: OneShard
    _settings: HandleSettings
    _lock: threading.Lock
    _newest_id: int
    _schema: ShardSchema

    @abstractmethod
    def _changing(self) -> tuple[int, tuple[int, ShardSchema]]:
        """The id of the newest schema as of now, and the current one. Raises InvalidUsage."""

    @abstractmethod
    def _changed(self, newest_id: int, found: tuple[int, ShardSchema]) -> ShardSchema:
        """The schema that came of a change by this handle, which it uses from here on."""

    def set_constraints(
        self,
        *,
        unique: bool | None = None,
        not_null: Sequence[str] | None = None,
        checks: Mapping[str, str] | None = None,
    ) -> ShardSchema:
        """Change what is asked of rows that are added; what is None stays. Repeating it is safe. Needs scope `manage`.

        What the shard holds as of its latest time is looked at first. The change lands only if that obeys what is new.
        From then on rows that were staged before it are refused at their commit (SchemaMismatch): writers of this
        package stage them anew by themselves.

        Args:
            unique: whether a key has at most one row at each time. docs/constraints.md tells which ways of writing are
                refused at once, and which are found by maintenance.
            not_null: the columns that take no null from now on. Earlier times may show some. A column that was made so
                takes none anyway.
            checks: predicates by their names, at most 64, as the Spark option `where` takes them: none may be false
                for a row that is added. Where one is neither true nor false, for a null, the row passes.
        Returns: the schema afterwards, whose `details` have the constraints.
        Raises: ConstraintViolated (what the shard holds breaks them; `details` has the count and the first keys),
            InvalidUsage (no such column, or a predicate that is none),
            SchemaMismatch (somebody else changed the schema meanwhile: look at it, then decide anew), UpperMismatch
            (others write all the time), NotReadable (what it holds cannot be read). Nothing was changed then.
        """
        given = Constraining.of(unique, not_null, checks)
        with self._lock:
            expected, before = self._newest_id, self._schema
        change = ConstraintChange(
            self._transport, self.name, expected, self._settings.read, self._settings.write.retry_s
        )
        found = change.run(before, given)
        if found is None:
            return self._changed(*self._changing())
        with after_commit(f"the change of constraints of shard {self.name!r}"):
            return self._changed(found[0], found)

    def broken_constraints(self) -> list[BrokenConstraint]:
        """Which constraints the contents as of the latest time break. It reads the whole shard.

        Of checks and columns without nulls there are none: every way of writing is refused. Keys may have a second row
        by the ways that docs/constraints.md names.

        Returns: for each constraint that is broken how many rows or keys break it, and the first ten keys.
        Raises: NotReadable (nothing can be read), and what reading may.
        """
        view = self._transport.view(self.name, ViewRequest(with_batches=False))
        if view.upper == MINIMUM:
            return []
        check_readable(self.name, view)
        look = SchemaLook(current_schema(view.schemas)[1], self.name)
        with holding(self._transport, self.name, None, "broken constraints", 0.0, self._settings.read) as held:
            try:
                look.at_all(_contents(held))
            finally:
                held.lease.close()
        return list(look.found())


def _contents(held: Held) -> Contents:
    """As of the latest time of the view; where the shard is closed, as of the one that is held."""
    upper = held.view.upper.element
    time = held.as_of if upper is None else upper - 1
    return Contents(current_schema(held.view.schemas)[1], replace(held, as_of=time), time)


def _new(before: ShardSchema, after: ShardSchema) -> ShardSchema:
    """The schema with those constraints alone that were not there before."""
    old, new = before.details, after.details
    known = {check.where for check in old.checks}
    return after.with_details(
        unique=new.unique and not old.unique,
        not_null=tuple(number for number in new.not_null if number not in old.not_null),
        checks=tuple(check for check in new.checks if check.where not in known),
    )


@dataclass(frozen=True)
class BrokenConstraint:
    """A constraint that the contents of a shard break: `what` says how, in words that follow the shard's name.

    `count` is how many rows (of a check or a column) or keys (of unique keys) break it, `keys` has the first keys.
    """

    constraint: str
    what: str
    count: int
    keys: list[tuple[Any, ...]]

    def to_json(self) -> dict[str, Any]:
        """The same for JSON. Raises nothing."""
        return {"constraint": self.constraint, "what": self.what, "count": self.count, "keys": told(self.keys)}


class SchemaLook:
    """What of a shard's contents breaks the constraints of a schema."""

    def __init__(self, schema: ShardSchema, name: str) -> None:
        self._schema = schema
        self._name = name
        self._broken: dict[str, tuple[str, int, list[tuple[Any, ...]]]] = {}
        self._crowds = Crowds(schema)

    def at_all(self, contents: Contents) -> None:
        """At all rows that are there."""
        for rows in contents.rows():
            self._add(rows)
            if self._schema.details.unique:
                self._crowds.add(self._schema.conform(rows, 0))

    def at_added(self, contents: Contents, after: int) -> None:
        """At the rows that came since the time `after`, and at the others of their keys."""
        keyed = key_schema(self._schema)
        keys = []
        for rows in contents.changes(after):
            self._add(rows)
            if self._schema.details.unique:
                keys.append(distinct_keys(rows.filter(pc.greater(rows.column(DIFF), 0)), keyed))
        if keys:
            for rows in with_keys(consolidate(keys, keyed), keyed, self._schema).rows(contents):
                self._crowds.add(self._schema.conform(rows, 0))

    def check(self) -> None:
        """Raise ConstraintViolated where something was found."""
        for broken in self.found():
            raise violation(
                f"constraint {broken.constraint!r} cannot be set: shard {self._name!r} {broken.what}; nothing was "
                "changed: mend what is wrong first",
                broken.constraint,
                broken.keys,
                broken.count,
            )

    def found(self) -> Iterator[BrokenConstraint]:
        """What was found. No more rows come."""
        for constraint, (how, count, keys) in self._broken.items():
            yield BrokenConstraint(constraint, f"holds {count_text(count, 'row')} {how}", count, keys)
        crowds = self._crowds.finish()
        if crowds.count:
            what = f"has {count_text(crowds.count, 'key')} with more than one row"
            yield BrokenConstraint(UNIQUE, what, crowds.count, crowds.keys)

    def _add(self, rows: pa.Table) -> None:
        for broken in breaking(rows, self._schema):
            self._note(broken)

    def _note(self, broken: BreakingRows) -> None:
        _, count, keys = self._broken.get(broken.constraint, ("", 0, []))
        more = keys_shown(broken.rows.select(list(self._schema.key)).slice(0, KEYS_SHOWN_MAX - len(keys)))
        self._broken[broken.constraint] = (broken.how, count + len(broken.rows), [*keys, *more])
