"""`persist shards [NAME]`: which shards there are, or all about one.

Through a server it tells what any client may know: who reads and writes is seen on the machine of the stores.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from persist.cli.connection_args import add_client_arguments, client_of, url_of, where_of
from persist.client.connect import Client
from persist.core.batch import HollowBatch
from persist.core.errors import InvalidUsage, PersistError
from persist.core.ids import check_shard_name
from persist.core.shard_view import ShardView, ViewRequest
from persist.core.state import State
from persist.parts import current_schema
from persist.parts.constraint_checks import constraints_json

BATCHES_SHOWN = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="show this shard; without it, list all")
    add_client_arguments(parser)
    parser.add_argument("--prefix", default="", help="list the shards whose names begin with this")
    parser.add_argument("--dropped", action="store_true", help="list also names whose shard was dropped")
    parser.add_argument("--json", action="store_true", help="print JSON, a line for each shard")
    parser.add_argument("--names", action="store_true", help="print names alone, a line for each")


def run(arguments: argparse.Namespace) -> int:
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
