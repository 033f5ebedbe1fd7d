"""`persist inspect WHAT …`: show the internals of shards and stores, read-only, in this process or through a server."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeAlias, TypeVar
from urllib.parse import quote, urlencode

from msgspec import Struct, ValidationError, convert

from persist.cli.connection_args import add_client_arguments, connection_to, url_of, where_of
from persist.cli.terminal import complain, plain, print_line, texts_of
from persist.client.arguments import ClientTls
from persist.commit.clocks_and_ids import SystemClock
from persist.core import errors
from persist.core.errors import InvalidUsage, PersistError, Unavailable
from persist.http_client.http_calls import Call, HttpCalls, Servers
from persist.inspect.documents import Document
from persist.inspect.log_listing import POLL_S
from persist.inspect.queries import OF_LOCATION, Query, answer, span_of
from persist.inspect.readonly_location import ReadOnlyLocation, open_readonly_directory, open_readonly_stores

HEALTHY, FOUND, USAGE, UNREACHABLE = 0, 1, 2, 3
Parser = argparse.ArgumentParser
T = TypeVar("T")

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
# errors of the caller
OF_USAGE = (InvalidUsage, errors.NotReadable, errors.Unauthorized, errors.Forbidden, errors.UpgradeNeeded)
WITH_KEYS = ("state", "parts", "part", "holds")
OPTIONS = ("at", "timestamp", "first", "last", "as_of", "lower", "upper", "keys", "follow", "rows")  # of a `Query`
AskFunction: TypeAlias = "Callable[[Query], Document | ServerAnswer]"  # in this process, or of a server


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
            command.add_argument("--from", dest="first", metavar="VERSION", default="", help="show changes since it")
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
    if isinstance(error, errors.Corruption):
        return FOUND
    return USAGE if isinstance(error, OF_USAGE) else UNREACHABLE


def _inspect(arguments: argparse.Namespace) -> int:
    given = {name: value for name in OPTIONS if (value := getattr(arguments, name, None))}
    query = Query(arguments.what, arguments.name, whole=arguments.what == "state" and arguments.json, **given)
    span_of(query)
    server = server_of(arguments)
    if server is not None:
        with closing(server), understood(server.url):
            return _show(server.ask, query, arguments)
    with closing(open_readonly(arguments)) as location:
        return _show(lambda query: answer(location, query), query, arguments)


def server_of(arguments: argparse.Namespace) -> Server | None:
    """The server of the arguments, with the token of the environment. None: the stores. Raises InvalidUsage."""
    if (url := url_of(arguments)) is None:
        return None
    connection = connection_to(url, arguments.ca_file)
    return Server(url, connection.token, connection.trust)


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
            print_line(f"{query.name if query.what != 'part' else 'shard'} v{result.seqno}")
        for line in lines(result.about_json(), result.rows_json()):
            print_line(line)
    findings = result.findings_json()
    if not arguments.json:
        for finding in findings:
            where = f"{finding['shard']}: " if finding["shard"] is not None else ""
            print_line(f"DAMAGED {where}{finding['what']}")
    return FOUND if findings else HEALTHY


def _show_log(ask: AskFunction, query: Query, arguments: argparse.Namespace) -> int:
    """Print the entries, and with --follow new ones, up to the last one that is requested."""
    _, last = span_of(query)
    damaged = False
    while True:
        result = ask(query)
        newest = 0
        for entry in result.rows_json():
            newest = entry["seqno"]
            damaged = damaged or entry["finding"] is not None
            print_line(json.dumps(entry) if arguments.json else log_line(entry))
        if newest:
            query = Query("log", query.name, first=str(newest + 1), last=query.last, follow=True)
        if not arguments.follow or (last is not None and newest >= last):
            return FOUND if damaged else HEALTHY
        sys.stdout.flush()
        time.sleep(POLL_S)


# Through a server: `GET /v1/inspect/…` and `GET /v1/shards/NAME/inspect/…`.

SERVER_S = 600.0  # for an answer
AGAIN_S = 1.0  # for which a server that does not answer is asked again
DOCUMENT_BYTES_MAX = 256 * 1024 * 1024
_OPTIONS = {"first": "from", "last": "to"}  # query fields whose HTTP parameters have other names


class _ReceivedDocument(Struct):
    """What an answer must have; a newer server may send more."""

    persist: Literal["inspect"]
    seqno: int | None
    about: dict[str, Any] | None
    rows: list[dict[str, Any]]
    findings: list[dict[str, Any]]


class _ReceivedEntry(Struct):
    """What an entry of a log must have."""

    seqno: int
    finding: str | None


@dataclass(frozen=True)
class ServerAnswer:
    """An answer of a server: its JSON (None: it is a log), and the parts of it."""

    rows: list[dict[str, Any]]
    document: Any = None
    seqno: int | None = None
    about: dict[str, Any] | None = None
    findings: tuple[dict[str, Any], ...] = ()

    def about_json(self) -> dict[str, Any] | None:
        return self.about

    def rows_json(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def findings_json(self) -> list[dict[str, Any]]:
        return list(self.findings)

    def pieces(self) -> Iterator[str]:
        yield f"{json.dumps(self.document)}\n"


class Server:
    """One or several servers of a location. `token` None: no authentication.

    Raises InvalidUsage: the URL is not one of servers, or a PEM file cannot be used.
    """

    def __init__(self, url: str, token: str | None, trust: ClientTls | None = None) -> None:
        clock = SystemClock()
        self.url = url
        self._calls = HttpCalls(Servers(url.split(","), clock), clock, token=token, trust=trust, timeout_s=AGAIN_S)

    def ask(self, query: Query) -> ServerAnswer:
        """Raises the error that the server returns, and Unavailable: it is unreachable, or no server of persist."""
        data = self._get(path_of(query))
        if query.what == "log":
            entries = [self._parsed(line) for line in data.splitlines()]
            self._checked(entries, list[_ReceivedEntry])
            return ServerAnswer(entries)
        document = self._parsed(data)
        received = self._checked(document, _ReceivedDocument)
        return ServerAnswer(received.rows, document, received.seqno, received.about, tuple(received.findings))

    def document(self, path: str) -> Any:
        """The JSON at a path. Raises as `ask` does."""
        return self._parsed(self._get(path))

    def close(self) -> None:
        self._calls.close()

    def _get(self, path: str) -> bytes:
        reply = self._calls.call(Call("GET", path, wait_s=SERVER_S, bytes_max=DOCUMENT_BYTES_MAX))
        if reply.status >= 300:  # not followed: the token is for this server
            raise Unavailable(f"{self.url} redirects to another server: give the URL of the server itself")
        return reply.data

    def _parsed(self, data: bytes) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Unavailable(f"{self.url} does not answer as a server of persist") from error

    def _checked(self, document: Any, kind: type[T]) -> T:
        try:
            return convert(document, kind)
        except ValidationError as error:
            raise Unavailable(f"{self.url} does not answer as a server of persist") from error


def path_of(query: Query) -> str:
    params: dict[str, str] = {}
    for name in (*OPTIONS, "whole"):
        if value := getattr(query, name):
            params[_OPTIONS.get(name, name)] = "true" if value is True else str(value)
    path = f"/v1/shards/{quote(query.name, safe='')}/inspect/{query.what}"
    if query.what in OF_LOCATION:
        path = f"/v1/inspect/{query.what}"
        params |= {"key" if query.what == "part" else "pattern": query.name} if query.name else {}
    return f"{path}?{urlencode(params)}" if params else path


@contextmanager
def understood(url: str) -> Iterator[None]:
    """Raise Unavailable if an answer lacks a field that is used, or the field has an unexpected type."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise Unavailable(f"{url} does not answer as a server of persist") from error


