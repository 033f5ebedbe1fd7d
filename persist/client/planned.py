"""What a verb is to its commit: a plan, which is bound to the schema of a shard and reads some of its contents."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

import pyarrow as pa

from persist.client.snapshot import Held, kept, part_reader
from persist.core.view import ShardView
from persist.parts import ALL_KEYS, KeyRange, ShardSchema, current_schema
from persist.parts.files import Keeps
from persist.parts.keyed import KeyPoints, semi_join
from persist.parts.pruning import Filter


@dataclass(frozen=True)
class Contents:
    """What a plan reads: a shard as of a time. `held` None: nothing was ever written to it."""

    schema: ShardSchema
    held: Held | None
    time: int

    def rows(self, key_range: KeyRange = ALL_KEYS, keeps: Keeps | None = None) -> Iterator[pa.Table]:
        """The rows of a key range in key order, with `__diff`. `keeps` is as `PartReader` says. Raises as a read."""
        if self.held is None:
            return
        _, reader = part_reader(self.held.transport, self.held.view, self.held.settings, keeps)
        yield from kept(reader.read_range(self.held.runs, as_of=self.time, key_range=key_range), self.held.lease)

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

    @abstractmethod
    def updates(self, contents: Contents) -> Iterator[pa.Table]:
        """The rows that are added and taken away, by their `__diff`. Raises InvalidUsage."""

    def concerns(self, contents: Contents, after: int) -> bool:
        """Whether what was changed since the time `after` may change what `updates` gave then."""
        return self.those.concern(contents, after)


class Binding:
    """A plan as it is for the schema that a shard has, which may change between two looks at it."""

    def __init__(self, plan: Plan) -> None:
        self.verb = plan.verb
        self._plan = plan
        self._found: tuple[int, Bound] | None = None

    def to(self, view: ShardView) -> Bound:
        """The plan for this view. Raises InvalidUsage where it does not fit."""
        number, schema = current_schema(view.schemas)
        if self._found is None or self._found[0] != number:
            self._found = number, self._plan.bound(schema)
        return self._found[1]
