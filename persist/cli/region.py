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
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from blob import Blob
from persist.cli.backup import EXIT_LOST, blob_at, show_recovered
from persist.cli.connection_args import Where, add_subcommand, check_given, read_age_ms, trust_in, where_of
from persist.cli.connection_args import add_arguments as add_where
from persist.cli.long_running import LEVELS, configure_logs, on_signals
from persist.cli.terminal import print_line
from persist.commit.clocks_and_ids import SystemClock
from persist.copies.recovery import GAP, RecoveryRequest, plan
from persist.copies.throttled_blob import read_rate
from persist.core.errors import Conflict, InvalidUsage, Overloaded, Unavailable
from persist.regions import region_index
from persist.regions.divergence import find_diverged, salvage
from persist.regions.failover import OldHome, Promotion, check_copy, last_promotion, promote, record_new_home
from persist.regions.region_index import RegionEntry, RegionIndex, change_index, check_region, read_index, urls_of
from persist.regions.remote_holds import list_region_holds, release_region_holds
from persist.regions.replication import INTERVAL_S_MIN, Replicated, ReplicateSettings, Replicator, check_seconds
from persist.regions.switchover import Switch, demote

EXIT_FOUND = 1
log = logging.getLogger("persist.regions")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True, metavar="SUBCOMMAND")
    _add_index(commands)
    holds = add_subcommand(commands, "holds", "list the holds of regions at this home", _holds)
    release = add_subcommand(commands, "release", "release the holds of a region at this home", _holds)
    release.add_argument("region", metavar="REGION")
    for command in (holds, release):
        add_where(command)
    _add_replicate(add_subcommand(commands, "replicate", "copy the blob store of a location to a region", _replicate))
    switch = add_subcommand(commands, "switch", "planned switchover: make a copy home without loss", _switch)
    _add_new_place(switch)
    switch.add_argument("--home-dir", metavar="PATH", help="the directory of the current home")
    switch.add_argument("--home-blob", metavar="URL", help="or its blob store")
    switch.add_argument("--home-consensus", metavar="URL", help="and its consensus store")
    switch.add_argument("--replicated", action="store_true", help="the store replicates itself: only wait for it")
    switch.add_argument("--undo", action="store_true", help="reopen the home, unless the copy has become home already")
    switch.add_argument("--log-level", choices=LEVELS, default="warning")
    _add_promote(add_subcommand(commands, "promote", "failover: make a copy home after the home is lost", _promote))
    salvaging = add_subcommand(commands, "salvage", "write to files what only an old home has", _salvage)
    salvaging.add_argument("--to", metavar="DIR", help="an empty or new directory, for one Parquet file for each shard")
    salvaging.add_argument("--dry-run", action="store_true", help="only list the shards that have diverged")
    demoting = add_subcommand(commands, "demote", "turn an old home into a copy of the new one", _demote)
    demoting.add_argument("--drop-diverged", action="store_true", help="also if updates the new home lacks are lost")
    for command in (salvaging, demoting):
        add_where(command)
        command.add_argument("--of", required=True, metavar="URL", help="the new home's blob store; it is only read")


def _add_index(commands: Any) -> None:
    listing = add_subcommand(commands, "list", "list the regions of the index", _list)
    put = add_subcommand(commands, "set", "set the servers and stores of a region", _set)
    put.add_argument("region", metavar="REGION")
    put.add_argument("--write", metavar="URLS", help="servers at its home, separated by commas")
    put.add_argument("--read", metavar="URLS", help="servers of the nearby replica, separated by commas")
    put.add_argument("--home-blob", metavar="URL", help="the blob store at its home")
    put.add_argument("--copy-blob", metavar="URL", help="the nearby copy of it")
    put.add_argument("--epoch", type=int, metavar="N", help="the epoch of its home: earlier homes are read-only")
    put.epilog = "Options that are not given leave the entry unchanged. An empty value clears it. The epoch only rises."
    remove = add_subcommand(commands, "remove", "remove a region from the index", _remove)
    remove.add_argument("region", metavar="REGION")
    check = add_subcommand(commands, "check", "check the status of every server in the index", _check)
    for command in (put, check):
        command.add_argument("--token", default=os.environ.get("PERSIST_TOKEN"), help="a token with the scope read")
        command.add_argument("--ca-file", metavar="FILE", help="PEM file of trusted CAs, for servers at https://…")
    for command in (listing, put, remove, check):
        command.add_argument("--index", required=True, metavar="FILE", help="the file")


