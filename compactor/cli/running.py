"""What the maintenance commands share: arguments, signals, logs, and ending with a parent process."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from compactor.loop import Loop
from compactor.metering import Metrics
from compactor.monitor import Monitor
from persist.cli import connection_args
from persist.cli.long_running import announce, configure_logs, end_with_parent, on_signals
from persist.commit.location import Location, LocationSettings
from persist.commit.machine import MachineSettings
from persist.commit.system import SystemClock
from persist.core.errors import InvalidUsage
from persist.formats.exposition import Family, exposition
from persist.regions.fencing import HomeWatch
from persist.regions.opening import check_region
from persist.regions.region_index import open_index

NUMBER_MAX = 2**31  # of any number among the arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shards", action="append", metavar="PATTERN", help="only shards that match, like 'orders-*' (may be repeated)"
    )
    parser.add_argument("--once", action="store_true", help="do what is due now, then end")
    parser.add_argument("--interval", type=float, default=0.05, metavar="S", help="least seconds between two rounds")
    parser.add_argument("--nice", type=int, default=0, metavar="N", help="lower this process's priority by N")
    parser.add_argument(
        "--end-with-parent", type=int, metavar="PID", help="end when the process PID, which starts this one, ends"
    )
    parser.add_argument("--region", metavar="NAME", help="with --index: the region that this is home of")
    parser.add_argument(
        "--index",
        metavar="FILE",
        help="the index of regions, a file or a server: it tells who is home",
    )
    parser.add_argument(
        "--metrics-port", type=int, metavar="PORT", help="tell /metrics and /healthz at this port (0: a free one)"
    )
    parser.add_argument(
        "--metrics-host", default="127.0.0.1", metavar="HOST", help="at this address (default 127.0.0.1); no tokens"
    )
    parser.add_argument("--verbose", action="store_true", help="a log line for every piece of work")


def prepare(arguments: argparse.Namespace) -> None:
    """The parent to end with, priority and logs, as the arguments say. Commands call it before anything else."""
    if arguments.end_with_parent is not None:
        end_with_parent(arguments.end_with_parent)
    check_positive(arguments, "interval")
    if arguments.metrics_port is not None and not 0 <= arguments.metrics_port < 65536:
        raise InvalidUsage(f"--metrics-port is {arguments.metrics_port}; it must be in [0, 65535]")
    try:
        os.nice(arguments.nice)
    except (OSError, OverflowError) as error:
        raise InvalidUsage(f"--nice {arguments.nice} is not possible: {error}") from error
    configure_logs("info" if arguments.verbose else "warning")


def open_location(arguments: argparse.Namespace) -> Location:
    """The location that the arguments name, without small merges after commits: those are the writers' own."""
    settings = LocationSettings(machine=MachineSettings(small_merges=False), metered=True, shows_no_copy=True)
    connection_args.check_given(arguments, "region", "index")
    region, index = check_region(arguments.region) if arguments.region else "", arguments.index
    if index and not region:
        raise InvalidUsage("--index needs --region, of which this is the home")
    trust = connection_args.trust_in(getattr(arguments, "ca_file", None))
    known = open_index(index, os.environ.get("PERSIST_INDEX_TOKEN"), SystemClock(), trust) if index else None
    location = connection_args.where_of(arguments).open(settings, must_exist=True)
    if known is not None:  # nothing is committed or deleted once the index says that another home has taken over
        HomeWatch(location.identity, region, known)
    return location


def check_stores(location: Location) -> None:
    """Probe the stores. One that can only be read, because its disk is full, is a line in the log: deletions go on."""
    for unwritable in location.check():
        announce("a store cannot be written: deletions go on", why=unwritable)


def check_positive(arguments: argparse.Namespace, *names: str) -> None:
    """Raises InvalidUsage unless these arguments are more than 0, at most NUMBER_MAX, or None."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and not 0 < value <= NUMBER_MAX:
            wanted = f"more than 0 and at most {NUMBER_MAX}"
            raise InvalidUsage(f"--{name.replace('_', '-')} is {value}; it must be {wanted}")


def run(
    loop: Loop, arguments: argparse.Namespace, metrics: Metrics, command: str, families: Callable[[], Iterator[Family]]
) -> int:
    """Work until a signal, or through every shard once; tell what was done. The exit code.

    `families` is what monitors are told, if there is a port for them.
    """
    on_signals(loop.stop)
    with monitored(arguments, families):
        return _run(loop, arguments, metrics, command)


@contextmanager
def monitored(arguments: argparse.Namespace, families: Callable[[], Iterator[Family]]) -> Iterator[None]:
    """Answer monitors meanwhile, if the arguments name a port for them. Its URL is a line of the log."""
    if arguments.metrics_port is None:
        yield
        return
    monitor = Monitor(arguments.metrics_host, arguments.metrics_port, lambda: exposition(families()))
    announce("metrics", url=f"{monitor.url}/metrics")
    try:
        yield
    finally:
        monitor.close()


def _run(loop: Loop, arguments: argparse.Namespace, metrics: Metrics, command: str) -> int:
    if not arguments.once:
        announce("running", command=command)
        loop.run()
        announce("ended", command=command, **metrics.to_json())
        return 0
    failures = loop.once()
    print(json.dumps(metrics.to_json()))
    return 1 if failures else 0
