"""`persist region …`: the index of regions, replication to other regions, switchover and failover.

The index is a file by which clients find the servers of regions.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from blob import Blob
from persist.cli.backup import EXIT_LOST, blob_at, show_recovered
from persist.cli.connection_args import Where, add_subcommand, check_given, read_age_ms, trust_of, where_of
from persist.cli.connection_args import add_arguments as add_where
from persist.cli.long_running import LEVELS, configure_logs, on_signals
from persist.commit.system import SystemClock
from persist.copies.recovery import GAP, RecoveryRequest, plan
from persist.copies.throttled_blob import read_rate
from persist.core.errors import Conflict, InvalidUsage, Overloaded, Unavailable
from persist.regions.divergence import Diverged, diverged, salvage
from persist.regions.failover import OldHome, Promotion, check_copy, last_promotion, moved_home, promote
from persist.regions.region_index import (
    ANSWER_S,
    FETCH_S,
    RegionEntry,
    RegionIndex,
    RegionServer,
    change_index,
    check_region,
    read_index,
    urls_of,
)
from persist.regions.remote_holds import held_by_regions, let_go
from persist.regions.replication import Replicated, ReplicateSettings, Replicator
from persist.regions.switchover import Switch, demote

EXIT_FOUND = 1
log = logging.getLogger("persist.regions")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True, metavar="SUBCOMMAND")
    _add_index(commands)
    holds = add_subcommand(commands, "holds", "list what regions hold at this home", _holds)
    release = add_subcommand(commands, "release", "release what a region holds at this home", _release)
    release.add_argument("region", metavar="REGION")
    for command in (holds, release):
        add_where(command)
    _add_replicate(add_subcommand(commands, "replicate", "copy the blob store of a location to a region", _replicate))
    switch = add_subcommand(commands, "switch", "make a copy home as planned; nothing is lost", _switch)
    _add_new_place(switch)
    switch.add_argument("--home-dir", metavar="PATH", help="the directory of the home that ends")
    switch.add_argument("--home-blob", metavar="URL", help="or its blob store")
    switch.add_argument("--home-consensus", metavar="URL", help="and its consensus store")
    switch.add_argument(
        "--replicated", action="store_true", help="the store replicates itself: only wait until everything has arrived"
    )
    switch.add_argument("--undo", action="store_true", help="let home continue, if the copy has not become home yet")
    switch.add_argument("--log-level", choices=LEVELS, default="warning")
    _add_promote(add_subcommand(commands, "promote", "make a copy home after the home is lost", _promote))
    salvaging = add_subcommand(commands, "salvage", "write to files what only an old home has", _salvage)
    salvaging.add_argument("--to", metavar="DIR", help="an empty directory, or a new one, for a Parquet file a shard")
    salvaging.add_argument("--dry-run", action="store_true", help="only list the shards that have diverged")
    demoting = add_subcommand(commands, "demote", "turn an old home into a copy of the new one", _demote)
    demoting.add_argument(
        "--drop-diverged", action="store_true", help="also if it has what the new home lacks: that is lost"
    )
    for command in (salvaging, demoting):
        add_where(command)
        command.add_argument(
            "--of", required=True, metavar="URL", help="the blob store of the new home; it is only read"
        )


def _add_index(commands: Any) -> None:
    """The subcommands of the index alone."""
    listing = add_subcommand(commands, "list", "list the regions of the index", _list)
    put = add_subcommand(commands, "set", "say how a region is reached", _set)
    put.add_argument("region", metavar="REGION")
    put.add_argument("--write", metavar="URLS", help="servers at its home, with commas")
    put.add_argument("--read", metavar="URLS", help="servers near here that read it, with commas")
    put.add_argument("--home-blob", metavar="URL", help="its blob store at home")
    put.add_argument("--copy-blob", metavar="URL", help="the copy of it near here")
    put.add_argument("--epoch", type=int, metavar="N", help="that of its home: earlier homes only read")
    put.epilog = "What is not given stays as it was. An empty value takes it away. The epoch is only raised."
    remove = add_subcommand(commands, "remove", "remove a region from the index", _remove)
    remove.add_argument("region", metavar="REGION")
    check = add_subcommand(commands, "check", "ask every server of the index", _check)
    for command in (put, check):
        command.add_argument("--token", default=os.environ.get("PERSIST_TOKEN"), help="a token of the scope read")
        command.add_argument("--ca-file", metavar="FILE", help="PEM file of whom to trust, for servers at https://…")
    for command in (listing, put, remove, check):
        command.add_argument("--index", required=True, metavar="FILE", help="the file")


def _add_replicate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--from", dest="source", required=True, metavar="URL", help="the blob store at home")
    parser.add_argument("--to", required=True, metavar="URL", help="the store of the region; empty, or a copy of home")
    parser.add_argument("--once", action="store_true", help="end once everything published before has been copied")
    parser.add_argument("--every", default="1s", metavar="AGE", help="pause between looks at the source (1s)")
    parser.add_argument(
        "--whole", default="1m", metavar="AGE", help="pause between comparisons of the whole stores (1m)"
    )
    parser.add_argument(
        "--keep", default="5m", metavar="AGE", help="for how long the copy keeps what home has deleted (5m)"
    )
    parser.add_argument("--rate", metavar="BYTES", help="read at most so many bytes a second, such as 50MiB")
    parser.add_argument(
        "--at-once", type=int, default=ReplicateSettings().at_once, metavar="N", help="blobs at a time (4)"
    )
    parser.add_argument("--log-level", choices=LEVELS, default="warning")


def _add_new_place(parser: argparse.ArgumentParser) -> None:
    """What a promotion and a switch take: where the new home is, and the index that is to say so."""
    parser.add_argument("region", metavar="REGION", help="where the new home is")
    parser.add_argument("--of", required=True, metavar="NAME", help="the region whose home it becomes")
    add_where(parser)
    parser.add_argument("--index", metavar="FILE", help="the index of regions, which is set to the new home")
    parser.add_argument("--write", metavar="URLS", help="with --index: servers of the new home")


def _add_promote(parser: argparse.ArgumentParser) -> None:
    _add_new_place(parser)
    parser.add_argument("--home", metavar="URLS", help="servers of the lost home, which must not answer")
    parser.add_argument("--home-blob", metavar="URL", help="its blob store, so that it stops if it is still there")
    parser.add_argument(
        "--home-is-lost", action="store_true", help="continue although it answers, or nothing shows whether it is lost"
    )
    parser.add_argument("--dry-run", action="store_true", help="only print what would continue, and from where")
    parser.add_argument("--accept-loss", action="store_true", help="continue although newest versions are not whole")
    parser.add_argument(
        "--gap", type=int, default=GAP, metavar="N", help=f"times that are left out after the last known one ({GAP})"
    )


# The index of regions.


def _list(arguments: argparse.Namespace) -> int:
    for name, entry in sorted(read_index(arguments.index).regions.items()):
        print(json.dumps(_line(name, entry)))
    return 0


def _set(arguments: argparse.Namespace) -> int:
    name = check_region(arguments.region)
    given: dict[str, Any] = {"home_blob": arguments.home_blob, "copy_blob": arguments.copy_blob}
    for option in ("write", "read"):
        text = getattr(arguments, option)
        given[option] = None if text is None else urls_of(text)
    given = {option: value for option, value in given.items() if value is not None}
    if not given and arguments.epoch is None:
        raise InvalidUsage(f"say by --write or --read how region {name!r} is reached")

    RegionEntry(epoch=arguments.epoch or 0).check()

    def with_it(index: RegionIndex) -> RegionIndex:
        before = index.regions.get(name, RegionEntry())
        epoch = max(arguments.epoch or 0, before.epoch)  # a fence is not taken away by the way
        entry = replace(before, **given, epoch=epoch)
        if not entry.write and not entry.read:
            raise InvalidUsage(f"say by --write or --read how region {name!r} is reached: it would have no server")
        _check_home(name, entry, arguments)
        return RegionIndex({**index.regions, name: entry})

    entry = change_index(arguments.index, with_it, makes=True).regions[name]
    print(json.dumps(_line(name, entry)))
    return 0


def _check_home(name: str, entry: RegionEntry, arguments: argparse.Namespace) -> None:
    """Raises Conflict where a home that the entry names answers, and is of an earlier epoch: it would only read."""
    for url in entry.write if entry.epoch else ():
        told, _ = _asked(url, arguments, FETCH_S)
        found = told.get("epoch")
        if told.get("role") == "home" and type(found) is int and found < entry.epoch:
            raise Conflict(
                f"the home at {url} is of epoch {found}, and the index would have epoch {entry.epoch} of region "
                f"{name!r}: it would only read. Name the home of that epoch; or give its epoch, after `persist region "
                "remove` where the index has a later one"
            )


def _remove(arguments: argparse.Namespace) -> int:
    def without(index: RegionIndex) -> RegionIndex:
        known = dict(index.regions)
        if known.pop(arguments.region, None) is None:
            raise InvalidUsage(f"the index has no region {arguments.region!r:.60}; it has {', '.join(sorted(known))}")
        return RegionIndex(known)

    change_index(arguments.index, without)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    """A line for each server: what it says of itself, and what is wrong with that. 1: something is wrong."""
    wrong = 0
    for name, entry in sorted(read_index(arguments.index).regions.items()):
        for url in dict.fromkeys((*entry.write, *entry.read)):
            told, why = _asked(url, arguments)
            if not why and url in entry.write and told.get("role") != "home":
                why = "it only reads, and the index sends writes there"
            if not why and url in entry.write and isinstance(told.get("epoch"), int) and told["epoch"] < entry.epoch:
                why = f"it is of epoch {told['epoch']}, and the home of epoch {entry.epoch} has taken over"
            shows = told.get("region") if told.get("role") == "home" else told.get("of")
            if not why and shows not in (None, name):
                why = f"it shows region {shows!r}"
            wrong += bool(why)
            kept = {key: told.get(key) for key in ("role", "location", "epoch", "published")}
            print(json.dumps({"region": name, "url": url, **kept, "wrong": why or None}))
    return EXIT_FOUND if wrong else 0


def _asked(url: str, arguments: argparse.Namespace, timeout_s: float = ANSWER_S) -> tuple[dict[str, Any], str]:
    """What a server tells of its region; else what went wrong."""
    try:
        return RegionServer(url, arguments.token, trust_of(arguments)).ask(timeout_s), ""
    except Unavailable as error:
        return {}, error.message


def _line(name: str, entry: RegionEntry) -> dict[str, Any]:
    told = {"region": name, "write": list(entry.write), "read": list(entry.read)}
    blobs = {"home_blob": entry.home_blob or None, "copy_blob": entry.copy_blob or None}
    return {**told, **blobs, "epoch": entry.epoch or None}


# Replication, and what regions hold at their home.


def _holds(arguments: argparse.Namespace) -> int:
    with closing(where_of(arguments).open(must_exist=True)) as location:
        for hold in held_by_regions(location):
            print(json.dumps(hold.to_json()))
    return 0


def _release(arguments: argparse.Namespace) -> int:
    region = check_region(arguments.region)
    with closing(where_of(arguments).open(must_exist=True)) as location:
        for hold in let_go(location, region):
            print(json.dumps(hold.to_json()))
    return 0


def _replicate(arguments: argparse.Namespace) -> int:
    """Ends by a signal, or with `--once` when everything has been copied."""
    every_s, whole_s, keep_s = (
        read_age_ms(f"--{name}", getattr(arguments, name)) / 1000 for name in ("every", "whole", "keep")
    )
    settings = ReplicateSettings(every_s, whole_s, keep_s, read_rate(arguments.rate), arguments.at_once)
    settings.check()
    configure_logs(arguments.log_level)
    with ExitStack() as opened:
        source = opened.enter_context(blob_at(arguments.source))
        target = opened.enter_context(blob_at(arguments.to, must_exist=False))
        replicator = Replicator(source, target, SystemClock(), settings)
        if arguments.once:
            _show_round(replicator.round(whole=True))
            return 0
        ends = threading.Event()
        on_signals(ends.set)
        while True:
            try:
                _show_round(replicator.round())
            except (Unavailable, Overloaded) as error:  # a link that is down comes back
                log.warning("nothing was copied: %s", error)
            if ends.wait(settings.every_s):
                return 0


def _show_round(done: Replicated) -> None:
    """A line of JSON for a round that did something."""
    if done.copied or done.deleted:
        print(json.dumps(asdict(done)), flush=True)


# Switchover and failover.


@dataclass(frozen=True, slots=True)
class NewHomeIndex:
    """The index that a new home is to be set in. `path` None: none is."""

    path: str | None
    of: str
    servers: tuple[str, ...]

    @classmethod
    def of_arguments(cls, arguments: argparse.Namespace) -> NewHomeIndex:
        """Raises InvalidUsage, Corruption: it cannot be read, or no servers are given for it."""
        check_given(arguments, "index", "write")
        check_region(arguments.region)
        servers = urls_of(arguments.write or "")
        RegionEntry(servers).check()
        if arguments.index and not servers:
            raise InvalidUsage("--index needs --write: the servers by which the new home is reached")
        if servers and not arguments.index:
            raise InvalidUsage("--write is for the index: give --index")
        found = cls(arguments.index, check_region(arguments.of), servers)
        found.entry()
        return found

    def entry(self) -> RegionEntry:
        """What the index says of the region now."""
        return RegionEntry() if self.path is None else read_index(self.path).regions.get(self.of, RegionEntry())

    def set(self, epoch: int) -> None:
        """Say where the region is at home from now on."""
        if self.path is not None:
            moved_home(self.path, self.of, self.servers, epoch)


def _switch(arguments: argparse.Namespace) -> int:
    configure_logs(arguments.log_level)
    if not (arguments.home_dir or arguments.home_blob):
        raise InvalidUsage("say which home ends: --home-dir, or --home-blob and --home-consensus")
    indexed = NewHomeIndex.of_arguments(arguments)
    with ExitStack() as opened:
        where = Where(arguments.home_dir, arguments.home_blob, arguments.home_consensus)
        home = opened.enter_context(closing(where.open(must_exist=True)))
        copy = opened.enter_context(closing(where_of(arguments).open(must_exist=True)))
        replicator = None if arguments.replicated else Replicator(home.blob, copy.blob, home.clock)
        switch = Switch(home, copy, arguments.region, arguments.of, replicator, indexed.entry().epoch)
        if arguments.undo:
            print(json.dumps({"taken_back": switch.undo(_say)}))
            return 0
        found = switch.run(_say)
        indexed.set(found.epoch)
    show_recovered(found, dry_run=False)
    return 0


def _say(step: str) -> None:
    print(step, file=sys.stderr, flush=True)


def _promote(arguments: argparse.Namespace) -> int:
    """0: done. 1: `--dry-run` has found shards whose newest version would not continue."""
    check_given(arguments, "home", "home_blob")
    indexed = NewHomeIndex.of_arguments(arguments)
    least = indexed.entry().epoch
    how = RecoveryRequest(arguments.accept_loss, arguments.gap, least=least)
    how.check()
    with ExitStack() as opened:
        home = _old_home(arguments, indexed, opened)
        location = opened.enter_context(closing(where_of(arguments).open(must_exist=True)))
        if arguments.dry_run:
            check_copy(location)
            fenced = [blob for blob in (home.blob,) if blob is not None]
            found = plan(location, arguments.gap, fenced=fenced, least=least)
        else:
            found = promote(location, arguments.region, arguments.of, home, how)
            indexed.set(found.epoch)
    show_recovered(found, dry_run=arguments.dry_run)
    return EXIT_LOST if arguments.dry_run and found.lacking else 0


def _old_home(arguments: argparse.Namespace, indexed: NewHomeIndex, opened: ExitStack) -> OldHome:
    urls = urls_of(arguments.home or "") or tuple(url for url in indexed.entry().write if url not in indexed.servers)
    RegionEntry(urls).check()
    blob = opened.enter_context(blob_at(arguments.home_blob)) if arguments.home_blob else None
    return OldHome(urls, blob, arguments.home_is_lost)


def _salvage(arguments: argparse.Namespace) -> int:
    """0: all of it was written, or there is nothing. 1: the updates of a shard are not known any more."""
    if bool(arguments.to) == arguments.dry_run:
        raise InvalidUsage("give --to, the directory for the files, or --dry-run")
    with ExitStack() as opened:
        old = opened.enter_context(closing(where_of(arguments).open(must_exist=True)))
        _, promotion = _new_home(arguments.of, opened)
        found = diverged(old, promotion) if arguments.dry_run else salvage(old, promotion, Path(arguments.to))
        return _show_diverged(found, promotion)


def _show_diverged(found: Iterator[Diverged], promotion: Promotion) -> int:
    shards = lost = 0
    for shard in found:
        shards, lost = shards + 1, lost + bool(shard.why)
        print(json.dumps(shard.to_json()), flush=True)
    told = {"epoch": promotion.epoch, "region": promotion.region, "of": promotion.of}
    print(json.dumps({**told, "shards": shards, "lost": lost}))
    return EXIT_FOUND if lost else 0


def _demote(arguments: argparse.Namespace) -> int:
    """`persist region replicate` then copies what the new home has."""
    with ExitStack() as opened:
        old = opened.enter_context(closing(where_of(arguments).open(must_exist=True)))
        new, promotion = _new_home(arguments.of, opened)
        deleted = demote(old, new, promotion, drop_diverged=arguments.drop_diverged)
    print(json.dumps({"epoch": promotion.epoch, "deleted": deleted}))
    return 0


def _new_home(url: str, opened: ExitStack) -> tuple[Blob, Promotion]:
    """The blob store of the new home, and what it notes of its promotion. Raises InvalidUsage: it notes none."""
    blob = opened.enter_context(blob_at(url))
    promotion = last_promotion(blob)
    if promotion is None:
        raise InvalidUsage(f"{blob.url} was never made home by `persist region promote` or `persist region switch`")
    return blob, promotion
