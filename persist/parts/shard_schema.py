"""A shard's schema: the user's columns, the key, ids, defaults and constraints; and the conversion of rows to it.

Rows are Arrow tables in `updates_schema`: the user's columns in schema order, then `__time` and `__diff` (int64, not
null). Dictionary columns are stored decoded, string and binary views as large strings and binaries. Key columns are
flat; values may be nested.

Ids, defaults and constraints are stored in the metadata of the serialized Arrow schema. Per column: `persist.id`, an
integer that identifies the column forever, and `persist.default`, the value in rows that were written without it. Per
schema: `persist.next_id`, the id of the next column, so that the id of a dropped column is not reused,
`persist.unique` and `persist.checks`. A schema without metadata is plain: the form before there were ids.
"""

from __future__ import annotations

import dataclasses
import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from persist.core.errors import Corruption, InvalidUsage, shown
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
from persist.parts.ipc_guard import check_schema, declared_sizes
from persist.parts.memory_size import row_bytes

TIME = "__time"
DIFF = "__diff"
COLUMNS_MAX = 2000
SCHEMAS_KEPT_MAX = 256  # decoded schemas that a process caches
ID, DEFAULT, NOT_NULL = b"persist.id", b"persist.default", b"persist.not_null"  # of a column
NEXT_ID, UNIQUE, CHECKS = b"persist.next_id", b"persist.unique", b"persist.checks"  # of a schema
# The last field of a schema that is not plain. A client of an older version, which would read columns by their names,
# does not support its type: it refuses rows of the schema, and the field's name is the remedy.
GUARD = pa.field("__upgrade_persist_to_read_this", pa.null())
CHECKS_MAX = 64
ID_MAX = 2**31 - 1
DEFAULT_BYTES_MAX = 2048  # encoded: every row of an old part gets the value when it is read
_RESERVED = (pa.field(TIME, pa.int64(), nullable=False), pa.field(DIFF, pa.int64(), nullable=False))


@dataclass(frozen=True, slots=True)
class Check:
    """A named predicate (in the language of `where`) that must not be false for any row."""

    name: str
    where: str


@dataclass(frozen=True)
class Details:
    """The ids, defaults and constraints of a schema.

    `ids` of the columns, in their order (empty: 1, 2, ... when a schema is created). `defaults` are pairs of a column's
    id and the encoded value (`encode_value`) in rows without the column. `unique`: no two rows have the same key at
    any time. `not_null` are the ids of the columns that accept no nulls from this schema on; earlier rows may have
    nulls. Constraints do not apply to retractions.
    """

    ids: tuple[int, ...] = ()
    next_id: int = 0
    defaults: tuple[tuple[int, bytes], ...] = dataclasses.field(default=())
    unique: bool = False
    checks: tuple[Check, ...] = ()
    not_null: tuple[int, ...] = ()

    def numbered(self, columns: int) -> Details:
        """With ids for `columns` columns. Raises ValueError if the details are invalid."""
        ids = self.ids or tuple(range(1, columns + 1))
        not_null = tuple(sorted(set(self.not_null) & set(ids)))  # constraints are dropped with their column
        numbered = replace(self, ids=ids, next_id=max(self.next_id, max(ids, default=0) + 1), not_null=not_null)
        if len(ids) != columns or len(set(ids)) < columns or min(ids, default=1) < 1 or numbered.next_id > ID_MAX:
            raise ValueError(f"the ids {list(ids)[:20]} are not valid for {columns} columns")
        if self.next_id and self.next_id <= max(ids, default=0):
            raise ValueError(f"the next id {self.next_id} is taken")
        if not {number for number, _ in self.defaults} <= set(ids):
            raise ValueError("a default belongs to no column")
        if len(self.checks) > CHECKS_MAX:
            raise ValueError(f"there are {len(self.checks)} checks; at most {CHECKS_MAX} are allowed")
        return numbered

    @cached_property
    def default_of(self) -> Mapping[int, bytes]:
        """The encoded defaults by the ids of their columns."""
        return dict(self.defaults)


PLAIN = Details()


