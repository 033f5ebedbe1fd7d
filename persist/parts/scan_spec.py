"""What a read returns: which rows, keys and columns, by the current schema or by the schema as of a time."""

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

KEY_CHARS_MAX = 100_000
_END = b"\x00\x00"  # of a text within an encoded key

Values = tuple[Any, ...]  # of the first columns of a key


@dataclass(frozen=True)
class Selection:
    """The rows for which `where` is true and whose keys are in the bounds, with their `columns` (None: all).

    With `then` the columns have the names and types of the time that is read: see `SchemaAsOf`. `start_key` is
    inclusive, `end_key` exclusive. `key_prefix` has the values of the first key columns; if the last of them is text,
    it is a prefix. `key` is one whole key. `called` are the caller's names of these four. `from_text`: they were parsed
    from text, as in a URL, where "7" is a number. `known` is the id of the schema whose column names are used (None:
    the current one).
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
        """Resolve it for a schema. Raises InvalidUsage if a column is unknown or a comparison is not supported."""
        return Selected(
            schema,
            None if self.where is None else Filter.of(self.where, schema),
            None if self.columns is None else schema.columns(self.columns),
            self._key_range(schema),
        )

    def _key_range(self, schema: ShardSchema) -> KeyRange:
        start, end, prefix = (
            None if values is None else _encode(schema, values, name, self.from_text)
            for values, name in zip((self.start_key, self.end_key, self.key_prefix), self.called[:3], strict=True)
        )
        wanted = KeyRange(start, end)
        if self.key is not None:
            wanted = wanted.meet(_exact_range(schema, self.key, self.called[3], self.from_text))
        if prefix is not None and self.key_prefix is not None:
            last = schema.arrow.field(schema.key[len(self.key_prefix) - 1]).type
            if is_text(last) and self.key_prefix[-1] is not None:
                prefix = prefix.removesuffix(_END)
            wanted = wanted.meet(KeyRange(prefix, successor(prefix)))
        return wanted


@dataclass(frozen=True)
class Selected:
    """A validated selection of a shard's rows. `columns` None: all."""

    schema: ShardSchema
    filter: Filter | None
    columns: tuple[str, ...] | None
    bounds: KeyRange

    @property
    def key_range(self) -> KeyRange:
        """A range that contains all selected keys."""
        return self.bounds if self.filter is None else self.bounds.meet(self.filter.key_range())

    @property
    def is_narrow(self) -> bool:
        """Whether some keys are excluded."""
        return self.key_range != ALL_KEYS

    @property
    def keeps(self) -> RowGroupFilter | None:
        """Which row groups may have selected rows, for `PartReader`."""
        return None if self.filter is None else self.filter.may_match

    @property
    def read(self) -> tuple[str, ...] | None:
        """The columns that `apply` needs: the selected ones, and those in `where`."""
        if self.columns is None or self.filter is None:
            return self.columns
        return (*self.columns, *(name for name in self.filter.columns if name not in self.columns))

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that are named explicitly, without those of the key bounds."""
        return tuple(self.read or (() if self.filter is None else self.filter.columns))

    def check_names(self, known: ShardSchema, who: str) -> None:
        """Raise InvalidUsage if a name of the selection belonged to another column in an earlier schema.

        A stream that continued with that name would not retract the rows that it emitted. `who` is the caller.
        """
        for name, became in moved_names(known, self.schema, self.names):
            raise InvalidUsage(
                f"column {name!r}, by which {who} selects, {became}, and another column has its name: restart from its "
                "frontier, with the current column names"
            )

    def apply(self, table: pa.Table) -> pa.Table:
        """The selected rows of a table that was read, with the selected columns, `__time` and `__diff`."""
        if self.filter is None:
            return table
        rows = self.filter.apply(table)
        if self.columns is None or self.columns == self.read:
            return rows
        return rows.select([*self.columns, *(name for name in (TIME, DIFF) if name in rows.column_names)])

    def no_updates(self) -> pa.Table:
        """An empty table with the selected columns, `__time` and `__diff`."""
        return self.schema.updates_schema.empty_table().select([*self.schema.columns(self.columns), TIME, DIFF])


EVERYTHING = Selection()


def _exact_range(schema: ShardSchema, values: Values, name: str, from_text: bool) -> KeyRange:
    """The range of exactly this key. Raises InvalidUsage if it is not a key of the shard."""
    if len(values) != len(schema.key):
        raise InvalidUsage(f"{name} has {len(values)} values; it needs one for each of {', '.join(schema.key)}")
    for column, value in zip(schema.key, values, strict=True):
        if value is None and not schema.arrow.field(column).nullable:
            raise InvalidUsage(f"{name} is null in column {column!r}, which is never null")
    encoded = _encode(schema, values, name, from_text)
    return KeyRange(encoded, encoded + b"\x00")  # no other key starts with the bytes of a whole key


def read_values(what: str, text: str, decoded: Any = json.loads) -> Values:
    """The values of the first key columns from a text: a JSON list, or the value of the first column.

    `decoded` parses JSON. Raises InvalidUsage naming `what`.
    """
    if len(text) > KEY_CHARS_MAX:
        raise InvalidUsage(f"{what} has {len(text)} characters; at most {KEY_CHARS_MAX}")
    if not text.lstrip().startswith("["):
        return (text,)
    try:
        values = decoded(text)
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(f"{what} is not valid JSON: {error}") from None
    for value in values:
        if isinstance(value, (list, dict)):
            raise InvalidUsage(f"{what} has the value {shown(value)}; key columns are flat")
    return tuple(values)


def _encode(schema: ShardSchema, values: Values, name: str, from_text: bool) -> bytes:
    if not 0 < len(values) <= len(schema.key):
        raise InvalidUsage(f"{name} has {len(values)} values; the key is ({', '.join(schema.key)})")
    try:
        return encode_key(schema, parse_key(schema, values, from_text=from_text))
    except InvalidUsage as error:
        raise InvalidUsage(f"{name}: {error.message}") from error


def schema_at(sound: Mapping[int, ShardSchema], times: Mapping[int, int], as_of: int) -> int:
    """The id of the newest schema that existed at the time; the first schema if it is earlier than all."""
    existing = [number for number in sound if times.get(number, 0) <= max(as_of, 0)]
    return max(existing, default=min(sound))


@dataclass(frozen=True)
class SchemaAsOf:
    """Shows the current columns as they were as of a time, with the names, order and types of then.

    Columns are matched by their ids. Columns that were dropped later are left out, since their values are gone, and so
    are columns that were added later. `shown` is the resulting schema.
    """

    shown: ShardSchema
    names: Mapping[str, str]  # of `shown`, with the current names

    @classmethod
    def of(cls, sound: Mapping[int, ShardSchema], number: int) -> SchemaAsOf:
        then, current = sound[number], newest(sound)[1]
        sources = Migration(then, current).sources
        names = {old: new for new, old in sources.items() if new not in (TIME, DIFF)}
        kept = [name for name in then.arrow.names if name in names]
        return cls(then.some(kept, then.key), names)

    def rows(self, table: pa.Table) -> pa.Table:
        """Rows with current columns, `__time` and `__diff`, converted to the columns of then that they have."""
        fields = [field for field in self.shown.arrow if self.names[field.name] in table.column_names]
        added = [name for name in (TIME, DIFF) if name in table.column_names]
        columns = [as_type(table.column(self.names[field.name]), field.type) for field in fields]  # whose values fit
        columns += map(table.column, added)
        return pa.Table.from_arrays(columns, schema=pa.schema([*fields, *map(table.schema.field, added)]))


@dataclass(frozen=True)
class SelectedAsOf(Selected):
    """As `Selected`, with the columns as of a time, over rows that are read with the current columns."""

    then: SchemaAsOf

    @classmethod
    def of(cls, selection: Selection, then: SchemaAsOf) -> SelectedAsOf:
        """Raises InvalidUsage as `Selection.on`."""
        return cls(**vars(selection.on(then.shown)), then=then)

    @property
    def keeps(self) -> RowGroupFilter | None:
        """None: the statistics of files are those of columns with other names and types."""
        return None

    @cached_property
    def read(self) -> tuple[str, ...]:
        """The columns to read, by their current names."""
        wanted = super().read
        return tuple(self.then.names[name] for name in (self.then.shown.arrow.names if wanted is None else wanted))

    def apply(self, table: pa.Table) -> pa.Table:
        """The selected rows of a table that was read, with the selected columns, `__time` and `__diff`."""
        rows = super().apply(self.then.rows(table))
        wanted = self.then.shown.arrow.names if self.columns is None else self.columns
        return rows.select([*wanted, *(name for name in (TIME, DIFF) if name in rows.column_names)])


def select_by_schema(sound: Mapping[int, ShardSchema], number: int | None, selection: Selection) -> Selected:
    """The selection by the columns of that schema (None: the current one).

    Raises InvalidUsage as `Selection.on` and `resolve_selection`.
    """
    if number is None:
        return resolve_selection(sound, selection)
    current, schema = newest(sound)
    return selection.on(schema) if number == current else SelectedAsOf.of(selection, SchemaAsOf.of(sound, number))


def resolve_selection(sound: Mapping[int, ShardSchema], selection: Selection) -> Selected:
    """The selection by the current columns.

    Raises InvalidUsage as `Selection.on`, and if a name in it belongs to another column than in the schema
    `selection.known`.
    """
    wanted = selection.on(newest(sound)[1])
    current_for_names(sound, selection.known, None if selection.columns is None else wanted.names)
    return wanted


def schema_shown(sound: Mapping[int, ShardSchema], number: int | None) -> ShardSchema:
    """The columns of that schema (None: the current one), without those that were dropped later."""
    current, schema = newest(sound)
    return schema if number is None or number == current else SchemaAsOf.of(sound, number).shown
