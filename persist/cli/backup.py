"""`persist backup …`: backups of a location in a blob store of their own, and recovery after a store is lost.

`export-state` and `import-state` move a single shard between locations as a JSON file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blob import Blob, open_blob
from consensus import open_consensus
from persist.cli.connection_args import add_arguments as add_where
from persist.cli.connection_args import add_subcommand, check_there, where_of
from persist.cli.output_files import STDOUT, replacing
from persist.client.arguments import read_bounded
from persist.client.timestamps import instant_text, read_instant, retention_ms
from persist.commit.clocks_and_ids import SystemClock, SystemIds
from persist.copies.backup_creation import TIMESTAMP, UPPER, BackupRequest, Progress, back_up, check_shards
from persist.copies.backup_restore import RestoreRequest, ShardRestored, select_backup, select_shards, verify_backup
from persist.copies.backup_store import Backup, BackupStore, KeepRule, check_separate, prune
from persist.copies.recovery import GAP, Recovered, RecoveryRequest, plan, run_recovery
from persist.copies.state_file import FILE_BYTES_MAX, export_state, import_state, read_file
from persist.copies.throttled_blob import read_rate
from persist.copies.verify import Depth
from persist.core.errors import InvalidUsage
from persist.core.ids import check_shard_name
from persist.formats.store_errors import translated

EXIT_FOUND = 1  # faults, or unreadable backups
EXIT_LOST = 1  # shards whose newest version cannot be recovered


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True, metavar="SUBCOMMAND")
    create = add_subcommand(commands, "create", "back up all shards or some of them", _create)
    add_where(create)
    create.add_argument("--to", required=True, metavar="URL", help="the blob store of the backups: file:///dir, s3://…")
    _add_shards(create)
    create.add_argument("--consistent", choices=(TIMESTAMP, UPPER), default=TIMESTAMP, help="one wall clock for all")
    _add_pace(create)
    _add_from(add_subcommand(commands, "list", "list the backups", _list), backup=False)
    _add_from(add_subcommand(commands, "show", "show one backup and its shards", _show), backup=True)
    verify = add_subcommand(commands, "verify", "check whether a backup can be restored", _verify)
    _add_from(verify, backup=True)
    verify.add_argument("--deep", action="store_true", help="read every byte, and decode every row")
    verify.add_argument("--rate", metavar="BYTES", help="with --deep: at most so many bytes a second, such as 50MiB")
    back = add_subcommand(commands, "restore", "restore shards in a location that does not have them", _restore)
    _add_from(back, backup=True)
    add_where(back)
    _add_shards(back)
    back.add_argument("--as", dest="as_name", metavar="NAME", help="the new name, if there is only one shard")
    back.add_argument("--at", metavar="TIME", help="the contents as of a wall clock, such as 2026-11-20T12:00:00Z")
    back.add_argument("--keep-policies", action="store_true", help="apply row retention policies at once")
    back.add_argument("--ahead", action="store_true", help="copy the blobs only; a later restore takes seconds")
    _add_pace(back)
    pruning = add_subcommand(commands, "prune", "delete old backups, and blobs that only they need", _prune)
    _add_from(pruning, backup=False)
    pruning.add_argument("--last", type=int, metavar="N", help="keep the newest N")
    pruning.add_argument("--within", metavar="AGE", help="keep those that are younger, such as 30d")
    pruning.add_argument("--damaged", action="store_true", help="delete backups whose manifest is damaged")
    pruning.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    _add_recovery(commands)


def _add_recovery(commands: Any) -> None:
    summary = "restart the logs of shards from the blob store, after the consensus store is lost"
    recovery = add_subcommand(commands, "recover", summary, _recover)
    add_where(recovery)
    recovery.add_argument("--dry-run", action="store_true", help="only print what would be recovered")
    recovery.add_argument("--accept-loss", action="store_true", help="continue although newest versions are incomplete")
    recovery.add_argument("--gap", type=int, default=GAP, metavar="N", help=f"times to skip after known ones ({GAP})")
    recovery.add_argument("--older-consensus", metavar="URL", help="an older copy of the lost store; it is only read")
    summary = "write the State of a shard as JSON, with the blobs that it names"
    out = add_subcommand(commands, "export-state", summary, _export_state)
    out.add_argument("name", metavar="NAME", help="the shard")
    add_where(out)
    out.add_argument("-o", "--out", metavar="FILE", help="the file; else standard output")
    summary = "create a shard from such a file, with copies of its blobs"
    back = add_subcommand(commands, "import-state", summary, _import_state)
    back.add_argument("file", metavar="FILE")
    add_where(back)
    back.add_argument("--as", dest="as_name", required=True, metavar="NAME", help="the name of the new shard")
    back.add_argument("--from", dest="source", metavar="URL", help="the blob store with its blobs; default: this one")
    back.add_argument("--keep-policies", action="store_true", help="apply its row retention policy at once")


def _add_from(parser: argparse.ArgumentParser, *, backup: bool) -> None:
    parser.add_argument("--from", dest="source", required=True, metavar="URL", help="the blob store of the backups")
    if backup:
        parser.add_argument("--backup", metavar="ID", help="the backup; default: the latest")


def _add_shards(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="the shards; default: all")
    parser.add_argument("--prefix", default="", metavar="TEXT", help="all shards whose names begin with this")


def _add_pace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", metavar="BYTES", help="read at most so many bytes a second, such as 50MiB")
    parser.add_argument("--at-once", type=int, default=4, metavar="N", help="concurrent shards, and blobs (4)")


def _create(arguments: argparse.Namespace) -> int:
    request = BackupRequest(
        tuple(arguments.names), arguments.prefix, arguments.consistent, read_rate(arguments.rate), arguments.at_once
    )
    request.check()
    with closing(where_of(arguments).open(must_exist=True)) as location:
        check_separate(location.blob.url, arguments.to)
        check_shards(location, request)  # before the store of the backups is created
        with blob_at(arguments.to, must_exist=False) as blob, _progress_line() as show:
            backup = back_up(location, BackupStore(blob, SystemClock(), SystemIds()), request, show)
    print(json.dumps(_line(backup)))
    return 0


def _list(arguments: argparse.Namespace) -> int:
    """Print a line for each backup. 1: some backups cannot be read."""
    with backups_at(arguments.source) as store:
        listed = store.listed()
    for backup in listed.backups:
        print(json.dumps(_line(backup)))
    for unread in listed.unread:
        print(json.dumps({"backup": unread.id, "kind": unread.error.kind, "why": unread.error.message}))
    return EXIT_FOUND if listed.unread else 0


def _show(arguments: argparse.Namespace) -> int:
    with backups_at(arguments.source) as store:
        backup = select_backup(store, None, arguments.backup)
    for shard in backup.shards:
        print(json.dumps({"shard": shard.name, "since": shard.since, "upper": shard.upper, "blobs": shard.blobs,
                          "bytes": shard.size, "sent": shard.sent}))  # fmt: skip
    print(json.dumps(_line(backup)))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    """Print a line for each fault. 1: there are faults."""
    depth = Depth(arguments.deep, read_rate(arguments.rate))
    depth.check()
    faults = 0
    with backups_at(arguments.source) as store:
        backup = select_backup(store, None, arguments.backup)
        for _, shard_faults in verify_backup(store, backup, depth):
            for fault in shard_faults:
                faults += 1
                print(json.dumps(fault.to_json()))
    print(json.dumps({**_line(backup), "faults": faults}))
    return EXIT_FOUND if faults else 0


def _restore(arguments: argparse.Namespace) -> int:
    at = None if arguments.at is None else read_instant("--at", arguments.at)
    choice = RestoreRequest(
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
        backup = select_backup(store, at, arguments.backup)
        selected = select_shards(store, backup, choice)  # before the location is created
        with closing(where_of(arguments).open()) as location, _progress_line() as show:
            restored = selected.restore(location, show)
    for shard in restored:
        if arguments.ahead:
            print(json.dumps({"shard": shard.name, "sent": shard.sent, "ahead": True}))
        else:
            print(json.dumps(_restored_line(shard)))
    print(json.dumps({"backup": backup.id, "shards": len(restored), "sent": sum(shard.sent for shard in restored)}))
    return 0


def _prune(arguments: argparse.Namespace) -> int:
    within = None if arguments.within is None else retention_ms(arguments.within, "--within", takes_none=False)
    rule = KeepRule(arguments.last, within, arguments.damaged)
    rule.check()
    with backups_at(arguments.source) as store:
        pruned = prune(store, rule, dry_run=arguments.dry_run)
    print(json.dumps({**asdict(pruned), "dry_run": arguments.dry_run}))
    return 0


def _recover(arguments: argparse.Namespace) -> int:
    """0: done. 1: with `--dry-run`, there are shards whose newest version would not be recovered."""
    with ExitStack() as stack:
        where = where_of(arguments)
        location = stack.enter_context(closing(where.open(must_exist=True, reads_only=arguments.dry_run)))
        older = None
        if arguments.older_consensus:
            check_there(arguments.older_consensus)
            with translated():
                older = open_consensus(arguments.older_consensus)
            stack.callback(older.close)
        request = RecoveryRequest(arguments.accept_loss, arguments.gap, older)
        try:
            recovered = plan(location, request) if arguments.dry_run else run_recovery(location, request)
        except InvalidUsage as error:
            if older is not None or not error.details.get("in_use"):
                raise
            raise InvalidUsage(f"{error.message}; give an older copy of the lost store by --older-consensus") from error
    show_recovered(recovered, dry_run=arguments.dry_run)
    return EXIT_LOST if arguments.dry_run and recovered.lacking else 0


def show_recovered(recovered: Recovered, *, dry_run: bool) -> None:
    """Print a line of JSON for each shard, and one for all of them."""
    for shard in recovered.shards:
        print(json.dumps(shard.to_json()))
    beat = None if recovered.beat_ms is None else instant_text(recovered.beat_ms)
    if recovered.had_ended:
        total: dict[str, object] = {"epoch": recovered.epoch, "had_ended": True}
    else:
        total = {"epoch": recovered.epoch, "shards": len(recovered.shards), "not_whole": len(recovered.lacking)}
    print(json.dumps({**total, "last_heartbeat": beat, "dry_run": dry_run}))


def _export_state(arguments: argparse.Namespace) -> int:
    with closing(where_of(arguments).open(must_exist=True)) as location:
        text = json.dumps(export_state(location, arguments.name), indent=1)
    if arguments.out in (None, STDOUT):
        sys.stdout.write(text + "\n")
    else:
        with replacing(Path(arguments.out)) as out:
            out.write(text.encode() + b"\n")
    return 0


def _import_state(arguments: argparse.Namespace) -> int:
    state_file = read_file(read_bounded(arguments.file, arguments.file, FILE_BYTES_MAX))
    check_shard_name(arguments.as_name)
    with ExitStack() as stack:  # what may be refused comes before the location, which may be created
        source = None if arguments.source is None else stack.enter_context(blob_at(arguments.source))
        location = stack.enter_context(closing(where_of(arguments).open()))
        imported = import_state(
            location,
            state_file,
            arguments.as_name,
            location.blob if source is None else source,
            keeps_policies=arguments.keep_policies,
        )
    print(json.dumps(_restored_line(imported)))
    return 0


def _restored_line(shard: ShardRestored) -> dict[str, Any]:
    line = {"shard": shard.name, "upper": shard.upper, "sent": shard.sent, "policy_taken_away": shard.policy}
    return {**line, "critical_readers": list(shard.readers), "left": shard.left}


def _line(backup: Backup) -> dict[str, Any]:
    return {
        "backup": backup.id,
        "taken": instant_text(backup.taken_ms),
        "at": None if backup.at_ms is None else instant_text(backup.at_ms),
        "shards": len(backup.shards),
        "blobs": sum(shard.blobs for shard in backup.shards),
        "bytes": backup.size,
        "sent": backup.sent,
    }


@contextmanager
def blob_at(url: str, *, must_exist: bool = True) -> Iterator[Blob]:
    """Open a blob store, and close it at the end. Raises InvalidUsage: it must exist, and does not."""
    if must_exist:
        check_there(url)
    with translated():
        blob = open_blob(url)
    with closing(blob):
        yield blob


@contextmanager
def backups_at(url: str) -> Iterator[BackupStore]:
    with blob_at(url) as blob:
        store = BackupStore(blob, SystemClock(), SystemIds())
        store.open(None)
        yield store


@contextmanager
def _progress_line() -> Iterator[Callable[[Progress], None]]:
    """Show progress on one line of standard error, if it is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return

    def show(progress: Progress) -> None:
        sys.stderr.write(
            f"\r{progress.shards_done} of {progress.shards} shards, {progress.blobs} blobs, "
            f"{progress.sent / 1e6:,.1f} MB sent "
        )
        sys.stderr.flush()

    try:
        yield show
    finally:
        print(file=sys.stderr)