def _add_replicate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--from", dest="source", required=True, metavar="URL", help="the blob store at home")
    parser.add_argument("--to", required=True, metavar="URL", help="the store of the region: empty, or a copy of home")
    parser.add_argument("--once", action="store_true", help="exit once everything published before has been copied")
    parser.add_argument("--every", default="1s", metavar="AGE", help="interval of polling the source (1s)")
    parser.add_argument("--whole", default="1m", metavar="AGE", help="interval of comparing the whole stores (1m)")
    parser.add_argument("--keep", default="5m", metavar="AGE", help="how long the copy keeps deleted blobs (5m)")
    parser.add_argument("--rate", metavar="BYTES", help="read at most so many bytes a second, such as 50MiB")
    parser.add_argument(
        "--at-once", type=int, default=ReplicateSettings().at_once, metavar="N", help="concurrent blobs (4)"
    )
    parser.add_argument("--log-level", choices=LEVELS, default="warning")


def _add_new_place(parser: argparse.ArgumentParser) -> None:
    """The arguments of a promotion and a switchover: the new home, and the index to update."""
    parser.add_argument("region", metavar="REGION", help="the region of the new home")
    parser.add_argument("--of", required=True, metavar="NAME", help="the region whose home it becomes")
    add_where(parser)
    parser.add_argument("--index", metavar="FILE", help="the index of regions, which is updated")
    parser.add_argument("--write", metavar="URLS", help="with --index: servers of the new home")


def _add_promote(parser: argparse.ArgumentParser) -> None:
    _add_new_place(parser)
    parser.add_argument("--home", metavar="URLS", help="servers of the lost home, which must not answer")
    parser.add_argument("--home-blob", metavar="URL", help="its blob store, to fence it if it still exists")
    parser.add_argument("--home-is-lost", action="store_true", help="continue although it answers, or is unknown")
    parser.add_argument("--dry-run", action="store_true", help="only print which shards would continue, and from where")
    parser.add_argument("--accept-loss", action="store_true", help="continue although newest versions are incomplete")
    parser.add_argument("--gap", type=int, default=GAP, metavar="N", help=f"times to skip after known ones ({GAP})")


def _list(arguments: argparse.Namespace) -> int:
    for name, entry in sorted(read_index(arguments.index).regions.items()):
        print(json.dumps(_line(name, entry)))
    return 0


def _set(arguments: argparse.Namespace) -> int:
    name = check_region(arguments.region)
    options = {option: getattr(arguments, option) for option in ("home_blob", "copy_blob", "write", "read")}
    fields: dict[str, Any] = {option: text for option, text in options.items() if text is not None}
    fields |= {option: urls_of(fields[option]) for option in ("write", "read") if option in fields}
    if not fields and arguments.epoch is None:
        raise InvalidUsage(f"give --write or --read, the servers of region {name!r}")
    RegionEntry(epoch=arguments.epoch or 0).check()

    def with_it(index: RegionIndex) -> RegionIndex:
        before = index.regions.get(name, RegionEntry())
        epoch = max(arguments.epoch or 0, before.epoch)  # fencing is never lowered
        entry = replace(before, **fields, epoch=epoch)
        if not entry.write and not entry.read:
            raise InvalidUsage(f"give --write or --read: region {name!r} would have no server")
        _check_home(name, entry, arguments)
        return RegionIndex({**index.regions, name: entry})

    entry = change_index(arguments.index, with_it, makes=True).regions[name]
    print(json.dumps(_line(name, entry)))
    return 0


