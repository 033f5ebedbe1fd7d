"""`persist constraints NAME`: what a shard asks of its rows beside their types.

A line of JSON with all of them, after what was asked for was done; with --look one more for each that is broken.
"""

from __future__ import annotations

import argparse
import json

from persist.cli.connection_args import add_client_arguments, client_of
from persist.core.errors import InvalidUsage
from persist.parts import ShardSchema
from persist.parts.constraint_checks import constraints_json, not_null

FOUND_CODE = 1  # with --look: something breaks a constraint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="the shard")
    add_client_arguments(parser)
    unique = parser.add_mutually_exclusive_group()
    unique.add_argument("--unique", action="store_true", default=None, help="a key has at most one row at each time")
    unique.add_argument("--not-unique", action="store_false", dest="unique", help="a key may have several")
    columns = {"--not-null": "takes no null in rows that are added", "--allow-null": "takes nulls again"}
    for option, what in columns.items():
        parser.add_argument(
            option, metavar="COLUMN", action="append", default=[], help=f"this column {what}; may be repeated"
        )
    add_check_argument(parser)
    parser.add_argument(
        "--drop-check", metavar="NAME", action="append", default=[], help="take this check away; may be repeated"
    )
    parser.add_argument("--look", action="store_true", help="look whether what is there obeys them: reads all rows")


def add_check_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--check",
        metavar="TEXT",
        action="append",
        default=[],
        help='a predicate that is false for no row, and its name: "positive: amount > 0"; may be repeated',
    )


def run(arguments: argparse.Namespace) -> int:
    added = read_checks(arguments.check)
    with client_of(arguments) as client:
        shard = client.shard(arguments.name)
        columns = _columns(shard.schema, arguments.not_null, arguments.allow_null)
        checks = _checks(shard.schema, added, arguments.drop_check)
        if arguments.unique is not None or columns is not None or checks is not None:
            shard.set_constraints(unique=arguments.unique, not_null=columns, checks=checks)
        print(json.dumps({"shard": shard.name, **constraints_json(shard.schema)}))
        found = shard.broken_constraints() if arguments.look else []
        for broken in found:
            print(json.dumps({"shard": shard.name, **broken.to_json()}))
    return FOUND_CODE if found else 0


def read_checks(given: list[str]) -> dict[str, str]:
    """Checks by their names, of texts such as "positive: amount > 0". Raises InvalidUsage."""
    found: dict[str, str] = {}
    for text in given:
        name, colon, where = text.partition(":")
        if not colon or not where.strip():
            raise InvalidUsage(
                f"--check is {text!r:.100}; write a name, a colon and a predicate: 'positive: amount > 0'"
            )
        if name.strip() in found:
            raise InvalidUsage(f"--check names {name.strip()!r:.100} twice; give one of them another name")
        found[name.strip()] = where.strip()
    return found


def _columns(schema: ShardSchema, added: list[str], allowed: list[str]) -> list[str] | None:
    if not added and not allowed:
        return None
    for name in schema.columns(dict.fromkeys(allowed)):
        if not schema.arrow.field(name).nullable:
            raise InvalidUsage(f"column {name!r} was made so that it takes no null, which is no constraint that can go")
    return [name for name in dict.fromkeys([*not_null(schema), *added]) if name not in allowed]


def _checks(schema: ShardSchema, added: dict[str, str], dropped: list[str]) -> dict[str, str] | None:
    if not added and not dropped:
        return None
    known = {check.name: check.where for check in schema.details.checks}
    for name in dropped:
        if name not in known:
            raise InvalidUsage(f"the shard has no check {name!r:.100}; its checks are {', '.join(known) or 'none'}")
    return {**{name: where for name, where in known.items() if name not in dropped}, **added}
