"""`persist cat`, `tail`, `diff` and `export`: the rows of a shard, and how they change."""

from __future__ import annotations

import argparse
import json
import sys
from threading import Event
from typing import Any

import pyarrow.parquet as pq

from persist.cli import terminal
from persist.cli.connection_args import add_shard_arguments, client_of, shard_of
from persist.cli.long_running import ended_by_sigterm, on_signals
from persist.cli.output_files import STDOUT, is_stdout, output_path, replacing
from persist.cli.row_files import FORMATS, form_of
from persist.cli.terminal import NDJSON, Output, Screen, add_format, add_selection, columns, print_line, show_changes
from persist.client.client import Client
from persist.client.read_api import NOW, THEN
from persist.client.timestamps import read_point
from persist.codecs import rows
from persist.core.errors import InvalidUsage
from persist.core.shard_view import ViewRequest
from persist.core.truncations_and_drops import last_written

# `persist cat NAME`: print the rows as a table in a terminal, else as NDJSON. With --count it prints their number, each
# row counted as often as its diff says.


def _add_snapshot_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--as-of", metavar="POINT", help=terminal.AS_OF)
    help_text = f"{NOW}: the current columns; {THEN}: the columns as of the time"
    parser.add_argument("--schema", choices=(NOW, THEN), default=NOW, help=help_text)
    add_selection(parser)


