"""`persist cat NAME`: the rows of a shard: a table in a terminal, else a line of JSON for each, or as it is told.

With --count it prints how many there are, each counted as often as it is there.
"""

from __future__ import annotations

import argparse

from persist.cli.connection_args import add_client_arguments, client_of
from persist.cli.terminal import AS_OF, Output, add_format, add_schema, add_selection, columns
from persist.client.timestamps import read_point
from persist.core.errors import InvalidUsage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the shard")
    parser.add_argument("-n", "--limit", metavar="N", type=int, help="at most so many rows, the first in key order")
    parser.add_argument("--count", action="store_true", help="only how many rows there are")
    add_client_arguments(parser)
    parser.add_argument("--as-of", metavar="POINT", help=AS_OF)
    add_schema(parser)
    add_selection(parser)
    add_format(parser)


def run(arguments: argparse.Namespace) -> int:
    output, wanted = Output.of(arguments), columns(arguments)
    as_of = None if arguments.as_of is None else read_point("--as-of", arguments.as_of)
    if arguments.count and not (arguments.limit is None and wanted is None and arguments.format is None):
        raise InvalidUsage("--count goes with --as-of and --where alone")
    with client_of(arguments) as client:
        shard = client.shard(arguments.name)
        if arguments.count:
            print(shard.count(arguments.where, as_of))
            return 0
        with shard.snapshot(
            as_of,
            where=arguments.where,
            columns=wanted,
            limit=arguments.limit,
            purpose="persist cat",
            wait_s=0.0,
            schema=arguments.schema,
        ) as snapshot:
            output.show(snapshot)
    return 0
