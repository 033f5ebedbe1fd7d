"""`persist shards`, `create`, `drop` and `clone`: which shards there are, and making and dropping them.

Through a server it tells what any client may know: who reads and writes is seen on the machine of the stores.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from persist.cli import row_files
from persist.cli.connection_args import add_client_arguments, check_given, client_of, url_of, where_of
from persist.cli.schema import add_check_argument, read_checks, read_columns, read_schema_file, schema_of
from persist.cli.terminal import Screen, plain
from persist.client.arguments import columns_of
from persist.client.connect import Client
from persist.client.shard_listing import ShardsDropped
from persist.client.timestamps import kept_ms, read_point
from persist.core.batch import HollowBatch
from persist.core.errors import InvalidUsage, PersistError, UnknownShard
from persist.core.ids import check_shard_name
from persist.core.shard_view import ShardView, ViewRequest
from persist.core.state import State
from persist.parts import ShardSchema, current_schema
from persist.parts.constraint_checks import constraints_json

BATCHES_SHOWN = 10


def add_shards(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="show this shard; without it, list all")
    add_client_arguments(parser)
    parser.add_argument("--prefix", default="", help="list the shards whose names begin with this")
    parser.add_argument("--dropped", action="store_true", help="list also names whose shard was dropped")
    parser.add_argument("--json", action="store_true", help="print JSON, a line for each shard")
    parser.add_argument("--names", action="store_true", help="print names alone, a line for each")


def run_shards(arguments: argparse.Namespace) -> int:
    if arguments.name is not None:
        check_shard_name(arguments.name)
    if arguments.names and (arguments.name is not None or arguments.json or arguments.dropped):
        raise InvalidUsage("--names prints names alone: leave out the name, --json and --dropped")
    if arguments.names or url_of(arguments) is not None:
        if arguments.dropped:
            raise InvalidUsage("a server does not tell names whose shard was dropped: ask on the machine of the stores")
        with client_of(arguments) as client:
            _asked(client, arguments)
        return 0
    location = where_of(arguments).open(must_exist=True)
    try:
        if arguments.name is not None:
            _show(details(location.machine(arguments.name).refresh()), arguments.json)
        else:
            found = location.all_names(arguments.prefix, arguments.dropped)
            _list(found, lambda name: summary(location.machine(name).state()), arguments.json)
    finally:
        location.close()
    return 0


def _asked(client: Client, arguments: argparse.Namespace) -> None:
    """What a client knows: names, and of each shard what readers and writers need."""

    def view_of(name: str) -> ShardView:
        return client.transport.view(name, ViewRequest())

    if arguments.names:
        for name in client.shards(arguments.prefix):
            print(name)
    elif arguments.name is not None:
        client.shard(arguments.name)  # or it was dropped
        view = view_of(arguments.name)
        _show({**summary(view), **_schema(view), **_newest(view.batches)}, arguments.json)
    else:
        _list(client.shards(arguments.prefix), lambda name: summary(view_of(name)), arguments.json)


def _list(names: Iterable[str], summary_of: Callable[[str], dict[str, Any]], as_json: bool) -> None:
    if not as_json:
        print(f"{'shard':40} {'since':>12} {'upper':>12} {'batches':>8} {'updates':>12} {'bytes':>14}")
    for name in names:
        try:
            found = summary_of(name)
        except PersistError as error:
            found = {"name": name, "error": error.message}
        if as_json:
            print(json.dumps(found))
        elif "error" in found:
            print(f"{name:40} {found['error']}")
        else:
            since, upper = _frontier(found["since"]), _frontier(found["upper"])
            counts = f"{found['batches']:>8} {found['updates']:>12} {found['bytes']:>14}"
            print(f"{name:40} {since:>12} {upper:>12} {counts}{'  dropped' if found['dropped'] else ''}")


def summary(state: State | ShardView) -> dict[str, Any]:
    """One shard in numbers."""
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
    """One shard with all that keeps it as it is: readers and what they hold, rollups, claims."""
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
            {
                "key": key,
                "owner": claim.owner,
                "lapses_in_s": round((claim.lapses_ms - state.lease_now_ms) / 1000, 1),
            }
            for key, claim in sorted(state.claims.items())
        ],
        **_newest(state.trace.batches),
    }


def _schema(found: State | ShardView) -> dict[str, Any]:
    _, schema = current_schema(found.schemas)
    columns = [
        {"name": f.name, "type": str(f.type), "nullable": f.nullable, "key": f.name in schema.key} for f in schema.arrow
    ]
    asked = constraints_json(schema)
    return {"columns": columns, "schema_id": found.schema_id, **({"constraints": asked} if any(asked.values()) else {})}


def _newest(batches: Sequence[HollowBatch]) -> dict[str, Any]:
    newest = [
        {"interval": str(batch.desc), "updates": batch.rows, "parts": batch.part_count, "bytes": batch.size}
        for batch in batches[-BATCHES_SHOWN:]
    ]
    return {"newest_batches": newest}


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    for key, value in found.items():
        if isinstance(value, list) and key not in ("since", "upper"):
            print(f"{key}: {'' if value else 'none'}")
            for item in value:
                print("  " + ", ".join(f"{k} {v}" for k, v in item.items()))
        else:
            print(f"{key}: {_frontier(value) if isinstance(value, list) else value}")


def _frontier(value: list[int]) -> str:
    return str(value[0]) if value else "closed"


# `persist create NAME`: make a shard, with the columns that a text tells, or those of a file.


def add_create(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the shard")
    add_client_arguments(parser)
    parser.add_argument("--schema", metavar="TEXT", help='its columns: "id int64, name string, at timestamp[us, UTC]"')
    parser.add_argument("--schema-file", metavar="FILE", help="the same in a file, or in JSON as HTTP takes it")
    parser.add_argument("--like", metavar="FILE", help="the columns of this file: CSV, Parquet, NDJSON or Arrow")
    parser.add_argument("--key", metavar="A,B", help="by which columns rows are ordered and found")
    parser.add_argument("--unique", action="store_true", help="a key has at most one row at each time")
    add_check_argument(parser)
    parser.add_argument("--history", metavar="AGE", help="for how long every time stays readable: 7d, none, forever")


def run_create(arguments: argparse.Namespace) -> int:
    check_shard_name(arguments.name)
    if arguments.history is not None:
        kept_ms(arguments.history)
    schema, checks = _new_schema(arguments), read_checks(arguments.check)
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


def _new_schema(arguments: argparse.Namespace) -> ShardSchema:
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


# `persist drop NAME…`: drops shards. It asks first in a terminal; elsewhere it needs --yes.


REFUSED = 2
SHOWN_MAX = 20  # names in the question


def add_drop(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="the shards; or give --prefix")
    add_client_arguments(parser)
    parser.add_argument("--prefix", help="the shards whose names begin with this")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument("--force", action="store_true", help="also those that readers hold")


def run_drop(arguments: argparse.Namespace) -> int:
    with client_of(arguments) as client:
        names, prefix, force = arguments.names or None, arguments.prefix, arguments.force
        chosen = client.drop_shards(names, prefix=prefix, force=force)
        count = len(chosen.outcomes)
        if not arguments.yes and not _is_confirmed(chosen):
            print(f"persist drop: nothing was dropped: {count} would be; give --yes to drop them", file=sys.stderr)
            return REFUSED
        done = client.drop_shards(names, prefix=prefix, confirm=count, force=force) if count else chosen
    print(json.dumps(done.to_json()))
    return 0 if done.complete or not count else 1


def _is_confirmed(chosen: ShardsDropped) -> bool:
    """Whether a person at the terminal says yes."""
    if not sys.stdin.isatty():
        return False
    names = [plain(one.shard) for one in chosen.outcomes[:SHOWN_MAX]]
    more = f" and {len(chosen.outcomes) - SHOWN_MAX} more" if len(chosen.outcomes) > SHOWN_MAX else ""
    print(f"drop {', '.join(names)}{more}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


# `persist clone SOURCE NAME`: a shard under a new name with the contents of another one. Prints JSON.


def add_clone(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="the shard to clone")
    parser.add_argument("name", metavar="NAME", help="of the clone")
    add_client_arguments(parser)
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--at", metavar="TIME", help="the contents of a time such as 416, or of a wall clock")
    when.add_argument("--tag", metavar="TAG", help="the contents of a tag of the source")
    parser.add_argument("--keep-policies", action="store_true", help="let its policy of rows go on at once")


def run_clone(arguments: argparse.Namespace) -> int:
    as_of = None if arguments.at is None else read_point("--at", arguments.at)
    with client_of(arguments) as client:
        made = client.clone(
            arguments.source, arguments.name, as_of=as_of, tag=arguments.tag, keep_policies=arguments.keep_policies
        )
        since, upper = made.since().to_json(), made.upper().to_json()
    print(json.dumps({"shard": arguments.name, "source": arguments.source, "since": since, "upper": upper}))
    return 0
