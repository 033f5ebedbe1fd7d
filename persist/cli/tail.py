"""`persist tail NAME`: the latest changes of a shard; with -f also those to come, until it is told to end.

A line of JSON for each change, with `__time` and `__diff`; in a terminal with + and -.
"""

from __future__ import annotations

import argparse
import sys
from datetime import datetime
from threading import Event

from persist.cli import terminal
from persist.cli.connection_args import add_client_arguments, client_of
from persist.cli.long_running import on_signals
from persist.cli.terminal import Screen, add_selection, columns, show_changes
from persist.client.listen import Listen
from persist.client.shard import Shard
from persist.client.timestamps import read_point
from persist.core.errors import InvalidUsage

TIMES = 10
TIMES_MAX = 1_000_000
WAIT_S = 0.5  # for the next change, before it looks whether it was told to end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the shard")
    add_client_arguments(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on with changes to come, until Ctrl-C")
    parser.add_argument("-n", "--times", metavar="N", type=int, help=f"the changes of the last N times ({TIMES})")
    parser.add_argument("--as-of", metavar="POINT", help="all changes after a time or an instant; -1: from the first")
    add_selection(parser)
    terminal.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """0 also where a signal ended it."""
    if arguments.times is not None and arguments.as_of is not None:
        raise InvalidUsage("-n and --as-of are both given; give one of them")
    times = TIMES if arguments.times is None else arguments.times
    if not 0 <= times <= TIMES_MAX:
        raise InvalidUsage(f"-n is {times}; it must be in [0, {TIMES_MAX}]")
    after = _after(arguments.as_of)
    wanted, screen, ended = columns(arguments), Screen.of(sys.stdout, arguments.no_colour), Event()
    if arguments.follow:
        on_signals(ended.set)
    with client_of(arguments) as client:
        shard = client.shard(arguments.name)
        begins = _begins(shard, times) if after is None else after
        until = None if arguments.follow else shard.upper()
        with shard.listen(begins, until=until, where=arguments.where, columns=wanted, purpose="persist tail") as found:
            _show(found, screen, ended)
    return 0


def _after(given: str | None) -> int | datetime | None:
    return None if given is None else -1 if given == "-1" else read_point("--as-of", given)


def _begins(shard: Shard, times: int) -> int:
    """The time after which the last `times` complete ones lie, as far as they can be told."""
    view = shard.view()
    if view.upper.element is None or view.since.element is None:
        return view.since.element or -1
    wanted = view.upper.element - 1 - times
    return max(wanted, view.since.element or -1)


def _show(listen: Listen, screen: Screen, ended: Event) -> None:
    while not listen.done and not ended.is_set():
        for event in listen.next_events(WAIT_S):
            show_changes(event.updates, screen)
            if ended.is_set():
                return
