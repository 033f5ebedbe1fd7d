"""`persist verify [NAME ...]`: whether everything that shards need is there and sound. Prints JSON; writes nothing."""

from __future__ import annotations

import argparse
import json
from collections import Counter

from persist.cli.where import add_arguments as add_where
from persist.cli.where import where_of
from persist.commit.location import Location
from persist.copies.pace import read_rate
from persist.copies.sampling import Sample, number_of_day, samples_of
from persist.copies.verify import How, verified
from persist.core.errors import InvalidUsage, UnknownShard

EXIT_FOUND = 1
SUMS = ("shards", "compared", "blobs", "bytes", "waiting_for_gc", "unnamed", "unnamed_bytes", "faults")
SEED_MAX = 2**31


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="the shards; without one, all of them")
    add_where(parser)
    parser.add_argument("--prefix", metavar="TEXT", help="all shards whose names begin so")
    parser.add_argument("--quick", action="store_true", help="read logs and States alone; look for no blob")
    parser.add_argument("--deep", action="store_true", help="read every byte, decode every row, compare contents")
    parser.add_argument("--sample", metavar="SHARE", help="as --deep, for a share of the parts, such as 1%%")
    parser.add_argument(
        "--seed", type=int, metavar="N", help="with --sample: which one; N and N+1 have no part in common (today's)"
    )
    parser.add_argument("--rate", metavar="BYTES", help="read at most so many bytes of parts a second, such as 50MiB")


def run(arguments: argparse.Namespace) -> int:
    """0: all is there and sound. 1: it is not; each fault has a line."""
    if arguments.names and arguments.prefix is not None:
        raise InvalidUsage("give names or --prefix, not both")
    if arguments.seed is not None and (arguments.sample is None or not 0 <= arguments.seed <= SEED_MAX):
        raise InvalidUsage(f"--seed is for --sample, and lies in [0, {SEED_MAX}]")
    of = None if arguments.sample is None else samples_of(arguments.sample)
    rate = read_rate(arguments.rate)
    How(arguments.deep, rate, arguments.quick, None if of is None else Sample(0, of)).check()
    location = where_of(arguments).open(must_exist=True)
    try:
        sample = None if of is None else Sample(_seed(arguments, location), of)
        totals = _looked_at(arguments, location, How(arguments.deep, rate, arguments.quick, sample))
        told = {} if sample is None else {"sample": arguments.sample, "seed": sample.number}
        print(json.dumps({**totals, **told}))
    finally:
        location.close()
    return EXIT_FOUND if totals["faults"] else 0


def _seed(arguments: argparse.Namespace, location: Location) -> int:
    given: int | None = arguments.seed
    return number_of_day(location.clock.now_ms()) if given is None else given


def _looked_at(arguments: argparse.Namespace, location: Location, how: How) -> Counter[str]:
    """Print a line for each fault; the sums."""
    names = list(dict.fromkeys(arguments.names))
    known = names or location.all_names(arguments.prefix or "", with_dropped=False)
    totals = Counter(dict.fromkeys(SUMS, 0))
    for found in verified(location, known, how):
        for fault in found.faults:
            print(json.dumps(fault.to_json()))
        sizes = (found.blobs, found.size, found.waiting, found.unnamed, found.unnamed_size)
        totals.update(dict(zip(SUMS, (1, int(found.is_compared), *sizes, len(found.faults)), strict=True)))
    if totals["shards"] < len(names):
        raise UnknownShard(f"of these {len(names)} shards {len(names) - totals['shards']} are not there")
    return totals
