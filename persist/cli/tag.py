"""`persist tag NAME`: times of a shard that stay readable although its history goes on.

A line of JSON for each tag, after what was asked for was done.
"""

from __future__ import annotations

import argparse
import json

from persist.cli.connection_args import add_client_arguments, client_of
from persist.client.timestamps import instant_ms, instant_text, read_instant
from persist.core.errors import InvalidUsage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the shard")
    add_client_arguments(parser)
    parser.add_argument("--set", metavar="TAG", help="set this tag, at the latest time unless one is given")
    parser.add_argument("--at", metavar="TIME", help="at this time, or at an instant such as 2026-11-20T12:00:00Z")
    parser.add_argument("--keep", metavar="AGE", help="for so long: 400d; else until it is taken away")
    parser.add_argument("--remove", metavar="TAG", help="take this tag away: its time may be forgotten")


def run(arguments: argparse.Namespace) -> int:
    if arguments.set is None and (arguments.at is not None or arguments.keep is not None):
        raise InvalidUsage("--at and --keep are for a tag that is set: give --set TAG")
    if arguments.set is not None and arguments.set == arguments.remove:
        raise InvalidUsage("--set and --remove name the same tag: give one of them")
    at = arguments.at
    if at is not None:
        at = int(at) if at.isdecimal() and len(at) < 20 else read_instant("--at", at)
    with client_of(arguments) as client:
        shard = client.shard(arguments.name)
        if arguments.set is not None:
            shard.tag(arguments.set, at, keep=arguments.keep)
        if arguments.remove is not None and not shard.untag(arguments.remove):
            raise InvalidUsage(f"shard {shard.name!r} has no tag {arguments.remove!r}")
        for tag, found in shard.tags().items():
            until = None if found.until is None else instant_text(instant_ms("until", found.until))
            print(json.dumps({"shard": shard.name, "tag": tag, "time": found.time, "until": until}))
    return 0
