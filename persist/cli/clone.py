"""`persist clone SOURCE NAME`: a shard under a new name with the contents of another one. Prints JSON."""

from __future__ import annotations

import argparse
import json

from persist.cli.connection_args import add_client_arguments, client_of
from persist.client.timestamps import read_point


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="the shard to clone")
    parser.add_argument("name", metavar="NAME", help="of the clone")
    add_client_arguments(parser)
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--at", metavar="TIME", help="the contents of a time such as 416, or of a wall clock")
    when.add_argument("--tag", metavar="TAG", help="the contents of a tag of the source")
    parser.add_argument("--keep-policies", action="store_true", help="let its policy of rows go on at once")


def run(arguments: argparse.Namespace) -> int:
    as_of = None if arguments.at is None else read_point("--at", arguments.at)
    with client_of(arguments) as client:
        made = client.clone(
            arguments.source, arguments.name, as_of=as_of, tag=arguments.tag, keep_policies=arguments.keep_policies
        )
        since, upper = made.since().to_json(), made.upper().to_json()
    print(json.dumps({"shard": arguments.name, "source": arguments.source, "since": since, "upper": upper}))
    return 0
