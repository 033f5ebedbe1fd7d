"""`persist erased NAME`: how far erasures are, or what still shows rows that were gone before a time. Prints JSON.

The exit code is 0 once nothing is left, and 3 before.
"""

from __future__ import annotations

import argparse
import json

from persist.cli.connection_args import add_client_arguments, client_of
from persist.core.errors import InvalidUsage

LEFT = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the shard")
    add_client_arguments(parser)
    parser.add_argument("--id", metavar="ID", help="this erasure; else all of the shard")
    parser.add_argument("--before", metavar="TIME", type=int, help="rows that were retracted or truncated before it")


def run(arguments: argparse.Namespace) -> int:
    if arguments.id is not None and arguments.before is not None:
        raise InvalidUsage("give --id or --before, not both")
    with client_of(arguments) as client:
        if arguments.before is not None:
            told = [client.shard(arguments.name).erased(before=arguments.before)]
        else:
            shard = client.shard(arguments.name)
            found = shard.erasures().values() if arguments.id is None else [shard.erased(arguments.id)]
            told = [{"shard": arguments.name, **status.to_json()} for status in found]
    for one in told:
        print(json.dumps(one))
    return 0 if all(one["phase"] == "erased" for one in told) else LEFT
