"""`persist drop NAME…`: drops shards. Without --confirm it only tells which, and how many."""

from __future__ import annotations

import argparse
import json

from persist.cli.where import add_client_arguments, client_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="the shards; or give --prefix")
    add_client_arguments(parser)
    parser.add_argument("--prefix", help="the shards whose names begin with this")
    parser.add_argument("--confirm", metavar="N", type=int, help="drop them, if they are so many")
    parser.add_argument("--force", action="store_true", help="also those that readers hold")


def run(arguments: argparse.Namespace) -> int:
    with client_of(arguments) as client:
        done = client.drop_shards(
            arguments.names or None, prefix=arguments.prefix, confirm=arguments.confirm, force=arguments.force
        )
    print(json.dumps(done.to_json()))
    return 0 if done.complete or not done.done else 1
