"""`persist history`, `restore` and `tag`: the history of a shard, its restoration, and its tags.

Every answer is a line of JSON.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from persist.cli.connection_args import add_client_arguments, add_shard_arguments, add_subcommand, client_of, shard_of
from persist.client.arguments import check_int, read_attribute
from persist.client.commit_info import entry_json, read_place
from persist.client.embedded import EmbeddedTransport
from persist.client.history_api import settings_json, tag_json
from persist.client.shard import Shard
from persist.client.timestamps import datetime_text, instant_text, read_instant, read_point
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.audit_log import PAGE_MAX
from persist.core.errors import InvalidUsage
from persist.core.frontier import frontier
from persist.core.shard_settings import history_ms
from persist.core.transitions.history_control import check_forgettable


def add_history(parser: argparse.ArgumentParser) -> None:
    add_shard_arguments(parser)
    parser.add_argument("--keep", metavar="AGE", help="how much history to keep from now on: 7d, none, forever")
    parser.add_argument("--forget", metavar="TIME", type=int, help="allow the history before this time to be deleted")
    parser.add_argument("--at", metavar="INSTANT", help="show which times were complete by 2026-11-20T12:00:00Z")
    parser.add_argument("--when", metavar="TIME", type=int, help="show the instant from which on this time is visible")
    parser.add_argument("--commits", metavar="N", type=int, help="show the last N changes of the shard, newest first")
    parser.add_argument("--before", metavar="PLACE", help="with --commits: those before this place, such as 7.0")
    parser.add_argument("--maintenance", action="store_true", help="with --commits: also merges, GC and expiries")
    parser.add_argument("--repair-clock", action="store_true", help="undo what a clock that was far ahead has settled")


def run_history(arguments: argparse.Namespace) -> int:
    with client_of(arguments) as client:
        shard, transport = client.shard(arguments.name), client.transport
        location = transport.location if isinstance(transport, EmbeddedTransport) else None  # None: of a server
        _check(arguments, shard, location)
        if arguments.repair_clock and location is not None:
            lowered = location.machine(shard.name).apply(c.LowerSeal())
            assert isinstance(lowered, c.SealLowered)
            from_ms = lowered.lowered_from_ms
            taken_back = None if from_ms is None else instant_text(from_ms)
            _print({"settled": instant_text(lowered.sealed_ms), "taken_back_from": taken_back})
        if arguments.keep is not None:
            shard.configure(history=arguments.keep)
        if arguments.forget is not None:
            shard.forget(arguments.forget)
        if arguments.at is not None:
            _print({"at": arguments.at, "frontier": shard.time_at(read_instant("--at", arguments.at)).to_json()})
        if arguments.when is not None:
            _print({"time": arguments.when, "timestamp": datetime_text(shard.timestamp_of(arguments.when))})
        if arguments.commits is not None:
            for entry in shard.history(arguments.commits, before=arguments.before, maintenance=arguments.maintenance):
                _print(entry_json(entry))
        settings = {"shard": shard.name, **settings_json(shard.settings), "since": shard.since().to_json()}
        if location is not None:  # until when wall clocks are settled is known only with access to the stores
            sealed_ms = location.machine(shard.name).refresh().seal.sealed_ms
            settings["settled"] = instant_text(sealed_ms) if sealed_ms else None
        _print(settings)
    return 0


def _check(arguments: argparse.Namespace, shard: Shard, location: Location | None) -> None:
    """Raise InvalidUsage before anything is changed, so that changes are made together or not at all."""
    if arguments.repair_clock and location is None:
        raise InvalidUsage("--repair-clock requires the stores: give --dir, or --blob and --consensus")
    if arguments.keep is not None:
        history_ms(arguments.keep, "--keep")
    if arguments.forget is not None and location is not None:
        check_forgettable(location.machine(shard.name).refresh(), frontier(arguments.forget))
    elif arguments.forget is not None and not frontier(arguments.forget) < (upper := shard.upper()):
        raise InvalidUsage(  # the server would refuse it too, but later
            f"--forget {arguments.forget} is beyond the latest complete time of {shard.name!r}: its upper is {upper}"
        )
    if arguments.at is not None:
        read_instant("--at", arguments.at)
    if arguments.commits is not None:
        check_int("limit", arguments.commits, 1, PAGE_MAX)
        read_place("--before", arguments.before)
    elif arguments.before is not None or arguments.maintenance:
        raise InvalidUsage("--before and --maintenance select commits: give --commits too")


def _print(fields: dict[str, Any]) -> None:
    print(json.dumps(fields))


# `persist restore NAME --at POINT`: restore the contents of a shard to a time. Prints a line of JSON.


def add_restore(parser: argparse.ArgumentParser) -> None:
    add_shard_arguments(parser)
    parser.add_argument("--at", metavar="POINT", required=True, help="a time, or an instant: 2026-11-20T12:00:00Z")
    parser.add_argument(
        "--attribute", metavar="KEY=VALUE", action="append", default=[], help="set it by this commit; KEY= unsets it"
    )
    parser.add_argument("--retries", metavar="N", type=int, default=0, help="retries after concurrent writes (0)")


def run_restore(arguments: argparse.Namespace) -> int:
    to = read_point("--at", arguments.at)
    attributes = [read_attribute("--attribute", text) for text in arguments.attribute]
    with shard_of(arguments) as shard:
        restored = shard.restore(to, retries=arguments.retries, attributes=attributes)
    print(json.dumps({"shard": arguments.name, **restored.to_json()}))
    return 0


# `persist tag list|set|remove NAME`: times that stay readable after the rest of the history is deleted.
#
# Prints a line of JSON for each tag that there is afterwards.


def add_tag(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="do", required=True, metavar="SUBCOMMAND")
    add_client_arguments(_subcommand(commands, "list", "list the tags"))
    setting = _subcommand(commands, "set", "set a tag")
    removing = _subcommand(commands, "remove", "remove a tag: its time may be deleted")
    for subcommand in (setting, removing):
        subcommand.add_argument("tag", metavar="TAG", help="the tag")
        add_client_arguments(subcommand)
    setting.add_argument("--at", metavar="POINT", help="a time or instant: 2026-11-20T12:00:00Z; default: the latest")
    setting.add_argument("--keep", metavar="AGE", help="how long: 400d; default: until it is removed")


def _subcommand(commands: Any, do: str, summary: str) -> argparse.ArgumentParser:
    parser = add_subcommand(commands, do, summary, _run_tag)
    parser.add_argument("name", metavar="NAME", help="the shard")
    return parser


def _run_tag(arguments: argparse.Namespace) -> int:
    at = read_point("--at", arguments.at) if arguments.do == "set" and arguments.at is not None else None
    with shard_of(arguments) as shard:
        if arguments.do == "set":
            shard.tag(arguments.tag, at, keep=arguments.keep)
        if arguments.do == "remove" and not shard.untag(arguments.tag):
            raise InvalidUsage(f"shard {shard.name!r} has no tag {arguments.tag!r}")
        for tag in shard.tags().values():
            print(json.dumps({"shard": shard.name, **tag_json(tag)}))
    return 0
