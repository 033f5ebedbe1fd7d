"""`persist truncate NAME --before POINT`: take away what was there before a time and still is. Prints JSON."""

from __future__ import annotations

import argparse
import json

from persist.cli.where import add_arguments as add_where
from persist.cli.where import where_of
from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.truncate import DROP, RETRACT, mode_of
from persist.client.wall_clock import read_point


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the shard")
    add_where(parser)
    parser.add_argument("--before", metavar="POINT", required=True, help="a time, or an instant: 2026-11-20T12:00:00Z")
    parser.add_argument("--mode", choices=(RETRACT, DROP), default=RETRACT, help="drop: read and write no row")
    parser.add_argument("--dry-run", action="store_true", help="tell how many rows would go, and change nothing")
    parser.add_argument("--retries", metavar="N", type=int, default=0, help="how often, if others write meanwhile (0)")


def run(arguments: argparse.Namespace) -> int:
    before = read_point("--before", arguments.before)
    location = where_of(arguments).open(must_exist=True)
    try:
        shard = Client(EmbeddedTransport(location)).shard(arguments.name)
        done = shard.truncate(
            before, mode=mode_of(arguments.mode), dry_run=arguments.dry_run, retries=arguments.retries
        )
    finally:
        location.close()
    print(json.dumps({"shard": arguments.name, **done.to_json()}))
    return 0
