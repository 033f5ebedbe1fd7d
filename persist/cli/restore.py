"""`persist restore NAME --at POINT`: make the contents of a shard again what they were. Prints a line of JSON."""

from __future__ import annotations

import argparse
import json

from persist.cli.connection_args import add_client_arguments, client_of
from persist.client.arguments import read_attribute
from persist.client.timestamps import read_point


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the shard")
    add_client_arguments(parser)
    parser.add_argument("--at", metavar="POINT", required=True, help="a time, or an instant: 2026-11-20T12:00:00Z")
    parser.add_argument(
        "--attribute",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="set an attribute in the same commit, such as a position; KEY= unsets it; others are kept",
    )
    parser.add_argument("--retries", metavar="N", type=int, default=0, help="how often, if others write meanwhile (0)")


def run(arguments: argparse.Namespace) -> int:
    to = read_point("--at", arguments.at)
    attributes = [read_attribute("--attribute", text) for text in arguments.attribute]
    with client_of(arguments) as client:
        done = client.shard(arguments.name).restore(to, retries=arguments.retries, attributes=attributes)
    print(json.dumps({"shard": arguments.name, **done.to_json()}))
    return 0
