"""`persist drop NAME…`: drops shards. Without --confirm it only tells which, and how many."""

from __future__ import annotations

import argparse
import json

from persist.cli.where import add_arguments as add_where
from persist.cli.where import where_of
from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="the shards; or give --prefix")
    add_where(parser)
    parser.add_argument("--prefix", help="the shards whose names begin with this")
    parser.add_argument("--confirm", metavar="N", type=int, help="drop them, if they are so many")
    parser.add_argument("--force", action="store_true", help="also those that readers hold")


def run(arguments: argparse.Namespace) -> int:
    location = where_of(arguments).open(must_exist=True)
    try:
        client = Client(EmbeddedTransport(location))
        done = client.drop_shards(
            arguments.names or None, prefix=arguments.prefix, confirm=arguments.confirm, force=arguments.force
        )
    finally:
        location.close()
    print(json.dumps(done.to_json()))
    return 0 if done.complete or not done.done else 1
