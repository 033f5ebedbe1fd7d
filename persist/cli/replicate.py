"""`persist replicate`: copies the blob store of a location to another store, from which a region reads."""

from __future__ import annotations

import argparse
import json
import logging
import threading
from contextlib import ExitStack
from dataclasses import asdict

from blob import open_blob
from persist.cli.connection_args import check_there
from persist.cli.long_running import LEVELS, configure_logs, on_signals
from persist.commit.system import SystemClock
from persist.copies.throttled_blob import read_rate
from persist.core.errors import Overloaded, Unavailable
from persist.formats.store_errors import translated
from persist.regions.replication import Replicated, ReplicateSettings, Replicator

log = logging.getLogger("persist.regions")
_DEFAULTS = ReplicateSettings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--from", dest="source", required=True, metavar="URL", help="the blob store at home")
    parser.add_argument("--to", required=True, metavar="URL", help="the store of the region; empty, or a copy of home")
    parser.add_argument("--once", action="store_true", help="end once all is there that was published before")
    parser.add_argument("--every", type=float, default=_DEFAULTS.every_s, metavar="S", help="seconds between looks (1)")
    parser.add_argument(
        "--whole", type=float, default=_DEFAULTS.whole_s, metavar="S",
        help="seconds between comparisons of the whole store (60)",
    )  # fmt: skip
    parser.add_argument(
        "--keep", type=float, default=_DEFAULTS.keep_s, metavar="S",
        help="seconds for which the copy keeps what home has deleted (300)",
    )  # fmt: skip
    parser.add_argument("--rate", metavar="BYTES", help="read at most so many bytes a second, such as 50MiB")
    parser.add_argument("--at-once", type=int, default=_DEFAULTS.at_once, metavar="N", help="blobs on their way (4)")
    parser.add_argument("--log-level", choices=LEVELS, default="warning")


def run(arguments: argparse.Namespace) -> int:
    """0: told to end, or with `--once` all is there."""
    settings = ReplicateSettings(
        arguments.every, arguments.whole, arguments.keep, read_rate(arguments.rate), arguments.at_once
    )
    settings.check()
    configure_logs(arguments.log_level)
    check_there(arguments.source)
    with ExitStack() as opened:
        with translated():
            source = open_blob(arguments.source)
            opened.callback(source.close)
            target = open_blob(arguments.to)
            opened.callback(target.close)
        replicator = Replicator(source, target, SystemClock(), settings)
        if arguments.once:
            _tell(replicator.round(whole=True))
            return 0
        ends = threading.Event()
        on_signals(ends.set)
        while True:
            try:
                _tell(replicator.round())
            except (Unavailable, Overloaded) as error:  # a link that is down comes back
                log.warning("nothing was copied: %s", error)
            if ends.wait(settings.every_s):
                return 0


def _tell(done: Replicated) -> None:
    """A line of JSON for a round that did something."""
    if done.copied or done.deleted:
        print(json.dumps(asdict(done)), flush=True)
