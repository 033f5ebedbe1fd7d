"""`persist head NAME`: the first rows of a shard in key order, shown as `persist cat` shows them."""

from __future__ import annotations

import argparse

from rpc.cli import cat

ROWS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cat.add_which(parser)
    parser.add_argument("-n", "--limit", metavar="N", type=int, default=ROWS, help=f"how many ({ROWS})")


def run(arguments: argparse.Namespace) -> int:
    return cat.show(arguments, arguments.limit)
