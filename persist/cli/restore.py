"""`persist restore NAME --at POINT`: make the contents of a shard again what they were. Prints a line of JSON."""

from __future__ import annotations

import argparse
import json

from persist.cli.where import add_arguments as add_where
from persist.cli.where import where_of
from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.wall_clock import read_point


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the shard")
    add_where(parser)
    parser.add_argument("--at", metavar="POINT", required=True, help="a time, or an instant: 2026-11-20T12:00:00Z")
    parser.add_argument("--retries", metavar="N", type=int, default=0, help="how often, if others write meanwhile (0)")


def run(arguments: argparse.Namespace) -> int:
    to = read_point("--at", arguments.at)
    location = where_of(arguments).open(must_exist=True)
    try:
        done = Client(EmbeddedTransport(location)).shard(arguments.name).restore(to, retries=arguments.retries)
    finally:
        location.close()
    print(json.dumps({"shard": arguments.name, **done.to_json()}))
    return 0
