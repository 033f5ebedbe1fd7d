"""`persist retention …` and `erase …`: the row policy of a shard, truncation, stream cuts, and permanent deletion.

Every answer is a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from persist.cli.connection_args import add_client_arguments, add_shard_arguments, add_subcommand, client_of, shard_of
from persist.client.many_shards import TEXT_CHARS_MAX, Cut
from persist.client.restore_and_truncate import DROP, RETRACT, mode_of
from persist.client.row_retention import read_policy
from persist.client.timestamps import read_instant, read_point
from persist.core.errors import InvalidUsage
from persist.parts.exact_numbers import EXACT_NUMBERS
from persist.parts.python_values import decode_json_keys

LIMITS = (
    "age", "bytes", "rows", "cut_every", "consumers", "consumers_max_age", "tags", "mode", "column", "column_age",
    "column_unit",
)  # fmt: skip


def add_retention(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="do", required=True, metavar="SUBCOMMAND")
    showing = add_subcommand(commands, "show", "show the policy and what holds it back", _show)
    setting = add_subcommand(commands, "set", "set the policy", _set)
    running = add_subcommand(commands, "run", "apply the policy now", _run)
    for subcommand in (showing, setting, running):
        add_shard_arguments(subcommand)
    running.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    setting.add_argument("--age", metavar="AGE", help="delete rows that are older: 90d")
    setting.add_argument("--bytes", metavar="SIZE", help="keep about this size: 500GiB")
    setting.add_argument("--rows", metavar="N", type=int, help="keep at least this many rows")
    setting.add_argument("--column", metavar="COLUMN", help="delete rows by the timestamp in this column")
    setting.add_argument("--column-age", metavar="AGE", help="with --column: the age from which on: 30d")
    setting.add_argument("--column-unit", metavar="UNIT", help="of an integer column: s, ms, us or ns")
    setting.add_argument("--cut-every", metavar="AGE", help="granularity (a hundredth of the age, or 1h)")
    setting.add_argument("--consumer", action="append", dest="consumers", metavar="NAME", help="keep its unread rows")
    setting.add_argument("--consumers-max-age", metavar="AGE", help="but delete rows that are older than this")
    setting.add_argument("--tags", metavar="LADDER", type=_ladder, help="scheduled tags: hourly=24,daily=31,monthly=24")
    setting.add_argument("--mode", metavar="MODE", help="drop: truncate without reading rows; default: retract")
    setting.add_argument("--keep-all", action="store_true", help="remove the policy, so that all rows are kept")
    setting.add_argument("--confirm", action="store_true", help="also if more than half of the rows are deleted")

    truncating = add_subcommand(commands, "truncate", "delete the rows written before a time", _truncate)
    truncating.add_argument("name", nargs="?", help="the shard; without it, give --cut")
    add_client_arguments(truncating)
    truncating.add_argument("--before", metavar="POINT", help="a time, or an instant: 2026-11-20T12:00:00Z")
    truncating.add_argument("--cut", metavar="FILE", help="a file of `persist retention cut` (-: standard input)")
    truncating.add_argument("--mode", choices=(RETRACT, DROP), default=RETRACT, help="drop: read and write no rows")
    truncating.add_argument("--dry-run", action="store_true", help="print how many rows would be deleted")
    truncating.add_argument("--retries", metavar="N", type=int, default=0, help="retries after concurrent writes (0)")
    truncating.add_argument("--force", action="store_true", help="at once, also in a shard that is fed by append")

    cutting = add_subcommand(commands, "cut", "print a frontier for each of many shards, for `truncate --cut`", _cut)
    cutting.add_argument("names", nargs="*", metavar="NAME", help="the shards; or give --prefix")
    add_client_arguments(cutting)
    cutting.add_argument("--prefix", help="the shards whose names begin with this")
    cutting.add_argument("--at", metavar="INSTANT", help="cut at 2026-11-20T12:00:00Z; default: now")
    cutting.add_argument("--cursor", action="append", metavar="NAME", help="cut at this critical reader (repeatable)")


def _ladder(text: str) -> dict[str, int]:
    """Parse a tag schedule. Raises ValueError."""
    return {rung: int(count) for rung, _, count in (item.partition("=") for item in text.split(","))}


def _show(arguments: argparse.Namespace) -> int:
    with shard_of(arguments) as shard:
        return _print(arguments.name, shard.retention().to_json())


def _set(arguments: argparse.Namespace) -> int:
    wanted = {name: getattr(arguments, name) for name in LIMITS if getattr(arguments, name) is not None}
    if bool(wanted) == arguments.keep_all:
        raise InvalidUsage("give a limit such as --age 90d, or --keep-all")
    if wanted:
        read_policy(wanted)
    with shard_of(arguments) as shard:
        return _print(arguments.name, shard.retain(wanted or None, confirm=arguments.confirm).to_json())


def _run(arguments: argparse.Namespace) -> int:
    with shard_of(arguments) as shard:
        return _print(arguments.name, shard.run_retention(dry_run=arguments.dry_run).to_json())


def _truncate(arguments: argparse.Namespace) -> int:
    """1: truncation failed for a shard of the cut."""
    by_cut = arguments.cut is not None
    if by_cut == (arguments.name is not None) or by_cut == (arguments.before is not None):
        raise InvalidUsage("give either a shard and --before, or --cut")
    if by_cut and arguments.mode != RETRACT:
        raise InvalidUsage(f"--mode {arguments.mode} requires a single shard; a cut is truncated by retractions")
    if by_cut and arguments.force:
        raise InvalidUsage("--force requires a single shard")
    cut = read_cut(arguments.cut) if by_cut else None
    before = None if by_cut else read_point("--before", arguments.before)
    options = {"dry_run": arguments.dry_run, "retries": arguments.retries}
    with client_of(arguments) as client:
        if cut is not None:
            result = client.truncate(cut, **options)
            for outcome in result.outcomes:
                print(json.dumps(outcome.to_json()))
            return 1 if result.failed else 0
        assert before is not None
        shard, mode = client.shard(arguments.name), mode_of(arguments.mode)
        truncated = shard.truncate(before, mode=mode, force=arguments.force, **options)
    return _print(arguments.name, truncated.to_json())


def read_cut(path: str) -> Cut:
    """Read a cut from a file; `-` is standard input. Raises InvalidUsage."""
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
    sys.stdout.write(cut.to_json() + "\n")
    return 0


def _print(name: str, fields: dict[str, object]) -> int:
    print(json.dumps({"shard": name, **fields}))
    return 0


# `persist erase start|status NAME`: delete rows permanently, and show the progress of erasures.

EXIT_LEFT = 3  # of `status`: some data still contains the rows


def add_erase(parser: argparse.ArgumentParser) -> None:
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
    starting.add_argument("--force", action="store_true", help="at once, even if fed by append: the writer must retry")
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
    except (ValueError, RecursionError) as error:  # whose text may show keys
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
