"""`persist changes NAME`: what was added and removed between two times, or what another shard has more.

A line of JSON for each row, with `__diff`, in key order. Values that JSON has no form for are texts, bytes are hex;
`--parquet FILE` writes them as they are.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa
import pyarrow.parquet as pq

from persist.cli.where import add_client_arguments, client_of
from persist.client.changes import Changes
from persist.client.connect import Client
from persist.client.wall_clock import read_point


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the shard")
    add_client_arguments(parser)
    parser.add_argument("--start", metavar="POINT", required=True, help="a time, or an instant: 2026-11-20T12:00:00Z")
    parser.add_argument("--end", metavar="POINT", help="the same; else the latest complete time")
    parser.add_argument("--other", metavar="NAME", help="the shard that is compared at --end; else this one")
    parser.add_argument("--parquet", metavar="FILE", help="write the rows to this file, in the place of printing them")


def run(arguments: argparse.Namespace) -> int:
    asked = Between.of(("--start", arguments.start), ("--end", arguments.end))
    with client_of(arguments) as client, asked.changes(client, arguments.name, arguments.other) as changes:
        if arguments.parquet is not None:
            _write(changes, arguments.parquet)
        else:
            _show(changes)
    return 0


@dataclass(frozen=True)
class Between:
    """The two times that are compared. `end` None: the latest complete one."""

    start: int | datetime
    end: int | datetime | None

    @classmethod
    def of(cls, start: tuple[str, str], end: tuple[str, str | None]) -> Between:
        """By what was typed, each with the name of its argument. Raises InvalidUsage."""
        return cls(read_point(*start), None if end[1] is None else read_point(end[0], end[1]))

    def changes(self, client: Client, name: str, other: str | None) -> Changes:
        """What the shard, or another one at the end, has more at the end. Raises what `Shard.changes` says."""
        later = None if other is None else client.shard(other)
        return client.shard(name).changes(self.start, self.end, other=later)


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
