"""The methods of `Shard` that change columns and constraints, including changes that must check the contents first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from persist.client.dml_plans import Contents, with_keys
from persist.client.idempotency import after_commit, send_for
from persist.client.shard_base import ShardBase
from persist.client.shared_lease_reads import hold_for_block
from persist.client.snapshot import Held, ReadSettings, check_lease, leased_blobs, part_reader
from persist.client.timestamps import check_readable
from persist.client.transport import OneShard
from persist.core import commands as c
from persist.core.errors import InvalidUsage, SchemaMismatch, UpperMismatch
from persist.core.frontier import MINIMUM, Antichain
from persist.core.shard_view import ViewRequest
from persist.parts import DIFF, ShardSchema, consolidate, constraint_checks, current_schema, schema_changes
from persist.parts.constraint_checks import UNIQUE, ViolatingRows, count_text, violation
from persist.parts.key_encoding import distinct_keys, key_schema
from persist.parts.schema_changes import Change, apply_changes
from persist.parts.schema_evolution import follow_by_name, widened_days

# One change of a schema. If the contents may violate the new schema, they are checked first, and the change lands only
# if nothing was written since.
#
# Writers check the rows that they stage by the schema that they know. So such a change also invalidates staged rows:
# their commit is refused, and they are staged anew.

RACES_MAX = 1_000  # lost by one change; each means that another writer made progress


@dataclass(frozen=True)
class SchemaEvolution:
    """One change of the schema of one shard, whose newest schema has the id `expected_id`."""

    transport: OneShard
    name: str
    expected_id: int
    read: ReadSettings
    retry_s: float

    def run(self, before: ShardSchema, after: ShardSchema) -> int:
        """The id of the new schema.

        Raises InvalidUsage (a day has no room), ConstraintViolated, SchemaMismatch, UpperMismatch (others write all the
        time), and what reading may. In these cases nothing was changed.
        """
        look: SchemaLook | DaysLook
        if constraint_checks.are_stricter(after, before):
            look = SchemaLook(_new(before, after), self.name)
        elif columns := widened_days(before, after):
            look = DaysLook(columns, after, self.name)
        else:
            return self.send(after)
        view = self.transport.view(self.name, ViewRequest(with_batches=False))
        if view.upper == MINIMUM and (number := self._landed(after, view.upper)) is not None:
            return number  # the shard was empty
        check_readable(self.name, view)
        with hold_for_block(self.transport, self.name, None, look.purpose, self.read) as held:
            for _ in range(RACES_MAX):
                if held.view.schema_id != self.expected_id:  # it has landed before, or this raises SchemaMismatch
                    return self.send(after)
                look.check(held)
                if (number := self._landed(after, held.view.upper)) is not None:
                    return number
                view = self.transport.view(self.name, ViewRequest())
                check_lease(view, held.as_of, held.lease)
                held.lease.keep()
                held = replace(held, view=view)
        raise UpperMismatch(
            f"others wrote to shard {self.name!r} before each of {RACES_MAX} tries to {look.purpose}; nothing was "
            "changed: try again",
            expected=view.upper.to_json(),
            actual=view.upper.to_json(),
            stays=False,
        )

    def send(self, after: ShardSchema, upper: Antichain | None = None) -> int:
        """The id of the schema. Raises SchemaMismatch if others changed it, UpperMismatch if they wrote since."""
        command = c.EvolveSchema(self.expected_id, after.to_record(), upper)
        return send_for(c.SchemaRegistered, self.transport, self.name, command, self.retry_s).schema_id

    def _landed(self, after: ShardSchema, upper: Antichain) -> int | None:
        """The id of the schema; None: others wrote."""
        try:
            return self.send(after, upper)
        except UpperMismatch:
            return None


class DaysLook:
    """Checks that all dates fit into columns that become timestamps in microseconds, which have a smaller range.

    All times are checked, including rows that can no longer be read: merges still read them. `columns` maps the old
    names to those in the schema `after`.
    """

    purpose = "widen columns"

    def __init__(self, columns: Mapping[str, str], after: ShardSchema, name: str) -> None:
        self._kinds = {before: after.arrow.field(widened).type for before, widened in columns.items()}
        self._name = name
        self._seen: frozenset[str] = frozenset()  # ids of parts that were checked

    def check(self, held: Held) -> None:
        """Raise InvalidUsage if a part that was not checked before has such a date."""
        _, reader = part_reader(held.transport, held.view, held.settings)
        with leased_blobs(held.lease):
            runs = reader.expanded(run for batch in held.view.batches for run in batch.runs)
            parts = {part.id: part for run in runs for part in run.parts}
            for part in [part for part in parts.values() if part.id not in self._seen]:
                for column, kind in self._kinds.items():
                    for values in reader.as_written(part, column):
                        _check_room(values, column, kind, self._name)
        self._seen = frozenset(parts)


def _check_room(days: pa.ChunkedArray, column: str, kind: pa.DataType, shard: str) -> None:
    try:
        days.cast(kind)
    except pa.ArrowInvalid as error:
        raise InvalidUsage(
            f"column {column!r} of shard {shard!r} has, or had, a day for which {kind} has no room ({error}); nothing "
            "was changed: widen it to timestamp[ms]"
        ) from error


ALTER_TRIES = 16  # if others change the columns meanwhile


class SchemaMethods(ShardBase):
    """The methods of `Shard` that change columns and constraints. Every method returns the schema afterwards."""

    def evolve_schema(self, schema: ShardSchema | pa.Schema) -> ShardSchema:
        """Add columns to the shard, all columns given by their names. Repeating it is safe.

        `schema` has the existing columns, unchanged and in their order, and new nullable ones. Raises InvalidUsage (the
        shard cannot evolve so), SchemaMismatch (others evolved it: refresh, retry).
        """
        newest, known = self._newest_schema()
        new = follow_by_name(known, schema if isinstance(schema, ShardSchema) else ShardSchema(schema, known.key))
        return self._evolve(newest, known, new)

    def alter(self, *changes: Change) -> ShardSchema:
        """Apply `changes` of columns, in order, all in one commit or not at all.

        `persist.parts.schema_changes` has the changes. Readers see old rows by the new columns at once; no row is
        rewritten. Writers that know the old columns can continue: their rows are read by the new ones. If others change
        columns meanwhile, the changes are applied to theirs. This handle uses the new schema from then on.

        Raises: InvalidUsage (a change cannot be made, or a name that this handle knows means another column by now:
            nothing was changed), SchemaMismatch (others changed columns all the time).
        """
        for left in range(ALTER_TRIES, 0, -1):
            newest, (number, schema) = self._changing()
            new = apply_changes(schema, changes)
            if new == schema:
                return self._changed(newest, (number, schema))
            try:
                return self._evolve(newest, schema, new)
            except SchemaMismatch:
                if left == 1:
                    raise
        raise AssertionError("unreachable")

    def add_column(
        self, name: str, kind: pa.DataType, *, nullable: bool = True, default: Any = None, after: str | None = None
    ) -> ShardSchema:
        """Add a value column. Existing rows, and rows that are written without it, have its default, or null.

        `kind` is the type of its values. Unless it is `nullable` it needs a `default`, which cannot be changed later.
        `after` is the column that precedes it (None: it is the last one).

        Raises: InvalidUsage (there is such a column `name`, or its type is not supported, or the default does not fit).
        """
        return self.alter(schema_changes.AddColumn(name, kind, nullable, default, after))

    def rename_column(self, name: str, to: str) -> ShardSchema:
        """Rename the column `name` to `to`; it may be one of the key.

        Raises: InvalidUsage (there is no column `name`, or there is one called `to`).
        """
        return self.alter(schema_changes.RenameColumn(name, to))

    def drop_column(self, name: str) -> ShardSchema:
        """Drop the value column `name` with all its values: no read of any time shows them again.

        Rows that differ in nothing else become one row, whose multiplicity is the sum of theirs. Compaction deletes the
        bytes. Raises InvalidUsage (there is no such column, or it is one of the key).
        """
        return self.alter(schema_changes.DropColumn(name))

    def move_column(self, name: str, *, after: str | None = None) -> ShardSchema:
        """Move the column `name` behind the column `after` (None: it is the first one). Nothing else changes.

        Raises: InvalidUsage (there is no such column).
        """
        return self.alter(schema_changes.MoveColumn(name, after))

    def widen_column(self, name: str, kind: pa.DataType) -> ShardSchema:
        """Give the column `name` a wider type `kind`, which holds every value of the old one.

        That is a wider integer, float or decimal; timestamp("ms") or ("us") for date32, which becomes midnight; a
        struct with more nullable fields, at any depth.

        Raises: InvalidUsage (the type does not hold every value, or keys would be encoded differently; for
            microseconds: the column has or had a date outside their range), UpperMismatch (others write all the time
            while its dates are checked).
        """
        return self.alter(schema_changes.WidenColumn(name, kind))

    def allow_nulls(self, name: str) -> ShardSchema:
        """Make the column `name` nullable. Raises InvalidUsage (there is no such column)."""
        return self.alter(schema_changes.RelaxColumn(name))

    def set_constraints(
        self,
        *,
        unique: bool | None = None,
        not_null: Sequence[str] | None = None,
        checks: Mapping[str, str] | None = None,
    ) -> ShardSchema:
        """Change the constraints on added rows; what is None stays. Repeating it is safe. Needs scope `manage`.

        The contents as of the latest time are checked first. The change lands only if they obey the new constraints.
        Rows that were staged before it are refused at their commit (SchemaMismatch); writers of this package stage
        them anew automatically.

        Args:
            unique: whether a key has at most one row at each time. docs/schemas.md lists which ways of writing are
                refused at once, and which violations maintenance finds.
            not_null: the columns that take no null from now on. Earlier times may show some. A column that was created
                so takes none anyway.
            checks: predicates by their names, at most 64, as in the Spark option `where`: none may be false for an
                added row. A predicate that is unknown because of a null accepts the row.
        Returns: the schema afterwards, whose `details` have the constraints.
        Raises: ConstraintViolated (the contents violate them; `details` has the count and the first keys),
            InvalidUsage (no such column, or an invalid predicate), SchemaMismatch (others changed the schema
            meanwhile: look at it, then decide anew), UpperMismatch (others write all the time), NotReadable (the
            contents cannot be read). In these cases nothing was changed.
        """
        change = constraint_checks.ConstraintChange.of(unique, not_null, checks)
        newest, before = self._newest_schema()
        try:
            after = change.applied(before)
            constraint_checks.check_compiles(after)
        except InvalidUsage:
            if self._transport.view(self.name, ViewRequest(with_batches=False)).schema_id != newest:
                self._evolution(newest).send(before)  # others have changed it: this raises SchemaMismatch
            raise
        return self._changed(*self._changing()) if after == before else self._evolve(newest, before, after)

    def broken_constraints(self) -> list[BrokenConstraint]:
        """Which constraints the contents as of the latest time violate. It reads the whole shard.

        Checks and columns without nulls are never violated: all ways of writing are refused. Keys may have a second
        row by the ways that docs/schemas.md names.

        Returns: for each violated constraint how many rows or keys violate it, and the first ten keys.
        Raises: NotReadable (nothing can be read), and what reading may.
        """
        view = self._transport.view(self.name, ViewRequest(with_batches=False))
        if view.upper == MINIMUM:
            return []
        check_readable(self.name, view)
        look = SchemaLook(current_schema(view.schemas)[1], self.name)
        with hold_for_block(self._transport, self.name, None, "broken constraints", self._settings.read) as held:
            return list(look.broken(held))

    # --- how it changes them

    def _evolution(self, newest: int) -> SchemaEvolution:
        read, retry_s = self._settings.read, self._settings.write.retry_s
        return SchemaEvolution(self._transport, self.name, newest, read, retry_s)

    def _evolve(self, newest: int, known: ShardSchema, new: ShardSchema) -> ShardSchema:
        number = self._evolution(newest).run(known, new)
        with after_commit(f"the change of the schema of shard {self.name!r}"):
            return self._changed(number, (number, new))


def _contents(held: Held) -> Contents:
    """The contents as of the latest time of the view; of a closed shard, as of the time that is held."""
    upper = held.view.upper.element
    time = held.as_of if upper is None else upper - 1
    return Contents(current_schema(held.view.schemas)[1], replace(held, as_of=time), time)


def _new(before: ShardSchema, after: ShardSchema) -> ShardSchema:
    """The schema with only the constraints that were not there before."""
    old, new = before.details, after.details
    known = {check.where for check in old.checks}
    return after.with_details(
        unique=new.unique and not old.unique,
        not_null=tuple(number for number in new.not_null if number not in old.not_null),
        checks=tuple(check for check in new.checks if check.where not in known),
    )


@dataclass(frozen=True)
class BrokenConstraint:
    """A constraint that the contents of a shard violate: `what` says how, in words that follow the shard's name.

    `count` is how many rows (of a check or a column) or keys (of unique keys) violate it, `keys` has the first keys.
    """

    constraint: str
    what: str
    count: int
    keys: list[tuple[Any, ...]]

    def to_json(self) -> dict[str, Any]:
        """The same for JSON. Raises nothing."""
        return {
            "constraint": self.constraint,
            "what": self.what,
            "count": self.count,
            "keys": constraint_checks.keys_json(self.keys),
        }


class SchemaLook:
    """Checks the contents of a shard against the constraints of a schema."""

    purpose = "set constraints"

    def __init__(self, schema: ShardSchema, name: str) -> None:
        self._schema = schema
        self._name = name
        self._seen: int | None = None  # the time up to which no violation was found
        self._broken: dict[str, tuple[str, int, list[tuple[Any, ...]]]] = {}

    def check(self, held: Held) -> None:
        """Raise ConstraintViolated if the contents, as far as they were not checked before, violate a constraint."""
        for broken in self.broken(held):
            raise violation(
                f"constraint {broken.constraint!r} cannot be set: shard {self._name!r} {broken.what}; nothing was "
                "changed: fix these rows first",
                broken.constraint,
                broken.keys,
                broken.count,
            )

    def broken(self, held: Held) -> Iterator[BrokenConstraint]:
        """The violated constraints."""
        contents, crowds = _contents(held), constraint_checks.DuplicateKeyCounter(self._schema)
        for rows in self._rows_to_group(contents):
            crowds.add(self._schema.conform(rows, 0))
        self._seen = contents.time
        for constraint, (how, count, keys) in self._broken.items():
            yield BrokenConstraint(constraint, f"holds {count_text(count, 'row')} {how}", count, keys)
        crowded = crowds.finish()
        if crowded.count:
            what = f"has {count_text(crowded.count, 'key')} with more than one row"
            yield BrokenConstraint(UNIQUE, what, crowded.count, crowded.keys)

    def _rows_to_group(self, contents: Contents) -> Iterator[pa.Table]:
        """For unique keys, the rows of all keys that gained rows since the last check. It notes other violations.

        The first check reads all rows.
        """
        keyed, keys = key_schema(self._schema), []
        is_unique = self._schema.details.unique
        for rows in contents.rows() if self._seen is None else contents.changes(self._seen):
            for broken in constraint_checks.violating_rows(rows, self._schema):
                self._note(broken)
            if is_unique and self._seen is None:
                yield rows
            elif is_unique:
                keys.append(distinct_keys(rows.filter(pc.greater(rows.column(DIFF), 0)), keyed))
        if keys:
            yield from with_keys(consolidate(keys, keyed), keyed, self._schema).rows(contents)

    def _note(self, broken: ViolatingRows) -> None:
        _, count, keys = self._broken.get(broken.constraint, ("", 0, []))
        more = constraint_checks.key_tuples(
            broken.rows.select(list(self._schema.key)).slice(0, constraint_checks.KEYS_SHOWN_MAX - len(keys))
        )
        self._broken[broken.constraint] = (broken.how, count + len(broken.rows), [*keys, *more])
