"""`persist erase NAME`: take rows away for good. Prints JSON; `persist erased` tells when nothing is left of them."""

from __future__ import annotations

import argparse
import json
import sys

from persist.cli.connection_args import add_client_arguments, client_of
from persist.core.errors import InvalidUsage
from persist.parts.column_types import EXACT_NUMBERS
from persist.parts.python_values import keys_of_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the shard")
    add_client_arguments(parser)
    parser.add_argument(
        "--keys", metavar="FILE", help='keys as a JSON list, such as [["ann"], ["bob"]]; - is the input'
    )
    parser.add_argument("--where", metavar="PREDICATE", help="rows for which it is true, such as \"customer = 'ann'\"")
    parser.add_argument("--gone", action="store_true", help="no rows: what was retracted or truncated before")
    parser.add_argument("--deadline", metavar="AGE", help="by when it should have ended: 30d")
    parser.add_argument(
        "--reason", metavar="TEXT", default="", help="what the receipt tells; it must not name the rows"
    )
    parser.add_argument("--tags", action="store_true", help="take earlier tags away; else it waits for them")
    parser.add_argument(
        "--force", action="store_true", help="at once, also in a shard fed by append, whose writer then has to go on"
    )


def run(arguments: argparse.Namespace) -> int:
    if sum((arguments.keys is not None, arguments.where is not None, arguments.gone)) != 1:
        raise InvalidUsage("give one of --keys, --where and --gone")
    keys = None if arguments.keys is None else _keys(arguments.keys)
    with client_of(arguments) as client:
        shard = client.shard(arguments.name)
        done = shard.erase(
            keys=keys_of_json(shard.schema, keys),
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
