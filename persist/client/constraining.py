"""Setting the constraints of a shard: what it holds is looked at first, and the change lands if it obeys them.

Whoever stages rows looks at them by the constraints that he knows. So the change also ends what was staged by weaker
ones: such rows are refused at their commit, and staged anew.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from persist.client.looked_first import RACES_MAX, LookedFirst
from persist.client.past import HandleSettings
from persist.client.planned import Contents, with_keys
from persist.client.rewriting import check_readable
from persist.client.snapshot import Held, check_lease, holding
from persist.client.transport import OneShard
from persist.core import commands as c
from persist.core.antichain import MINIMUM, Antichain
from persist.core.errors import InvalidUsage
from persist.core.view import ViewRequest
from persist.parts import DIFF, ShardSchema, consolidate, current_schema
from persist.parts.constrained import UNIQUE, Broken, breaking, check_sound, counted, told, violation
from persist.parts.constraints import Constraining, ask_more
from persist.parts.keyed import distinct_keys, key_schema
from persist.parts.unique import KEYS_SHOWN_MAX, Crowds, keys_shown


@dataclass(frozen=True)
class Change(LookedFirst):
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
                    look = Look(new, self.name)
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
        change = Change(self._transport, self.name, expected, self._settings.read, self._settings.write.retry_s)
        found = change.run(before, given)
        return self._changed(*self._changing()) if found is None else self._changed(found[0], found)

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
        look = Look(current_schema(view.schemas)[1], self.name)
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


class Look:
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
            yield BrokenConstraint(constraint, f"holds {counted(count, 'row')} {how}", count, keys)
        crowds = self._crowds.finish()
        if crowds.count:
            what = f"has {counted(crowds.count, 'key')} with more than one row"
            yield BrokenConstraint(UNIQUE, what, crowds.count, crowds.keys)

    def _add(self, rows: pa.Table) -> None:
        for broken in breaking(rows, self._schema):
            self._note(broken)

    def _note(self, broken: Broken) -> None:
        _, count, keys = self._broken.get(broken.constraint, ("", 0, []))
        more = keys_shown(broken.rows.select(list(self._schema.key)).slice(0, KEYS_SHOWN_MAX - len(keys)))
        self._broken[broken.constraint] = (broken.how, count + len(broken.rows), [*keys, *more])
