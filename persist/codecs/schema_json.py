"""Shard schemas and changes of columns as JSON, for HTTP and the command line."""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from persist.codecs.json_rows import UNREADABLE, rows_of_json
from persist.core.errors import InvalidUsage
from persist.core.state import SchemaRecord
from persist.parts import ShardSchema, current_schema, shard_schema
from persist.parts.ipc_guard import check_schema
from persist.parts.schema_changes import (
    CHANGES_MAX,
    AddColumn,
    Change,
    DropColumn,
    MoveColumn,
    RelaxColumn,
    RenameColumn,
    WidenColumn,
)

TYPE_CHARS_MAX = 1_000
_DECIMAL = re.compile(r"(?:decimal(32|64|128|256)?|numeric)\((\d{1,2}),\s*(-?\d{1,2})\)\Z")
_TIMESTAMP = re.compile(r"timestamp\[(s|ms|us|ns),\s*(?:tz=)?([A-Za-z0-9_+:/-]{1,64})\]\Z")
_NESTED = re.compile(r"(list|large_list|fixed_size_list|struct|map)<(.+)>(?:\[(\d{1,9})\])?\Z", re.DOTALL)
_FIXED = re.compile(r"(?:fixed_size_binary\[|binary\()(\d{1,5})[\])]\Z")
_NOT_NULL, _KEYS_SORTED = " not null", "keys_sorted"
_OPEN, _CLOSE = "[(<", "])>"
_SQL = {  # names in other systems for exactly one Arrow type
    "bigint": "int64", "long": "int64", "int": "int32", "integer": "int32", "smallint": "int16", "short": "int16",
    "tinyint": "int8", "byte": "int8", "real": "float", "double precision": "double", "boolean": "bool",
    "varchar": "string", "text": "string", "char": "string", "bytea": "binary", "blob": "binary",
    "varbinary": "binary", "date": "date32",
}  # fmt: skip
_AMBIGUOUS = {  # names in other systems with several meanings, and what to write instead
    "timestamp": "timestamp[us, UTC] for instants, or timestamp[us] for times without a zone",
    "timestamptz": "timestamp[us, UTC]",
    "timestamp with time zone": "timestamp[us, UTC]",
    "timestamp without time zone": "timestamp[us]",
    "timestamp_ntz": "timestamp[us]",
    "timestamp_ltz": "timestamp[us, UTC]",
    "datetime": "timestamp[us, UTC] for instants, or timestamp[us] for times without a zone",
    "time": "time64[us]",
    "interval": "duration[us]",
    "decimal": "decimal128(38, 2), with its precision and scale",
    "numeric": "decimal128(38, 2), with its precision and scale",
    "number": "int64, double or decimal128(38, 2)",
    "uuid": "string, or fixed_size_binary[16]",
    "json": "string, or a struct or map",
    "array": "list<int64>, with the type of its items",
    "list": "list<int64>, with the type of its items",
    "struct": "struct<x: int64, y: string>, with its fields",
    "map": "map<string, int64>, with the types of its keys and values",
}


def read_schema(value: Any) -> ShardSchema:
    """Read `{"fields": [{"name", "type", "key", "nullable"}]}` or `{"schema": base64, "key": [names]}`.

    The former is for people; the latter is a serialized Arrow schema, for programs. Raises InvalidUsage.
    """
    if not isinstance(value, dict) or ("fields" in value) == ("schema" in value):
        raise InvalidUsage('the body must be a JSON object with either "fields" or "schema"')
    if "schema" in value:
        key = value.get("key")
        if not isinstance(key, list) or not all(isinstance(name, str) for name in key):
            raise InvalidUsage('"key" must be the list of the key columns\' names')
        try:
            data = b64decode(value["schema"], validate=True)
            check_schema(data)
            arrow, details = shard_schema.read(pa.ipc.read_schema(pa.py_buffer(data)))
        except (pa.ArrowException, OSError, ValueError, TypeError) as error:
            raise InvalidUsage(f'"schema" is not a serialized Arrow schema in base64: {error}') from error
        return ShardSchema(arrow, tuple(key), details)
    return ShardSchema(*read_fields(value["fields"]))


