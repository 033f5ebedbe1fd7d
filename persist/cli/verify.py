"""`persist verify [NAME ...]`: whether everything that shards need is there and sound. Prints JSON; writes nothing."""

from __future__ import annotations

import argparse
import json
from itertools import chain

from persist.cli.where import add_arguments as add_where
from persist.cli.where import where_of
from persist.copies.verify import How, verified
from persist.core.errors import InvalidUsage, UnknownShard
from persist.core.row_policy import bytes_of

EXIT_FOUND = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="the shards; without one, all of them")
    add_where(parser)
    parser.add_argument("--prefix", metavar="TEXT", help="all shards whose names begin so")
    parser.add_argument("--deep", action="store_true", help="read every byte, and decode every row")
    parser.add_argument("--rate", metavar="BYTES", help="with --deep: at most so many bytes a second, such as 50MiB")


def run(arguments: argparse.Namespace) -> int:
    """0: all is there and sound. 1: it is not; each fault has a line."""
    if arguments.names and arguments.prefix is not None:
        raise InvalidUsage("give names or --prefix, not both")
    how = How(arguments.deep, None if arguments.rate is None else _rate(arguments.rate))
    how.check()
    location = where_of(arguments).open(must_exist=True)
    try:
        names = list(dict.fromkeys(arguments.names))
        known = iter(names) if names else location.all_names(arguments.prefix or "", with_dropped=False)
        totals = dict.fromkeys(("shards", "blobs", "bytes", "waiting_for_gc", "unnamed", "unnamed_bytes", "faults"), 0)
        for found in verified(location, chain(known), how):
            for fault in found.faults:
                print(json.dumps(fault.to_json()))
            for what, count in zip(
                totals,
                (1, found.blobs, found.size, found.waiting, found.unnamed, found.unnamed_size, len(found.faults)),
                strict=True,
            ):
                totals[what] += count
        if totals["shards"] < len(names):
            raise UnknownShard(f"of these {len(names)} shards {len(names) - totals['shards']} are not there")
        print(json.dumps(totals))
    finally:
        location.close()
    return EXIT_FOUND if totals["faults"] else 0


def _rate(text: str) -> int:
    try:
        return bytes_of(int(text) if text.isdecimal() else text)
    except InvalidUsage as error:
        raise InvalidUsage(f"--rate is {text!r:.100}; it must be bytes a second, such as 50MiB") from error