def encode_value(value: pa.Scalar) -> bytes:
    """A value of any type as bytes: an Arrow stream of one row. The encoding is deterministic."""
    sink = pa.BufferOutputStream()
    batch = pa.record_batch([pa.repeat(value, 1)], names=[""])
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return bytes(sink.getvalue())


def decode_value(data: bytes, kind: Any) -> pa.Scalar:
    """The value that `encode_value` encoded, in this type. Raises ValueError or an ArrowException.

    The bytes are untrusted: data that would expand is not decoded.
    """
    check_schema(data)
    for declared in declared_sizes(data):
        if declared.is_compressed or declared.dictionaries or declared.rows > 1:
            raise ValueError("a default is one uncompressed value")
    table = pa.ipc.open_stream(pa.py_buffer(data)).read_all()
    table.validate(full=True)
    if table.num_rows != 1 or table.num_columns != 1:
        raise ValueError("a default is one value")
    column = table.column(0)
    return (column if column.type == kind else column.cast(kind))[0]


def write(arrow: pa.Schema, details: Details) -> pa.Schema:
    """The schema with its details as metadata; unchanged if it is plain."""
    if details == PLAIN:
        return arrow
    fields = []
    for number, column in zip(details.ids, arrow, strict=True):
        metadata = {ID: str(number).encode()}
        if (default := details.default_of.get(number)) is not None:
            metadata[DEFAULT] = b64encode(default)
        if number in details.not_null:
            metadata[NOT_NULL] = b"true"
        fields.append(column.with_metadata(metadata))
    metadata = {NEXT_ID: str(details.next_id).encode()}
    if details.unique:
        metadata[UNIQUE] = b"true"
    if details.checks:
        pairs = [{"name": check.name, "where": check.where} for check in details.checks]
        metadata[CHECKS] = json.dumps(pairs, separators=(",", ":")).encode()
    return pa.schema([*fields, GUARD], metadata)


def read(arrow: pa.Schema) -> tuple[pa.Schema, Details]:
    """The columns of a schema that `write` returned, and its details. Raises ValueError if it is invalid."""
    metadata = arrow.metadata or {}
    if NEXT_ID not in metadata:
        return arrow, PLAIN
    if not len(arrow) or not arrow.field(len(arrow) - 1).equals(GUARD):
        raise ValueError(f"its last field is not {GUARD.name}")
    arrow = pa.schema(list(arrow)[:-1])
    columns = [(column, column.metadata or {}) for column in arrow]
    if any(ID not in of_column for _, of_column in columns):
        raise ValueError("a column has no id")
    return arrow, Details(
        tuple(int(of_column[ID]) for _, of_column in columns),
        int(metadata[NEXT_ID]),
        tuple(
            (int(of_column[ID]), _read_default(column, of_column[DEFAULT]))
            for column, of_column in columns
            if DEFAULT in of_column
        ),
        metadata.get(UNIQUE) == b"true",
        _read_checks(metadata.get(CHECKS, b"[]")),
        tuple(int(of_column[ID]) for _, of_column in columns if of_column.get(NOT_NULL) == b"true"),
    ).numbered(len(columns))


def _read_default(column: pa.Field, text: bytes) -> bytes:
    data = b64decode(text, validate=True)
    if len(data) > DEFAULT_BYTES_MAX:
        raise ValueError(f"the default of column {column.name!r} takes more than {DEFAULT_BYTES_MAX} bytes")
    if not decode_value(data, column.type).is_valid:
        raise ValueError(f"the default of column {column.name!r} is null")
    return data


def _read_checks(text: bytes) -> tuple[Check, ...]:
    pairs = json.loads(text)
    if not isinstance(pairs, list) or not all(
        isinstance(pair, dict) and isinstance(pair.get("name"), str) and isinstance(pair.get("where"), str)
        for pair in pairs
    ):
        raise ValueError("the checks are not a list of names and predicates")
    return tuple(Check(pair["name"], pair["where"]) for pair in pairs)


