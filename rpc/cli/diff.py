"""`persist diff NAME T1 [T2]`: what a shard, or another one, has more at the second time than at the first, and less.

A line of JSON for each row, with `__diff`, in key order; in a terminal with + and -. `persist changes` tells the same.
"""

from __future__ import annotations

import argparse
import sys

from persist.cli import screen as terminal
from persist.cli.changes import Between
from persist.cli.screen import Screen
from persist.cli.where import add_client_arguments, client_of
from rpc.cli.showing import show_changes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the shard")
    parser.add_argument("start", metavar="T1", help="a time, or an instant: 2026-11-20T12:00:00Z")
    parser.add_argument("end", metavar="T2", nargs="?", help="the same; else the latest complete time")
    add_client_arguments(parser)
    parser.add_argument("--other", metavar="NAME", help="the shard that is compared at T2; else this one")
    terminal.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    asked = Between.of(("T1", arguments.start), ("T2", arguments.end))
    screen = Screen.of(sys.stdout, arguments.no_colour)
    with client_of(arguments) as client, asked.changes(client, arguments.name, arguments.other) as changes:
        for table in changes.batches():
            show_changes(table, screen)
    return 0
