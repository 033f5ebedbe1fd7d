"""`persist retention …`: which rows a shard keeps by its policy; truncation; stream cuts of many shards.

Every answer is a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from persist.cli.connection_args import add_client_arguments, add_subcommand, client_of
from persist.client.rewrites import DROP, RETRACT, mode_of
from persist.client.row_retention import read_policy
from persist.client.stream_cuts import TEXT_CHARS_MAX, Cut
from persist.client.timestamps import read_instant, read_point
from persist.core.errors import InvalidUsage

LIMITS = (
    "age", "bytes", "rows", "cut_every", "consumers", "consumers_max_age", "tags", "mode", "column", "column_age",
    "column_unit",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="do", required=True, metavar="SUBCOMMAND")
    showing = add_subcommand(commands, "show", "show the policy and what holds it back", _show)
    setting = add_subcommand(commands, "set", "set the policy", _set)
    running = add_subcommand(commands, "run", "apply the policy now", _run)
    for subcommand in (showing, setting, running):
        subcommand.add_argument("name", help="the shard")
        add_client_arguments(subcommand)
    running.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    setting.add_argument("--age", metavar="AGE", help="delete rows that are older: 90d")
    setting.add_argument("--bytes", metavar="SIZE", help="keep about so much: 500GiB")
    setting.add_argument("--rows", metavar="N", type=int, help="keep at least so many rows")
    setting.add_argument("--column", metavar="COLUMN", help="delete rows whose wall clock in this column is old enough")
    setting.add_argument("--column-age", metavar="AGE", help="from which age on: 30d")
    setting.add_argument("--column-unit", metavar="UNIT", help="of a column of whole numbers: s, ms, us or ns")
    setting.add_argument("--cut-every", metavar="AGE", help="how finely (a hundredth of the age, or 1h)")
    setting.add_argument(
        "--consumer", action="append", dest="consumers", metavar="NAME", help="delete nothing that it has not passed"
    )
    setting.add_argument("--consumers-max-age", metavar="AGE", help="except what is older than this")
    setting.add_argument(
        "--tags", metavar="LADDER", type=_ladder, help="tags that are kept: hourly=24,daily=31,monthly=24"
    )
    setting.add_argument("--mode", metavar="MODE", help="drop truncates without reading the rows; else retract")
    setting.add_argument("--keep-all", action="store_true", help="remove the policy: all rows are kept")
    setting.add_argument(
        "--confirm", action="store_true", help="also if more than half of the rows are deleted at once"
    )

    truncating = add_subcommand(commands, "truncate", "delete the rows written before a time", _truncate)
    truncating.add_argument("name", nargs="?", help="the shard; without it, give --cut")
    add_client_arguments(truncating)
    truncating.add_argument("--before", metavar="POINT", help="a time, or an instant: 2026-11-20T12:00:00Z")
    truncating.add_argument(
        "--cut", metavar="FILE", help="what `persist retention cut` printed (-: standard input): all its shards"
    )
    truncating.add_argument("--mode", choices=(RETRACT, DROP), default=RETRACT, help="drop: read and write no row")
    truncating.add_argument("--dry-run", action="store_true", help="print how many rows would be deleted")
    truncating.add_argument("--retries", metavar="N", type=int, default=0, help="how often, if others write (0)")
    truncating.add_argument("--force", action="store_true", help="at once, also in a shard that is fed by append")

    cutting = add_subcommand(commands, "cut", "a frontier for each of many shards, for a later `truncate`", _cut)
    cutting.add_argument("names", nargs="*", metavar="NAME", help="the shards; or give --prefix")
    add_client_arguments(cutting)
    cutting.add_argument("--prefix", help="the shards whose names begin with this")
    cutting.add_argument("--at", metavar="INSTANT", help="what was there by 2026-11-20T12:00:00Z; else by now")
    cutting.add_argument(
        "--cursor", action="append", metavar="NAME", help="what this critical reader has passed (may be repeated)"
    )


def _ladder(text: str) -> dict[str, int]:
    """The ladder of a text. Raises ValueError."""
    return {rung: int(count) for rung, _, count in (item.partition("=") for item in text.split(","))}


def _show(arguments: argparse.Namespace) -> int:
    with client_of(arguments) as client:
        return _print(arguments.name, client.shard(arguments.name).retention().to_json())


def _set(arguments: argparse.Namespace) -> int:
    wanted = {name: getattr(arguments, name) for name in LIMITS if getattr(arguments, name) is not None}
    if bool(wanted) == arguments.keep_all:
        raise InvalidUsage("give a limit such as --age 90d, or --keep-all")
    if wanted:
        read_policy(wanted)
    with client_of(arguments) as client:
        policy = client.shard(arguments.name).retain(wanted or None, confirm=arguments.confirm)
        return _print(arguments.name, policy.to_json())


def _run(arguments: argparse.Namespace) -> int:
    with client_of(arguments) as client:
        return _print(arguments.name, client.shard(arguments.name).run_retention(dry_run=arguments.dry_run).to_json())


def _truncate(arguments: argparse.Namespace) -> int:
    """1: a shard of the cut refused."""
    by_cut = arguments.cut is not None
    if by_cut == (arguments.name is not None) or by_cut == (arguments.before is not None):
        raise InvalidUsage("give either a shard and --before, or --cut")
    if by_cut and arguments.mode != RETRACT:
        raise InvalidUsage(f"--mode {arguments.mode} is for one shard; a cut is truncated by retractions")
    if by_cut and arguments.force:
        raise InvalidUsage("--force is for one shard")
    cut = read_cut(arguments.cut) if by_cut else None
    before = None if by_cut else read_point("--before", arguments.before)
    with client_of(arguments) as client:
        if cut is not None:
            found = client.truncate(cut, dry_run=arguments.dry_run, retries=arguments.retries)
            for outcome in found.outcomes:
                print(json.dumps(outcome.to_json()))
            return 0 if found.complete else 1
        assert before is not None
        done = client.shard(arguments.name).truncate(
            before,
            mode=mode_of(arguments.mode),
            dry_run=arguments.dry_run,
            retries=arguments.retries,
            force=arguments.force,
        )
    return _print(arguments.name, done.to_json())


def read_cut(path: str) -> Cut:
    """The cut in a file; `-` is standard input. Raises InvalidUsage."""
    try:
        if path == "-":
            return Cut.from_json(sys.stdin.read(TEXT_CHARS_MAX + 1))
        with Path(path).open(encoding="utf-8") as file:
            return Cut.from_json(file.read(TEXT_CHARS_MAX + 1))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidUsage(f"the cut {path!r} cannot be read: {error}") from error


def _cut(arguments: argparse.Namespace) -> int:
    at = None if arguments.at is None else read_instant("--at", arguments.at)
    with client_of(arguments) as client:
        cut = client.cut(arguments.names or None, prefix=arguments.prefix, at=at, cursors=arguments.cursor or ())
    print(cut.to_json())
    return 0


def _print(name: str, told: dict[str, object]) -> int:
    print(json.dumps({"shard": name, **told}))
    return 0