def _check_home(name: str, entry: RegionEntry, arguments: argparse.Namespace) -> None:
    """Raise Conflict if a home in the entry answers with an earlier epoch: clients would treat it as read-only."""
    for url in entry.write if entry.epoch else ():
        status, _ = _ask(url, arguments, region_index.FETCH_S)
        epoch = status.get("epoch")
        if status.get("role") == "home" and type(epoch) is int and epoch < entry.epoch:
            raise Conflict(
                f"the home at {url} has epoch {epoch}, and the index would have epoch {entry.epoch} for region "
                f"{name!r}, which makes it read-only. Name the home of that epoch; or set its own epoch, after "
                "`persist region remove` if the index has a later one"
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
    """Print a line for each server: its status, and what is wrong with it. 1: something is wrong."""
    wrong = 0
    for name, entry in sorted(read_index(arguments.index).regions.items()):
        for url in dict.fromkeys((*entry.write, *entry.read)):
            status, problem = _ask(url, arguments)
            if not problem and url in entry.write and status.get("role") != "home":
                problem = "it is read-only, and the index sends writes to it"
            epoch = status.get("epoch")
            if not problem and url in entry.write and isinstance(epoch, int) and epoch < entry.epoch:
                problem = f"it has epoch {epoch}, and the home of epoch {entry.epoch} has taken over"
            shows = status.get("region") if status.get("role") == "home" else status.get("of")
            if not problem and shows not in (None, name):
                problem = f"it serves region {shows!r}"
            wrong += bool(problem)
            shown = {key: status.get(key) for key in ("role", "location", "epoch", "published")}
            print(json.dumps({"region": name, "url": url, **shown, "wrong": problem or None}))
    return EXIT_FOUND if wrong else 0


def _ask(url: str, arguments: argparse.Namespace, wait_s: float = region_index.ANSWER_S) -> tuple[dict[str, Any], str]:
    """The status of a server; or an empty one and the error."""
    try:
        return region_index.RegionServer(url, arguments.token, trust_in(arguments.ca_file)).ask(wait_s), ""
    except Unavailable as error:
        return {}, error.message


def _line(name: str, entry: RegionEntry) -> dict[str, Any]:
    fields = {"region": name, "write": list(entry.write), "read": list(entry.read)}
    blobs = {"home_blob": entry.home_blob or None, "copy_blob": entry.copy_blob or None}
    return {**fields, **blobs, "epoch": entry.epoch or None}


def _holds(arguments: argparse.Namespace) -> int:
    """List the holds of regions, or release those of one."""
    region = check_region(arguments.region) if arguments.action == "release" else None
    with closing(where_of(arguments).open(must_exist=True)) as location:
        for hold in list_region_holds(location) if region is None else release_region_holds(location, region):
            print(json.dumps(hold.to_json()))
    return 0


def _replicate(arguments: argparse.Namespace) -> int:
    """Replicate until a signal, or with `--once` until everything has been copied."""
    options = ("every", "whole", "keep")
    every_s, whole_s, keep_s = (read_age_ms(f"--{name}", getattr(arguments, name)) / 1000 for name in options)
    check_seconds("every_s", every_s, INTERVAL_S_MIN)
    settings = ReplicateSettings(whole_s, keep_s, read_rate(arguments.rate), arguments.at_once)
    settings.check()
    configure_logs(arguments.log_level)
    with ExitStack() as stack:
        source = stack.enter_context(blob_at(arguments.source))
        target = stack.enter_context(blob_at(arguments.to, must_exist=False))
        replicator = Replicator(source, target, SystemClock(), settings)
        if arguments.once:
            _show_round(replicator.round(whole=True))
            return 0
        stop = threading.Event()
        on_signals(stop.set)
        while True:
            try:
                _show_round(replicator.round())
            except (Unavailable, Overloaded) as error:  # retried in the next round
                log.warning("nothing was copied: %s", error)
            if stop.wait(every_s):
                return 0


def _show_round(round_: Replicated) -> None:
    """Print a line of JSON for a round that copied or deleted something."""
    if round_.copied or round_.deleted:
        print(json.dumps(asdict(round_)), flush=True)


def _index_entry(arguments: argparse.Namespace) -> RegionEntry:
    """The entry of the index that the new home is set in, as it is now; an empty one if no index is given.

    Raises InvalidUsage, Corruption: it cannot be read, or no servers are given for it.
    """
    check_given(arguments, "index", "write")
    check_region(arguments.region)
    check_region(arguments.of)
    servers = urls_of(arguments.write or "")
    RegionEntry(servers).check()
    if arguments.index and not servers:
        raise InvalidUsage("--index requires --write, the servers of the new home")
    if servers and not arguments.index:
        raise InvalidUsage("--write requires --index")
    regions = read_index(arguments.index).regions if arguments.index else {}
    return regions.get(arguments.of, RegionEntry())


def _record_home(arguments: argparse.Namespace, epoch: int) -> None:
    if arguments.index:
        record_new_home(arguments.index, arguments.of, urls_of(arguments.write), epoch)


def _switch(arguments: argparse.Namespace) -> int:
    configure_logs(arguments.log_level)
    if not (arguments.home_dir or arguments.home_blob):
        raise InvalidUsage("give the current home: --home-dir, or --home-blob and --home-consensus")
    entry = _index_entry(arguments)
    with ExitStack() as stack:
        home_location = Where(arguments.home_dir, arguments.home_blob, arguments.home_consensus)
        home = stack.enter_context(closing(home_location.open(must_exist=True)))
        copy = stack.enter_context(closing(where_of(arguments).open(must_exist=True)))
        replicator = None if arguments.replicated else Replicator(home.blob, copy.blob, home.clock)
        switch = Switch(home, copy, arguments.region, arguments.of, replicator, entry.epoch)
        report = partial(print_line, out=sys.stderr)
        if arguments.undo:
            print(json.dumps({"taken_back": switch.undo(report)}))
            return 0
        recovered = switch.run(report)
        _record_home(arguments, recovered.epoch)
    show_recovered(recovered, dry_run=False)
    return 0


def _promote(arguments: argparse.Namespace) -> int:
    """0: done. 1: with `--dry-run`, there are shards whose newest version would not continue."""
    check_given(arguments, "home", "home_blob")
    entry = _index_entry(arguments)
    request = RecoveryRequest(arguments.accept_loss, arguments.gap, least=entry.epoch)
    request.check()
    servers = urls_of(arguments.write or "")
    urls = urls_of(arguments.home or "") or tuple(url for url in entry.write if url not in servers)
    RegionEntry(urls).check()
    with ExitStack() as stack:
        blob = stack.enter_context(blob_at(arguments.home_blob)) if arguments.home_blob else None
        where = where_of(arguments)
        location = stack.enter_context(closing(where.open(must_exist=True, reads_only=arguments.dry_run)))
        if arguments.dry_run:
            check_copy(location)
            recovered = plan(location, replace(request, fenced=[] if blob is None else [blob]))
        else:
            home = OldHome(urls, blob, arguments.home_is_lost)
            recovered = promote(location, arguments.region, arguments.of, home, request)
            _record_home(arguments, recovered.epoch)
    show_recovered(recovered, dry_run=arguments.dry_run)
    return EXIT_LOST if arguments.dry_run and recovered.lacking else 0


def _salvage(arguments: argparse.Namespace) -> int:
    """0: everything was written, or there is nothing to write. 1: updates of a shard are lost."""
    if bool(arguments.to) == arguments.dry_run:
        raise InvalidUsage("give either --to, the directory for the files, or --dry-run")
    with ExitStack() as stack:
        old = stack.enter_context(closing(where_of(arguments).open(must_exist=True)))
        _, promotion = _new_home(arguments.of, stack)
        shards = find_diverged(old, promotion) if arguments.dry_run else salvage(old, promotion, Path(arguments.to))
        count = lost = 0
        for shard in shards:
            count, lost = count + 1, lost + bool(shard.why)
            print(json.dumps(shard.to_json()), flush=True)
    line = {"epoch": promotion.epoch, "region": promotion.region, "of": promotion.of}
    print(json.dumps({**line, "shards": count, "lost": lost}))
    return EXIT_FOUND if lost else 0


def _demote(arguments: argparse.Namespace) -> int:
    """`persist region replicate` then copies the new home to it."""
    with ExitStack() as stack:
        old = stack.enter_context(closing(where_of(arguments).open(must_exist=True)))
        new, promotion = _new_home(arguments.of, stack)
        deleted = demote(old, new, promotion, drop_diverged=arguments.drop_diverged)
    print(json.dumps({"epoch": promotion.epoch, "deleted": deleted}))
    return 0


def _new_home(url: str, stack: ExitStack) -> tuple[Blob, Promotion]:
    """The blob store of the new home, and its latest promotion. Raises InvalidUsage: there was none."""
    blob = stack.enter_context(blob_at(url))
    promotion = last_promotion(blob)
    if promotion is None:
        raise InvalidUsage(f"{blob.url} was never made home by `persist region promote` or `persist region switch`")
    return blob, promotion
