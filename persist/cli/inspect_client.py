"""Inspections through a server, and their answers as tables."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from typing import Any
from urllib.parse import quote, urlencode

from persist.cli.connection_args import check_url
from persist.cli.terminal import plain
from persist.client.server_address import Trust, normal
from persist.core.errors import InvalidUsage, PersistError, Unavailable
from persist.formats.http_messages import error_from_json
from persist.http_client.http_connection import Broken, ConnectionPool, NotSent, Reply, tls_of
from persist.inspect.queries import OF_LOCATION, Query

# An inspection through a server: `GET /v1/inspect/…` and `GET /v1/shards/NAME/inspect/…`.


ANSWER_S = 60.0  # that a server may be silent
DOCUMENT_BYTES_MAX = 256 * 1024 * 1024  # that is shown as a table; JSON is passed on as it comes
LINE_BYTES_MAX = 16 * 1024 * 1024
END_BYTES = 64  # of a document, in which its end is looked for
_BEGINS = re.compile(rb'\s*\{\s*"persist"\s*:\s*"inspect"')
_ENDS_HEALTHY = re.compile(rb'"findings"\s*:\s*\[\s*\]\s*\}\s*\Z')
_CONTROL = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]")  # no JSON has them raw
_OPTIONS = {"first": "from", "last": "to"}  # how a question's options are called there


class Server:
    """A server, or several of one location: the first of them that answers is asked. `token` None: there is none.

    Raises InvalidUsage: it is no URL of servers, or a PEM file cannot be used.
    """

    def __init__(self, url: str, token: str | None, trust: Trust | None = None) -> None:
        check_url(url)
        urls = tuple(dict.fromkeys(map(normal, url.split(","))))
        tls = tls_of(urls, trust)
        self._pools = {one: ConnectionPool(one, connect_s=ANSWER_S, tls=tls) for one in urls}
        self._url = urls[0]
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}

    @property
    def url(self) -> str:
        """The one that was asked last."""
        return self._url

    def ask(self, query: Query) -> Far:
        """Raises what the server refuses, and Unavailable: it does not answer, or not as a server of persist."""
        pieces = self._opened(path_of(query), ANSWER_S)
        return Far(chain(tuple(islice(pieces, 1)), pieces), query.what, self._url)

    def document(self, path: str, silent_s: float) -> Any:
        """The JSON at a path; the server may be silent for so long. Raises as `ask` does."""
        try:
            return json.loads(_whole(self._opened(path, silent_s), "ask for fewer shards"))
        except (Broken, ValueError, RecursionError) as error:
            raise Unavailable(
                f"{self._url} does not answer as a server of persist, or its answer was cut off"
            ) from error

    def _opened(self, path: str, silent_s: float) -> Iterator[bytes]:
        """The body, read as it comes; none of the pieces is empty. Raises Broken: the answer was cut off."""
        failed: Exception | None = None
        for url, pool in self._pools.items():
            self._url = url
            with ExitStack() as held:
                try:
                    reply, pieces = held.enter_context(pool.stream(path, self._headers, silent_s))
                except (NotSent, Broken, InvalidUsage) as error:  # or its certificate is not trusted
                    failed = error
                    continue
                if reply.status >= 300:
                    raise _refusal(reply, url)
                yield from filter(None, pieces)
                return
        raise Unavailable(f"{self._url} does not answer: {failed}") from failed


def _whole(pieces: Iterator[bytes], remedy: str) -> bytes:
    """All of a body. Raises InvalidUsage: it is longer than DOCUMENT_BYTES_MAX."""
    data = bytearray()
    for piece in pieces:
        data += piece
        if len(data) > DOCUMENT_BYTES_MAX:
            raise InvalidUsage(f"the answer has more than {DOCUMENT_BYTES_MAX} bytes; {remedy}")
    return bytes(data)


def path_of(query: Query) -> str:
    """Where a server answers the question."""
    given: dict[str, str] = {}
    for name in ("at", "timestamp", "first", "last", "as_of", "lower", "upper"):
        if value := getattr(query, name):
            given[_OPTIONS.get(name, name)] = value
    given |= {name: "true" for name in ("keys", "whole", "follow") if getattr(query, name)}
    given |= {"rows": str(query.rows)} if query.rows else {}
    path = f"/v1/shards/{quote(query.name, safe='')}/inspect/{query.what}"
    if query.what in OF_LOCATION:
        path = f"/v1/inspect/{query.what}"
        given |= {"key" if query.what == "part" else "pattern": query.name} if query.name else {}
    return f"{path}?{urlencode(given)}" if given else path


class Far:
    """An answer of a server, read as it comes."""

    def __init__(self, pieces: Iterator[bytes], what: str, url: str) -> None:
        self._pieces = pieces
        self._what = what
        self._url = url
        self._document: dict[str, Any] | None = None
        self._findings: list[dict[str, Any]] = []

    @property
    def seqno(self) -> int | None:
        found: int | None = self._read()["seqno"]
        return found

    @property
    def about(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self._read()["about"]
        return found

    def rows(self) -> Iterator[dict[str, Any]]:
        return iter(self._read()["rows"])

    def findings(self) -> list[dict[str, Any]]:
        return self._findings if self._document is None else list(self._document["findings"])

    def json(self) -> Iterator[str]:
        """As it comes. Raises Unavailable: the answer was cut off."""
        if self._what == "log":
            yield from self._lines()
            return
        start, end, decoder = b"", b"", codecs.getincrementaldecoder("utf-8")("replace")
        pieces = self._taken()
        while len(start) < END_BYTES and (more := next(pieces, b"")):
            start += more
        if start and not _BEGINS.match(start):
            raise self._foreign()
        for piece in chain((start,), pieces):
            if _CONTROL.search(piece):
                raise self._foreign()
            end = (end + piece)[-END_BYTES:]
            yield decoder.decode(piece)
        if not end.endswith(b"]}\n"):
            raise self._cut()
        if not _ENDS_HEALTHY.search(end):
            self._findings = [{"shard": None, "what": "as the document says", "key": None}]

    def _lines(self) -> Iterator[str]:
        rest = b""
        for piece in self._taken():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if not _is_entry(_parsed(line)):
                    raise self._foreign()
                yield f"{line.decode('utf-8', 'replace')}\n"
            if len(rest) > LINE_BYTES_MAX:
                break
        if rest:
            raise self._cut()

    def _read(self) -> dict[str, Any]:
        if self._document is None:
            data = _whole(self._taken(), "take --json")
            found = _parsed(data)
            if found is None and _BEGINS.match(data):
                raise self._cut()
            if not _is_document(found):
                raise self._foreign()
            self._document = found
        return self._document

    def _taken(self) -> Iterator[bytes]:
        try:
            yield from self._pieces
        except Broken as error:
            raise self._cut() from error

    def _foreign(self) -> Unavailable:
        return Unavailable(f"{self._url} does not answer as a server of persist")

    def _cut(self) -> Unavailable:
        return Unavailable(f"the answer of {self._url} was cut off; its log says why, ask again")


@contextmanager
def understood(url: str) -> Iterator[None]:
    """Raises Unavailable where an answer lacks what is shown of it, or has another kind of value there."""
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise Unavailable(f"{url} does not answer as a server of persist") from error


def _parsed(data: bytes) -> Any:
    """None: it is no JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _is_document(found: Any) -> bool:
    if not isinstance(found, dict) or found.get("persist") != "inspect":
        return False
    seqno, about = found.get("seqno", ""), found.get("about", "")
    lists = (found.get("rows"), found.get("findings"))
    return (
        (seqno is None or type(seqno) is int)
        and (about is None or isinstance(about, dict))
        and all(isinstance(one, list) and all(isinstance(row, dict) for row in one) for one in lists)
    )


