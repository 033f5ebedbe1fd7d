"""What a verb is to its commit: a plan, which is bound to the schema of a shard and reads some of its contents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from persist.client.snapshot import Held, kept, part_reader
from persist.core.antichain import Antichain
from persist.core.batch import Run
from persist.core.drops import pending_drop
from persist.core.view import ShardView
from persist.parts import ALL_KEYS, DIFF, TIME, KeyRange, ShardSchema, consolidate, current_schema
from persist.parts.constrained import UNIQUE, counted, violation
from persist.parts.digest import numbers_of_rows
from persist.parts.evolution import named_by, sound_schemas
from persist.parts.files import Keeps
from persist.parts.keyed import KeyPoints, distinct_keys, key_schema, semi_join
from persist.parts.pruning import Filter
from persist.parts.unique import KEYS_SHOWN_MAX, crowded, keys_shown


@dataclass(frozen=True)
class Contents:
    """What a plan reads: a shard as of a time. `held` None: nothing was ever written to it.

    `following`: `rows` are read from these runs, as of this time, and not from those of `held`.
    """

    schema: ShardSchema
    held: Held | None
    time: int
    following: tuple[tuple[Run, ...], int] | None = None

    def for_next_commit(self, *, retracts: bool) -> tuple[Contents, int]:
        """What the rows of the next commit meet, which makes what is pending effective; and the cut of a truncation.

        `retracts`: that commit takes rows away, so that a pending truncation is withdrawn. A cut of 0: there is none.
        """
        if self.held is None or self.held.view.upper != Antichain(self.time + 1):
            return self, 0
        waiting = None if retracts else pending_drop(self.held.view.drops, self.held.view.upper)
        cut = 0 if waiting is None else waiting.cut
        return replace(self, following=self.held.with_pending(cut)), cut

    def rows(self, key_range: KeyRange = ALL_KEYS, keeps: Keeps | None = None) -> Iterator[pa.Table]:
        """The rows of a key range in key order, with `__diff`. `keeps` is as `PartReader` says. Raises as a read."""
        if self.held is None:
            return
        _, reader = part_reader(self.held.transport, self.held.view, self.held.settings, keeps)
        runs, time = self.following or (self.held.runs, self.time)
        yield from kept(reader.read_range(runs, as_of=time, key_range=key_range), self.held.lease)

    def changes(self, after: int, key_range: KeyRange = ALL_KEYS, keeps: Keeps | None = None) -> Iterator[pa.Table]:
        """What was added and removed since the time `after`, as rows with `__diff`."""
        if self.held is None:
            return
        _, reader = part_reader(self.held.transport, self.held.view, self.held.settings, keeps)
        found = reader.read_changes(self.held.runs, after, self.time, key_range=key_range)
        yield from kept(found, self.held.lease)


@dataclass(frozen=True)
class Those:
    """Some rows of a shard: which are read for them, and which of those that were read they are."""

    key_range: KeyRange
    keeps: Keeps | None
    pick: Callable[[pa.Table], pa.Table]

    def rows(self, contents: Contents) -> Iterator[pa.Table]:
        """They as of the time of the contents."""
        if self.key_range.is_empty:
            return
        for table in contents.rows(self.key_range, self.keeps):
            if len(found := self.pick(table)):
                yield found

    def concern(self, contents: Contents, after: int) -> bool:
        """Whether one of them was added or taken away since the time `after`."""
        if self.key_range.is_empty:
            return False
        return any(len(self.pick(table)) for table in contents.changes(after, self.key_range, self.keeps))


ALL = Those(ALL_KEYS, None, lambda table: table)
NONE = Those(KeyRange(b"", b""), None, lambda table: table.slice(0, 0))


def matching(where: str, schema: ShardSchema) -> Those:
    """The rows for which a predicate is true. Raises InvalidUsage."""
    found = Filter.of(where, schema)
    return Those(found.key_range(), found.may_match, found.apply)


def with_keys(keys: pa.Table, keyed: ShardSchema, schema: ShardSchema) -> Those:
    """The rows whose columns `keyed.key` have the values of one of the sorted `keys`."""
    if not len(keys):
        return NONE
    span: KeyRange = KeyPoints.of(keys, keyed) if keyed.key == schema.key else ALL_KEYS
    return Those(span, None, partial(semi_join, keys=keys, keyed=keyed))


class Plan(Protocol):
    """What one verb does to a shard."""

    verb: ClassVar[str]

    def bound(self, schema: ShardSchema) -> Bound:
        """For a shard with this schema. Raises InvalidUsage where it does not fit."""
        ...


@dataclass(frozen=True)
class Bound(ABC):
    """A plan for a shard with this schema: what was given is read by it once.

    `those` are the rows of the shard that it reads. `question` is what was asked for, as JSON: a token stands for it.
    `replacement` has the rows that stand in the place of all that is there, whatever that is; None: it is no such verb.
    """

    schema: ShardSchema
    those: Those
    question: Sequence[object]
    replacement: pa.Table | None = None

    @property
    def may_crowd(self) -> bool:
        """Whether a key may come to have more rows than it had, so that unique keys have to be looked up."""
        return True

    @property
    def source_names(self) -> Sequence[str]:
        """Columns of a source which may have others than the shard has."""
        return ()

    @property
    def cut(self) -> int:
        """The pending truncation by which what was worked out last goes, as `CompareAndAppend` says; 0: none."""
        return 0

    @abstractmethod
    def updates(self, contents: Contents) -> Iterator[pa.Table]:
        """The rows that are added and taken away, by their `__diff`. Raises InvalidUsage."""

    def concerns(self, contents: Contents, after: int) -> bool:
        """Whether what was changed since the time `after` may change what `updates` gave then."""
        return self.those.concern(contents, after)


class GainedKeys:
    """The keys that get rows by some changes. Of each row that is changed it holds the key and a number.

    Keys are looked at with their rows: one that is taken away without being there makes no room for another one. Where
    a key loses a row and gets one, it is looked at as well: the one that it loses need not have been there.
    """

    def __init__(self, schema: ShardSchema) -> None:
        self._schema = schema
        self._keyed = key_schema(schema)
        self._number = "number of " + " ".join(schema.key)  # which is the name of none of them
        numbered = self._keyed.arrow.append(pa.field(self._number, pa.uint64(), nullable=False))
        self._lines = ShardSchema(numbered, schema.key)
        self._changed: list[pa.Table] = []

    def of(self, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        """The changes, whose keys are noted as they pass."""
        for rows in tables:
            self._changed.append(self._numbered(rows))
            yield rows

    def rows(self) -> Those:
        """The rows of a shard that have one of the keys."""
        return with_keys(self._gained(), self._keyed, self._schema)

    def check(self, contents: Contents, *, are_changed: bool) -> None:
        """Raise ConstraintViolated where one of the keys has more than one row.

        `are_changed`: the contents have the changes; otherwise these come to them.
        """
        gained = self._gained()
        if not len(gained):
            return
        found = [self._numbered(rows) for rows in with_keys(gained, self._keyed, self._schema).rows(contents)]
        if not are_changed:
            found += [semi_join(rows, gained, self._keyed) for rows in self._changed]
        check_uncrowded(consolidate(found, self._lines), self._lines)

    def _gained(self) -> pa.Table:
        self._changed = [consolidate(self._changed, self._lines)]
        return distinct_keys(self._changed[0].filter(pc.greater(self._changed[0].column(DIFF), 0)), self._keyed)

    def _numbered(self, rows: pa.Table) -> pa.Table:
        """The keys of the rows, each with a number that stands for the row: rows may be large."""
        rows = self._schema.conform(rows, 0)
        numbers = pa.array(numbers_of_rows(rows.drop_columns([TIME])))
        return self._lines.conform(rows.select([*self._keyed.key, DIFF]).append_column(self._number, numbers), 0)


@dataclass(frozen=True, kw_only=True)
class Guarded(Bound):
    """What a plan does to a shard whose keys are unique: refused where a key would have more than one row.

    `gained` has the keys that get rows by what was worked out last.
    """

    inner: Bound
    gained: list[GainedKeys]

    @classmethod
    def of(cls, inner: Bound) -> Guarded:
        """Raises ConstraintViolated where rows that stand in the place of all that is there have a key twice."""
        if inner.replacement is not None:
            keyed = key_schema(inner.schema)
            check_uncrowded(distinct_keys(inner.replacement, keyed), keyed)
        return cls(inner.schema, inner.those, inner.question, inner.replacement, inner=inner, gained=[])

    def updates(self, contents: Contents) -> Iterator[pa.Table]:
        self.gained[:] = [GainedKeys(self.schema)]
        yield from self.gained[0].of(self.inner.updates(contents))
        self.gained[0].check(contents, are_changed=False)

    def concerns(self, contents: Contents, after: int) -> bool:
        if self.inner.concerns(contents, after):
            return True
        return any(keys.rows().concern(contents, after) for keys in self.gained)


def check_uncrowded(rows: pa.Table, schema: ShardSchema) -> None:
    """Raise ConstraintViolated where a key has more than one of these rows, which would be all of it, at some time."""
    keys = crowded(rows, schema)
    if len(keys):
        raise violation(
            f"constraint {UNIQUE!r}: {counted(len(keys), 'key')} would have more than one row; nothing was written: "
            "upsert the rows, or take away the old ones in the same write",
            UNIQUE,
            keys_shown(keys.slice(0, KEYS_SHOWN_MAX)),
            len(keys),
        )


class Binding:
    """A plan as it is for the schema that a shard has, which may change between two looks at it.

    `known` is the id of the schema by whose names the caller has said what is to happen.
    """

    def __init__(self, plan: Plan, known: int) -> None:
        self.verb = plan.verb
        self._plan = plan
        self._known = known
        self._found: tuple[int, Bound] | None = None

    @property
    def cut(self) -> int:
        """As `Bound.cut`, of the plan as it was bound last."""
        return 0 if self._found is None else self._found[1].cut

    def to(self, view: ShardView) -> Bound:
        """The plan for this view. Raises InvalidUsage where it does not fit, or a name means another column by now."""
        number, schema = current_schema(view.schemas)
        if self._found is None or self._found[0] != number:
            schemas = sound_schemas(view.schemas)
            known = schemas.get(self._known, named_by(schemas, self._known))
            bound = self._plan.bound(schema)
            for name in bound.source_names:
                if name not in schema.id_of and known.id_of.get(name) in schema.name_of:
                    raise schema.no_column(name)
            is_guarded = schema.details.unique and bound.may_crowd
            self._found = number, Guarded.of(bound) if is_guarded else bound
        return self._found[1]
