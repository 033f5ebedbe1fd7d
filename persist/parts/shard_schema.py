"""A shard's schema: columns, key, and how rows are converted; with ids, defaults and constraints in its metadata."""

from __future__ import annotations

import dataclasses
import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from persist.core.errors import Corruption, InvalidUsage
from persist.core.frontier import TIME_MAX, TIME_MIN
from persist.core.state import SchemaRecord
from persist.parts.column_types import (
    check_nested_nulls,
    check_storable,
    conform_column,
    empty_column,
    has_parquet_limits,
    has_required_children,
    stored_type,
    without_empty_chunks,
)
from persist.parts.ipc_guard import DeclaredSize, check_schema, is_compressed
from persist.parts.memory_size import row_bytes

# What a schema says of a shard beyond columns and key: ids, defaults and constraints, and how these are kept.
#
# All of it lies in the metadata of the serialized Arrow schema. Per column `persist.id`, a whole number that belongs to
# the column for ever, and `persist.default`, the value of rows that were written without it. Per schema
# `persist.next_id`, the id of the next column, which is kept so that the id of a dropped column never comes back;
# `persist.unique`; and `persist.checks`. A schema without metadata is plain: it means what all schemas meant before
# there were ids.


ID, DEFAULT, NOT_NULL = b"persist.id", b"persist.default", b"persist.not_null"  # of a column
NEXT_ID, UNIQUE, CHECKS = b"persist.next_id", b"persist.unique", b"persist.checks"  # of a schema
# The last field of a schema that is not plain. A client of an older build, which would read columns by their names,
# takes no such field for a column: it refuses rows of the schema, and names the remedy.
GUARD = pa.field("__upgrade_persist_to_read_this", pa.null())
CHECKS_MAX = 64
ID_MAX = 2**31 - 1
DEFAULT_BYTES_MAX = 2048  # encoded: every row of an old part gets the value when it is read


@dataclass(frozen=True, slots=True)
class Check:
    """A predicate (in the language of `where`) that no row may make false, and its name."""

    name: str
    where: str


@dataclass(frozen=True)
class Details:
    """`ids` of the columns, in their order (empty: 1, 2, ... when a schema is made), and what else a schema says.

    `defaults` are pairs of a column's id and the encoded value (`encode_value`) that rows without the column have.
    `unique`: at no time may two rows have one key. `not_null` are the ids of the columns that take no null from this
    schema on, though earlier rows may have some. Both ask nothing of rows that are taken away.
    """

    ids: tuple[int, ...] = ()
    next_id: int = 0
    defaults: tuple[tuple[int, bytes], ...] = dataclasses.field(default=())
    unique: bool = False
    checks: tuple[Check, ...] = ()
    not_null: tuple[int, ...] = ()

    def numbered(self, columns: int) -> Details:
        """With ids, for so many columns. Raises ValueError where the ids cannot be those of a schema."""
        ids = self.ids or tuple(range(1, columns + 1))
        not_null = tuple(sorted(set(self.not_null) & set(ids)))  # what is asked of a column goes with it
        found = replace(self, ids=ids, next_id=max(self.next_id, max(ids, default=0) + 1), not_null=not_null)
        if len(ids) != columns or len(set(ids)) < columns or min(ids, default=1) < 1 or found.next_id > ID_MAX:
            raise ValueError(f"the ids {list(ids)[:20]} are not those of {columns} columns")
        if self.next_id and self.next_id <= max(ids, default=0):
            raise ValueError(f"the next id {self.next_id} is taken")
        if not {number for number, _ in self.defaults} <= set(ids):
            raise ValueError("a default is of no column")
        if len(self.checks) > CHECKS_MAX:
            raise ValueError(f"there are {len(self.checks)} checks; at most {CHECKS_MAX} are kept")
        return found

    @cached_property
    def default_of(self) -> Mapping[int, bytes]:
        """The encoded defaults by the ids of their columns."""
        return dict(self.defaults)


PLAIN = Details()


