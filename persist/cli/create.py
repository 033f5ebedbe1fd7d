"""`persist create NAME`: make a shard, with the columns that a text tells, or those of a file."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress

from persist.cli import row_files
from persist.cli.connection_args import add_client_arguments, check_given, client_of
from persist.cli.schema import add_check_argument, read_checks
from persist.cli.schema_argument import read_columns, read_schema_file, schema_of
from persist.cli.terminal import Screen
from persist.client.arguments import columns_of
from persist.client.timestamps import kept_ms
from persist.core.errors import InvalidUsage, UnknownShard
from persist.core.ids import check_shard_name
from persist.parts import ShardSchema


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the shard")
    add_client_arguments(parser)
    parser.add_argument("--schema", metavar="TEXT", help='its columns: "id int64, name string, at timestamp[us, UTC]"')
    parser.add_argument("--schema-file", metavar="FILE", help="the same in a file, or in JSON as HTTP takes it")
    parser.add_argument("--like", metavar="FILE", help="the columns of this file: CSV, Parquet, NDJSON or Arrow")
    parser.add_argument("--key", metavar="A,B", help="by which columns rows are ordered and found")
    parser.add_argument("--unique", action="store_true", help="a key has at most one row at each time")
    add_check_argument(parser)
    parser.add_argument("--history", metavar="AGE", help="for how long every time stays readable: 7d, none, forever")


def run(arguments: argparse.Namespace) -> int:
    check_shard_name(arguments.name)
    if arguments.history is not None:
        kept_ms(arguments.history)
    schema, checks = _schema(arguments), read_checks(arguments.check)
    with client_of(arguments, must_exist=False) as client:
        is_there = False
        with suppress(UnknownShard):
            client.shard(arguments.name)
            is_there = True
        shard = client.create_shard(
            arguments.name,
            schema.arrow,
            schema.key,
            history=arguments.history,
            unique=arguments.unique,
            checks=checks,
        )
        found = shard.schema
    columns = {field.name: str(field.type) for field in found.arrow}
    done = "already there" if is_there else "created"
    if Screen.of(sys.stdout).is_terminal:
        print(
            f"shard {arguments.name} {'is already there' if is_there else 'created'}, ordered by {', '.join(found.key)}"
        )
    else:
        print(json.dumps({"shard": arguments.name, "done": done, "columns": columns, "key": list(found.key)}))
    return 0


def _schema(arguments: argparse.Namespace) -> ShardSchema:
    check_given(arguments, "key", "schema", "schema_file", "like")
    if sum(one is not None for one in (arguments.schema, arguments.schema_file, arguments.like)) != 1:
        raise InvalidUsage("say which columns it has: give one of --schema, --schema-file and --like")
    key = columns_of(arguments.key)
    if arguments.schema_file is not None:
        return read_schema_file(arguments.schema_file, key)
    if arguments.schema is not None:
        return schema_of(read_columns(arguments.schema), key)
    with row_files.opened([arguments.like], None) as [source]:
        return schema_of(source.inferred(), key)
