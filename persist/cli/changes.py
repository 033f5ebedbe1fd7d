"""`persist changes NAME`: what was added and removed between two times, or what another shard has more.

A line of JSON for each row, with `__diff`, in key order. Values that JSON has no form for are texts, bytes are hex;
`--parquet FILE` writes them as they are.
"""

from __future__ import annotations

import argparse
import json

import pyarrow as pa
import pyarrow.parquet as pq

from persist.cli.where import add_arguments as add_where
from persist.cli.where import where_of
from persist.client.changes import Changes
from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.wall_clock import read_point


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the shard")
    add_where(parser)
    parser.add_argument("--start", metavar="POINT", required=True, help="a time, or an instant: 2026-11-20T12:00:00Z")
    parser.add_argument("--end", metavar="POINT", help="the same; else the latest complete time")
    parser.add_argument("--other", metavar="NAME", help="the shard that is compared at --end; else this one")
    parser.add_argument("--parquet", metavar="FILE", help="write the rows to this file, in the place of printing them")


def run(arguments: argparse.Namespace) -> int:
    start = read_point("--start", arguments.start)
    end = None if arguments.end is None else read_point("--end", arguments.end)
    location = where_of(arguments).open(must_exist=True)
    try:
        client = Client(EmbeddedTransport(location))
        other = None if arguments.other is None else client.shard(arguments.other)
        with client.shard(arguments.name).changes(start, end, other=other) as changes:
            if arguments.parquet is not None:
                _write(changes, arguments.parquet)
            else:
                _show(changes)
    finally:
        location.close()
    return 0


def _write(changes: Changes, path: str) -> None:
    with pq.ParquetWriter(path, changes.empty().schema, compression="zstd") as writer:
        for table in changes.batches():
            writer.write_table(table.cast(writer.schema))


def _show(changes: Changes) -> None:
    for table in changes.batches():
        for row in _rows(table):
            print(row)


def _rows(table: pa.Table) -> list[str]:
    return [json.dumps(row, default=_text, ensure_ascii=False) for row in table.to_pylist()]


def _text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
