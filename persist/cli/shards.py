"""`persist shards`, `create`, `drop` and `clone`: list, create, drop and clone shards.

Through a server it shows less: readers, writers and dropped names are only visible with access to the stores.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

from persist.cli import connection_args, row_files
from persist.cli.connection_args import add_client_arguments, check_given, client_of
from persist.cli.inspect import lines
from persist.cli.schema import add_check_argument, read_checks, read_columns, read_schema_file, schema_of
from persist.cli.terminal import Screen, complain, plain, print_line
from persist.client.arguments import columns_of
from persist.client.client import Client
from persist.client.many_shards import check_names_or_prefix
from persist.client.timestamps import read_point, retention_ms
from persist.core.batch import HollowBatch
from persist.core.errors import InvalidUsage, PersistError, UnknownShard
from persist.core.ids import check_shard_name
from persist.core.shard_view import ShardView, ViewRequest
from persist.core.state import State
from persist.parts import ShardSchema, current_schema
from persist.parts.constraint_checks import constraints_json

BATCHES_SHOWN = 10


def add_shards(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="show this shard; default: list all")
    add_client_arguments(parser)
    parser.add_argument("--prefix", default="", help="list the shards whose names begin with this")
    parser.add_argument("--dropped", action="store_true", help="also list the names of dropped shards")
    parser.add_argument("--json", action="store_true", help="print JSON, a line for each shard")
    parser.add_argument("--names", action="store_true", help="only print names, a line for each")


def run_shards(arguments: argparse.Namespace) -> int:
    if arguments.name is not None:
        check_shard_name(arguments.name)
    if arguments.names and (arguments.name is not None or arguments.json or arguments.dropped):
        raise InvalidUsage("--names only prints names: leave out the name, --json and --dropped")
    if arguments.names or connection_args.url_of(arguments) is not None:
        if arguments.dropped:
            raise InvalidUsage("a server does not list dropped shards: run it with access to the stores")
        with client_of(arguments) as client:
            _show_from_server(client, arguments)
        return 0
    with closing(connection_args.where_of(arguments).open(must_exist=True)) as location:
        if arguments.name is not None:
            _show(details(location.machine(arguments.name).refresh()), arguments.json)
        else:
            names = location.all_names(arguments.prefix, arguments.dropped)
            _list(names, lambda name: summary(location.machine(name).state()), arguments.json)
    return 0


def _show_from_server(client: Client, arguments: argparse.Namespace) -> None:
    """What a server shows: names, and of each shard what readers and writers need."""

    def view_of(name: str) -> ShardView:
        return client.transport.view(name, ViewRequest())

    if arguments.names:
        for name in client.shards(arguments.prefix):
            print_line(name)
    elif arguments.name is not None:
        client.shard(arguments.name)  # raises if it was dropped
        view = view_of(arguments.name)
        _show({**summary(view), **_schema(view), "newest_batches": _newest(view.batches)}, arguments.json)
    else:
        _list(client.shards(arguments.prefix), lambda name: summary(view_of(name)), arguments.json)


def _list(names: Iterable[str], summary_of: Callable[[str], dict[str, Any]], as_json: bool) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        for name in names:
            try:
                yield summary_of(name)
            except PersistError as error:
                yield {"name": name, "error": error.message}

    for line in map(json.dumps, rows()) if as_json else lines(None, rows()):
        print_line(line)


def summary(state: State | ShardView) -> dict[str, Any]:
    """The sizes of a shard."""
    batches = state.batches if isinstance(state, ShardView) else state.trace.batches
    return {
        "name": state.name,
        "id": str(state.shard_id),
        "seqno": int(state.seqno),
        "since": state.since.to_json(),
        "upper": state.upper.to_json(),
        "batches": len(batches),
        "parts": sum(batch.part_count for batch in batches),
        "updates": sum(batch.rows for batch in batches),
        "bytes": sum(batch.size for batch in batches),
        "inline_bytes": sum(batch.inline_size for batch in batches),
        "dropped": state.is_dropped if isinstance(state, ShardView) else state.tombstone or state.is_closed,
    }


def details(state: State) -> dict[str, Any]:
    """A shard with its readers and their holds, rollups and claims."""
    return {
        **summary(state),
        **_schema(state),
        "writers": len(state.writers),
        "readers": [
            {
                "id": str(key),
                "purpose": reader.purpose,
                "since": reader.since.to_json(),
                "seqno": int(reader.seqno),
                "lapses_in_s": round((reader.lapses_ms - state.lease_now_ms) / 1000, 1),
            }
            for key, reader in state.leased_readers.items()
        ],
        "critical_readers": [
            {"id": str(key), "purpose": reader.purpose, "since": reader.since.to_json()}
            for key, reader in state.critical_readers.items()
        ],
        "rollups": [{"seqno": int(seqno), "bytes": rollup.size} for seqno, rollup in sorted(state.rollups.items())],
        "claims": [
            {"key": key, "owner": claim.owner, "lapses_in_s": round((claim.lapses_ms - state.lease_now_ms) / 1000, 1)}
            for key, claim in sorted(state.claims.items())
        ],
        "newest_batches": _newest(state.trace.batches),
    }


def _schema(state: State | ShardView) -> dict[str, Any]:
    _, schema = current_schema(state.schemas)
    columns = [
        {"name": f.name, "type": str(f.type), "nullable": f.nullable, "key": f.name in schema.key} for f in schema.arrow
    ]
    constraints = constraints_json(schema)
    fields = {"columns": columns, "schema_id": state.schema_id}
    return {**fields, "constraints": constraints} if any(constraints.values()) else fields


def _newest(batches: Sequence[HollowBatch]) -> list[dict[str, Any]]:
    return [
        {"interval": str(batch.desc), "updates": batch.rows, "parts": batch.part_count, "bytes": batch.size}
        for batch in batches[-BATCHES_SHOWN:]
    ]


def _show(fields: dict[str, Any], as_json: bool) -> None:
    """Print one shard: as JSON, or its numbers and then each list of its items as a table."""
    if as_json:
        print_line(json.dumps(fields))
        return
    tables = {name: rows for name, rows in fields.items() if isinstance(rows, list) and rows and type(rows[0]) is dict}
    for line in lines({name: value for name, value in fields.items() if name not in tables}, ()):
        print_line(line)
    for name, rows in tables.items():
        print_line(f"{name}:")
        for line in lines(None, rows):
            print_line(f"  {line}")


# `persist create NAME`: create a shard with the columns of a text or a file.


def add_create(parser: argparse.ArgumentParser) -> None:
    connection_args.add_shard_arguments(parser)
    parser.add_argument("--schema", metavar="TEXT", help='its columns: "id int64, name string, at timestamp[us, UTC]"')
    parser.add_argument("--schema-file", metavar="FILE", help="the same in a file, or JSON as in the HTTP API")
    parser.add_argument("--like", metavar="FILE", help="the columns of this file: CSV, Parquet, NDJSON or Arrow")
    parser.add_argument("--key", metavar="A,B", help="the key columns, by which rows are ordered")
    parser.add_argument("--unique", action="store_true", help="a key has at most one row at each time")
    add_check_argument(parser)
    parser.add_argument("--history", metavar="AGE", help="how long history stays readable: 7d, none, forever")


def run_create(arguments: argparse.Namespace) -> int:
    check_shard_name(arguments.name)
    if arguments.history is not None:
        retention_ms(arguments.history)
    schema, checks = _new_schema(arguments), read_checks(arguments.check)
    with client_of(arguments, must_exist=False) as client:
        outcome, text = "created", "created"
        with suppress(UnknownShard):
            client.shard(arguments.name)
            outcome, text = "already there", "exists already"
        created = client.create_shard(
            arguments.name, schema.arrow, schema.key, history=arguments.history, unique=arguments.unique, checks=checks
        ).schema
    if Screen.of(sys.stdout).is_terminal:
        print_line(f"shard {arguments.name} {text}, ordered by {', '.join(created.key)}")
    else:
        columns = {field.name: str(field.type) for field in created.arrow}
        print(json.dumps({"shard": arguments.name, "done": outcome, "columns": columns, "key": list(created.key)}))
    return 0


def _new_schema(arguments: argparse.Namespace) -> ShardSchema:
    check_given(arguments, "key", "schema", "schema_file", "like")
    if sum(option is not None for option in (arguments.schema, arguments.schema_file, arguments.like)) != 1:
        raise InvalidUsage("give the columns by one of --schema, --schema-file and --like")
    key = columns_of(arguments.key)
    if arguments.schema_file is not None:
        return read_schema_file(arguments.schema_file, key)
    if arguments.schema is not None:
        return schema_of(read_columns(arguments.schema), key)
    with row_files.opened([arguments.like], None) as [source]:
        source.check_typed()
        return schema_of(source.inferred(), key)


# `persist drop NAME…`: drop shards. It asks for confirmation in a terminal; elsewhere it requires --yes.

REFUSED = 2
SHOWN_MAX = 20  # names in the question


def add_drop(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="the shards; or give --prefix")
    add_client_arguments(parser)
    parser.add_argument("--prefix", help="the shards whose names begin with this")
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation")
    parser.add_argument("--force", action="store_true", help="also drop shards that have readers")


def run_drop(arguments: argparse.Namespace) -> int:
    with client_of(arguments) as client:
        names, prefix = tuple(dict.fromkeys(arguments.names)), arguments.prefix
        check_names_or_prefix(names or None, prefix, "drop")
        dropped = client.drop_shards(prefix=prefix) if prefix is not None else None  # which only lists them
        names = names if dropped is None else tuple(outcome.shard for outcome in dropped.outcomes)
        if not arguments.yes and not _is_confirmed(names):
            complain("persist drop", f"nothing was dropped: {len(names)} would be; give --yes to drop them")
            return REFUSED
        if dropped is None or names:
            dropped = client.drop_shards(names, force=arguments.force)
    print(json.dumps(dropped.to_json()))
    return 0 if dropped.complete or not names else 1


def _is_confirmed(names: Sequence[str]) -> bool:
    """Ask the user at the terminal."""
    if not sys.stdin.isatty():
        return False
    shown = [plain(name) for name in names[:SHOWN_MAX]]
    more = f" and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else ""
    sys.stderr.write(f"drop {', '.join(shown)}{more}? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


# `persist clone SOURCE NAME`: create a shard with the contents of another one. Prints JSON.


def add_clone(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="the shard to clone")
    parser.add_argument("name", metavar="NAME", help="the name of the clone")
    add_client_arguments(parser)
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--at", metavar="TIME", help="the contents at a time such as 416, or at a wall clock")
    when.add_argument("--tag", metavar="TAG", help="the contents at a tag of the source")
    parser.add_argument("--keep-policies", action="store_true", help="apply its row retention policy at once")


def run_clone(arguments: argparse.Namespace) -> int:
    as_of = None if arguments.at is None else read_point("--at", arguments.at)
    with client_of(arguments) as client:
        tag, keep_policies = arguments.tag, arguments.keep_policies
        made = client.clone(arguments.source, arguments.name, as_of=as_of, tag=tag, keep_policies=keep_policies)
        since, upper = made.since().to_json(), made.upper().to_json()
    print(json.dumps({"shard": arguments.name, "source": arguments.source, "since": since, "upper": upper}))
    return 0