# Formatting: the fields of the whole, a table of rows, and findings.

ALIGNED_ROWS_MAX = 1_000  # that decide the widths of columns; later rows may be wider
CELL_CHARS_MAX = 400
GAP = "  "
FRONTIERS = ("since", "upper", "lower")  # an empty one is the closed frontier

Row = Mapping[str, Any]


def lines(about: Row | None, rows: Iterable[Row]) -> Iterator[str]:
    """Format the fields of the whole, one a line, then the table. Columns that are empty in all rows are omitted."""
    about = dict(about or {})
    shown = about.pop("shown", ())
    for name, value in _flat(about):
        yield plain(f"{name}: {value}")
    yield from _table(rows, follows=bool(about))
    yield from _table(shown, follows=True)


def _table(rows: Iterable[Row], *, follows: bool) -> Iterator[str]:
    """Format a table, after an empty line if it `follows` something. Without rows there is no table."""
    upcoming = iter(rows)
    first = [_cells(row) for row in islice(upcoming, ALIGNED_ROWS_MAX)]
    if not first:
        return
    if follows:
        yield ""
    more = next(upcoming, None)
    known = dict.fromkeys(name for row in first for name in row)  # newer servers may return more fields for some rows
    names = [name for name in known if more is not None or any(row.get(name, "-") not in ("-", "") for row in first)]
    numeric = {name for name in names if all(_is_number(row.get(name, "-")) for row in first)}
    widths = {name: max(len(name), *(len(row.get(name, "-")) for row in first)) for name in names}
    yield _line({name: name for name in names}, names, numeric, widths)
    for row in first:
        yield _line(row, names, numeric, widths)
    while more is not None:
        yield _line(_cells(more), names, numeric, widths)
        more = next(upcoming, None)


