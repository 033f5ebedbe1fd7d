"""`persist salvage`: what an old home has acknowledged and the new one does not have goes to files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from blob import Blob, open_blob
from persist.cli.connection_args import add_arguments as add_where
from persist.cli.connection_args import check_there, where_of
from persist.core.errors import InvalidUsage
from persist.formats.store_errors import translated
from persist.regions.divergence import Diverged, diverged, salvage
from persist.regions.failover_record import Promotion, last_promotion

EXIT_FOUND = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_where(parser)
    add_new_home(parser)
    parser.add_argument("--to", metavar="DIR", help="an empty directory, or a new one, for a Parquet file a shard")
    parser.add_argument("--dry-run", action="store_true", help="only tell which shards have gone on there")


def add_new_home(parser: argparse.ArgumentParser) -> None:
    """The new home, as `--of`."""
    parser.add_argument("--of", required=True, metavar="URL", help="the blob store of the new home; it is only read")


def new_home(url: str, opened: ExitStack) -> tuple[Blob, Promotion]:
    """The blob store of the new home, and what it notes of its promotion. Raises InvalidUsage: it notes none."""
    check_there(url)
    with translated():
        blob = open_blob(url)
    opened.callback(blob.close)
    promotion = last_promotion(blob)
    if promotion is None:
        raise InvalidUsage(f"{blob.url} was never made home by `persist promote` or `persist switch`")
    return blob, promotion


def run(arguments: argparse.Namespace) -> int:
    """0: all of it was written, or there is nothing. 1: the updates of a shard cannot be told any more."""
    if bool(arguments.to) == arguments.dry_run:
        raise InvalidUsage("give --to, the directory for the files, or --dry-run")
    with ExitStack() as opened:
        old = where_of(arguments).open(must_exist=True)
        opened.callback(old.close)
        _, promotion = new_home(arguments.of, opened)
        found = diverged(old, promotion) if arguments.dry_run else salvage(old, promotion, Path(arguments.to))
        return _tell(found, promotion)


def _tell(found: Iterator[Diverged], promotion: Promotion) -> int:
    shards = lost = 0
    for shard in found:
        shards, lost = shards + 1, lost + bool(shard.why)
        print(json.dumps(shard.to_json()), flush=True)
    told = {"epoch": promotion.epoch, "region": promotion.region, "of": promotion.of}
    print(json.dumps({**told, "shards": shards, "lost": lost}))
    return EXIT_FOUND if lost else 0