def encode_value(value: pa.Scalar) -> bytes:
    """A value of any type as bytes: an Arrow stream of one row. The same value gives the same bytes."""
    sink = pa.BufferOutputStream()
    batch = pa.record_batch([pa.repeat(value, 1)], names=[""])
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return bytes(sink.getvalue())


def decode_value(data: bytes, kind: Any) -> pa.Scalar:
    """The value that `encode_value` made bytes of, in this type. Raises ValueError or an ArrowException.

    Somebody may have made the bytes by hand: what would take more than it is long is not decoded.
    """
    check_schema(data)
    declared = DeclaredSize()
    with suppress(StopIteration):
        messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(data))
        while True:
            message = messages.read_next_message()
            declared.add(message)
            if is_compressed(message) or declared.dictionaries or declared.rows > 1:
                raise ValueError("a default is one value, which is not compressed")
    table = pa.ipc.open_stream(pa.py_buffer(data)).read_all()
    table.validate(full=True)
    if table.num_rows != 1 or table.num_columns != 1:
        raise ValueError("a default is one value")
    found = table.column(0)
    return (found if found.type == kind else found.cast(kind))[0]


def write(arrow: pa.Schema, details: Details) -> pa.Schema:
    """The schema with its details as metadata; as it is where it is plain."""
    if details == PLAIN:
        return arrow
    fields = []
    for number, column in zip(details.ids, arrow, strict=True):
        said = {ID: str(number).encode()}
        if (default := details.default_of.get(number)) is not None:
            said[DEFAULT] = b64encode(default)
        if number in details.not_null:
            said[NOT_NULL] = b"true"
        fields.append(column.with_metadata(said))
    told = {NEXT_ID: str(details.next_id).encode()}
    if details.unique:
        told[UNIQUE] = b"true"
    if details.checks:
        pairs = [{"name": check.name, "where": check.where} for check in details.checks]
        told[CHECKS] = json.dumps(pairs, separators=(",", ":")).encode()
    return pa.schema([*fields, GUARD], told)


def read(arrow: pa.Schema) -> tuple[pa.Schema, Details]:
    """The columns of a schema that `write` made, and its details. Raises ValueError where it made none such."""
    told = arrow.metadata or {}
    if NEXT_ID not in told:
        return arrow, PLAIN
    if not len(arrow) or not arrow.field(len(arrow) - 1).equals(GUARD):
        raise ValueError(f"its last field is not {GUARD.name}")
    arrow = pa.schema(list(arrow)[:-1])
    said = [column.metadata or {} for column in arrow]
    if any(ID not in one for one in said):
        raise ValueError("a column has no id")
    ids = [int(one[ID]) for one in said]
    return arrow, Details(
        tuple(ids),
        int(told[NEXT_ID]),
        _defaults(ids, said, arrow),
        told.get(UNIQUE) == b"true",
        _checks(told.get(CHECKS, b"[]")),
        tuple(number for number, one in zip(ids, said, strict=True) if one.get(NOT_NULL) == b"true"),
    ).numbered(len(ids))


def _defaults(
    ids: Sequence[int], said: Iterable[Mapping[bytes, bytes]], arrow: pa.Schema
) -> tuple[tuple[int, bytes], ...]:
    found = []
    for number, one, column in zip(ids, said, arrow, strict=True):
        if DEFAULT in one:
            data = b64decode(one[DEFAULT], validate=True)
            if len(data) > DEFAULT_BYTES_MAX:
                raise ValueError(f"the default of column {column.name!r} takes more than {DEFAULT_BYTES_MAX} bytes")
            if not decode_value(data, column.type).is_valid:
                raise ValueError(f"the default of column {column.name!r} is null")
            found.append((number, data))
    return tuple(found)


def _checks(text: bytes) -> tuple[Check, ...]:
    pairs = json.loads(text)
    if not isinstance(pairs, list) or not all(
        isinstance(pair, dict) and isinstance(pair.get("name"), str) and isinstance(pair.get("where"), str)
        for pair in pairs
    ):
        raise ValueError("the checks are no list of names and predicates")
    return tuple(Check(pair["name"], pair["where"]) for pair in pairs)


