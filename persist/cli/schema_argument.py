"""The columns of a new shard: as a text tells them, as a file of JSON, or as a file of rows has them."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa

from persist.codecs.schema_json import pieces, read_fields, read_schema, read_type
from persist.core.errors import InvalidUsage
from persist.formats.http_messages import named_once
from persist.parts import ShardSchema
from persist.parts.column_types import plain_type

SCHEMA_CHARS_MAX = 1024 * 1024
NOT_NULL = " not null"


def read_columns(text: str) -> pa.Schema:
    """The columns of `id int64, name string not null, at timestamp[us, UTC]`; lines are as good as commas.

    A name with blanks stands in double quotes. Types are written as Arrow prints them. Raises InvalidUsage.
    """
    if len(text) > SCHEMA_CHARS_MAX:
        raise InvalidUsage(f"a schema has at most {SCHEMA_CHARS_MAX} characters, not {len(text)}")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    texts = [piece.strip() for line in lines for piece in pieces(line)]
    fields = [_field(text) for text in texts if text]
    if not fields:
        raise InvalidUsage('the schema names no column; write it as "id int64, name string"')
    return pa.schema(fields)


def read_schema_file(path: str, key: list[str] | None) -> ShardSchema:
    """The schema in a file: a text as `read_columns` reads it, or JSON as HTTP takes it, which may name the key too.

    Raises InvalidUsage.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(SCHEMA_CHARS_MAX + 1)
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise InvalidUsage(f"the schema file {path!r} cannot be read: {said}") from error
    if not text.lstrip().startswith("{"):
        return schema_of(read_columns(text), key)
    try:
        value = json.loads(text, object_pairs_hook=named_once)
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(f"the schema file {path!r} cannot be read as JSON: {error}") from error
    if key is None or not isinstance(value, dict) or set(value) != {"fields"}:
        found = read_schema(value)
        return found if key is None else schema_of(found.arrow, key)
    return schema_of(read_fields(value["fields"])[0], key)


def schema_of(columns: pa.Schema, key: list[str] | None) -> ShardSchema:
    """The schema of a new shard. Raises InvalidUsage where no shard can have it, or no key is named."""
    if not key:
        raise InvalidUsage("say by which columns rows are ordered and found: --key id, or --key region,id")
    return ShardSchema(columns, tuple(key))


def storable(found: pa.Schema) -> pa.Schema:
    """The columns of a new shard for rows with these: what is only null is text, and seconds are microseconds.

    Dictionaries, run ends and extension types, such as UUID and JSON, become the types that hold their values. The
    items of lists have the name that Arrow gives them: Parquet has another one, and a digest tells them apart.
    """
    return pa.schema([pa.field(field.name, _storable(_plain(field.type)), field.nullable) for field in found])


def _plain(kind: pa.DataType) -> pa.DataType:
    try:
        plain: pa.DataType = plain_type(kind)
    except TypeError:  # a union, which the schema refuses by its name
        return kind
    return plain


def _storable(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_null(kind):
        return pa.string()
    if types.is_timestamp(kind) and kind.unit == "s":
        return pa.timestamp("us", kind.tz)
    if types.is_struct(kind):
        return pa.struct([pa.field(field.name, _storable(field.type), field.nullable) for field in kind])
    if types.is_map(kind):
        return pa.map_(_storable(kind.key_type), _storable(kind.item_type), kind.keys_sorted)
    if types.is_fixed_size_list(kind):
        return pa.list_(_storable(kind.value_type), kind.list_size)
    if types.is_large_list(kind):
        return pa.large_list(_storable(kind.value_type))
    if types.is_list(kind):
        return pa.list_(_storable(kind.value_type))
    return kind


def _field(text: str) -> pa.Field:
    if text.startswith('"'):
        name, _, kind = text[1:].partition('"')
    else:
        name, _, kind = text.partition(" ")
    kind = kind.strip()
    is_not_null = f" {kind.lower()}".endswith(NOT_NULL)
    if is_not_null:
        kind = kind[: len(kind) - len(NOT_NULL.strip())].strip()
    if not name or not kind:
        raise InvalidUsage(f'a column is written as its name and its type, such as "id int64", not {text!r:.100}')
    return pa.field(name, read_type(kind), not is_not_null)
