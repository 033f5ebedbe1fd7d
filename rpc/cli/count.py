"""`persist count NAME`: how many rows a shard has, each counted as often as it is there."""

from __future__ import annotations

import argparse

from persist.cli.where import add_client_arguments, client_of
from persist.client.wall_clock import read_point
from rpc.cli.showing import AS_OF


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the shard")
    add_client_arguments(parser)
    parser.add_argument("--as-of", metavar="POINT", help=AS_OF)
    parser.add_argument("--where", metavar="PREDICATE", help='only rows for which it is true: "amount > 10"')


def run(arguments: argparse.Namespace) -> int:
    as_of = None if arguments.as_of is None else read_point("--as-of", arguments.as_of)
    with client_of(arguments) as client:
        print(client.shard(arguments.name).count(arguments.where, as_of))
    return 0