# A shard's schema: the user's columns, which of them are the key, and how rows are brought into it.
#
# Rows travel as Arrow tables in `updates_schema`: the user's columns in schema order, then `__time` and `__diff`
# (int64, not null). Dictionary columns are stored decoded, string and binary views as large ones. Keys are flat
# columns; values may be nested.


TIME = "__time"
DIFF = "__diff"
COLUMNS_MAX = 2000
SCHEMAS_KEPT_MAX = 256  # that were read back, in a process
_RESERVED = (pa.field(TIME, pa.int64(), nullable=False), pa.field(DIFF, pa.int64(), nullable=False))


@dataclass(frozen=True)
class ShardSchema:
    """The user's columns (without `__time` and `__diff`), the names of the key columns, and what else is said of them.

    Rows are ordered by the key columns as `key` lists them, then by the other columns by their ids (in a plain schema:
    in schema order), then by time. `former` are names that columns had, with those of today (None: it was dropped).
    Raises InvalidUsage when a column cannot be stored, a key column is absent or nested, or names clash.
    """

    arrow: pa.Schema
    key: tuple[str, ...]
    details: Details = PLAIN
    former: tuple[tuple[str, str | None], ...] = dataclasses.field(
        default=(), compare=False, repr=False
    )  # names: see `no_column`

    def __post_init__(self) -> None:
        if not isinstance(self.arrow, pa.Schema):
            raise InvalidUsage(f"the columns of a shard come as a pyarrow.Schema, not {type(self.arrow).__name__}")
        object.__setattr__(self, "key", tuple(self.key))
        names = self.arrow.names
        if len(names) > COLUMNS_MAX:
            raise InvalidUsage(f"a shard has at most {COLUMNS_MAX} columns, not {len(names)}")
        for name in names:
            if name in (TIME, DIFF):
                raise InvalidUsage(f"column name {name!r} is reserved; rename the column")
            if names.count(name) > 1:
                raise InvalidUsage(f"column {name!r} occurs twice; column names must be unique")
        fields = [pa.field(f.name, stored_type(f.name, f.type), f.nullable) for f in self.arrow]
        object.__setattr__(self, "arrow", pa.schema(fields))
        if not self.key:
            raise InvalidUsage("a shard needs at least one key column")
        for name in self.key:
            if name not in names:
                raise InvalidUsage(f"key column {name!r} is not among the columns {names}")
            if self.key.count(name) > 1:
                raise InvalidUsage(f"key column {name!r} is named twice")
            if pa.types.is_nested(self.arrow.field(name).type):
                raise InvalidUsage(f"key column {name!r} is nested; keys are flat columns")
        if not self.is_plain:
            try:
                object.__setattr__(self, "details", self.details.numbered(len(names)))
            except ValueError as error:
                raise InvalidUsage(f"the schema cannot be one: {error}") from error

    @property
    def is_plain(self) -> bool:
        """Whether it says nothing but columns and key, as every schema did before there were ids."""
        return self.details == PLAIN

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """The ids of the columns, in their order. Those of a plain schema follow from the schemas around it."""
        return self.details.ids or tuple(range(1, len(self.arrow) + 1))

    @cached_property
    def id_of(self) -> dict[str, int]:
        """The ids of the columns by their names."""
        return dict(zip(self.arrow.names, self.ids, strict=True))

    @cached_property
    def name_of(self) -> dict[int, str]:
        """The names of the columns by their ids."""
        return dict(zip(self.ids, self.arrow.names, strict=True))

    @cached_property
    def defaults(self) -> dict[str, pa.Scalar]:
        """The values that rows have which were written without these columns; of other columns it is null."""
        told = self.details.default_of
        return {
            name: decode_value(told[number], self.arrow.field(name).type)
            for name, number in self.id_of.items()
            if number in told
        }

    def no_column(self, name: str, begins: str = "") -> InvalidUsage:
        """The error for a column name that the shard does not have; `former` names say what became of it."""
        for old, new in self.former:
            if old == name and new is not None:
                return InvalidUsage(f"{begins}column {name!r} is called {new!r} now; use that name")
            if old == name:
                return InvalidUsage(f"{begins}column {name!r} was dropped; leave it out")
        return InvalidUsage(
            f"{begins}the shard has no column {name!r:.200}; its columns are {', '.join(self.arrow.names)}"
        )

    def absent(self, name: str, count: int) -> pa.Array:
        """So many values of a value column that a writer does not give: its default, or null.

        Raises InvalidUsage where it has no default and takes no null, and for a key column.
        """
        if name not in self.defaults and (name in self.key or not self.arrow.field(name).nullable):
            raise InvalidUsage(f"column {name!r} is absent from the rows")
        return self.defaulted(name, count)

    def defaulted(self, name: str, count: int) -> pa.Array:
        """So many times the default of a column, which is null where it has none."""
        default = self.defaults.get(name)
        if default is None or not count:
            return pa.nulls(count, self.arrow.field(name).type)
        return pa.repeat(default, count)

    def some(self, names: Iterable[str], key: Sequence[str], extra: Sequence[pa.Field] = ()) -> ShardSchema:
        """These of its columns, and `extra` ones, as a schema by which rows are brought into form."""
        chosen = list(names)
        arrow = pa.schema([*map(self.arrow.field, chosen), *extra])
        if self.is_plain:
            return ShardSchema(arrow, tuple(key))
        first = self.details.next_id
        ids = (*map(self.id_of.__getitem__, chosen), *range(first, first + len(extra)))
        kept = tuple(pair for pair in self.details.defaults if pair[0] in ids)
        return ShardSchema(arrow, tuple(key), Details(ids, first + len(extra), kept), self.former)

    def with_details(self, **changes: Any) -> ShardSchema:
        """The schema with other details (`Details`: `unique`, `checks` ...); ids are given where there were none."""
        return replace(self, details=replace(self.details, **changes).numbered(len(self.arrow)))

    @cached_property
    def updates_schema(self) -> pa.Schema:
        """The user's columns, then `__time` and `__diff` (int64, not null)."""
        return pa.schema([*self.arrow, *_RESERVED])

    @cached_property
    def _targets(self) -> dict[str, pa.Field]:
        """The fields of `updates_schema` by name, in order."""
        return {field.name: field for field in self.updates_schema}

    @cached_property
    def _plain(self) -> frozenset[str]:
        """The columns that hold any value of their type."""
        fields = self._targets.values()
        return frozenset(
            field.name
            for field in fields
            if field.nullable and not has_parquet_limits(field.type) and not pa.types.is_nested(field.type)
        )

    @cached_property
    def value(self) -> tuple[str, ...]:
        """The columns that are not key columns, by their ids: the order in which rows are sorted by them."""
        names = self.arrow.names if self.is_plain else sorted(self.arrow.names, key=self.id_of.__getitem__)
        return tuple(name for name in names if name not in self.key)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The columns in sort order, without the time."""
        return (*self.key, *self.value)

    def columns(self, names: Iterable[str] | None) -> tuple[str, ...]:
        """These of the user's columns (None: all). Raises InvalidUsage at one that the shard has not, or at a twin."""
        chosen = tuple(self.arrow.names if names is None else names)
        for name in chosen:
            if name not in self.arrow.names:
                raise self.no_column(name)
        if len(set(chosen)) != len(chosen):
            raise InvalidUsage(f"a column is named twice in {list(chosen)}")
        return chosen

    def to_record(self) -> SchemaRecord:
        """The durable form. A plain schema gives the bytes that it always gave."""
        return SchemaRecord(write(self.arrow, self.details).serialize().to_pybytes(), self.key)

    @classmethod
    def from_record(cls, record: SchemaRecord) -> ShardSchema:
        """Read a schema back. Raises Corruption when its bytes are no Arrow schema, or one that no shard can have."""
        return _read(record)

    @cached_property
    def _picky(self) -> tuple[tuple[int, pa.Field, bool], ...]:
        """The columns that do not take every value of their type, with their places; and whether Parquet does not."""
        picky = ((place, field, has_parquet_limits(field.type)) for place, field in enumerate(self.updates_schema))
        return tuple(one for one in picky if one[2] or not one[1].nullable)

    @cached_property
    def strict(self) -> tuple[pa.Field, ...]:
        """The columns with something within them that may not be null."""
        return tuple(field for field in self.arrow if has_required_children(field.type))

    @cached_property
    def width(self) -> int:
        """The number of columns that rows have, with those for times and multiplicities."""
        return len(self.updates_schema)

    @cached_property
    def is_flat(self) -> bool:
        """Whether no column has values within values."""
        return not any(pa.types.is_nested(field.type) for field in self.updates_schema)

    @cached_property
    def row_bytes(self) -> int:
        """The bytes that a row takes at least."""
        return row_bytes(self.updates_schema)

    def check_values(self, rows: Any) -> None:
        """Raise InvalidUsage where rows in `updates_schema` hold a null that is not allowed, or what Parquet cannot."""
        for place, field, may_not_fit in self._picky:
            column = rows.column(place)
            if not field.nullable and column.null_count:
                raise InvalidUsage(f"column {field.name!r} holds {column.null_count} nulls but does not allow them")
            if may_not_fit:
                check_storable(column, field)
        for field in self.strict:
            check_nested_nulls(rows.column(field.name), field)

    def conform(self, rows: pa.Table | pa.RecordBatch, default_time: int | None) -> pa.Table:
        """The rows in `updates_schema`: columns ordered and losslessly cast, `__time` and `__diff` filled in.

        `__time` defaults to `default_time`, `__diff` to 1, a value column to its default or null. Raises InvalidUsage,
        naming the column, where one is unknown or not losslessly castable, or absent though it takes no null, a null is
        not allowed, or a time is out of range.
        """
        names = rows.schema.names
        for name in names:
            if name not in self._targets:
                raise self.no_column(name)
        if len(set(names)) != len(names):
            raise InvalidUsage("a column occurs twice in the rows; column names must be unique")
        columns = []
        for name, field in self._targets.items():
            if name in names:
                column = without_empty_chunks(rows.column(name))
                if name not in self._plain or column.type != field.type:
                    column = conform_column(column, field) if len(column) else empty_column(column, field)
                columns.append(column)
            elif name == DIFF:
                columns.append(pa.repeat(1, rows.num_rows))
            elif name == TIME and default_time is not None:
                columns.append(_times(default_time, rows.num_rows))
            elif name == TIME:
                raise InvalidUsage(f"column {name!r} is absent from the rows")
            else:
                columns.append(self.absent(name, rows.num_rows))
        table = pa.Table.from_arrays(columns, schema=self.updates_schema)
        if TIME in names and len(table):
            span = pc.min_max(table.column(TIME)).as_py()
            _check_times(span["min"], span["max"])
        try:
            table.validate(full=True)
        except (pa.ArrowException, ValueError) as error:  # text that is not UTF-8: no reader could show it
            raise InvalidUsage(f"the rows are not sound: {str(error).splitlines()[0]}") from error
        if len(table) != rows.num_rows:
            raise Corruption(f"{rows.num_rows} rows became {len(table)}; it is a fault of persist: report it")
        return table


@lru_cache(SCHEMAS_KEPT_MAX)
def _read(record: SchemaRecord) -> ShardSchema:
    """See `from_record`. Every commit and every read asks for the schemas of its shard, which hardly ever change."""
    try:
        check_schema(record.arrow)
        arrow = pa.ipc.read_schema(pa.py_buffer(record.arrow))
        columns, details = read(arrow)
        return ShardSchema(columns, record.key, details)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Corruption(f"the shard's schema cannot be read: {error}") from error
    except InvalidUsage as error:
        raise Corruption(f"the shard's schema cannot be one: {error.message}") from error


def _times(time: int, count: int) -> pa.Array:
    if not count:
        return pa.array([], pa.int64())
    _check_times(time, time)
    return pa.repeat(pa.scalar(time, pa.int64()), count)


def _check_times(low: int, high: int) -> None:
    if low < TIME_MIN or high > TIME_MAX:
        raise InvalidUsage(f"{TIME} is outside [{TIME_MIN}, {TIME_MAX}]: {low} to {high}")
