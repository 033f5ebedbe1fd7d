"""`persist switch`: a copy becomes home as planned, and nothing is lost."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack

from persist.cli.connection_args import Where, where_of
from persist.cli.long_running import LEVELS, configure_logs
from persist.cli.promote import Indexed, add_region_arguments, tell
from persist.core.errors import InvalidUsage
from persist.regions.replication import Replicator
from persist.regions.switchover import Switch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_region_arguments(parser)
    parser.add_argument("--home-dir", metavar="PATH", help="the directory of the home that ends")
    parser.add_argument("--home-blob", metavar="URL", help="or its blob store")
    parser.add_argument("--home-consensus", metavar="URL", help="and its consensus store")
    parser.add_argument(
        "--replicated", action="store_true", help="the store replicates itself: only wait until all has come"
    )
    parser.add_argument("--undo", action="store_true", help="let home go on, if the copy has not become home yet")
    parser.add_argument("--log-level", choices=LEVELS, default="warning")


def run(arguments: argparse.Namespace) -> int:
    """0: done."""
    configure_logs(arguments.log_level)
    if not (arguments.home_dir or arguments.home_blob):
        raise InvalidUsage("say which home ends: --home-dir, or --home-blob and --home-consensus")
    indexed = Indexed.of_arguments(arguments)
    with ExitStack() as opened:
        home = Where(arguments.home_dir, arguments.home_blob, arguments.home_consensus).open(must_exist=True)
        opened.callback(home.close)
        copy = where_of(arguments).open(must_exist=True)
        opened.callback(copy.close)
        replicator = None if arguments.replicated else Replicator(home.blob, copy.blob, home.clock)
        switch = Switch(home, copy, arguments.region, arguments.of, replicator, indexed.entry().epoch)
        if arguments.undo:
            print(json.dumps({"taken_back": switch.undo(_say)}))
            return 0
        found = switch.run(_say)
        indexed.set(found.epoch)
    tell(found, dry_run=False)
    return 0


def _say(step: str) -> None:
    print(step, file=sys.stderr, flush=True)