@dataclass(frozen=True)
class ShardSchema:
    """The user's columns (without `__time` and `__diff`), the names of the key columns, and their details.

    Rows are sorted by the key columns in the order of `key`, then by the other columns in the order of their ids (in a
    plain schema: in schema order), then by time. `former` are earlier names of columns, with the current ones (None: it
    was dropped), for the messages of `no_column`. Raises InvalidUsage if a column cannot be stored, a key column is
    absent or nested, or names are not unique.
    """

    arrow: pa.Schema
    key: tuple[str, ...]
    details: Details = PLAIN
    former: tuple[tuple[str, str | None], ...] = dataclasses.field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.arrow, pa.Schema):
            raise InvalidUsage(f"the columns of a shard are a pyarrow.Schema, not {type(self.arrow).__name__}")
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
                raise InvalidUsage(f"the schema is invalid: {error}") from error

    @property
    def is_plain(self) -> bool:
        """Whether it has only columns and a key, the form before there were ids."""
        return self.details == PLAIN

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """The ids of the columns, in their order. In a plain schema they are positions."""
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
        """The values of columns in rows that were written without them; other columns are null."""
        encoded = self.details.default_of
        return {
            name: decode_value(encoded[number], self.arrow.field(name).type)
            for name, number in self.id_of.items()
            if number in encoded
        }

    def no_column(self, name: str, begins: str = "") -> InvalidUsage:
        """The error for an unknown column, which explains what happened to a column of that former name."""
        for old, new in self.former:
            if old == name and new is not None:
                return InvalidUsage(f"{begins}column {name!r} is called {new!r} now; use that name")
            if old == name:
                return InvalidUsage(f"{begins}column {name!r} was dropped; leave it out")
        return InvalidUsage(
            f"{begins}the shard has no column {shown(name)}; its columns are {', '.join(self.arrow.names)}"
        )

    def absent(self, name: str, count: int) -> pa.Array:
        """`count` values of a column that a writer omits: its default, or null.

        Raises InvalidUsage if it has no default and is not nullable, and for a key column.
        """
        if name not in self.defaults and (name in self.key or not self.arrow.field(name).nullable):
            raise InvalidUsage(f"column {name!r} is absent from the rows")
        return self.defaulted(name, count)

    @cached_property
    def required(self) -> tuple[str, ...]:
        """The key columns without a default: each row must name them, if only as null."""
        return tuple(name for name in self.key if name not in self.defaults)

    def defaulted(self, name: str, count: int) -> pa.Array:
        """The default of a column `count` times; null if it has none."""
        default = self.defaults.get(name)
        if default is None or not count:
            return pa.nulls(count, self.arrow.field(name).type)
        return pa.repeat(default, count)

    def some(self, names: Iterable[str], key: Sequence[str], extra: Sequence[pa.Field] = ()) -> ShardSchema:
        """A schema of some of its columns and `extra` ones, to which rows can be converted."""
        chosen = list(names)
        arrow = pa.schema([*map(self.arrow.field, chosen), *extra])
        if self.is_plain:
            return ShardSchema(arrow, tuple(key))
        first = self.details.next_id
        ids = (*map(self.id_of.__getitem__, chosen), *range(first, first + len(extra)))
        kept = tuple(pair for pair in self.details.defaults if pair[0] in ids)
        return ShardSchema(arrow, tuple(key), Details(ids, first + len(extra), kept), self.former)

    def with_details(self, **changes: Any) -> ShardSchema:
        """The schema with other details (`Details`: `unique`, `checks` ...); ids are assigned if there are none."""
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
        """The columns that can hold any value of their type."""
        return frozenset(
            field.name
            for field in self.updates_schema
            if field.nullable and not has_parquet_limits(field.type) and not pa.types.is_nested(field.type)
        )

    @cached_property
    def value(self) -> tuple[str, ...]:
        """The columns that are not key columns, in sort order: by their ids."""
        names = self.arrow.names if self.is_plain else sorted(self.arrow.names, key=self.id_of.__getitem__)
        return tuple(name for name in names if name not in self.key)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The columns in sort order, without the time."""
        return (*self.key, *self.value)

    def columns(self, names: Iterable[str] | None) -> tuple[str, ...]:
        """These of the user's columns (None: all). Raises InvalidUsage if one is unknown or repeated."""
        chosen = tuple(self.arrow.names if names is None else names)
        for name in chosen:
            if name not in self.arrow.names:
                raise self.no_column(name)
        if len(set(chosen)) != len(chosen):
            raise InvalidUsage(f"a column is named twice in {list(chosen)}")
        return chosen

    def to_record(self) -> SchemaRecord:
        """The durable form."""
        return SchemaRecord(write(self.arrow, self.details).serialize().to_pybytes(), self.key)

    @classmethod
    def from_record(cls, record: SchemaRecord) -> ShardSchema:
        """Decode a schema. Raises Corruption if it is not an Arrow schema, or not valid for a shard."""
        return _read(record)

    @cached_property
    def _limited(self) -> tuple[tuple[int, pa.Field, bool], ...]:
        """The columns that do not accept every value of their type: position, field, and whether Parquet limits it."""
        columns = ((place, field, has_parquet_limits(field.type)) for place, field in enumerate(self.updates_schema))
        return tuple(column for column in columns if column[2] or not column[1].nullable)

    @cached_property
    def with_required_children(self) -> tuple[pa.Field, ...]:
        """The columns with children that must not be null."""
        return tuple(field for field in self.arrow if has_required_children(field.type))

    @cached_property
    def width(self) -> int:
        """The number of columns of rows, including `__time` and `__diff`."""
        return len(self.updates_schema)

    @cached_property
    def is_flat(self) -> bool:
        """Whether no column is nested."""
        return not any(pa.types.is_nested(field.type) for field in self.updates_schema)

    @cached_property
    def row_bytes(self) -> int:
        """The least bytes of a row."""
        return row_bytes(self.updates_schema)

    def check_values(self, rows: Any) -> None:
        """Raise InvalidUsage if rows in `updates_schema` have a forbidden null or a value that Parquet cannot store."""
        for place, field, may_not_fit in self._limited:
            column = rows.column(place)
            if not field.nullable and column.null_count:
                raise InvalidUsage(f"column {field.name!r} holds {column.null_count} nulls but does not allow them")
            if may_not_fit:
                check_storable(column, field)
        for field in self.with_required_children:
            check_nested_nulls(rows.column(field.name), field)

    def conform(self, rows: pa.Table | pa.RecordBatch, default_time: int | None) -> pa.Table:
        """The rows in `updates_schema`: columns ordered and losslessly cast, missing columns filled in.

        `__time` defaults to `default_time`, `__diff` to 1, a value column to its default or null. Raises InvalidUsage,
        naming the column, if one is unknown, cannot be cast losslessly, has a forbidden null, or is absent and not
        nullable; also if a time is out of range.
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
                time = default_time if rows.num_rows else TIME_MIN
                _check_times(time, time)
                columns.append(pa.repeat(pa.scalar(time, pa.int64()), rows.num_rows))
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
        except (pa.ArrowException, ValueError) as error:  # such as text that is not UTF-8, which no reader could show
            raise InvalidUsage(f"the rows are invalid: {str(error).splitlines()[0]}") from error
        if len(table) != rows.num_rows:
            raise Corruption(f"{rows.num_rows} rows became {len(table)}; this is a bug: report it")
        return table


@lru_cache(SCHEMAS_KEPT_MAX)
def _read(record: SchemaRecord) -> ShardSchema:
    """See `from_record`. Every commit and every read needs the schemas of its shard, which rarely change."""
    try:
        check_schema(record.arrow)
        arrow = pa.ipc.read_schema(pa.py_buffer(record.arrow))
        columns, details = read(arrow)
        return ShardSchema(columns, record.key, details)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Corruption(f"the shard's schema cannot be read: {error}") from error
    except InvalidUsage as error:
        raise Corruption(f"the shard's schema is invalid: {error.message}") from error


def _check_times(low: int, high: int) -> None:
    if low < TIME_MIN or high > TIME_MAX:
        raise InvalidUsage(f"{TIME} is outside [{TIME_MIN}, {TIME_MAX}]: {shown(low)} to {shown(high)}")
