"""`persist inspect WHAT …`: show the internals of shards and stores, read-only, in this process or through a server."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import closing

from persist.cli import inspect_client
from persist.cli.connection_args import add_client_arguments, token_of_environment, trust_in, url_of, where_of
from persist.cli.terminal import complain, plain, texts_of
from persist.core.errors import (
    Corruption,
    Forbidden,
    InvalidUsage,
    NotReadable,
    PersistError,
    Unauthorized,
    UpgradeNeeded,
)
from persist.inspect.documents import Document
from persist.inspect.log_listing import POLL_S
from persist.inspect.queries import Query, answer, span_of
from persist.inspect.readonly_location import ReadOnlyLocation, open_readonly_directory, open_readonly_stores

HEALTHY, FOUND, USAGE, UNREACHABLE = 0, 1, 2, 3
Parser = argparse.ArgumentParser

# question -> its line of help
WHATS = {
    "state": "the State at any version in the log, and its changes since another version",
    "log": "the state diffs of the log",
    "parts": "the parts by batch and run, including those in bundles",
    "part": "the footer, row groups, statistics and checksums of a part",
    "holds": "readers, cursors, writers, claims, tags and loans, and what they hold",
    "attributes": "attributes and their values, and the size of their index",
    "usage": "the location, its shards, and their storage",
    "digest": "a digest of the contents: equal contents have equal digests",
}
OF_USAGE = (InvalidUsage, NotReadable, Unauthorized, Forbidden, UpgradeNeeded)  # errors of the caller
WITH_KEYS = ("state", "parts", "part", "holds")
OPTIONS = ("at", "timestamp", "first", "last", "as_of", "lower", "upper", "keys", "follow", "rows")  # of a `Query`


AskFunction = Callable[[Query], Document | inspect_client.ServerAnswer]  # in this process, or of a server


def add_arguments(parser: Parser) -> None:
    subcommands = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for what, summary in WHATS.items():
        command = subcommands.add_parser(what, help=summary, description=summary)
        if what == "usage":
            command.add_argument("name", nargs="?", default="", metavar="PATTERN", help="a name, or eu/*; default: all")
        elif what == "part":
            command.add_argument("name", metavar="KEY", help="the key of its blob, as `parts` shows it")
        else:
            command.add_argument("name", metavar="NAME", help="the shard")
        add_client_arguments(command)
        command.add_argument("--json", action="store_true", help="print JSON; docs/check.md has its schema")
        if what in WITH_KEYS:
            command.add_argument("--keys", action="store_true", help="show keys of rows instead of hashes")
        if what == "part":
            command.add_argument("--rows", metavar="N", type=int, default=0, help="show its first N updates")
        elif what == "state":
            command.add_argument("--at", metavar="VERSION", default="", help="such as v12; default: the newest")
            command.add_argument("--timestamp", metavar="INSTANT", default="", help="as of 2026-11-20T12:00:00Z")
            command.add_argument(
                "--from", dest="first", metavar="VERSION", default="", help="show changes since this version"
            )
        elif what == "log":
            command.add_argument("--from", dest="first", metavar="VERSION", default="", help="from this version")
            command.add_argument("--to", dest="last", metavar="VERSION", default="", help="up to this version")
            command.add_argument("--follow", action="store_true", help="follow new entries, up to --to")
        elif what == "attributes":
            command.add_argument("--lower", metavar="KEY", default="", help="from this key on")
            command.add_argument("--upper", metavar="KEY", default="", help="up to this key, exclusive")
        elif what == "digest":
            command.add_argument("--as-of", metavar="TIME", default="", help="a complete time; default: the latest")


def run(arguments: argparse.Namespace) -> int:
    """0: healthy. 1: something is damaged or missing. 2: wrong usage. 3: a store, or the server, cannot be reached."""
    try:
        return _inspect(arguments)
    except PersistError as error:
        complain("persist inspect", error.message, texts_of(arguments))
        return exit_of(error)


def exit_of(error: PersistError) -> int:
    """The exit code for an error that prevents any output."""
    if isinstance(error, Corruption):
        return FOUND
    return USAGE if isinstance(error, OF_USAGE) else UNREACHABLE


def _inspect(arguments: argparse.Namespace) -> int:
    given = {name: value for name in OPTIONS if (value := getattr(arguments, name, None))}
    query = Query(arguments.what, arguments.name, whole=arguments.what == "state" and arguments.json, **given)
    span_of(query)
    server = server_of(arguments)
    if server is not None:
        with inspect_client.understood(server.url):
            return _show(server.ask, query, arguments)
    with closing(open_readonly(arguments)) as location:
        return _show(lambda query: answer(location, query), query, arguments)


def server_of(arguments: argparse.Namespace) -> inspect_client.Server | None:
    """The server of the arguments, with the token of the environment. None: the stores. Raises InvalidUsage."""
    url = url_of(arguments)
    return None if url is None else inspect_client.Server(url, token_of_environment(), trust_in(arguments.ca_file))


def open_readonly(arguments: argparse.Namespace) -> ReadOnlyLocation:
    """Open the location of the arguments read-only. Raises InvalidUsage, Unavailable."""
    where = where_of(arguments)
    urls = where.urls()
    return open_readonly_directory(where.path) if urls is None else open_readonly_stores(*urls)


def _show(ask: AskFunction, query: Query, arguments: argparse.Namespace) -> int:
    if query.what == "log":
        return _show_log(ask, query, arguments)
    result = ask(query)
    if arguments.json:
        for piece in result.pieces():
            sys.stdout.write(piece)
    else:
        if result.seqno is not None:
            print(plain(f"{query.name if query.what != 'part' else 'shard'} v{result.seqno}"))
        for line in inspect_client.lines(result.about_json(), result.rows_json()):
            print(line)
    findings = result.findings_json()
    if not arguments.json:
        for finding in findings:
            where = f"{finding['shard']}: " if finding["shard"] is not None else ""
            print(plain(f"DAMAGED {where}{finding['what']}"))
    return FOUND if findings else HEALTHY


def _show_log(ask: AskFunction, query: Query, arguments: argparse.Namespace) -> int:
    """Print the entries, and with --follow new ones, up to the last one that is requested."""
    _, last = span_of(query)
    damaged = False
    while True:
        result = ask(query)
        newest = 0
        for line in result.pieces():
            entry = json.loads(line)
            newest = entry["seqno"]
            damaged = damaged or entry["finding"] is not None
            print(line.rstrip("\n") if arguments.json else inspect_client.log_line(entry))
        if newest:
            query = Query("log", query.name, first=str(newest + 1), last=query.last, follow=True)
        if not arguments.follow or (last is not None and newest >= last):
            return FOUND if damaged else HEALTHY
        sys.stdout.flush()
        time.sleep(POLL_S)
