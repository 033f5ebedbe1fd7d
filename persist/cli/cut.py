"""`persist cut NAME…`: a frontier for each of many shards, as JSON. `persist truncate --cut FILE` truncates by it."""

from __future__ import annotations

import argparse

from persist.cli.connection_args import add_client_arguments, client_of
from persist.client.timestamps import read_instant


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="the shards; or give --prefix")
    add_client_arguments(parser)
    parser.add_argument("--prefix", help="the shards whose names begin with this")
    parser.add_argument("--at", metavar="INSTANT", help="what was there by 2026-11-20T12:00:00Z; else by now")
    parser.add_argument(
        "--cursor", action="append", metavar="NAME", help="what this critical reader has passed (may be repeated)"
    )


def run(arguments: argparse.Namespace) -> int:
    at = None if arguments.at is None else read_instant("--at", arguments.at)
    with client_of(arguments) as client:
        cut = client.cut(arguments.names or None, prefix=arguments.prefix, at=at, cursors=arguments.cursor or ())
    print(cut.to_json())
    return 0
