"""`persist truncate NAME --before POINT`: take away what was there before a time and still is. Prints JSON.

`persist truncate --cut FILE` does it in every shard of a cut: a line for each, and exit code 1 where one refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from persist.cli.connection_args import add_client_arguments, client_of
from persist.client.rewrites import DROP, RETRACT, mode_of
from persist.client.stream_cuts import TEXT_CHARS_MAX, Cut
from persist.client.timestamps import read_point
from persist.core.errors import InvalidUsage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="the shard; without it, give --cut")
    add_client_arguments(parser)
    parser.add_argument("--before", metavar="POINT", help="a time, or an instant: 2026-11-20T12:00:00Z")
    parser.add_argument("--cut", metavar="FILE", help="what `persist cut` printed (-: standard input): all its shards")
    parser.add_argument("--mode", choices=(RETRACT, DROP), default=RETRACT, help="drop: read and write no row")
    parser.add_argument("--dry-run", action="store_true", help="tell how many rows would go, and change nothing")
    parser.add_argument("--retries", metavar="N", type=int, default=0, help="how often, if others write meanwhile (0)")
    parser.add_argument("--force", action="store_true", help="at once, also in a shard that is fed by append")


def run(arguments: argparse.Namespace) -> int:
    by_cut = arguments.cut is not None
    if by_cut == (arguments.name is not None) or by_cut == (arguments.before is not None):
        raise InvalidUsage("give either a shard and --before, or --cut")
    if by_cut and arguments.mode != RETRACT:
        raise InvalidUsage(f"--mode {arguments.mode} is for one shard; a cut is truncated by retractions")
    if by_cut and arguments.force:
        raise InvalidUsage("--force is for one shard")
    cut = read_cut(arguments.cut) if by_cut else None
    before = None if by_cut else read_point("--before", arguments.before)
    with client_of(arguments) as client:
        if cut is not None:
            found = client.truncate(cut, dry_run=arguments.dry_run, retries=arguments.retries)
            for outcome in found.outcomes:
                print(json.dumps(outcome.to_json()))
            return 0 if found.complete else 1
        assert before is not None
        done = client.shard(arguments.name).truncate(
            before,
            mode=mode_of(arguments.mode),
            dry_run=arguments.dry_run,
            retries=arguments.retries,
            force=arguments.force,
        )
    print(json.dumps({"shard": arguments.name, **done.to_json()}))
    return 0


def read_cut(path: str) -> Cut:
    """The cut in a file; `-` is standard input. Raises InvalidUsage."""
    try:
        if path == "-":
            return Cut.from_json(sys.stdin.read(TEXT_CHARS_MAX + 1))
        with Path(path).open(encoding="utf-8") as file:
            return Cut.from_json(file.read(TEXT_CHARS_MAX + 1))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidUsage(f"the cut {path!r} cannot be read: {error}") from error
