"""What a schema says of a shard beyond columns and key: ids, defaults and constraints, and how these are kept.

All of it lies in the metadata of the serialized Arrow schema. Per column `persist.id`, a whole number that belongs to
the column for ever, and `persist.default`, the value of rows that were written without it. Per schema
`persist.next_id`, the id of the next column, which is kept so that the id of a dropped column never comes back;
`persist.unique`; and `persist.checks`. A schema without metadata is plain: it means what all schemas meant before
there were ids.
"""

from __future__ import annotations

import dataclasses
import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pyarrow as pa

from persist.parts.arrow_messages import Declared, check_schema, is_compressed

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
    declared = Declared()
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
