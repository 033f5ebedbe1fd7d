"""`persist diff NAME T1 [T2]`: what a shard, or another one, has more at the second time than at the first, and less.

A line of JSON for each row, with `__diff`, in key order; in a terminal with + and -. `--parquet FILE` writes the rows
with their types; the file is there as a whole or not at all.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pyarrow.parquet as pq

from persist.cli import terminal
from persist.cli.connection_args import add_client_arguments, client_of
from persist.cli.long_running import ended_by_sigterm
from persist.cli.output_files import replacing
from persist.cli.terminal import Screen, show_changes
from persist.client.contents_diff import Changes
from persist.client.timestamps import read_point


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the shard")
    parser.add_argument("start", metavar="T1", help="a time, or an instant: 2026-11-20T12:00:00Z")
    parser.add_argument("end", metavar="T2", nargs="?", help="the same; else the latest complete time")
    add_client_arguments(parser)
    parser.add_argument("--other", metavar="NAME", help="the shard that is compared at T2; else this one")
    parser.add_argument("--parquet", metavar="FILE", help="write the rows to this file instead of printing them")
    terminal.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    start = read_point("T1", arguments.start)
    end = None if arguments.end is None else read_point("T2", arguments.end)
    screen = Screen.of(sys.stdout, arguments.no_colour)
    with ended_by_sigterm(), client_of(arguments) as client:
        other = None if arguments.other is None else client.shard(arguments.other)
        with client.shard(arguments.name).changes(start, end, other=other) as changes:
            if arguments.parquet is not None:
                _write(changes, Path(arguments.parquet))
            else:
                for table in changes.batches():
                    show_changes(table, screen)
    return 0


def _write(changes: Changes, path: Path) -> None:
    schema = changes.empty().schema
    with replacing(path) as out, pq.ParquetWriter(out, schema, compression="zstd") as writer:
        for table in changes.batches():
            writer.write_table(table.cast(schema))
