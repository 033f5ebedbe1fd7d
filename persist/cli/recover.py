"""`persist recover`: shards begin their logs anew in an empty consensus store, from what the blob store tells."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack

from consensus import open_consensus
from persist.cli.connection_args import add_arguments as add_where
from persist.cli.connection_args import check_there, where_of
from persist.client.timestamps import instant_text
from persist.copies.recovery import GAP, Recovered, plan, recover
from persist.core.errors import InvalidUsage
from persist.formats.store_errors import translated

EXIT_LOST = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_where(parser)
    parser.add_argument("--dry-run", action="store_true", help="only tell what would come back")
    parser.add_argument(
        "--accept-loss", action="store_true", help="go on although the newest versions of shards are not whole"
    )
    parser.add_argument(
        "--gap", type=int, default=GAP, metavar="N", help=f"times that are left out after the last known one ({GAP})"
    )
    parser.add_argument(
        "--older-consensus", metavar="URL", help="an older copy of the lost consensus store, which is read only"
    )


def run(arguments: argparse.Namespace) -> int:
    """0: done. 1: `--dry-run` has found shards whose newest version would not come back."""
    try:
        found = _found(arguments)
    except InvalidUsage as error:
        if arguments.older_consensus or not error.details.get("in_use"):
            raise
        raise InvalidUsage(
            f"{error.message}; an older copy of the lost one is given by --older-consensus beside it"
        ) from error
    for shard in found.shards:
        print(json.dumps(shard.to_json()))
    print(json.dumps(_sum(found, dry_run=arguments.dry_run)))
    return EXIT_LOST if arguments.dry_run and found.lacking else 0


def _found(arguments: argparse.Namespace) -> Recovered:
    with ExitStack() as opened:
        location = where_of(arguments).open(must_exist=True)
        opened.callback(location.close)
        older = None
        if arguments.older_consensus:
            check_there(arguments.older_consensus)
            with translated():
                older = open_consensus(arguments.older_consensus)
            opened.callback(older.close)
        if arguments.dry_run:
            return plan(location, arguments.gap, older)
        return recover(location, accept_loss=arguments.accept_loss, gap=arguments.gap, older=older)


def _sum(found: Recovered, *, dry_run: bool) -> dict[str, object]:
    beat = None if found.beat_ms is None else instant_text(found.beat_ms)
    told = {"epoch": found.epoch, "shards": len(found.shards), "not_whole": len(found.lacking)}
    return {**told, "last_heartbeat": beat, "dry_run": dry_run}
