"""Shard schemas as JSON: a list of fields for people, a serialized Arrow schema for programs."""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from persist.core.errors import InvalidUsage
from persist.core.state import SchemaRecord
from persist.parts import ShardSchema, current_schema, described
from persist.parts.arrow_messages import check_schema

TYPE_CHARS_MAX = 1_000
_DECIMAL = re.compile(r"decimal(128|256)?\((\d{1,2}),\s*(-?\d{1,2})\)\Z")
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns),\s*(?:tz=)?([A-Za-z0-9_+:/-]{1,64})\]\Z")
_LIST = re.compile(r"list<(.+)>\Z")
_FIXED = re.compile(r"fixed_size_binary\[(\d{1,5})\]\Z")


def read_schema(value: Any) -> ShardSchema:
    """Read `{"fields": [{"name", "type", "key", "nullable"}]}` or `{"schema": base64, "key": [names]}`."""
    if not isinstance(value, dict) or ("fields" in value) == ("schema" in value):
        raise InvalidUsage('the body must be a JSON object with either "fields" or "schema"')
    if "schema" in value:
        key = value.get("key")
        if not isinstance(key, list) or not all(isinstance(name, str) for name in key):
            raise InvalidUsage('"key" must be the list of the key columns\' names')
        try:
            given = b64decode(value["schema"], validate=True)
            check_schema(given)
            arrow = pa.ipc.read_schema(pa.py_buffer(given))
            arrow, details = described.read(arrow)
        except (pa.ArrowException, OSError, ValueError, TypeError) as error:
            raise InvalidUsage(f'"schema" is not a serialized Arrow schema in base64: {error}') from error
        return ShardSchema(arrow, tuple(key), details)
    return ShardSchema(*read_fields(value["fields"]))


def read_fields(fields: Any) -> tuple[pa.Schema, tuple[str, ...]]:
    """The columns of `[{"name", "type", "key", "nullable"}]`, and the names of the key. Raises InvalidUsage."""
    if not isinstance(fields, list):
        raise InvalidUsage('"fields" must be a list of objects with "name" and "type"')
    read = [_field(field) for field in fields]
    return pa.schema([field for field, _ in read]), tuple(field.name for field, key in read if key)


def write_schema(records: Mapping[int, SchemaRecord]) -> list[dict[str, Any]]:
    """The fields of the current one of a shard's schemas, as `read_schema` reads them."""
    _, schema = current_schema(records)
    return [
        {"name": f.name, "type": str(f.type), "nullable": f.nullable, "key": f.name in schema.key} for f in schema.arrow
    ]


def _field(value: Any) -> tuple[pa.Field, bool]:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not isinstance(value.get("type"), str):
        raise InvalidUsage(f'a field is {{"name": text, "type": text}}, not {value!r:.100}')
    unknown = sorted(set(value) - {"name", "type", "key", "nullable"})
    if unknown:
        raise InvalidUsage(f"field {value['name']!r} has the unknown setting {unknown[0]!r}")
    key, nullable = value.get("key", False), value.get("nullable", True)
    if type(key) is not bool or type(nullable) is not bool:
        raise InvalidUsage(f"field {value['name']!r}: key and nullable are true or false")
    return _made(pa.field, value["name"], read_type(value["type"]), nullable, text=value["name"]), key


def read_type(text: str) -> pa.DataType:
    """A type as Arrow prints it: int64, timestamp[us], timestamp[us, tz=UTC], decimal128(10, 2), list<int64>."""
    text = text.strip()
    if len(text) > TYPE_CHARS_MAX:
        raise InvalidUsage(f"a column type of {len(text)} characters is too long; at most {TYPE_CHARS_MAX} are read")
    if found := _DECIMAL.match(text):
        make = pa.decimal256 if found.group(1) == "256" else pa.decimal128
        return _made(make, int(found.group(2)), int(found.group(3)), text=text)
    if found := _TIMESTAMP.match(text):
        return _made(pa.timestamp, found.group(1), found.group(2), text=text)
    if found := _FIXED.match(text):
        return pa.binary(int(found.group(1)))
    if found := _LIST.match(text):
        return pa.list_(read_type(found.group(1).removeprefix("item: ").removeprefix("element: ")))
    return _made(pa.type_for_alias, text, text=text)


def _made(make: Any, *args: Any, text: str) -> pa.DataType:
    try:
        return make(*args)
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise InvalidUsage(f"{text!r} is not a column type that is known here; write it as Arrow does") from error
