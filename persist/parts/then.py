"""The columns of a shard as they were as of a time, over rows that are read by the columns of today.

Columns are told by their ids. Each one that is there still has the name, the place and the type of then. One that was
dropped since is left out, as its values are; one that was added since is left out too: no row had it then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from persist.parts.column_types import as_type
from persist.parts.evolution import named_by, newest
from persist.parts.files import Keeps
from persist.parts.keycodec import ALL_KEYS, KeyRange
from persist.parts.migration import Migration
from persist.parts.schema import DIFF, TIME, ShardSchema
from persist.parts.selection import Selected, Selection


def schema_at(sound: Mapping[int, ShardSchema], times: Mapping[int, int], as_of: int) -> int:
    """The id of the newest schema that was there when the time was written; the first one, as of before all."""
    there = [number for number in sound if times.get(number, 0) <= max(as_of, 0)]
    return max(there, default=min(sound))


@dataclass(frozen=True)
class Then:
    """How the columns of today are shown as those of then. `shown` are these, without what was dropped since."""

    shown: ShardSchema
    names: Mapping[str, str]  # of `shown`, with the names of today

    @classmethod
    def of(cls, sound: Mapping[int, ShardSchema], number: int) -> Then:
        then, current = sound[number], newest(sound)[1]
        sources = Migration(then, current).sources
        names = {old: new for new, old in sources.items() if new not in (TIME, DIFF)}
        kept = [name for name in then.arrow.names if name in names]
        return cls(then.some(kept, then.key), names)

    def rows(self, table: pa.Table) -> pa.Table:
        """Rows of columns of today, with what readers add to them, by the columns of then that they have."""
        fields = [field for field in self.shown.arrow if self.names[field.name] in table.column_names]
        added = [name for name in (TIME, DIFF) if name in table.column_names]
        columns = [as_type(table.column(self.names[field.name]), field.type) for field in fields]  # whose values fit
        columns += map(table.column, added)
        return pa.Table.from_arrays(columns, schema=pa.schema([*fields, *map(table.schema.field, added)]))


@dataclass(frozen=True)
class SelectedThen:
    """A selection by the columns of then, of rows that are read by those of today: what `Selected` is else."""

    then: Then
    inner: Selected

    @classmethod
    def of(cls, selection: Selection, then: Then) -> SelectedThen:
        """Raises InvalidUsage as `Selection.on`."""
        return cls(then, selection.on(then.shown))

    @property
    def key_range(self) -> KeyRange:
        """Keys outside of it are not meant; they are encoded as they were then."""
        return self.inner.key_range

    @property
    def is_narrow(self) -> bool:
        """Whether there are keys that are not meant."""
        return self.key_range != ALL_KEYS

    @property
    def keeps(self) -> Keeps | None:
        """Statistics of files tell nothing of columns by other names and types."""
        return None

    @cached_property
    def read(self) -> tuple[str, ...]:
        """The columns to read, by their names of today."""
        wanted = self.then.shown.arrow.names if self.inner.read is None else self.inner.read
        return tuple(self.then.names[name] for name in wanted)

    def apply(self, table: pa.Table) -> pa.Table:
        """The rows that are meant of what was read, with the columns that are shown, and what readers add."""
        found = self.inner.apply(self.then.rows(table))
        wanted = self.then.shown.arrow.names if self.inner.columns is None else self.inner.columns
        return found.select([*wanted, *(name for name in (TIME, DIFF) if name in found.column_names)])


def by_columns(sound: Mapping[int, ShardSchema], number: int | None, selection: Selection) -> Selected | SelectedThen:
    """What is selected, by the columns of that schema (None: of today).

    Raises InvalidUsage as `Selection.on`, and as `selected`.
    """
    if number is None:
        return selected(sound, selection)
    current, schema = newest(sound)
    return selection.on(schema) if number == current else SelectedThen.of(selection, Then.of(sound, number))


def selected(sound: Mapping[int, ShardSchema], selection: Selection) -> Selected:
    """What is selected, by the columns of today.

    Raises InvalidUsage as `Selection.on`, and where a name that is selected by, or shown, means another column than by
    the schema `selection.known`.
    """
    wanted = selection.on(newest(sound)[1])
    named_by(sound, selection.known, None if selection.columns is None else wanted.names)
    return wanted


def shown_by(sound: Mapping[int, ShardSchema], number: int | None) -> ShardSchema:
    """The columns of that schema (None: of today), without those that were dropped since."""
    current, schema = newest(sound)
    return schema if number is None or number == current else Then.of(sound, number).shown
