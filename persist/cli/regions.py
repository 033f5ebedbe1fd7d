"""`persist regions`: the index of regions, a file by which clients find servers; and what regions hold at a home."""

from __future__ import annotations

import argparse
import json
import os
from contextlib import closing
from dataclasses import replace
from typing import Any

from persist.cli.connection_args import add_arguments as add_where
from persist.cli.connection_args import trust_of, where_of
from persist.core.errors import Conflict, InvalidUsage, Unavailable
from persist.regions.asking import ANSWER_S, RegionServer
from persist.regions.opening import check_region
from persist.regions.region_index import FETCH_S, Entry, Index, change_index, read_index, urls_of
from persist.regions.remote_holds import held_by_regions, let_go

EXIT_FOUND = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="what the index says", description="what the index says")
    put = actions.add_parser("set", help="say how a region is reached", description="say how a region is reached")
    put.add_argument("region", metavar="REGION")
    put.add_argument("--write", metavar="URLS", help="servers at its home, with commas")
    put.add_argument("--read", metavar="URLS", help="servers near here that read it, with commas")
    put.add_argument("--home-blob", metavar="URL", help="its blob store at home")
    put.add_argument("--copy-blob", metavar="URL", help="the copy of it near here")
    put.add_argument("--epoch", type=int, metavar="N", help="that of its home: earlier homes only read")
    put.epilog = "What is not given stays as it was. An empty value takes it away. The epoch is only raised."
    remove = actions.add_parser("remove", help="forget a region", description="forget a region")
    remove.add_argument("region", metavar="REGION")
    check = actions.add_parser("check", help="ask every server", description="ask every server of the index")
    for action in (put, check):
        action.add_argument("--token", default=os.environ.get("PERSIST_TOKEN"), help="a token of the scope read")
        action.add_argument("--ca-file", metavar="FILE", help="PEM file of whom to trust, for servers at https://…")
    holds = actions.add_parser("holds", help="what regions hold here", description="what regions hold at this home")
    ends = "end what a region holds here"
    letting_go = actions.add_parser("let-go", help=ends, description=ends)
    letting_go.add_argument("region", metavar="REGION")
    for action, run_it in ((holds, _holds), (letting_go, _let_go)):
        add_where(action)
        action.set_defaults(act=run_it)
    for action, run_it in ((show, _show), (put, _set), (remove, _remove), (check, _check)):
        action.add_argument("--index", required=True, metavar="FILE", help="the file")
        action.set_defaults(act=run_it)


def run(arguments: argparse.Namespace) -> int:
    """0: done. 1: `check` has found a server that does not answer, or is not what the index says."""
    return int(arguments.act(arguments))


def _show(arguments: argparse.Namespace) -> int:
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

    Entry(epoch=arguments.epoch or 0).check()

    def with_it(index: Index) -> Index:
        before = index.regions.get(name, Entry())
        epoch = max(arguments.epoch or 0, before.epoch)  # a fence is not taken away by the way
        entry = replace(before, **given, epoch=epoch)
        if not entry.write and not entry.read:
            raise InvalidUsage(f"say by --write or --read how region {name!r} is reached: it would have no server")
        _check_home(name, entry, arguments)
        return Index({**index.regions, name: entry})

    entry = change_index(arguments.index, with_it, makes=True).regions[name]
    print(json.dumps(_line(name, entry)))
    return 0


def _check_home(name: str, entry: Entry, arguments: argparse.Namespace) -> None:
    """Raises Conflict where a home that the entry names answers, and is of an earlier epoch: it would only read."""
    for url in entry.write if entry.epoch else ():
        told, _ = _asked(url, arguments, FETCH_S)
        found = told.get("epoch")
        if told.get("role") == "home" and type(found) is int and found < entry.epoch:
            raise Conflict(
                f"the home at {url} is of epoch {found}, and the index would have epoch {entry.epoch} of region "
                f"{name!r}: it would only read. Name the home of that epoch; or give its epoch, after `persist regions "
                "remove` where the index has a later one"
            )


def _remove(arguments: argparse.Namespace) -> int:
    def without(index: Index) -> Index:
        known = dict(index.regions)
        if known.pop(arguments.region, None) is None:
            raise InvalidUsage(f"the index has no region {arguments.region!r:.60}; it has {', '.join(sorted(known))}")
        return Index(known)

    change_index(arguments.index, without)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    """A line for each server: what it says of itself, and what is wrong with that."""
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


def _holds(arguments: argparse.Namespace) -> int:
    with closing(where_of(arguments).open(must_exist=True)) as location:
        for hold in held_by_regions(location):
            print(json.dumps(hold.to_json()))
    return 0


def _let_go(arguments: argparse.Namespace) -> int:
    region = check_region(arguments.region)
    with closing(where_of(arguments).open(must_exist=True)) as location:
        for hold in let_go(location, region):
            print(json.dumps(hold.to_json()))
    return 0


def _line(name: str, entry: Entry) -> dict[str, Any]:
    told = {"region": name, "write": list(entry.write), "read": list(entry.read)}
    blobs = {"home_blob": entry.home_blob or None, "copy_blob": entry.copy_blob or None}
    return {**told, **blobs, "epoch": entry.epoch or None}
