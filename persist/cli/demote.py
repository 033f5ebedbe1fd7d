"""`persist demote`: an old home becomes a copy of the new one."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack

from persist.cli.connection_args import add_arguments as add_where
from persist.cli.connection_args import where_of
from persist.cli.salvage import add_new_home, new_home
from persist.regions.switchover import demote


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_where(parser)
    add_new_home(parser)
    parser.add_argument(
        "--drop-diverged", action="store_true", help="also where it has what the new home does not have: that is lost"
    )


def run(arguments: argparse.Namespace) -> int:
    """0: done; `persist replicate` brings what the new home has."""
    with ExitStack() as opened:
        old = where_of(arguments).open(must_exist=True)
        opened.callback(old.close)
        new, promotion = new_home(arguments.of, opened)
        deleted = demote(old, new, promotion, drop_diverged=arguments.drop_diverged)
    print(json.dumps({"epoch": promotion.epoch, "deleted": deleted}))
    return 0
