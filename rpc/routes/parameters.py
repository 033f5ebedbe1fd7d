"""Query parameters that several routes read, and the check that a request has no others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Annotated

from fastapi import Depends, Query, Request
from fastapi.dependencies.models import Dependant

from persist.client.wall_clock import read_instant
from persist.core import antichain
from persist.core.antichain import EMPTY, Antichain
from persist.core.errors import InvalidUsage
from persist.core.ids import SeqNo, Token, parse, token_of_key
from persist.core.recorded import Caller
from persist.core.tags import check_tag_name
from persist.core.view import Seen
from rpc.saying import INFO, PURPOSE, said

KEY_LENGTH_MAX = 200
SEEN = "Persist-Seen"
_CLOSED = ("[]", "closed")

Frontier = Annotated[
    str, Query(description="A time (`7` or `[7]`), or `[]` for closed: no more.", examples=["7"], max_length=32)
]
Timestamp = Annotated[
    str | None,
    Query(
        description="A wall clock with its zone (RFC 3339), in the place of a time.",
        examples=["2030-01-01T12:00:00Z"],
        max_length=64,
    ),
]
Format = Annotated[
    str | None,
    Query(alias="format", description="arrow, parquet, ndjson or csv; else by the header.", examples=["ndjson"]),
]
IdempotencyToken = Annotated[
    str | None,
    Query(
        description="Makes a retry safe: repeat the request with the same token to learn or complete its outcome. "
        f"1 to {KEY_LENGTH_MAX} characters; or the header Idempotency-Key.",
        examples=["load-2030-01-01"],
    ),
]


SAID_PARAMETERS = [
    {
        "name": INFO,
        "in": "header",
        "schema": {"type": "string"},
        "example": '{"ticket": 4711}',
        "description": "What the history is to tell of this write: a JSON object of at most 4 KiB.",
    },
    {
        "name": PURPOSE,
        "in": "header",
        "schema": {"type": "string"},
        "example": "nightly load",
        "description": "What the history is to tell of the writer, percent-encoded.",
    },
]


def caller_of(request: Request) -> Caller:
    """Who sends the request, and what they say for the commit history. Raises InvalidUsage."""
    return said(request.scope["persist.principal"], request.headers)


IF_MATCH = {
    "name": "If-Match",
    "in": "header",
    "required": True,
    "schema": {"type": "string"},
    "example": '"1"',
    "description": "The version that the settings have now, as the header ETag of the GET tells it.",
}


def version_of(request: Request) -> int:
    """The version of the settings that the caller knows: `If-Match: "1"`. Raises InvalidUsage."""
    found = re.fullmatch(r'"?([0-9]{1,18})"?', ", ".join(request.headers.getlist("if-match")))
    if found is None or found[0].count('"') == 1:
        raise InvalidUsage('the header If-Match must have the version of the settings, as If-Match: "1"')
    return int(found[1])


def seen_of(request: Request) -> Seen | None:
    """What the caller says it has read before: `Persist-Seen: SEQNO.COMMIT_ID`. Raises InvalidUsage."""
    text = request.headers.get(SEEN)
    return None if text is None else read_seen(text, SEEN)


def read_seen(text: str, header: str) -> Seen:
    """Read `SEQNO.COMMIT_ID`. Raises InvalidUsage naming the header."""
    found = re.fullmatch(r"([0-9]{1,18})\.([0-9a-f]{32})", text)
    if not found:
        raise InvalidUsage(f"the header {header} has {text!r:.100}, where the seqno and the commit_id of a view belong")
    return Seen(SeqNo(int(found.group(1))), found.group(2))


async def only_known(request: Request) -> None:
    """Raises InvalidUsage at a query parameter that the route does not have, or that comes twice, and at a key.

    A misspelt one would mean its default, and of two only one would be heeded. A key that nothing remembers would
    promise what does not hold: that the same key with another request is refused.
    """
    known = list(_query_parameters(request.scope["route"].dependant))
    for name in request.query_params:
        if len(request.query_params.getlist(name)) > 1:
            raise InvalidUsage(f"parameter {name[:100]!r} is given more than once; give it once")
        if name not in known:
            raise InvalidUsage(f"there is no parameter {name[:100]!r} here; there is {', '.join(known) or 'none'}")
    if "token" not in known and request.method not in ("GET", "HEAD") and "idempotency-key" in request.headers:
        raise InvalidUsage("this request takes no Idempotency-Key; leave it out: repeating the request is safe")


def _query_parameters(dependant: Dependant) -> Iterator[str]:
    """Names of the query parameters of a route, also of those that it reads by a function."""
    yield from (parameter.alias for parameter in dependant.query_params)
    for inner in dependant.dependencies:
        yield from _query_parameters(inner)


def frontier(text: str, name: str) -> Antichain:
    """Read `7`, `[7]`, `[]` or `closed`. Raises InvalidUsage naming the parameter."""
    if text in _CLOSED:
        return EMPTY
    found = re.fullmatch(r"([0-9]{1,19})|\[([0-9]{1,19})\]", text)
    if not found:
        raise InvalidUsage(f"parameter {name} is {text!r}; it must be a time such as 7, or [] for closed")
    return antichain.frontier(int(found.group(1) or found.group(2)))


def _as_of(
    as_of: Annotated[int | None, Query(ge=0, description="The time; else the latest complete one.")] = None,
    timestamp: Timestamp = None,
) -> int | datetime | None:
    return _time_or_instant("as_of", as_of, timestamp)


def _as_of_or_tag(
    at: Annotated[int | datetime | None, Depends(_as_of)],
    tag: Annotated[str | None, Query(description="A tag, in the place of a time.", max_length=128)] = None,
) -> int | datetime | str | None:
    if tag is None:
        return at
    if at is not None:
        raise InvalidUsage("the parameters tag and as_of or timestamp are both given; give one of them")
    return check_tag_name(tag)


def _at(
    at: Annotated[int | None, Query(ge=0, description="The time; else the latest complete one.")] = None,
    timestamp: Timestamp = None,
) -> int | datetime | None:
    return _time_or_instant("at", at, timestamp)


def _after(
    after: Annotated[int | None, Query(ge=0, description="Updates at later times; else all of them.")] = None,
    timestamp: Timestamp = None,
) -> int | datetime | None:
    return _time_or_instant("after", after, timestamp)


AsOf = Annotated[int | datetime | None, Depends(_as_of)]
AsOfOrTag = Annotated[int | datetime | str | None, Depends(_as_of_or_tag)]
At = Annotated[int | datetime | None, Depends(_at)]
After = Annotated[int | datetime | None, Depends(_after)]


def _time_or_instant(name: str, time: int | None, timestamp: str | None) -> int | datetime | None:
    """The time or the wall clock that is asked for, of which there may be one. Raises InvalidUsage."""
    if timestamp is None:
        return time
    if time is not None:
        raise InvalidUsage(f"the parameters {name} and timestamp are both given; give one of them")
    return read_instant("parameter timestamp", timestamp)


def token_of(request: Request, parameter: str | None) -> Token | None:
    """The token that a client means: one that persist minted, or a free-form key. Raises InvalidUsage."""
    given = {*request.headers.getlist("idempotency-key"), *(() if parameter is None else (parameter,))}
    if not given:
        return None
    if len(given) > 1:
        raise InvalidUsage("the parameter token and the header Idempotency-Key differ; give one of them")
    [text] = given
    if not 1 <= len(text) <= KEY_LENGTH_MAX:
        raise InvalidUsage(f"a token or Idempotency-Key has 1 to {KEY_LENGTH_MAX} characters, not {len(text)}")
    try:
        return parse(Token, text)
    except InvalidUsage:
        return token_of_key(text)
