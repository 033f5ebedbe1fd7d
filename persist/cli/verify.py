"""`persist verify [NAME ...]`: whether everything that shards need is there and sound. Prints JSON; writes nothing."""

from __future__ import annotations

import argparse
import json
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from persist.cli.inspect import look_of
from persist.cli.where import add_arguments as add_where
from persist.cli.where import check_given
from persist.copies.found import Fault, Kind
from persist.copies.lost_logs import lost_logs
from persist.copies.pace import EndingBlob, EndingClock, PacedBlob, read_rate
from persist.copies.verify import How, verified
from persist.core.errors import InvalidUsage, UnknownShard
from persist.inspect.documents import Findings
from persist.inspect.looking import TWO_LOCATIONS, Look, location_summary

EXIT_FOUND = 1
SUMS = ("shards", "blobs", "bytes", "waiting_for_gc", "unnamed", "unnamed_bytes", "faults")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="the shards; without one, all of them")
    add_where(parser)
    parser.add_argument("--prefix", metavar="TEXT", help="all shards whose names begin so")
    parser.add_argument("--quick", action="store_true", help="read logs and States alone; look for no blob")
    parser.add_argument("--deep", action="store_true", help="read every byte, decode every row")
    parser.add_argument("--rate", metavar="BYTES", help="read at most so many bytes of parts a second, such as 50MiB")


def run(arguments: argparse.Namespace) -> int:
    """0: all is there and sound. 1: it is not; each fault has a line."""
    check_given(arguments, "dir", "blob", "consensus")
    if arguments.names and arguments.prefix is not None:
        raise InvalidUsage("give names or --prefix, not both")
    how = How(arguments.deep, read_rate(arguments.rate), arguments.quick)
    how.check()
    look = look_of(arguments)
    try:
        with _ending() as stop:
            totals = _looked_at(arguments, look, how, stop)
        print(json.dumps(totals))
    finally:
        look.close()
    return EXIT_FOUND if totals["faults"] else 0


@contextmanager
def _ending() -> Iterator[threading.Event]:
    """Set by ctrl-C: threads that read, or wait for the rate, then end, and so does the command."""
    stop, before = threading.Event(), signal.getsignal(signal.SIGINT)

    def end(number: int, frame: FrameType | None) -> None:
        stop.set()
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        signal.signal(signal.SIGINT, end)
    try:
        yield stop
    finally:
        if is_main:
            signal.signal(signal.SIGINT, before)


def _names(arguments: argparse.Namespace, look: Look) -> Iterator[str]:
    """The shards that are asked for. Where none is named, those too whose logs are lost."""
    if arguments.names:
        yield from dict.fromkeys(arguments.names)
        return
    prefix = arguments.prefix or ""
    yield from look.names(prefix, with_dropped=False)
    if not arguments.quick:
        yield from lost_logs(look, set(look.names(prefix)), prefix)


def _looked_at(arguments: argparse.Namespace, look: Look, how: How, stop: threading.Event) -> Counter[str]:
    """Print a line for each fault; the sums."""
    totals = Counter(dict.fromkeys(SUMS, 0))
    wrong = Findings()
    location_summary(look, wrong)
    if any(one.what.startswith(TWO_LOCATIONS) for one in wrong):
        raise InvalidUsage(f"{TWO_LOCATIONS}: give two that belong together")
    for one in wrong.listed():
        print(json.dumps(Fault("", Kind.LOCATION, one.what, one.key or "").to_json()))
        totals["faults"] += 1
    read = EndingBlob(look.blob, stop)
    paced = read if how.rate is None else PacedBlob(read, how.rate, EndingClock(look.clock, stop))
    for found in verified(look, _names(arguments, look), replace(how, rate=None), paced):
        for fault in found.faults:
            print(json.dumps(fault.to_json()))
        sizes = (found.blobs, found.size, found.waiting, found.unnamed, found.unnamed_size)
        totals.update(dict(zip(SUMS, (1, *sizes, len(found.faults)), strict=True)))
    names = len(dict.fromkeys(arguments.names))
    if totals["shards"] < names:
        raise UnknownShard(f"of these {names} shards {names - totals['shards']} are not there")
    return totals
