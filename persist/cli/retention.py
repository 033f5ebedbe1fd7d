"""`persist retention show|set|run NAME`: which rows a shard keeps, what holds its policy back, and running it now."""

from __future__ import annotations

import argparse
import json

from persist.cli.connection_args import add_client_arguments, client_of
from persist.client.row_retention import read_policy
from persist.core.errors import InvalidUsage

OF_COLUMN = ("column", "column_age", "column_unit")
LIMITS = ("age", "bytes", "rows", "cut_every", "consumers", "consumers_max_age", "tags", "mode", *OF_COLUMN)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("do", choices=("show", "set", "run"), help="what to do; every answer is a line of JSON")
    parser.add_argument("name", help="the shard")
    add_client_arguments(parser)
    parser.add_argument("--age", metavar="AGE", help="rows that are older go: 90d")
    parser.add_argument("--bytes", metavar="SIZE", help="about so much stays: 500GiB")
    parser.add_argument("--rows", metavar="N", type=int, help="at least so many rows stay")
    parser.add_argument("--column", metavar="COLUMN", help="rows go whose wall clock in this column is old enough")
    parser.add_argument("--column-age", metavar="AGE", help="from which age on: 30d")
    parser.add_argument("--column-unit", metavar="UNIT", help="of a column of whole numbers: s, ms, us or ns")
    parser.add_argument("--cut-every", metavar="AGE", help="how finely (a hundredth of the age, or 1h)")
    parser.add_argument(
        "--consumer", action="append", dest="consumers", metavar="NAME", help="nothing goes that it has not passed"
    )
    parser.add_argument("--consumers-max-age", metavar="AGE", help="but for what is older than this")
    parser.add_argument(
        "--tags", metavar="LADDER", type=_ladder, help="tags that are kept: hourly=24,daily=31,monthly=24"
    )
    parser.add_argument("--mode", metavar="MODE", help="drop truncates without reading what goes; else retract")
    parser.add_argument("--keep-all", action="store_true", help="take the policy away: all rows are kept")
    parser.add_argument("--confirm", action="store_true", help="also if more than half of the rows go at once")
    parser.add_argument("--dry-run", action="store_true", help="with run: only tell what would go")


def _ladder(text: str) -> dict[str, int]:
    """The ladder that a text tells. Raises ValueError."""
    return {rung: int(count) for rung, _, count in (item.partition("=") for item in text.split(","))}


def run(arguments: argparse.Namespace) -> int:
    wanted = {name: getattr(arguments, name) for name in LIMITS if getattr(arguments, name) is not None}
    sets = arguments.do == "set"
    if not sets and (wanted or arguments.keep_all or arguments.confirm):
        raise InvalidUsage(f"a policy is given to `persist retention set`, not to {arguments.do}")
    if sets and bool(wanted) == arguments.keep_all:
        raise InvalidUsage("give a limit such as --age 90d, or --keep-all")
    if arguments.dry_run and arguments.do != "run":
        raise InvalidUsage("--dry-run is for `persist retention run`")
    if wanted:
        read_policy(wanted)
    with client_of(arguments) as client:
        shard = client.shard(arguments.name)
        if arguments.do == "run":
            told = shard.run_retention(dry_run=arguments.dry_run).to_json()
        elif sets:
            told = shard.retain(wanted or None, confirm=arguments.confirm).to_json()
        else:
            told = shard.retention().to_json()
    print(json.dumps({"shard": arguments.name, **told}))
    return 0
