"""`persist cat NAME`: the rows of a shard, as HTTP writes them: a line of JSON for each, or CSV."""

from __future__ import annotations

import argparse
import sys

from persist.cli.where import add_arguments as add_where
from persist.cli.where import where_of
from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.expanding import expanded
from persist.client.snapshot import Snapshot
from persist.client.wall_clock import read_point
from persist.core.errors import InvalidUsage
from rpc import rows
from rpc.routes.parameters import columns_of

FORMATS = ("ndjson", "csv")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the shard")
    add_where(parser)
    parser.add_argument("--as-of", metavar="POINT", help="a time, or an instant: 2026-11-20T12:00:00Z; else the latest")
    parser.add_argument("--where", metavar="PREDICATE", help='only rows for which it is true: "amount > 10"')
    parser.add_argument("--columns", metavar="A,B", help="which columns; else all")
    parser.add_argument("--limit", metavar="N", type=int, help="at most so many rows, the first ones in key order")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="ndjson unless it is given")


def run(arguments: argparse.Namespace) -> int:
    as_of = None if arguments.as_of is None else read_point("--as-of", arguments.as_of)
    location = where_of(arguments).open(must_exist=True)
    try:
        shard = Client(EmbeddedTransport(location)).shard(arguments.name)
        with shard.snapshot(
            as_of,
            where=arguments.where,
            columns=columns_of(arguments.columns),
            limit=arguments.limit,
            purpose="persist cat",
            wait_s=0.0,
        ) as snapshot:
            _show(snapshot, arguments.format)
    finally:
        location.close()
    return 0


def _show(snapshot: Snapshot, form: str) -> None:
    empty = snapshot.empty().drop_columns(["__diff"])
    if not empty.num_columns:
        raise InvalidUsage("--columns names none")
    tables = (piece for table in snapshot.batches() for piece in expanded(table))
    for data in rows.write(tables, empty, form):
        sys.stdout.buffer.write(data)
    sys.stdout.flush()
