"""`persist backup create|list|show|verify|restore|prune`: copies of a location in a blob store of their own."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from blob import open_blob
from persist.cli.connection_args import add_arguments as add_where
from persist.cli.connection_args import check_there, where_of
from persist.client.timestamps import instant_text, kept_ms, read_instant
from persist.commit.system import SystemClock, SystemIds
from persist.copies.backup_creation import TIMESTAMP, UPPER, Progress, Wanted, back_up
from persist.copies.backup_pruning import Kept, prune
from persist.copies.backup_restore import Choice, checked_backup, chosen, restore
from persist.copies.backup_store import Backup, BackupStore
from persist.copies.throttled_blob import read_rate
from persist.copies.verify import How
from persist.formats.store_errors import translated

EXIT_FOUND = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = _action(actions, "create", "make a backup, of all shards or of some", _create)
    add_where(create)
    create.add_argument("--to", required=True, metavar="URL", help="the blob store of the backups: file:///dir, s3://…")
    _add_shards(create)
    create.add_argument("--consistent", choices=(TIMESTAMP, UPPER), default=TIMESTAMP, help="one wall clock for all")
    _add_pace(create)
    for name, what, run in (("list", "the backups", _list), ("show", "one backup and its shards", _show)):
        _add_from(_action(actions, name, what, run), backup=name == "show")
    verify = _action(actions, "verify", "whether a backup can be restored", _verify)
    _add_from(verify, backup=True)
    verify.add_argument("--deep", action="store_true", help="read every byte, and decode every row")
    verify.add_argument("--rate", metavar="BYTES", help="with --deep: at most so many bytes a second, such as 50MiB")
    back = _action(actions, "restore", "bring shards back in a location that does not have them", _restore)
    _add_from(back, backup=True)
    add_where(back)
    _add_shards(back)
    back.add_argument("--as", dest="as_name", metavar="NAME", help="the only shard comes back under this name")
    back.add_argument("--at", metavar="TIME", help="the contents of that wall clock, such as 2026-11-20T12:00:00Z")
    back.add_argument("--keep-policies", action="store_true", help="let policies of rows go on at once")
    back.add_argument("--ahead", action="store_true", help="bring the blobs only; a later restore takes seconds")
    _add_pace(back)
    pruning = _action(actions, "prune", "delete old backups, and what only they need", _prune)
    _add_from(pruning, backup=False)
    pruning.add_argument("--last", type=int, metavar="N", help="keep the newest N")
    pruning.add_argument("--within", metavar="AGE", help="keep those that are younger, such as 30d")
    pruning.add_argument("--damaged", action="store_true", help="let backups go of which the manifest is damaged")
    pruning.add_argument("--dry-run", action="store_true", help="tell what would go")


def run(arguments: argparse.Namespace) -> int:
    """0: done. 1: `verify` has found faults, or `list` backups that cannot be read; each has a line."""
    act: Callable[[argparse.Namespace], int] = arguments.act
    return act(arguments)


def _action(actions: Any, name: str, what: str, act: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    found: argparse.ArgumentParser = actions.add_parser(name, help=what, description=what)
    found.set_defaults(act=act)
    return found


def _add_from(parser: argparse.ArgumentParser, *, backup: bool) -> None:
    parser.add_argument("--from", dest="source", required=True, metavar="URL", help="the blob store of the backups")
    if backup:
        parser.add_argument("--backup", metavar="ID", help="the backup; without it the latest one")


def _add_shards(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="the shards; without one, all of them")
    parser.add_argument("--prefix", default="", metavar="TEXT", help="all shards whose names begin so")


def _add_pace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", metavar="BYTES", help="read at most so many bytes a second, such as 50MiB")
    parser.add_argument(
        "--at-once", type=int, default=4, metavar="N", help="shards, and blobs, on their way at a time (4)"
    )


def _create(arguments: argparse.Namespace) -> int:
    wanted = Wanted(
        tuple(arguments.names), arguments.prefix, arguments.consistent, read_rate(arguments.rate), arguments.at_once
    )
    wanted.check()
    location = where_of(arguments).open(must_exist=True)
    try:
        with _store(arguments.to) as store, _shown() as told:
            made = back_up(location, store, wanted, told)
    finally:
        location.close()
    print(json.dumps(_line(made)))
    return 0


def _list(arguments: argparse.Namespace) -> int:
    with backups_at(arguments.source) as store:
        listed = store.listed()
    for backup in listed.backups:
        print(json.dumps(_line(backup)))
    for unread in listed.unread:
        print(json.dumps({"backup": unread.id, "kind": unread.why.kind, "why": unread.why.message}))
    return EXIT_FOUND if listed.unread else 0


def _show(arguments: argparse.Namespace) -> int:
    with backups_at(arguments.source) as store:
        backup = chosen(store, None, arguments.backup)
    for shard in backup.shards:
        print(json.dumps({"shard": shard.name, "since": shard.since, "upper": shard.upper, "blobs": shard.blobs,
                          "bytes": shard.size, "sent": shard.sent}))  # fmt: skip
    print(json.dumps(_line(backup)))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    how = How(arguments.deep, read_rate(arguments.rate))
    how.check()
    faults = 0
    with backups_at(arguments.source) as store:
        backup = chosen(store, None, arguments.backup)
        for _, found in checked_backup(store, backup, how):
            for fault in found:
                faults += 1
                print(json.dumps(fault.to_json()))
    print(json.dumps({**_line(backup), "faults": faults}))
    return EXIT_FOUND if faults else 0


def _restore(arguments: argparse.Namespace) -> int:
    at = None if arguments.at is None else read_instant("--at", arguments.at)
    choice = Choice(
        tuple(arguments.names),
        arguments.prefix,
        arguments.as_name,
        at,
        arguments.keep_policies,
        read_rate(arguments.rate),
        arguments.at_once,
        arguments.ahead,
    )
    choice.check()
    with backups_at(arguments.source) as store:
        backup = chosen(store, at, arguments.backup)
        location = where_of(arguments).open()
        try:
            with _shown() as shown:
                back = restore(store, backup, location, choice, shown)
        finally:
            location.close()
    for shard in back:
        if arguments.ahead:
            print(json.dumps({"shard": shard.name, "sent": shard.sent, "ahead": True}))
            continue
        told = {"shard": shard.name, "upper": shard.upper, "sent": shard.sent, "policy_taken_away": shard.policy}
        print(json.dumps({**told, "critical_readers": list(shard.readers), "left": shard.left}))
    print(json.dumps({"backup": backup.id, "shards": len(back), "sent": sum(shard.sent for shard in back)}))
    return 0


def _prune(arguments: argparse.Namespace) -> int:
    within = None if arguments.within is None else kept_ms(arguments.within, "--within", takes_none=False)
    kept = Kept(arguments.last, within, arguments.damaged)
    kept.check()
    with backups_at(arguments.source) as store:
        found = prune(store, kept, dry_run=arguments.dry_run)
    print(json.dumps({**asdict(found), "dry_run": arguments.dry_run}))
    return 0


def _line(backup: Backup) -> dict[str, Any]:
    at_ms = backup.at_ms
    return {
        "backup": backup.id,
        "taken": instant_text(backup.taken_ms),
        "at": None if at_ms is None else instant_text(at_ms),
        "shards": len(backup.shards),
        "blobs": sum(shard.blobs for shard in backup.shards),
        "bytes": backup.size,
        "sent": backup.sent,
    }


@contextmanager
def _store(url: str) -> Iterator[BackupStore]:
    with translated():
        blob = open_blob(url)
    try:
        yield BackupStore(blob, SystemClock(), SystemIds())
    finally:
        blob.close()


@contextmanager
def backups_at(url: str) -> Iterator[BackupStore]:
    """The backups that lie there."""
    check_there(url)
    with _store(url) as store:
        store.open(None)
        yield store


@contextmanager
def _shown() -> Iterator[Callable[[Progress], None]]:
    """A line on the terminal that goes on; nothing where stderr is none."""
    is_shown = sys.stderr.isatty()

    def told(progress: Progress) -> None:
        if is_shown:
            print(
                f"\r{progress.shards_done} of {progress.shards} shards, {progress.blobs} blobs, "
                f"{progress.sent / 1e6:,.1f} MB sent ",
                end="", file=sys.stderr, flush=True,
            )  # fmt: skip

    try:
        yield told
    finally:
        if is_shown:
            print(file=sys.stderr)