def read_fields(fields: Any) -> tuple[pa.Schema, tuple[str, ...]]:
    """The columns of `[{"name", "type", "key", "nullable"}]`, and the names of the key. Raises InvalidUsage."""
    if not isinstance(fields, list):
        raise InvalidUsage('"fields" must be a list of objects with "name" and "type"')
    read = [_parse_field(field) for field in fields]
    return pa.schema([field for field, _ in read]), tuple(field.name for field, key in read if key)


def write_schema(records: Mapping[int, SchemaRecord]) -> list[dict[str, Any]]:
    """The fields of a shard's current schema, as `read_schema` reads them."""
    _, schema = current_schema(records)
    return [
        {"name": f.name, "type": str(f.type), "nullable": f.nullable, "key": f.name in schema.key} for f in schema.arrow
    ]


def _parse_field(value: Any) -> tuple[pa.Field, bool]:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not isinstance(value.get("type"), str):
        raise InvalidUsage(f'a field is {{"name": text, "type": text}}, not {value!r:.100}')
    unknown = sorted(set(value) - {"name", "type", "key", "nullable"})
    if unknown:
        raise InvalidUsage(f"field {value['name']!r} has the unknown setting {unknown[0]!r}")
    key, nullable = value.get("key", False), value.get("nullable", True)
    if type(key) is not bool or type(nullable) is not bool:
        raise InvalidUsage(f"field {value['name']!r}: key and nullable are true or false")
    return _make(pa.field, value["name"], read_type(value["type"]), nullable, text=value["name"]), key


def read_type(text: str) -> pa.DataType:
    """A type as Arrow prints it, such as timestamp[us, tz=UTC] or struct<x: int64>, or its SQL name."""
    text = text.strip()
    if len(text) > TYPE_CHARS_MAX:
        raise InvalidUsage(f"a column type of {len(text)} characters is too long; at most {TYPE_CHARS_MAX} are read")
    if match := _DECIMAL.match(text):
        make = {"32": pa.decimal32, "64": pa.decimal64, "256": pa.decimal256}.get(match.group(1), pa.decimal128)
        return _make(make, int(match.group(2)), int(match.group(3)), text=text)
    if match := _TIMESTAMP.match(text):
        return _make(pa.timestamp, match.group(1), match.group(2), text=text)
    if match := _FIXED.match(text):
        return pa.binary(int(match.group(1)))
    if match := _NESTED.match(text):
        return _parse_nested(match.group(1), split_commas(match.group(2)), match.group(3), text)
    lowered = text.lower()
    if (remedy := _AMBIGUOUS.get(lowered.partition("(")[0].partition("<")[0].strip())) is not None:
        raise InvalidUsage(f"{text!r} is not a column type here: write {remedy}")
    if "(" in lowered and (name := _SQL.get(lowered.partition("(")[0].strip())) is not None:
        raise InvalidUsage(f"{text!r} has a length limit, which column types do not have: write {name}")
    return _make(pa.type_for_alias, _SQL.get(lowered, text), text=text)


def split_commas(text: str) -> list[str]:
    """Split a text at its commas, except those in brackets and quotes."""
    parts, start, depth, is_quoted = [], 0, 0, False
    for place, char in enumerate(text):
        if char == '"':
            is_quoted = not is_quoted
        elif not is_quoted and char in _OPEN:
            depth += 1
        elif not is_quoted and char in _CLOSE:
            depth -= 1
        elif char == "," and not depth and not is_quoted:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]


def _parse_nested(what: str, inner: list[str], size: str | None, text: str) -> pa.DataType:
    if what == "struct" and size is None:
        return _make(lambda: pa.struct([_parse_child(part, None) for part in inner]), text=text)
    if what == "map" and size is None:
        is_sorted = len(inner) == 3 and inner[2].strip() == _KEYS_SORTED
        if len(inner) == 2 or is_sorted:
            return pa.map_(read_type(inner[0]), _parse_child(inner[1], "value"), is_sorted)
    elif len(inner) == 1 and (size is not None) == (what == "fixed_size_list"):
        item = _parse_child(inner[0], "item")
        if size is not None:
            return pa.list_(item, int(size))
        return pa.large_list(item) if what == "large_list" else pa.list_(item)
    return _make(pa.type_for_alias, text, text=text)


