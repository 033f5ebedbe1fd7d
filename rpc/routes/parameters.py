"""Query parameters that several routes read, and the check that a request has no others."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated

from fastapi import Query, Request

from persist.core import antichain
from persist.core.antichain import EMPTY, Antichain
from persist.core.errors import InvalidUsage
from persist.core.ids import Token, WriterId, parse

KEY_LENGTH_MAX = 200
_CLOSED = ("[]", "closed")

Frontier = Annotated[
    str, Query(description="A time (`7` or `[7]`), or `[]` for closed: no more.", examples=["7"], max_length=32)
]
Format = Annotated[
    str | None,
    Query(alias="format", description="arrow, parquet, ndjson or csv; else by the header.", examples=["ndjson"]),
]
IdempotencyToken = Annotated[
    str | None,
    Query(
        description="Makes a retry safe: repeat the request with the same token to learn or complete its outcome.",
        max_length=KEY_LENGTH_MAX,
        examples=["load-2030-01-01"],
    ),
]
WriterParameter = Annotated[
    str | None, Query(description="A writer id of one's own (`w` and 32 hex digits).", max_length=33)
]


async def only_known(request: Request) -> None:
    """Raises InvalidUsage at a query parameter that the route does not have: a misspelt one would mean its default."""
    known = [parameter.alias for parameter in request.scope["route"].dependant.query_params]
    for name in request.query_params:
        if name not in known:
            raise InvalidUsage(f"there is no parameter {name[:100]!r} here; there is {', '.join(known) or 'none'}")


def frontier(text: str, name: str) -> Antichain:
    """Read `7`, `[7]`, `[]` or `closed`. Raises InvalidUsage naming the parameter."""
    if text in _CLOSED:
        return EMPTY
    found = re.fullmatch(r"\[?(\d{1,19})\]?", text)
    if not found:
        raise InvalidUsage(f"parameter {name} is {text!r}; it must be a time such as 7, or [] for closed")
    return antichain.frontier(int(found.group(1)))


def token_and_writer(token: str | None, writer: str | None) -> tuple[Token | None, WriterId | None]:
    """The ids that a client means. A token may be any text where it comes alone, since then it names its writer too."""
    if writer is not None:
        return (None if token is None else parse(Token, token)), parse(WriterId, writer)
    if token is None:
        return None, None
    return Token("i" + hashlib.sha256(b"persist token\0" + token.encode()).hexdigest()[:32]), None
