"""`persist inspect WHAT …`: looks at shards and stores, by itself or through a server, and writes nothing."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from persist.cli import inspect_client
from persist.cli.connection_args import (
    DEFAULT_DIRECTORY,
    add_client_arguments,
    token_of_environment,
    trust_of,
    url_of,
    where_of,
)
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
from persist.inspect.documents import Document, Finding
from persist.inspect.log_listing import POLL_S
from persist.inspect.queries import Query, answer, span_of
from persist.inspect.readonly_location import ReadOnlyLocation, look_at_directory, look_at_stores

HEALTHY, FOUND, USAGE, UNREACHABLE = 0, 1, 2, 3
Parser = argparse.ArgumentParser

# Every question, in a line each.
WHATS = {
    "state": "the State, at any version that the log has, and what changed since another",
    "log": "each state diff of the log",
    "parts": "the parts by batch and run, also those that bundles list",
    "part": "a part's footer, row groups, statistics and checksums",
    "holds": "readers, cursors, writers, claims, tags and loans, and what they hold",
    "attributes": "attributes and their values, and the size of their index",
    "usage": "the location, its shards, and what takes room",
    "digest": "a digest of the contents, equal wherever they are equal",
}
OF_USAGE = (InvalidUsage, NotReadable, Unauthorized, Forbidden, UpgradeNeeded)  # errors of who asks
WITH_KEYS = ("state", "parts", "part", "holds")


class Seen(Protocol):
    """An answer, from here or from a server."""

    @property
    def seqno(self) -> int | None: ...

    @property
    def about(self) -> dict[str, Any] | None: ...

    def rows(self) -> Iterator[dict[str, Any]]: ...

    def findings(self) -> list[dict[str, Any]]:
        """Complete once the rows, or the JSON, were taken."""
        ...

    def json(self) -> Iterator[str]:
        """The JSON, in pieces; of a log without what comes after a piece that was asked for."""
        ...


class Near:
    """An answer that is made here."""

    def __init__(self, document: Document) -> None:
        self._document = document

    @property
    def seqno(self) -> int | None:
        return self._document.seqno

    @property
    def about(self) -> dict[str, Any] | None:
        about = self._document.about
        return None if about is None else about.to_json()

    def rows(self) -> Iterator[dict[str, Any]]:
        return (row.to_json() for row in self._document.rows)

    def findings(self) -> list[dict[str, Any]]:
        return [Finding.of(fault).to_json() for fault in self._document.findings.listed()]

    def json(self) -> Iterator[str]:
        return self._document.pieces()


Ask = Callable[[Query], Seen]


def add_arguments(parser: Parser) -> None:
    actions = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for what, told in WHATS.items():
        one = actions.add_parser(what, help=told, description=told)
        _add_subject(one, what)
        add_client_arguments(one)
        one.add_argument("--json", action="store_true", help="print JSON; docs/check.md has its schema")
        if what in WITH_KEYS:
            one.add_argument("--keys", action="store_true", help="show keys of rows, which are data; else hashes")
        if what == "part":
            one.add_argument(
                "--rows", metavar="N", type=int, default=0, help="show its first N updates, which are data"
            )
        elif what == "state":
            one.add_argument("--at", metavar="VERSION", default="", help="such as v12; without it the newest")
            one.add_argument("--timestamp", metavar="INSTANT", default="", help="as of 2026-11-20T12:00:00Z")
            one.add_argument(
                "--from", dest="first", metavar="VERSION", default="", help="show what changed from this one on"
            )
        elif what == "log":
            one.add_argument("--from", dest="first", metavar="VERSION", default="", help="from this one on")
            one.add_argument("--to", dest="last", metavar="VERSION", default="", help="up to this one")
            one.add_argument("--follow", action="store_true", help="go on with new ones as they come, up to --to")
        elif what == "attributes":
            one.add_argument("--lower", metavar="KEY", default="", help="from this key on")
            one.add_argument("--upper", metavar="KEY", default="", help="up to this key, without it")
        elif what == "digest":
            one.add_argument("--as-of", metavar="TIME", default="", help="a complete time; without it the latest")


def _add_subject(parser: Parser, what: str) -> None:
    if what == "usage":
        parser.add_argument("name", nargs="?", default="", metavar="PATTERN", help="a name, or eu/*; without it all")
    elif what == "part":
        parser.add_argument("name", metavar="KEY", help="the key of its blob, as `parts` shows it")
    else:
        parser.add_argument("name", metavar="NAME", help="the shard")


def run(arguments: argparse.Namespace) -> int:
    """0: healthy. 1: something is damaged or missing. 2: wrong usage. 3: a store, or the server, cannot be reached."""
    try:
        return _inspect(arguments)
    except PersistError as error:
        complain("persist inspect", error.message, texts_of(arguments))
        return exit_of(error)


def exit_of(error: PersistError) -> int:
    """The exit code for an error that leaves nothing to show."""
    if isinstance(error, Corruption):
        return FOUND
    return USAGE if isinstance(error, OF_USAGE) else UNREACHABLE


def _inspect(arguments: argparse.Namespace) -> int:
    query = _query_of(arguments)
    span_of(query)
    server = server_of(arguments)
    if server is not None:
        with inspect_client.understood(server.url):
            return _shown(server.ask, query, arguments)
    with closing(look_of(arguments)) as look:
        return _shown(lambda one: Near(answer(look, one)), query, arguments)


def server_of(arguments: argparse.Namespace) -> inspect_client.Server | None:
    """The server that is meant, with the token of the environment. None: the stores are. Raises InvalidUsage."""
    url = url_of(arguments)
    return None if url is None else inspect_client.Server(url, token_of_environment(), trust_of(arguments))


def _query_of(arguments: argparse.Namespace) -> Query:
    given = vars(arguments)
    texts: dict[str, Any] = {
        name: given.get(name) or "" for name in ("at", "timestamp", "first", "last", "as_of", "lower", "upper")
    }
    whole = arguments.what == "state" and arguments.json
    flags = {name: bool(given.get(name)) for name in ("keys", "follow")} | {"whole": whole}
    rows = int(given.get("rows") or 0)
    return replace(Query(arguments.what, arguments.name, **texts), rows=rows, **flags)


def look_of(arguments: argparse.Namespace) -> ReadOnlyLocation:
    """The stores that the arguments of `where` name, opened to be looked at. Raises InvalidUsage, Unavailable."""
    where = where_of(arguments)
    if where.blob or where.consensus:
        if where.directory or not (where.blob and where.consensus):
            raise InvalidUsage("give either --dir, or both --blob and --consensus")
        return look_at_stores(where.blob, where.consensus)
    return look_at_directory(Path(where.directory or DEFAULT_DIRECTORY).absolute())


def _shown(ask: Ask, query: Query, arguments: argparse.Namespace) -> int:
    if query.what == "log":
        return _log(ask, query, arguments)
    seen = ask(query)
    if arguments.json:
        for piece in seen.json():
            sys.stdout.write(piece)
    else:
        if seen.seqno is not None:
            print(plain(f"{query.name if query.what != 'part' else 'shard'} v{seen.seqno}"))
        for line in inspect_client.lines(seen.about, seen.rows()):
            print(line)
    found = seen.findings()
    if not arguments.json:
        for finding in found:
            print(inspect_client.finding_line(finding))
    return FOUND if found else HEALTHY


def _log(ask: Ask, query: Query, arguments: argparse.Namespace) -> int:
    """The entries as they are, and with --follow those that come, up to the last one that is asked for."""
    last = span_of(query).last
    damaged = False
    while True:
        seen = ask(query)
        newest = 0
        for entry, text in seen_entries(seen):
            newest = entry["seqno"]
            damaged = damaged or entry["finding"] is not None
            print(text if arguments.json else inspect_client.log_line(entry))
        if newest:
            query = _after(query, newest)
        if not arguments.follow or (last is not None and newest >= last):
            return FOUND if damaged else HEALTHY
        sys.stdout.flush()
        time.sleep(POLL_S)


def seen_entries(seen: Seen) -> Iterator[tuple[dict[str, Any], str]]:
    """The entries of a log, each with its line of JSON."""
    for piece in seen.json():
        yield json.loads(piece), piece.rstrip("\n")


def _after(query: Query, seqno: int) -> Query:
    return Query("log", query.name, first=str(seqno + 1), last=query.last, follow=True)
