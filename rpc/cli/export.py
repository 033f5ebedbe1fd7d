"""`persist export NAME FILE`: the rows of a shard in a file, which is there as a whole or not at all."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from persist.cli.process import ended_by_sigterm
from persist.cli.screen import Screen, plain
from persist.cli.where import add_client_arguments, client_of
from persist.client.expanding import expanded
from persist.client.snapshot import Snapshot
from persist.client.wall_clock import read_point
from persist.core.errors import InvalidUsage
from persist.parts import DIFF
from rpc import rows
from rpc.cli.files import FORMATS, form_of
from rpc.cli.showing import AS_OF, add_selection, columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the shard")
    parser.add_argument("file", metavar="FILE", help="where to: .parquet, .csv, .ndjson or .arrow; it is replaced")
    add_client_arguments(parser)
    parser.add_argument("--format", choices=FORMATS, help="if the name of the file does not tell")
    parser.add_argument("--as-of", metavar="POINT", help=AS_OF)
    add_selection(parser)


def run(arguments: argparse.Namespace) -> int:
    form, wanted = form_of(arguments.file, arguments.format), columns(arguments)
    as_of = None if arguments.as_of is None else read_point("--as-of", arguments.as_of)
    with ended_by_sigterm(), client_of(arguments) as client:
        shard = client.shard(arguments.name)
        with (
            shard.snapshot(
                as_of, where=arguments.where, columns=wanted, purpose="persist export", wait_s=0.0
            ) as snapshot,
            replacing(Path(arguments.file)) as out,
        ):
            count = _write(snapshot, form, out)
    if Screen.of(sys.stdout).is_terminal:
        print(f"{plain(arguments.file)}: {count:,} row{'' if count == 1 else 's'}, as of {snapshot.as_of}")
    else:
        told = {"shard": arguments.name, "file": arguments.file, "rows": count, "as_of": snapshot.as_of}
        print(json.dumps(told))
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


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes this name once it is whole; after an error nothing is left of it. Raises InvalidUsage."""
    if path.is_dir():
        raise InvalidUsage(f"{str(path)!r} is a directory: name a file in it")
    made = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with made.open("xb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        made.replace(path)
    except OSError as error:
        raise InvalidUsage(f"{str(path)!r} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            made.unlink()