def _snapshot_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `Shard.snapshot` by those of the command. Raises InvalidUsage."""
    as_of = None if arguments.as_of is None else read_point("--as-of", arguments.as_of)
    selection = {"where": arguments.where, "columns": columns(arguments), "schema": arguments.schema}
    return {"as_of": as_of, **selection, "purpose": f"persist {arguments.command}", "wait_s": 0.0}


def add_cat(parser: argparse.ArgumentParser) -> None:
    add_shard_arguments(parser)
    parser.add_argument("-n", "--limit", metavar="N", type=int, help="at most N rows, the first in key order")
    parser.add_argument("--count", action="store_true", help="only print the number of rows")
    _add_snapshot_arguments(parser)
    add_format(parser)


def run_cat(arguments: argparse.Namespace) -> int:
    output, selection = Output.of(arguments), _snapshot_arguments(arguments)
    others = (arguments.limit, arguments.columns, arguments.format)
    if arguments.count and (arguments.schema != NOW or any(other is not None for other in others)):
        raise InvalidUsage("--count can only be combined with --as-of and --where")
    with shard_of(arguments) as shard:
        if arguments.count:
            print_line(str(shard.count(arguments.where, selection["as_of"])))
            return 0
        with shard.snapshot(**selection, limit=arguments.limit) as snapshot:
            output.show(snapshot)
    return 0


# `persist export NAME FILE`: write the rows to a file atomically. A pipe or a device gets them as they are read.


def add_export(parser: argparse.ArgumentParser) -> None:
    add_shard_arguments(parser)
    parser.add_argument(
        "file", metavar="FILE", help="target: .parquet, .csv, .ndjson or .arrow, which is replaced; -: stdout"
    )
    parser.add_argument("--format", choices=FORMATS, help=f"default: by the name of the file; {NDJSON} for -")
    _add_snapshot_arguments(parser)


def run_export(arguments: argparse.Namespace) -> int:
    path, default = output_path(arguments.file), NDJSON if arguments.file == STDOUT else None
    form = form_of(arguments.file, arguments.format or default)
    selection = _snapshot_arguments(arguments)
    with (
        ended_by_sigterm(),
        shard_of(arguments) as shard,
        shard.snapshot(**selection) as snapshot,
        replacing(path) as out,
    ):
        counted = terminal.CountedRows(snapshot)
        for data in rows.write(iter(counted), counted.empty, form):
            out.write(data)
    report = sys.stderr if is_stdout(path) else sys.stdout  # keep the report out of the rows
    if Screen.of(report).is_terminal:
        print_line(f"{arguments.file}: {counted.summary()}", report)
    else:
        fields = {"shard": arguments.name, "file": arguments.file, "rows": counted.count, "as_of": snapshot.as_of}
        print(json.dumps(fields), file=report)
    return 0


# `persist tail NAME`: print the latest changes; with -f also new ones, until a signal.
#
# A line of JSON for each change, with `__time` and `__diff`; in a terminal with + and -.

TIMES = 10
TIMES_MAX = 1_000_000
WAIT_S = 0.5  # for the next change, before it checks whether it was stopped


def add_tail(parser: argparse.ArgumentParser) -> None:
    add_shard_arguments(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="continue with new changes until Ctrl-C")
    parser.add_argument("-n", "--times", metavar="N", type=int, help=f"the changes at the last N times ({TIMES})")
    parser.add_argument("--as-of", metavar="POINT", help="all changes after a time or an instant; -1: all changes")
    add_selection(parser)
    terminal.add_arguments(parser)


def run_tail(arguments: argparse.Namespace) -> int:
    """0, also after a signal."""
    if arguments.times is not None and arguments.as_of is not None:
        raise InvalidUsage("-n and --as-of are both given; give only one of them")
    times = TIMES if arguments.times is None else arguments.times
    if not 0 <= times <= TIMES_MAX:
        raise InvalidUsage(f"-n is {times}; it must be in [0, {TIMES_MAX}]")
    after = None if arguments.as_of is None else read_point("--as-of", arguments.as_of)
    wanted, screen, stop = columns(arguments), Screen.of(sys.stdout, arguments.no_colour), Event()
    if arguments.follow:
        on_signals(stop.set)
    with client_of(arguments) as client:
        shard = client.shard(arguments.name)
        start = _start_time(client, shard.name, times) if after is None else after
        until = None if arguments.follow else shard.upper()
        with shard.listen(start, until=until, where=arguments.where, columns=wanted, purpose="persist tail") as listen:
            while not listen.done and not stop.is_set():
                for event in listen.next_events(WAIT_S):
                    show_changes(event.updates, screen)
                    if stop.is_set():
                        break
    return 0


def _start_time(client: Client, name: str, times: int) -> int:
    """The time after which the last `times` complete times are, or the oldest readable one."""
    view = client.transport.view(name, ViewRequest())
    oldest = view.since.element or -1
    if view.since.element is None:
        return oldest
    last = view.upper.element
    if last is None:  # it is closed to writes
        last = 1 + last_written((part for batch in view.batches for part in batch.parts()), view.drops)
    return max(last - 1 - times, oldest)


# `persist diff NAME T1 [T2]`: print the difference of a shard, or of two shards, between two times.
#
# A line of JSON for each row, with `__diff`, in key order; in a terminal with + and -. `--parquet FILE` writes the
# rows with their types, atomically.


def add_diff(parser: argparse.ArgumentParser) -> None:
    add_shard_arguments(parser)
    parser.add_argument("start", metavar="T1", help="a time, or an instant: 2026-11-20T12:00:00Z")
    parser.add_argument("end", metavar="T2", nargs="?", help="likewise; default: the latest complete time")
    parser.add_argument("--other", metavar="NAME", help="the shard to compare at T2; default: the same shard")
    parser.add_argument(
        "--parquet", metavar="FILE", help="write the rows to this file instead of printing them; -: stdout"
    )
    terminal.add_arguments(parser)


def run_diff(arguments: argparse.Namespace) -> int:
    start = read_point("T1", arguments.start)
    end = None if arguments.end is None else read_point("T2", arguments.end)
    screen = Screen.of(sys.stdout, arguments.no_colour)
    with ended_by_sigterm(), client_of(arguments) as client:
        other = None if arguments.other is None else client.shard(arguments.other)
        with client.shard(arguments.name).changes(start, end, other=other, wait_s=0.0) as changes:
            if arguments.parquet is None:
                for table in changes.batches():
                    show_changes(table, screen)
                return 0
            schema = changes.empty().schema
            with (
                replacing(output_path(arguments.parquet)) as out,
                pq.ParquetWriter(out, schema, compression="zstd") as writer,
            ):
                for table in changes.batches():
                    writer.write_table(table.cast(schema))
    return 0
