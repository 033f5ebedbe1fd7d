"""`persist schema …`: the columns of a shard and its constraints, and changes of them; columns of a new shard.

A line of JSON with the columns, or the constraints, as they are then.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from persist.cli.connection_args import add_client_arguments, add_subcommand, client_of
from persist.codecs.json_rows import signed_zero, to_json_values
from persist.codecs.schema_json import read_changes, read_fields, read_schema, read_type, split_commas
from persist.core.errors import InvalidUsage
from persist.formats.http_messages import named_once
from persist.parts import ShardSchema
from persist.parts.column_types import plain_type
from persist.parts.constraint_checks import constraints_json, not_null

EXIT_BROKEN = 1  # of `constraints --look`: rows break a constraint
# verb -> its line of help, and which of the options below it takes
_CHANGES = {
    "add": ("add a column", ("type", "default", "not_null", "after")),
    "rename": ("rename a column", ("to",)),
    "drop": ("drop a column", ()),
    "move": ("move a column: to the first place, or with --after", ("after",)),
    "widen": ("give a column a wider type", ("type",)),
    "allow-nulls": ("let a column take nulls", ()),
}
_OPTIONS: dict[str, dict[str, Any]] = {
    "to": {"metavar": "NAME", "required": True, "help": "its new name"},
    "type": {"metavar": "TYPE", "required": True, "help": 'its type, as Arrow has it: "int64", "timestamp[ms]"'},
    "default": {"metavar": "JSON", "help": "the value of rows that are written without it"},
    "not_null": {"action": "store_true", "help": "it takes no null, and so needs a default"},
    "after": {"metavar": "NAME", "help": "the column before it"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="do", required=True, metavar="SUBCOMMAND")
    subcommands = [add_subcommand(commands, "show", "show the columns", _columns)]
    for verb, (what, options) in _CHANGES.items():
        subcommands.append(add_subcommand(commands, verb, what, _columns))
        for option in options:
            subcommands[-1].add_argument(f"--{option.replace('_', '-')}", **_OPTIONS[option])
    altering = add_subcommand(commands, "alter", "make several changes in one commit", _columns)
    constraining = add_subcommand(commands, "constraints", "show and set the constraints on rows", _constraints)
    for subcommand in (*subcommands, altering, constraining):
        subcommand.add_argument("name", help="the shard")
        add_client_arguments(subcommand)
    for subcommand in subcommands[1:]:
        subcommand.add_argument("column", help="the column")
    altering.add_argument("changes", help="a JSON list of changes, as HTTP takes it")
    _add_constraints(constraining)


def _add_constraints(parser: argparse.ArgumentParser) -> None:
    unique = parser.add_mutually_exclusive_group()
    unique.add_argument("--unique", action="store_true", default=None, help="a key has at most one row at each time")
    unique.add_argument("--not-unique", action="store_false", dest="unique", help="a key may have several")
    columns = {"--not-null": "takes no null in rows that are added", "--allow-null": "takes nulls again"}
    for option, what in columns.items():
        parser.add_argument(
            option, metavar="COLUMN", action="append", default=[], help=f"this column {what}; may be repeated"
        )
    add_check_argument(parser)
    parser.add_argument(
        "--drop-check", metavar="NAME", action="append", default=[], help="remove this check; may be repeated"
    )
    parser.add_argument("--look", action="store_true", help="check the rows that are there: reads all of them")


def add_check_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--check",
        metavar="TEXT",
        action="append",
        default=[],
        help='a predicate that is false for no row, and its name: "positive: amount > 0"; may be repeated',
    )


def _columns(arguments: argparse.Namespace) -> int:
    changes = None if arguments.do == "show" else read_changes(_wanted(arguments))
    with client_of(arguments) as client:
        shard = client.shard(arguments.name)
        schema = shard.schema if changes is None else shard.alter(*changes)
    columns = {field.name: f"{field.type}{'' if field.nullable else ' not null'}" for field in schema.arrow}
    told = {"shard": arguments.name, "columns": columns, "key": list(schema.key)}
    if schema.defaults:
        told["defaults"] = {name: to_json_values(pa.repeat(value, 1))[0] for name, value in schema.defaults.items()}
    print(json.dumps(told))
    return 0


def _wanted(arguments: argparse.Namespace) -> Any:
    """The changes as HTTP takes them. Raises InvalidUsage."""
    if arguments.do == "alter":
        return _json("the list of changes", arguments.changes)
    given = vars(arguments)
    change = {arguments.do.replace("-", "_"): arguments.column}
    change.update({name: given[name] for name in ("to", "type", "after") if given.get(name) is not None})
    if given.get("default") is not None:
        change["default"] = _json("--default", arguments.default)
    if given.get("not_null"):
        change["nullable"] = False
    return [change]


def _json(what: str, text: str) -> Any:
    try:
        return json.loads(text, parse_int=signed_zero)
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(f"{what} is not valid JSON (a text stands in double quotes): {error}") from None


def _constraints(arguments: argparse.Namespace) -> int:
    added = read_checks(arguments.check)
    with client_of(arguments) as client:
        shard = client.shard(arguments.name)
        columns = _not_null(shard.schema, arguments.not_null, arguments.allow_null)
        checks = _checks(shard.schema, added, arguments.drop_check)
        if arguments.unique is not None or columns is not None or checks is not None:
            shard.set_constraints(unique=arguments.unique, not_null=columns, checks=checks)
        print(json.dumps({"shard": shard.name, **constraints_json(shard.schema)}))
        found = shard.broken_constraints() if arguments.look else []
        for broken in found:
            print(json.dumps({"shard": shard.name, **broken.to_json()}))
    return EXIT_BROKEN if found else 0


def read_checks(given: list[str]) -> dict[str, str]:
    """Checks by their names, of texts such as "positive: amount > 0". Raises InvalidUsage."""
    found: dict[str, str] = {}
    for text in given:
        name, colon, where = text.partition(":")
        if not colon or not where.strip():
            raise InvalidUsage(
                f"--check is {text!r:.100}; write a name, a colon and a predicate: 'positive: amount > 0'"
            )
        if name.strip() in found:
            raise InvalidUsage(f"--check names {name.strip()!r:.100} twice; give one of them another name")
        found[name.strip()] = where.strip()
    return found


def _not_null(schema: ShardSchema, added: list[str], allowed: list[str]) -> list[str] | None:
    if not added and not allowed:
        return None
    for name in schema.columns(dict.fromkeys(allowed)):
        if not schema.arrow.field(name).nullable:
            raise InvalidUsage(f"column {name!r} was made so that it takes no null, which is no constraint that can go")
    return [name for name in dict.fromkeys([*not_null(schema), *added]) if name not in allowed]


def _checks(schema: ShardSchema, added: dict[str, str], dropped: list[str]) -> dict[str, str] | None:
    if not added and not dropped:
        return None
    known = {check.name: check.where for check in schema.details.checks}
    for name in dropped:
        if name not in known:
            raise InvalidUsage(f"the shard has no check {name!r:.100}; its checks are {', '.join(known) or 'none'}")
    return {**{name: where for name, where in known.items() if name not in dropped}, **added}


# The columns of a new shard: as a text tells them, as a file of JSON, or as a file of rows has them.


SCHEMA_CHARS_MAX = 1024 * 1024
NOT_NULL = " not null"


def read_columns(text: str) -> pa.Schema:
    """The columns of `id int64, name string not null, at timestamp[us, UTC]`; lines are as good as commas.

    A name with blanks stands in double quotes. Types are written as Arrow prints them. Raises InvalidUsage.
    """
    if len(text) > SCHEMA_CHARS_MAX:
        raise InvalidUsage(f"a schema has at most {SCHEMA_CHARS_MAX} characters, not {len(text)}")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    texts = [piece.strip() for line in lines for piece in split_commas(line)]
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
