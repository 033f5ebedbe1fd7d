"""`persist tag list|set|remove NAME`: times of a shard that stay readable although its history moves on.

A line of JSON for each tag, as they are then.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from persist.cli.connection_args import add_client_arguments, add_subcommand, client_of
from persist.client.timestamps import instant_ms, instant_text, read_point
from persist.core.errors import InvalidUsage


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="do", required=True, metavar="SUBCOMMAND")
    add_client_arguments(_subcommand(commands, "list", "list the tags"))
    setting = _subcommand(commands, "set", "set a tag")
    removing = _subcommand(commands, "remove", "remove a tag: its time may be forgotten")
    for subcommand in (setting, removing):
        subcommand.add_argument("tag", metavar="TAG", help="the tag")
        add_client_arguments(subcommand)
    setting.add_argument("--at", metavar="POINT", help="a time, or an instant: 2026-11-20T12:00:00Z; else the latest")
    setting.add_argument("--keep", metavar="AGE", help="for how long: 400d; else until it is removed")


def _subcommand(commands: Any, do: str, what: str) -> argparse.ArgumentParser:
    found = add_subcommand(commands, do, what, _run)
    found.add_argument("name", metavar="NAME", help="the shard")
    return found


def _run(arguments: argparse.Namespace) -> int:
    at = read_point("--at", arguments.at) if arguments.do == "set" and arguments.at is not None else None
    with client_of(arguments) as client:
        shard = client.shard(arguments.name)
        if arguments.do == "set":
            shard.tag(arguments.tag, at, keep=arguments.keep)
        if arguments.do == "remove" and not shard.untag(arguments.tag):
            raise InvalidUsage(f"shard {shard.name!r} has no tag {arguments.tag!r}")
        for tag, found in shard.tags().items():
            until = None if found.until is None else instant_text(instant_ms("until", found.until))
            print(json.dumps({"shard": shard.name, "tag": tag, "time": found.time, "until": until}))
    return 0