def _is_entry(found: Any) -> bool:
    """Whether it is an entry of a log."""
    return isinstance(found, dict) and type(found.get("seqno")) is int and "finding" in found


def _refusal(reply: Reply, url: str) -> PersistError:
    """What the server says is wrong."""
    if reply.status < 400:
        return Unavailable(f"{url} redirects to another place, which is not asked: give the URL of the server itself")
    told = _parsed(reply.data)
    if isinstance(told, dict) and isinstance(told.get("kind"), str):
        return error_from_json(told)
    return Unavailable(f"{url} does not answer as a server of persist: HTTP error {reply.status}")


# Answers of an inspection for people: what holds for the whole, a table of rows, and what is wrong.


ALIGNED_ROWS_MAX = 1_000  # by which the widths of columns are chosen; later rows may be wider
CELL_CHARS_MAX = 400
GAP = "  "
FRONTIERS = ("since", "upper", "lower")  # where nothing within is the closed frontier

Row = Mapping[str, Any]


def lines(about: Row | None, rows: Iterable[Row]) -> Iterator[str]:
    """What is told of the whole, a line a field, then the table. Columns that are empty in all rows are left out."""
    about = dict(about or {})
    shown = about.pop("shown", ())
    for name, value in _flat(about):
        yield plain(f"{name}: {value}")
    yield from _table(rows, follows=bool(about))
    yield from _table(shown, follows=True)