def _parse_child(text: str, name: str | None) -> pa.Field:
    """`x: int64 not null`; the name is optional if there is a default `name`."""
    kind = text.strip()
    is_not_null = kind.lower().endswith(_NOT_NULL)
    if is_not_null:
        kind = kind[: -len(_NOT_NULL)].rstrip()
    own_name, colon, rest = kind.partition(": ")
    if colon and not any(char in _OPEN for char in own_name):
        return pa.field(own_name, read_type(rest), not is_not_null)
    if name is None:
        raise InvalidUsage(
            f"a field of a struct is written as its name and its type, such as x: int64, not {text!r:.100}"
        )
    return pa.field(name, read_type(kind), not is_not_null)


def _make(constructor: Any, *args: Any, text: str) -> pa.DataType:
    try:
        return constructor(*args)
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise InvalidUsage(f"{text!r} is not a known column type; write it as Arrow does") from error


EXAMPLE = [
    {"add": "currency", "type": "string", "default": "EUR", "after": "state"},
    {"rename": "state", "to": "status"},
    {"widen": "n", "type": "int64"},
    {"allow_nulls": "status"},
    {"move": "n", "after": None},
    {"drop": "note"},
]


def read_changes(wanted: Any) -> list[Change]:
    """The changes from a list of objects in the forms of `EXAMPLE`. Raises InvalidUsage."""
    if not isinstance(wanted, list) or not 0 < len(wanted) <= CHANGES_MAX:
        raise InvalidUsage(f'"changes" is a list of between 1 and {CHANGES_MAX} changes')
    return list(map(_change, wanted))


def _change(change: Any) -> Change:
    verbs = [verb for verb in _FORMS if isinstance(change, dict) and verb in change]
    if len(verbs) != 1:
        raise InvalidUsage(f"a change is an object with one of {', '.join(_FORMS)}, not {change!r:.100}")
    needed, more, make = _FORMS[verbs[0]]
    unknown = sorted(set(change) - {verbs[0], *needed, *more})
    absent = [name for name in needed if name not in change]
    if unknown or absent:
        what = f"has the unknown setting {unknown[0]!r}" if unknown else f"lacks {absent[0]!r}"
        raise InvalidUsage(f"the change {verbs[0]!r} of column {change[verbs[0]]!r:.100} {what}")
    for name in (verbs[0], "to", "type", "after"):
        if name in change and not isinstance(change[name], str) and not (name == "after" and change[name] is None):
            raise InvalidUsage(f"{name!r} of a change is a text, not {change[name]!r:.100}")
    return make(change)


def _add_column(change: Mapping[str, Any]) -> Change:
    nullable = change.get("nullable", True)
    if not isinstance(nullable, bool):
        raise InvalidUsage(f"'nullable' of a change is true or false, not {nullable!r:.100}")
    kind = read_type(change["type"])
    return AddColumn(change["add"], kind, nullable, _default(change, kind), change.get("after"))


def _default(change: Mapping[str, Any], kind: pa.DataType) -> pa.Scalar | None:
    """The default value, in the JSON form of rows."""
    if change.get("default") is None:
        return None
    try:
        return rows_of_json([{"value": change["default"]}], pa.schema([("value", kind)])).column(0)[0]
    except UNREADABLE as error:
        raise InvalidUsage(f"the default of column {change['add']!r:.100} does not fit {kind}: {error}") from error


# verb -> required settings, optional settings, constructor
_FORMS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], Callable[[Mapping[str, Any]], Change]]] = {
    "add": (("type",), ("nullable", "default", "after"), _add_column),
    "rename": (("to",), (), lambda change: RenameColumn(change["rename"], change["to"])),
    "drop": ((), (), lambda change: DropColumn(change["drop"])),
    "move": ((), ("after",), lambda change: MoveColumn(change["move"], change.get("after"))),
    "widen": (("type",), (), lambda change: WidenColumn(change["widen"], read_type(change["type"]))),
    "allow_nulls": ((), (), lambda change: RelaxColumn(change["allow_nulls"])),
}
