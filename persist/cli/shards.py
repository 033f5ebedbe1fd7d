"""`persist shards [NAME]`: which shards there are, or all about one."""

from __future__ import annotations

import argparse
import json
from typing import Any

from persist.cli.where import add_arguments as add_where
from persist.cli.where import where_of
from persist.commit.location import Location
from persist.core.errors import PersistError
from persist.core.ids import check_shard_name
from persist.core.state import State
from persist.parts import current_schema


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="show this shard; without it, list all")
    add_where(parser)
    parser.add_argument("--prefix", default="", help="list the shards whose names begin with this")
    parser.add_argument("--dropped", action="store_true", help="list also names whose shard was dropped")
    parser.add_argument("--json", action="store_true", help="print JSON, a line for each shard")


def run(arguments: argparse.Namespace) -> int:
    location = where_of(arguments).open(must_exist=True)
    try:
        if arguments.name is not None:
            _show(location, check_shard_name(arguments.name), arguments.json)
        else:
            _list(location, arguments)
    finally:
        location.close()
    return 0


def _list(location: Location, arguments: argparse.Namespace) -> None:
    as_json = arguments.json
    if not as_json:
        print(f"{'shard':40} {'since':>12} {'upper':>12} {'batches':>8} {'updates':>12} {'bytes':>14}")
    for name in location.all_names(arguments.prefix, arguments.dropped):
        try:
            found = summary(location.machine(name).state())
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


def summary(state: State) -> dict[str, Any]:
    """One shard in numbers."""
    batches = state.trace.batches
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
        "dropped": state.tombstone or state.is_closed,
    }


def details(state: State) -> dict[str, Any]:
    """One shard with all that keeps it as it is: readers and what they hold, rollups, claims."""
    _, schema = current_schema(state.schemas)
    return {
        **summary(state),
        "columns": [
            {"name": f.name, "type": str(f.type), "nullable": f.nullable, "key": f.name in schema.key}
            for f in schema.arrow
        ],
        "schema_id": state.schema_id,
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
        "newest_batches": [
            {"interval": str(batch.desc), "updates": batch.rows, "parts": batch.part_count, "bytes": batch.size}
            for batch in state.trace.batches[-BATCHES_SHOWN:]
        ],
    }


BATCHES_SHOWN = 10


def _show(location: Location, name: str, as_json: bool) -> None:
    found = details(location.machine(name).refresh())
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
