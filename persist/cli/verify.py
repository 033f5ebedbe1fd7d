"""`persist verify [NAME ...]`: whether everything that shards need is there and sound. Prints JSON; writes nothing."""

from __future__ import annotations

import argparse
import json
from collections import Counter

from persist.cli.where import add_arguments as add_where
from persist.cli.where import where_of
from persist.copies.pace import read_rate
from persist.copies.verify import How, verified
from persist.core.errors import InvalidUsage, UnknownShard

EXIT_FOUND = 1
SUMS = ("shards", "blobs", "bytes", "waiting_for_gc", "unnamed", "unnamed_bytes", "faults")


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
    how = How(arguments.deep, read_rate(arguments.rate))
    how.check()
    location = where_of(arguments).open(must_exist=True)
    try:
        names = list(dict.fromkeys(arguments.names))
        known = names or location.all_names(arguments.prefix or "", with_dropped=False)
        totals = Counter(dict.fromkeys(SUMS, 0))
        for found in verified(location, known, how):
            for fault in found.faults:
                print(json.dumps(fault.to_json()))
            sizes = (found.blobs, found.size, found.waiting, found.unnamed, found.unnamed_size)
            totals.update(dict(zip(SUMS, (1, *sizes, len(found.faults)), strict=True)))
        if totals["shards"] < len(names):
            raise UnknownShard(f"of these {len(names)} shards {len(names) - totals['shards']} are not there")
        print(json.dumps(totals))
    finally:
        location.close()
    return EXIT_FOUND if totals["faults"] else 0
