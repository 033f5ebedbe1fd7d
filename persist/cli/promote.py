"""`persist promote`: a copy becomes home, from what has come of the home that is lost."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from dataclasses import dataclass

from blob import Blob, open_blob
from persist.cli.connection_args import add_arguments as add_where
from persist.cli.connection_args import check_given, check_there, where_of
from persist.client.timestamps import instant_text
from persist.copies.recovery import GAP, How, Recovered, plan
from persist.core.errors import InvalidUsage
from persist.formats.store_errors import translated
from persist.regions.failover import OldHome, check_copy, moved_home, promote
from persist.regions.opening import check_region
from persist.regions.region_index import Entry, read_index, urls_of

EXIT_LOST = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_region_arguments(parser)
    parser.add_argument("--home", metavar="URLS", help="servers of the lost home, which must not answer")
    parser.add_argument("--home-blob", metavar="URL", help="its blob store, so that it stops if it is still there")
    parser.add_argument(
        "--home-is-lost", action="store_true", help="go on although nothing tells whether it is, or it answers"
    )
    parser.add_argument("--dry-run", action="store_true", help="only tell what would go on, and from where")
    parser.add_argument("--accept-loss", action="store_true", help="go on although newest versions are not whole")
    parser.add_argument(
        "--gap", type=int, default=GAP, metavar="N", help=f"times that are left out after the last known one ({GAP})"
    )


def add_region_arguments(parser: argparse.ArgumentParser) -> None:
    """What a promotion and a switch take: where the new home is, and the index that is to say so."""
    parser.add_argument("region", metavar="REGION", help="where the new home is")
    parser.add_argument("--of", required=True, metavar="NAME", help="the region whose home it becomes")
    add_where(parser)
    parser.add_argument("--index", metavar="FILE", help="the index of regions, which is set to the new home")
    parser.add_argument("--write", metavar="URLS", help="with --index: servers of the new home")


@dataclass(frozen=True, slots=True)
class Indexed:
    """The index that a new home is to be set in. `path` None: none is."""

    path: str | None
    of: str
    servers: tuple[str, ...]

    @classmethod
    def of_arguments(cls, arguments: argparse.Namespace) -> Indexed:
        """Raises InvalidUsage, Corruption: it cannot be read, or no servers are given for it."""
        check_given(arguments, "index", "write")
        check_region(arguments.region)
        servers = urls_of(arguments.write or "")
        Entry(servers).check()
        if arguments.index and not servers:
            raise InvalidUsage("--index needs --write: the servers by which the new home is reached")
        if servers and not arguments.index:
            raise InvalidUsage("--write is for the index: give --index")
        found = cls(arguments.index, check_region(arguments.of), servers)
        found.entry()
        return found

    def entry(self) -> Entry:
        """What the index says of the region now."""
        return Entry() if self.path is None else read_index(self.path).regions.get(self.of, Entry())

    def set(self, epoch: int) -> None:
        """Say where the region is at home from now on."""
        if self.path is not None:
            moved_home(self.path, self.of, self.servers, epoch)


def run(arguments: argparse.Namespace) -> int:
    """0: done. 1: `--dry-run` has found shards whose newest version would not go on."""
    check_given(arguments, "home", "home_blob")
    indexed = Indexed.of_arguments(arguments)
    least = indexed.entry().epoch
    how = How(arguments.accept_loss, arguments.gap, least=least)
    how.check()
    with ExitStack() as opened:
        home = _home(arguments, indexed, opened)
        location = where_of(arguments).open(must_exist=True)
        opened.callback(location.close)
        if arguments.dry_run:
            check_copy(location)
            fenced = [blob for blob in (home.blob,) if blob is not None]
            found = plan(location, arguments.gap, fenced=fenced, least=least)
        else:
            found = promote(location, arguments.region, arguments.of, home, how)
            indexed.set(found.epoch)
    tell(found, dry_run=arguments.dry_run)
    return EXIT_LOST if arguments.dry_run and found.lacking else 0


def _home(arguments: argparse.Namespace, indexed: Indexed, opened: ExitStack) -> OldHome:
    urls = urls_of(arguments.home or "") or tuple(url for url in indexed.entry().write if url not in indexed.servers)
    Entry(urls).check()
    blob: Blob | None = None
    if arguments.home_blob:
        check_there(arguments.home_blob)
        with translated():
            blob = open_blob(arguments.home_blob)
        opened.callback(blob.close)
    return OldHome(urls, blob, arguments.home_is_lost)


def tell(found: Recovered, *, dry_run: bool) -> None:
    """A line of JSON for each shard, and one for all of them."""
    for shard in found.shards:
        print(json.dumps(shard.to_json()))
    beat = None if found.beat_ms is None else instant_text(found.beat_ms)
    if found.had_ended:
        told: dict[str, object] = {"epoch": found.epoch, "had_ended": True}
    else:
        told = {"epoch": found.epoch, "shards": len(found.shards), "not_whole": len(found.lacking)}
    print(json.dumps({**told, "last_heartbeat": beat, "dry_run": dry_run}))
