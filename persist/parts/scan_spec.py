"""What a read returns: which rows, of which keys, which columns, by the schema of now or of a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa

from persist.core.errors import InvalidUsage, shown
from persist.parts.column_types import as_type
from persist.parts.filter_eval import Filter
from persist.parts.key_encoding import ALL_KEYS, KeyRange, encode_key, successor
from persist.parts.part_files import RowGroupFilter
from persist.parts.python_values import is_text, parse_key
from persist.parts.schema_evolution import Migration, current_for_names, moved_names, newest
from persist.parts.shard_schema import DIFF, TIME, ShardSchema

# What a read gives of a shard: which rows, of which keys, and which of their columns.


KEY_CHARS_MAX = 100_000
_END = b"\x00\x00"  # of a text within an encoded key

Values = tuple[Any, ...]  # of the first columns of a key


@dataclass(frozen=True)
class Selection:
    """The rows for which `where` is true and whose keys lie in the bounds, and of them `columns` (None: all).

    With `then` the columns are those of the time that is read, in names and types: see `persist.parts.scan_spec`.
    `start_key` is inclusive, `end_key` exclusive. `key_prefix` gives the values of the first key columns; where the
    last of them is text, everything that begins with it is meant. `key` is one whole key. `called` are the names of
    these four for the caller. `from_text` is set where they were read from text, as in a URL: "7" is a number there.
    `known` is the id of the schema by which the columns are named (None: the current one).
    """

    where: str | None = None
    start_key: Values | None = None
    end_key: Values | None = None
    key_prefix: Values | None = None
    key: Values | None = None
    columns: tuple[str, ...] | None = None
    called: tuple[str, str, str, str] = ("start_key", "end_key", "key_prefix", "key")
    then: bool = False
    from_text: bool = field(default=False, compare=False)
    known: int | None = field(default=None, compare=False)

    def on(self, schema: ShardSchema) -> Selected:
        """What it means for a shard. Raises InvalidUsage where the shard has no such column, or cannot compare so."""
        return Selected(
            schema,
            None if self.where is None else Filter.of(self.where, schema),
            None if self.columns is None else schema.columns(self.columns),
            self._key_range(schema),
        )

    def _key_range(self, schema: ShardSchema) -> KeyRange:
        start, end, prefix = (
            None if values is None else _encoded(schema, values, name, self.from_text)
            for values, name in zip((self.start_key, self.end_key, self.key_prefix), self.called[:3], strict=True)
        )
        wanted = KeyRange(start, end)
        if self.key is not None:
            wanted = wanted.meet(_whole(schema, self.key, self.called[3], self.from_text))
        if prefix is not None and self.key_prefix is not None:
            last = schema.arrow.field(schema.key[len(self.key_prefix) - 1]).type
            if is_text(last) and self.key_prefix[-1] is not None:
                prefix = prefix.removesuffix(_END)
            wanted = wanted.meet(KeyRange(prefix, successor(prefix)))
        return wanted


@dataclass(frozen=True)
class Selected:
    """A selection of a shard's rows, checked. `columns` None: all."""

    schema: ShardSchema
    filter: Filter | None
    columns: tuple[str, ...] | None
    bounds: KeyRange

    @property
    def key_range(self) -> KeyRange:
        """Keys outside of it are not meant."""
        return self.bounds if self.filter is None else self.bounds.meet(self.filter.key_range())

    @property
    def is_narrow(self) -> bool:
        """Whether there are keys that are not meant."""
        return self.key_range != ALL_KEYS

    @property
    def keeps(self) -> RowGroupFilter | None:
        """Which row groups may have rows that are meant, as `PartReader` asks."""
        return None if self.filter is None else self.filter.may_match

    @property
    def read(self) -> tuple[str, ...] | None:
        """The columns to read, which `apply` needs: those that are shown, and what `where` looks at."""
        if self.columns is None or self.filter is None:
            return self.columns
        return (*self.columns, *(name for name in self.filter.columns if name not in self.columns))

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that are named, beside those of the bounds of keys."""
        return tuple(self.read or (() if self.filter is None else self.filter.columns))

    def check_names(self, known: ShardSchema, who: str) -> None:
        """Raise InvalidUsage where a name of the selection meant another column by an earlier schema of the chain.

        A stream that went on by that name would not take away what it gave. `who` is what selects.
        """
        for name, became in moved_names(known, self.schema, self.names):
            raise InvalidUsage(
                f"column {name!r}, by which {who} selects, {became}, and another column has its name: begin anew from "
                "its frontier, with the columns as they are named now"
            )

    def apply(self, table: pa.Table) -> pa.Table:
        """The rows that are meant of what was read, with the columns that are shown, `__time` and `__diff`."""
        if self.filter is None:
            return table
        found = self.filter.apply(table)
        if self.columns is None or self.columns == self.read:
            return found
        return found.select([*self.columns, *(name for name in (TIME, DIFF) if name in found.column_names)])

    def no_updates(self) -> pa.Table:
        """A table of the columns that are shown, `__time` and `__diff`, without rows."""
        return self.schema.updates_schema.empty_table().select([*self.schema.columns(self.columns), TIME, DIFF])


EVERYTHING = Selection()


def _whole(schema: ShardSchema, values: Values, name: str, from_text: bool) -> KeyRange:
    """The range of exactly this key. Raises InvalidUsage where it is no key of the shard."""
    if len(values) != len(schema.key):
        raise InvalidUsage(f"{name} has {len(values)} values; it needs one for each of {', '.join(schema.key)}")
    for column, value in zip(schema.key, values, strict=True):
        if value is None and not schema.arrow.field(column).nullable:
            raise InvalidUsage(f"{name} is null in column {column!r}, which is never null")
    encoded = _encoded(schema, values, name, from_text)
    return KeyRange(encoded, encoded + b"\x00")  # no other key begins with the bytes of a whole one


def read_values(what: str, text: str, decoded: Any = json.loads) -> Values:
    """The values of the first key columns that a text gives: a JSON list, or the value of the first one as it is.

    `decoded` reads JSON. Raises InvalidUsage naming `what`.
    """
    if len(text) > KEY_CHARS_MAX:
        raise InvalidUsage(f"{what} has {len(text)} characters; at most {KEY_CHARS_MAX}")
    if not text.lstrip().startswith("["):
        return (text,)
    try:
        found = decoded(text)
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(f"{what} is not valid JSON: {error}") from None
    for value in found:
        if isinstance(value, (list, dict)):
            raise InvalidUsage(f"{what} has the value {shown(value)}; a key has none such")
    return tuple(found)


def _encoded(schema: ShardSchema, values: Values, name: str, from_text: bool) -> bytes:
    if not 0 < len(values) <= len(schema.key):
        raise InvalidUsage(f"{name} has {len(values)} values; the key is ({', '.join(schema.key)})")
    try:
        return encode_key(schema, parse_key(schema, values, from_text=from_text))
    except InvalidUsage as error:
        raise InvalidUsage(f"{name}: {error.message}") from error


# The columns of a shard as they were as of a time, over rows that are read by the columns of today.
#
# Columns are told by their ids. Each one that is there still has the name, the place and the type of then. One that was
# dropped since is left out, as its values are; one that was added since is left out too: no row had it then.


def schema_at(sound: Mapping[int, ShardSchema], times: Mapping[int, int], as_of: int) -> int:
    """The id of the newest schema that was there when the time was written; the first one, as of before all."""
    there = [number for number in sound if times.get(number, 0) <= max(as_of, 0)]
    return max(there, default=min(sound))


@dataclass(frozen=True)
class SchemaAsOf:
    """How the columns of today are shown as those of then. `shown` are these, without what was dropped since."""

    shown: ShardSchema
    names: Mapping[str, str]  # of `shown`, with the names of today

    @classmethod
    def of(cls, sound: Mapping[int, ShardSchema], number: int) -> SchemaAsOf:
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
class SelectedAsOf:
    """A selection by the columns of then, of rows that are read by those of today: what `Selected` is else."""

    then: SchemaAsOf
    inner: Selected

    @classmethod
    def of(cls, selection: Selection, then: SchemaAsOf) -> SelectedAsOf:
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
    def keeps(self) -> RowGroupFilter | None:
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


def select_by_schema(
    sound: Mapping[int, ShardSchema], number: int | None, selection: Selection
) -> Selected | SelectedAsOf:
    """What is selected, by the columns of that schema (None: of today).

    Raises InvalidUsage as `Selection.on`, and as `resolve_selection`.
    """
    if number is None:
        return resolve_selection(sound, selection)
    current, schema = newest(sound)
    return selection.on(schema) if number == current else SelectedAsOf.of(selection, SchemaAsOf.of(sound, number))


def resolve_selection(sound: Mapping[int, ShardSchema], selection: Selection) -> Selected:
    """What is selected, by the columns of today.

    Raises InvalidUsage as `Selection.on`, and where a name that is selected by, or shown, means another column than by
    the schema `selection.known`.
    """
    wanted = selection.on(newest(sound)[1])
    current_for_names(sound, selection.known, None if selection.columns is None else wanted.names)
    return wanted


def schema_shown(sound: Mapping[int, ShardSchema], number: int | None) -> ShardSchema:
    """The columns of that schema (None: of today), without those that were dropped since."""
    current, schema = newest(sound)
    return schema if number is None or number == current else SchemaAsOf.of(sound, number).shown
