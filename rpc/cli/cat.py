"""`persist cat NAME`: the rows of a shard: a table in a terminal, else a line of JSON for each, or as it is told."""

from __future__ import annotations

import argparse

from persist.cli.where import add_client_arguments, client_of
from persist.client.wall_clock import read_point
from rpc.cli.showing import AS_OF, Output, add_format, add_schema, add_selection, columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_which(parser)
    parser.add_argument("--limit", metavar="N", type=int, help="at most so many rows, the first ones in key order")


def run(arguments: argparse.Namespace) -> int:
    return show(arguments, arguments.limit)


def add_which(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `show` reads."""
    parser.add_argument("name", help="the shard")
    add_how(parser)


def add_how(parser: argparse.ArgumentParser) -> None:
    """Add those of them that do not say which shard is meant."""
    add_client_arguments(parser)
    parser.add_argument("--as-of", metavar="POINT", help=AS_OF)
    add_schema(parser)
    add_selection(parser)
    add_format(parser)


def show(arguments: argparse.Namespace, limit: int | None) -> int:
    """Show the first rows of what is asked for; None: all of them. The exit code."""
    output, wanted = Output.of(arguments), columns(arguments)
    as_of = None if arguments.as_of is None else read_point("--as-of", arguments.as_of)
    with client_of(arguments) as client:
        shard = client.shard(arguments.name)
        with shard.snapshot(
            as_of,
            where=arguments.where,
            columns=wanted,
            limit=limit,
            purpose="persist cat",
            wait_s=0.0,
            schema=arguments.schema,
        ) as snapshot:
            output.show(snapshot)
    return 0