def _table(rows: Iterable[Row], *, follows: bool) -> Iterator[str]:
    """A table, after an empty line where it `follows` something. Of no rows there is none."""
    upcoming = iter(rows)
    first = [_cells(row) for row in islice(upcoming, ALIGNED_ROWS_MAX)]
    if not first:
        return
    if follows:
        yield ""
    more = next(upcoming, None)
    known = dict.fromkeys(name for row in first for name in row)  # a later build may tell more of some rows
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
    """An entry of the log on one line."""
    if entry["finding"] is not None and entry["commit_id"] is None:
        return plain(f"v{entry['seqno']}  {entry['bytes']} bytes  DAMAGED: {entry['finding']}")
    said = entry["operations"] or entry["kinds"]
    told = [f"v{entry['seqno']}", entry["timestamp"] or "-", f"{entry['bytes']} bytes", ", ".join(said)]
    if entry["added"]:
        told.append("added " + ", ".join(map(_batch, entry["added"])))
    if entry["replaces"]:
        became = ", ".join(map(_batch, entry["replaced"])) or "nothing"
        told.append(f"{entry['replaces']} batches from the {entry['first']}th became {became}")
    if entry["gone"]:
        told.append(f"{entry['gone']} blobs left")
    if entry["finding"] is not None:
        told.append(f"DAMAGED: {entry['finding']}")
    return plain(GAP.join(told))


def finding_line(finding: Row) -> str:
    """What is wrong, on one line."""
    where = f"{finding['shard']}: " if finding["shard"] is not None else ""
    return plain(f"DAMAGED {where}{finding['what']}")


def _batch(batch: Row) -> str:
    return f"[{_text(batch['lower'])}, {_text(batch['upper'])}) of {batch['rows']} updates"


def _line(row: Mapping[str, str], names: list[str], numeric: set[str], widths: Mapping[str, int]) -> str:
    cells = ((row.get(name, "-"), widths[name], name in numeric) for name in names)
    return GAP.join(text.rjust(width) if right else text.ljust(width) for text, width, right in cells).rstrip()


def _cells(row: Row) -> dict[str, str]:
    """What is shown of a row, by columns. Names and values are of whoever wrote them: none may move the cursor."""
    return {plain(name): plain(text) for name, text in _flat(row)}


def _flat(row: Row) -> Iterator[tuple[str, str]]:
    """The fields as texts; those of an object within come one by one, and blobs with their bytes together."""
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
        return _list(value)[:CELL_CHARS_MAX]
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items())[:CELL_CHARS_MAX]
    return str(value)


def _list(value: list[Any]) -> str:
    if not value:
        return "[]"
    if len(value) == 1 and isinstance(value[0], int):
        return str(value[0])
    return "; ".join(map(_text, value))


def _is_number(text: str) -> bool:
    return text == "-" or text.lstrip("-").replace(".", "", 1).isdecimal()