def log_line(entry: Row) -> str:
    if entry["finding"] is not None and entry["commit_id"] is None:
        return plain(f"v{entry['seqno']}  {entry['bytes']} bytes  DAMAGED: {entry['finding']}")
    operations = entry["operations"] or entry["kinds"]
    fields = [f"v{entry['seqno']}", entry["timestamp"] or "-", f"{entry['bytes']} bytes", ", ".join(operations)]
    if entry["added"]:
        fields.append("added " + ", ".join(map(_batch, entry["added"])))
    if entry["replaces"]:
        replaced = ", ".join(map(_batch, entry["replaced"])) or "nothing"
        fields.append(f"{entry['replaces']} batches from the {entry['first']}th became {replaced}")
    if entry["gone"]:
        fields.append(f"{entry['gone']} blobs left")
    if entry["finding"] is not None:
        fields.append(f"DAMAGED: {entry['finding']}")
    return plain(GAP.join(fields))


def _batch(batch: Row) -> str:
    return f"[{_text(batch['lower'])}, {_text(batch['upper'])}) of {batch['rows']} updates"


def _line(row: Mapping[str, str], names: list[str], numeric: set[str], widths: Mapping[str, int]) -> str:
    cells = ((row.get(name, "-"), widths[name], name in numeric) for name in names)
    return GAP.join(text.rjust(width) if right else text.ljust(width) for text, width, right in cells).rstrip()


def _cells(row: Row) -> dict[str, str]:
    """The texts of a row by column, with control characters escaped: names and values are untrusted."""
    return {plain(name): plain(text) for name, text in _flat(row)}


def _flat(row: Row) -> Iterator[tuple[str, str]]:
    """The fields as texts. Nested objects are flattened; counts of blobs are shown with their bytes."""
    for name, value in row.items():
        if isinstance(value, Mapping) and value.keys() == {"blobs", "bytes"}:
            yield name, f"{value['bytes']} ({value['blobs']})" if value["blobs"] else "-"
        elif isinstance(value, Mapping) and name in ("location", "orphans", "earlier", "later"):
            yield from ((f"{name}.{inner}", text) for inner, text in _flat(value))
        elif value == [] and name not in FRONTIERS:
            yield name, "-"
        else:
            yield name, _text(value)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        is_frontier = len(value) == 1 and isinstance(value[0], int)
        return str(value[0]) if is_frontier else "; ".join(map(_text, value))[:CELL_CHARS_MAX] or "[]"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items())[:CELL_CHARS_MAX]
    return str(value)


def _is_number(text: str) -> bool:
    return text == "-" or text.lstrip("-").replace(".", "", 1).isdecimal()
