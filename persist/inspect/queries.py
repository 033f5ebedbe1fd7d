"""The queries of an inspection, with the same names on the command line and over HTTP."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from persist.client.timestamps import instant_ms, read_instant
from persist.core.errors import InvalidUsage
from persist.core.ids import check_shard_name
from persist.inspect.attribute_listing import attributes_document
from persist.inspect.content_digest import digest_document
from persist.inspect.documents import Document, KeyFormat
from persist.inspect.holds import holds_document
from persist.inspect.log_listing import Span, log_document, version_at
from persist.inspect.part_listing import SHOWN_MAX, part_document, parts_document
from persist.inspect.readonly_location import ReadOnlyLocation
from persist.inspect.state_dump import state_document
from persist.inspect.usage import usage_document


@dataclass(frozen=True, slots=True)
class Query:
    """One query, with its options as texts; "": not given. `name` is the shard, a pattern, or the key of a part.

    `keys`: show keys of rows. `rows`: how many updates of a part to show. `whole`: the whole State instead of its
    summary. `follow`: the log may begin at a version that does not exist yet.
    """

    what: str
    name: str = ""
    at: str = ""
    timestamp: str = ""
    first: str = ""
    last: str = ""
    as_of: str = ""
    lower: str = ""
    upper: str = ""
    keys: bool = False
    rows: int = 0
    whole: bool = False
    follow: bool = False


def answer(location: ReadOnlyLocation, query: Query) -> Document:
    """Answer a query. Raises InvalidUsage (including UnknownShard), NotReadable, Unavailable, Corruption.

    Corruption: nothing can be shown. Everything else that is wrong is a finding.
    """
    if query.what not in ANSWERS:
        raise InvalidUsage(f"{query.what!r:.60} cannot be inspected; give one of {', '.join(ANSWERS)}")
    if query.what == "part" and not query.name:
        raise InvalidUsage("give the key of a part; `persist inspect parts NAME` lists them")
    if query.what in OF_ONE:
        check_shard_name(query.name)
    if not 0 <= query.rows <= SHOWN_MAX:
        raise InvalidUsage(f"rows is {query.rows}; it must be from 0 to {SHOWN_MAX}")
    return ANSWERS[query.what](location, query)


def _state(location: ReadOnlyLocation, query: Query) -> Document:
    at, since = _seqno(query.at), _seqno(query.first)
    if query.timestamp:
        if at is not None:
            raise InvalidUsage("give a version or a timestamp, not both")
        at = version_at(location, query.name, instant_ms("timestamp", read_instant("timestamp", query.timestamp)))
    return state_document(location, query.name, at, since, KeyFormat(query.keys), whole=query.whole)


def span_of(query: Query) -> Span:
    """The requested versions of the log. Raises InvalidUsage."""
    first, last = _seqno(query.first), _seqno(query.last)
    for name, value in (("from", first), ("to", last)):
        if value is not None and not 0 < value < 2**63:
            raise InvalidUsage(f"{name} is {value}; versions are in [1, {2**63 - 1}]")
    if first is not None and last is not None and first > last:
        raise InvalidUsage(f"from is {first} and to is {last}: from must not be later")
    return first, last


def _seqno(text: str) -> int | None:
    """Parse a version, `v12` or `12`; "": None. Raises InvalidUsage."""
    if not re.fullmatch("(v?[0-9]{1,19})?", text):
        raise InvalidUsage(f"{text!r:.60} is not a version; give a number such as 12, or v12")
    return int(text.removeprefix("v")) if text else None


def _time(text: str) -> int | None:
    if not re.fullmatch("[0-9]{0,19}", text):
        raise InvalidUsage(f"as-of is {text!r:.60}; it must be a time, such as 416")
    return int(text) if text else None


ANSWERS: Mapping[str, Callable[[ReadOnlyLocation, Query], Document]] = {
    "state": _state,
    "log": lambda location, query: log_document(location, query.name, span_of(query), waits=query.follow),
    "parts": lambda location, query: parts_document(location, query.name, KeyFormat(query.keys)),
    "part": lambda location, query: part_document(location, query.name, KeyFormat(query.keys), query.rows),
    "holds": lambda location, query: holds_document(location, query.name, KeyFormat(query.keys)),
    "attributes": lambda place, query: attributes_document(place, query.name, query.lower or None, query.upper or None),
    "usage": lambda location, query: usage_document(location, query.name or None),
    "digest": lambda location, query: digest_document(location, query.name, _time(query.as_of)),
}
OF_LOCATION = ("usage", "part")  # the name is a pattern, which may be omitted, or the key of a part
OF_ONE = tuple(what for what in ANSWERS if what not in OF_LOCATION)
