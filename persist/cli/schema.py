"""`persist schema …`: the columns and constraints of a shard, and changes of them; columns of a new shard.

Prints the resulting columns or constraints as a line of JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from persist.cli.connection_args import add_shard_arguments, add_subcommand, shard_of
from persist.codecs.json_rows import signed_zero, to_json_values
from persist.codecs.schema_json import read_changes, read_fields, read_schema, read_type, split_commas
from persist.core.errors import InvalidUsage
from persist.formats.http_messages import named_once
from persist.parts import ShardSchema
from persist.parts.column_types import plain_type
from persist.parts.constraint_checks import constraints_json, not_null

EXIT_BROKEN = 1  # of `constraints --look`: rows violate a constraint
# verb -> its line of help, and which of _OPTIONS it has
_CHANGES = {
    "add": ("add a column", ("type", "default", "not_null", "after")),
    "rename": ("rename a column", ("to",)),
    "drop": ("drop a column", ()),
    "move": ("move a column to the first place, or with --after", ("after",)),
    "widen": ("give a column a wider type", ("type",)),
    "allow-nulls": ("allow nulls in a column", ()),
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "to": {"metavar": "NAME", "required": True, "help": "its new name"},
    "type": {"metavar": "TYPE", "required": True, "help": 'its type in Arrow\'s notation: "int64", "timestamp[ms]"'},
    "default": {"metavar": "JSON", "help": "the value in rows that are written without it"},
    "not_null": {"action": "store_true", "help": "disallow nulls; requires a default"},
    "after": {"metavar": "NAME", "help": "the preceding column"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="do", required=True, metavar="SUBCOMMAND")
    subcommands = [add_subcommand(commands, "show", "show the columns", _columns)]
    for verb, (summary, options) in _CHANGES.items():
        subcommands.append(add_subcommand(commands, verb, summary, _columns))
        for option in options:
            subcommands[-1].add_argument(f"--{option.replace('_', '-')}", **_OPTIONS[option])
    altering = add_subcommand(commands, "alter", "make several changes in one commit", _columns)
    constraining = add_subcommand(commands, "constraints", "show and set the constraints on rows", _constraints)
    for subcommand in (*subcommands, altering, constraining):
        add_shard_arguments(subcommand)
    for subcommand in subcommands[1:]:
        subcommand.add_argument("column", help="the column")
    altering.add_argument("changes", help="a JSON list of changes, in the format of the HTTP API")
    _add_constraints(constraining)


def _add_constraints(parser: argparse.ArgumentParser) -> None:
    unique = parser.add_mutually_exclusive_group()
    unique.add_argument("--unique", action="store_true", default=None, help="a key has at most one row at each time")
    unique.add_argument("--not-unique", action="store_false", dest="unique", help="a key may have several")
    columns = {"--not-null": "takes no nulls in new rows", "--allow-null": "takes nulls again"}
    for option, meaning in columns.items():
        parser.add_argument(
            option, metavar="COLUMN", action="append", default=[], help=f"this column {meaning} (repeatable)"
        )
    add_check_argument(parser)
    parser.add_argument("--drop-check", metavar="NAME", action="append", default=[], help="drop a check (repeatable)")
    parser.add_argument("--look", action="store_true", help="check all existing rows against the constraints")


def add_check_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--check",
        metavar="TEXT",
        action="append",
        default=[],
        help='a name and a predicate that must not be false for any row: "positive: amount > 0"; (repeatable)',
    )


def _columns(arguments: argparse.Namespace) -> int:
    changes = None if arguments.do == "show" else read_changes(_wanted(arguments))
    with shard_of(arguments) as shard:
        schema = shard.schema if changes is None else shard.alter(*changes)
    columns = {field.name: f"{field.type}{'' if field.nullable else ' not null'}" for field in schema.arrow}
    fields = {"shard": arguments.name, "columns": columns, "key": list(schema.key)}
    if schema.defaults:
        fields["defaults"] = {name: to_json_values(pa.repeat(value, 1))[0] for name, value in schema.defaults.items()}
    print(json.dumps(fields))
    return 0


def _wanted(arguments: argparse.Namespace) -> Any:
    """The changes in the format of the HTTP API. Raises InvalidUsage."""
    if arguments.do == "alter":
        return _json("the list of changes", arguments.changes)
    values = vars(arguments)
    change = {arguments.do.replace("-", "_"): arguments.column}
    change.update({name: values[name] for name in ("to", "type", "after") if values.get(name) is not None})
    if values.get("default") is not None:
        change["default"] = _json("--default", arguments.default)
    if values.get("not_null"):
        change["nullable"] = False
    return [change]


def _json(what: str, text: str) -> Any:
    try:
        return json.loads(text, parse_int=signed_zero)
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(f"{what} is not valid JSON (strings need double quotes): {error}") from None


def _constraints(arguments: argparse.Namespace) -> int:
    added = read_checks(arguments.check)
    with shard_of(arguments) as shard:
        columns = _not_null(shard.schema, arguments.not_null, arguments.allow_null)
        checks = _checks(shard.schema, added, arguments.drop_check)
        if arguments.unique is not None or columns is not None or checks is not None:
            shard.set_constraints(unique=arguments.unique, not_null=columns, checks=checks)
        print(json.dumps({"shard": shard.name, **constraints_json(shard.schema)}))
        broken = shard.broken_constraints() if arguments.look else []
        for constraint in broken:
            print(json.dumps({"shard": shard.name, **constraint.to_json()}))
    return EXIT_BROKEN if broken else 0


def read_checks(texts: list[str]) -> dict[str, str]:
    """Parse checks such as "positive: amount > 0" to predicates by name. Raises InvalidUsage."""
    checks: dict[str, str] = {}
    for text in texts:
        name, colon, where = text.partition(":")
        if not colon or not where.strip():
            raise InvalidUsage(f"--check is {text!r:.100}; write a name and a predicate: 'positive: amount > 0'")
        if name.strip() in checks:
            raise InvalidUsage(f"--check names {name.strip()!r:.100} twice; rename one of them")
        checks[name.strip()] = where.strip()
    return checks


def _not_null(schema: ShardSchema, added: list[str], allowed: list[str]) -> list[str] | None:
    if not added and not allowed:
        return None
    for name in schema.columns(dict.fromkeys(allowed)):
        if not schema.arrow.field(name).nullable:
            raise InvalidUsage(f"column {name!r} was created not null, which is not a constraint that can be removed")
    return [name for name in dict.fromkeys([*not_null(schema), *added]) if name not in allowed]


def _checks(schema: ShardSchema, added: dict[str, str], dropped: list[str]) -> dict[str, str] | None:
    if not added and not dropped:
        return None
    known = {check.name: check.where for check in schema.details.checks}
    for name in dropped:
        if name not in known:
            raise InvalidUsage(f"the shard has no check {name!r:.100}; its checks are {', '.join(known) or 'none'}")
    return {**{name: where for name, where in known.items() if name not in dropped}, **added}


# The columns of a new shard: from a text, a JSON file, or a file of rows.

SCHEMA_CHARS_MAX = 1024 * 1024
NOT_NULL = " not null"


def read_columns(text: str) -> pa.Schema:
    """Parse columns such as `id int64, name string not null, at timestamp[us, UTC]`, separated by commas or newlines.

    Names with blanks need double quotes. Types are in Arrow's notation. Raises InvalidUsage.
    """
    if len(text) > SCHEMA_CHARS_MAX:
        raise InvalidUsage(f"a schema has at most {SCHEMA_CHARS_MAX} characters; this one has {len(text)}")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    texts = [piece.strip() for line in lines for piece in split_commas(line)]
    fields = [_field(text) for text in texts if text]
    if not fields:
        raise InvalidUsage('the schema has no columns; write it as "id int64, name string"')
    return pa.schema(fields)


def read_schema_file(path: str, key: list[str] | None) -> ShardSchema:
    """Read a schema file: a text for `read_columns`, or JSON in the format of the HTTP API, which may include the key.

    Raises InvalidUsage.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(SCHEMA_CHARS_MAX + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not valid UTF-8"
        raise InvalidUsage(f"the schema file {path!r} cannot be read: {reason}") from error
    if not text.lstrip().startswith("{"):
        return schema_of(read_columns(text), key)
    try:
        value = json.loads(text, object_pairs_hook=named_once)
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(f"the schema file {path!r} cannot be read as JSON: {error}") from error
    if key is None or not isinstance(value, dict) or set(value) != {"fields"}:
        schema = read_schema(value)
        return schema if key is None else schema_of(schema.arrow, key)
    return schema_of(read_fields(value["fields"])[0], key)


def schema_of(columns: pa.Schema, key: list[str] | None) -> ShardSchema:
    """The schema of a new shard. Raises InvalidUsage if it is invalid, or has no key."""
    if not key:
        raise InvalidUsage("give the key columns, by which rows are ordered and found: --key id, or --key region,id")
    return ShardSchema(columns, tuple(key))


def storable(schema: pa.Schema) -> pa.Schema:
    """The columns of a new shard for rows with these: null columns become strings, and seconds microseconds.

    Dictionary, run-end encoded and extension types, such as UUID and JSON, become the types of their values. List
    items get Arrow's default name: Parquet has another one, and digests depend on it.
    """
    return pa.schema([pa.field(field.name, _storable(_plain(field.type)), field.nullable) for field in schema])


def _plain(kind: pa.DataType) -> pa.DataType:
    try:
        plain: pa.DataType = plain_type(kind)
    except TypeError:  # a union, which the schema rejects with a better message
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
    return pa.list_(_storable(kind.value_type)) if types.is_list(kind) else kind


def _field(text: str) -> pa.Field:
    name, _, type_text = text[1:].partition('"') if text.startswith('"') else text.partition(" ")
    type_text = type_text.strip()
    is_not_null = f" {type_text.lower()}".endswith(NOT_NULL)
    if is_not_null:
        type_text = type_text[: len(type_text) - len(NOT_NULL.strip())].strip()
    if not name or not type_text:
        raise InvalidUsage(f'a column is a name and a type, such as "id int64"; got {text!r:.100}')
    return pa.field(name, read_type(type_text), not is_not_null)
