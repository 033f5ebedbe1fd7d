"""`persist audit`: who did what through servers with tokens, the oldest entry first.

The entries are rows of a shard, so they are shown and chosen as those of any other one.
"""

from __future__ import annotations

import argparse

from persist.core.ids import AUDIT_SHARD
from rpc.cli.cat import add_how, show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_how(parser)
    parser.add_argument("--limit", metavar="N", type=int, help="at most so many entries, the oldest ones")


def run(arguments: argparse.Namespace) -> int:
    arguments.name = AUDIT_SHARD
    return show(arguments, arguments.limit)
