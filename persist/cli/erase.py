"""`persist erase start|status NAME`: delete rows permanently, and show the progress of erasures. Prints JSON."""

from __future__ import annotations

import argparse
import json
import sys

from persist.cli.connection_args import add_shard_arguments, add_subcommand, shard_of
from persist.core.errors import InvalidUsage
from persist.parts.exact_numbers import EXACT_NUMBERS
from persist.parts.python_values import decode_json_keys

EXIT_LEFT = 3  # of `status`: some data still contains the rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="do", required=True, metavar="SUBCOMMAND")
    starting = add_subcommand(commands, "start", "delete rows permanently", _start)
    status = add_subcommand(commands, "status", "show the progress of erasures, or their certificates", _status)
    for subcommand in (starting, status):
        add_shard_arguments(subcommand)
    starting.add_argument("--keys", metavar="FILE", help='a JSON list of keys, such as [["ann"], ["bob"]]; -: stdin')
    starting.add_argument("--where", metavar="PREDICATE", help="rows that match it, such as \"customer = 'ann'\"")
    starting.add_argument("--gone", action="store_true", help="only rows that were retracted or truncated before")
    starting.add_argument("--deadline", metavar="AGE", help="when it should have ended: 30d")
    starting.add_argument("--reason", metavar="TEXT", default="", help="for the certificate; it must not name rows")
    starting.add_argument("--tags", action="store_true", help="remove earlier tags instead of waiting for them")
    starting.add_argument(
        "--force", action="store_true", help="at once, also in a shard fed by append: its writer has to retry"
    )
    status.add_argument("--id", metavar="ID", help="this erasure; default: all of the shard")
    status.add_argument("--before", metavar="TIME", type=int, help="rows retracted or truncated before this time")


def _start(arguments: argparse.Namespace) -> int:
    if sum((arguments.keys is not None, arguments.where is not None, arguments.gone)) != 1:
        raise InvalidUsage("give one of --keys, --where and --gone")
    keys = None if arguments.keys is None else _keys(arguments.keys)
    with shard_of(arguments) as shard:
        done = shard.erase(
            keys=decode_json_keys(shard.schema, keys),
            where=arguments.where,
            gone=arguments.gone,
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
            keys = json.load(sys.stdin, **EXACT_NUMBERS)
        else:
            with open(path, encoding="utf-8") as file:
                keys = json.load(file, **EXACT_NUMBERS)
    except OSError as error:
        raise InvalidUsage(f"--keys cannot be read: {error.strerror}") from error
    except ValueError as error:  # whose text may show keys
        raise InvalidUsage(f"--keys cannot be read as a JSON list: {type(error).__name__}") from error
    if not isinstance(keys, list):
        raise InvalidUsage('--keys must hold a JSON list of keys, such as [["ann"], ["bob"]]')
    return keys


def _status(arguments: argparse.Namespace) -> int:
    """0: all rows are erased. 3: some are left."""
    if arguments.id is not None and arguments.before is not None:
        raise InvalidUsage("give --id or --before, not both")
    with shard_of(arguments) as shard:
        if arguments.before is not None:
            lines = [shard.erased(before=arguments.before)]
        else:
            statuses = shard.erasures().values() if arguments.id is None else [shard.erased(arguments.id)]
            lines = [{"shard": arguments.name, **status.to_json()} for status in statuses]
    for line in lines:
        print(json.dumps(line))
    return 0 if all(line["phase"] == "erased" for line in lines) else EXIT_LEFT
