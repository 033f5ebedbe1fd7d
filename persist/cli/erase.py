"""`persist erase start|status NAME`: delete rows for good, and show how far erasures are. Prints JSON."""

from __future__ import annotations

import argparse
import json
import sys

from persist.cli.connection_args import add_client_arguments, add_subcommand, client_of
from persist.core.errors import InvalidUsage
from persist.parts.column_types import EXACT_NUMBERS
from persist.parts.python_values import decode_json_keys

EXIT_LEFT = 3  # of `status`: something still shows the rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="do", required=True, metavar="SUBCOMMAND")
    starting = add_subcommand(commands, "start", "delete rows for good", _start)
    status = add_subcommand(commands, "status", "show the progress of erasures, or their certificates", _status)
    for subcommand in (starting, status):
        subcommand.add_argument("name", help="the shard")
        add_client_arguments(subcommand)
    starting.add_argument(
        "--keys", metavar="FILE", help='keys as a JSON list, such as [["ann"], ["bob"]]; - is the input'
    )
    starting.add_argument(
        "--where", metavar="PREDICATE", help="rows for which it is true, such as \"customer = 'ann'\""
    )
    starting.add_argument("--gone", action="store_true", help="no rows: what was retracted or truncated before")
    starting.add_argument("--deadline", metavar="AGE", help="by when it should have ended: 30d")
    starting.add_argument(
        "--reason", metavar="TEXT", default="", help="what the certificate says; it must not name the rows"
    )
    starting.add_argument("--tags", action="store_true", help="remove earlier tags; else it waits for them")
    starting.add_argument(
        "--force", action="store_true", help="at once, also in a shard that append feeds: its writer then has to retry"
    )
    status.add_argument("--id", metavar="ID", help="this erasure; else all of the shard")
    status.add_argument("--before", metavar="TIME", type=int, help="rows that were retracted or truncated before it")


def _start(arguments: argparse.Namespace) -> int:
    if sum((arguments.keys is not None, arguments.where is not None, arguments.gone)) != 1:
        raise InvalidUsage("give one of --keys, --where and --gone")
    keys = None if arguments.keys is None else _keys(arguments.keys)
    with client_of(arguments) as client:
        shard = client.shard(arguments.name)
        done = shard.erase(
            keys=decode_json_keys(shard.schema, keys),
            where=arguments.where,
            deadline=arguments.deadline,
            reason=arguments.reason,
            tags=arguments.tags,
            force=arguments.force,
        )
    print(json.dumps({"shard": arguments.name, **done.to_json()}))
    return 0


def _keys(path: str) -> list[object]:
    try:
        if path == "-":
            found = json.load(sys.stdin, **EXACT_NUMBERS)
        else:
            with open(path, encoding="utf-8") as file:
                found = json.load(file, **EXACT_NUMBERS)
    except (OSError, ValueError) as error:
        raise InvalidUsage(f"--keys cannot be read as a JSON list: {type(error).__name__}") from error
    if not isinstance(found, list):
        raise InvalidUsage('--keys must hold a JSON list of keys, such as [["ann"], ["bob"]]')
    return found


def _status(arguments: argparse.Namespace) -> int:
    """0: nothing is left of the rows. 3: something is."""
    if arguments.id is not None and arguments.before is not None:
        raise InvalidUsage("give --id or --before, not both")
    with client_of(arguments) as client:
        shard = client.shard(arguments.name)
        if arguments.before is not None:
            told = [shard.erased(before=arguments.before)]
        else:
            found = shard.erasures().values() if arguments.id is None else [shard.erased(arguments.id)]
            told = [{"shard": arguments.name, **status.to_json()} for status in found]
    for one in told:
        print(json.dumps(one))
    return 0 if all(one["phase"] == "erased" for one in told) else EXIT_LEFT
