"""`persist schema NAME`: the columns of a shard, and changes of them.

A line of JSON with the columns as they are then.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import pyarrow as pa

from persist.cli.connection_args import add_client_arguments, client_of
from persist.codecs.json_rows import plain, signed_zero
from persist.codecs.schema_json import read_changes
from persist.core.errors import InvalidUsage

VERBS = ("show", "add", "rename", "drop", "move", "widen", "allow-nulls", "alter")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the shard")
    parser.add_argument("do", nargs="?", choices=VERBS, default="show", help="what to do with a column")
    parser.add_argument("column", nargs="?", help="the column; for alter: a JSON list of changes, as HTTP takes it")
    add_client_arguments(parser)
    parser.add_argument("--to", metavar="NAME", help="what it is called from here on")
    parser.add_argument("--type", metavar="TYPE", help='its type, as Arrow has it: "int64", "timestamp[ms]"')
    parser.add_argument("--default", metavar="JSON", help="the value of rows that are written without it")
    parser.add_argument("--not-null", action="store_true", help="it takes no null, and so needs a default")
    parser.add_argument("--after", metavar="NAME", help="the column that it stands after")


def run(arguments: argparse.Namespace) -> int:
    changes = None if arguments.do == "show" else read_changes(_wanted(arguments))
    if changes is None and arguments.column is not None:
        raise InvalidUsage(f"`persist schema {arguments.name}` shows all columns; say what to do with one of them")
    with client_of(arguments) as client:
        shard = client.shard(arguments.name)
        schema = shard.schema if changes is None else shard.alter(*changes)
    columns = {field.name: f"{field.type}{'' if field.nullable else ' not null'}" for field in schema.arrow}
    told = {"shard": arguments.name, "columns": columns, "key": list(schema.key)}
    if schema.defaults:
        told["defaults"] = {name: plain(pa.repeat(value, 1))[0] for name, value in schema.defaults.items()}
    print(json.dumps(told))
    return 0


def _wanted(arguments: argparse.Namespace) -> Any:
    """The changes as HTTP takes them. Raises InvalidUsage."""
    if arguments.column is None:
        raise InvalidUsage(f"`persist schema {arguments.name} {arguments.do}` needs a column")
    if arguments.do == "alter":
        return _json("the list of changes", arguments.column)
    change = {arguments.do.replace("-", "_"): arguments.column}
    given = {"to": arguments.to, "type": arguments.type, "after": arguments.after}
    change.update({name: value for name, value in given.items() if value is not None})
    if arguments.default is not None:
        change["default"] = _json("--default", arguments.default)
    if arguments.not_null:
        change["nullable"] = False
    return [change]


def _json(what: str, text: str) -> Any:
    try:
        return json.loads(text, parse_int=signed_zero)
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(f"{what} is not valid JSON (a text stands in double quotes): {error}") from None
