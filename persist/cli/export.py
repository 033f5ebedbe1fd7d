"""`persist export NAME FILE`: the rows of a shard in a file, which is there as a whole or not at all.

A pipe or a device gets them as they are read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from persist.cli.connection_args import add_client_arguments, client_of
from persist.cli.long_running import ended_by_sigterm
from persist.cli.output_files import is_stdout, replacing
from persist.cli.row_files import FORMATS, form_of
from persist.cli.terminal import AS_OF, Screen, add_schema, add_selection, columns, plain
from persist.client.row_reader import expanded
from persist.client.snapshot import Snapshot
from persist.client.timestamps import read_point
from persist.codecs import rows
from persist.parts import DIFF


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the shard")
    parser.add_argument("file", metavar="FILE", help="where to: .parquet, .csv, .ndjson or .arrow; it is replaced")
    add_client_arguments(parser)
    parser.add_argument("--format", choices=FORMATS, help="if the name of the file does not tell")
    parser.add_argument("--as-of", metavar="POINT", help=AS_OF)
    add_schema(parser)
    add_selection(parser)


def run(arguments: argparse.Namespace) -> int:
    path, form, wanted = Path(arguments.file), form_of(arguments.file, arguments.format), columns(arguments)
    as_of = None if arguments.as_of is None else read_point("--as-of", arguments.as_of)
    with ended_by_sigterm(), client_of(arguments) as client:
        shard = client.shard(arguments.name)
        with (
            shard.snapshot(
                as_of,
                where=arguments.where,
                columns=wanted,
                purpose="persist export",
                wait_s=0.0,
                schema=arguments.schema,
            ) as snapshot,
            replacing(path) as out,
        ):
            count = _write(snapshot, form, out)
    said = sys.stderr if is_stdout(path) else sys.stdout  # rows are not mixed with what is said of them
    if Screen.of(said).is_terminal:
        print(f"{plain(arguments.file)}: {count:,} row{'' if count == 1 else 's'}, as of {snapshot.as_of}", file=said)
    else:
        told = {"shard": arguments.name, "file": arguments.file, "rows": count, "as_of": snapshot.as_of}
        print(json.dumps(told), file=said)
    return 0


def _write(snapshot: Snapshot, form: str, out: BinaryIO) -> int:
    """How many rows were written."""
    count = 0

    def pieces() -> Iterator[pa.Table]:
        nonlocal count
        for table in snapshot.batches():
            for piece in expanded(table):
                count += len(piece)
                yield piece

    for data in rows.write(pieces(), snapshot.empty().drop_columns([DIFF]), form):
        out.write(data)
    return count
