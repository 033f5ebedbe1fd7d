"""What a caller says for the commit history, in two headers, as clients write and servers read them.

    Persist-Info: {"ticket": 4711}
    Persist-Purpose: nightly load

The first is a JSON object of at most 4 KiB, in UTF-8 or with escapes; the second is percent-encoded. Who the caller is
the server knows by the token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from persist.client.telling import checked_purpose, read_info
from persist.core.errors import InvalidUsage
from persist.core.recorded import Caller
from rpc.auth import ANYBODY, Principal

if TYPE_CHECKING:
    from starlette.datastructures import Headers

INFO = "Persist-Info"
PURPOSE = "Persist-Purpose"


def said_headers(caller: Caller) -> Mapping[str, str]:
    """The headers that tell what this caller says."""
    found = {}
    if caller.info:
        found[INFO] = json.dumps(json.loads(caller.info), separators=(",", ":"))
    if caller.purpose:
        found[PURPOSE] = quote(caller.purpose, safe="/:")
    return found


def said(principal: Principal, headers: Headers) -> Caller:
    """Who asks, and what these headers say. Raises InvalidUsage naming the header."""
    who = "" if principal is ANYBODY else principal.name
    info, purpose = _one(headers, INFO), _one(headers, PURPOSE)
    if info is None and purpose is None:
        return Caller(who)
    told = b"" if info is None else read_info(f"the header {INFO}", info)
    try:
        plain = unquote(purpose or "", errors="strict")
    except UnicodeDecodeError as error:
        raise InvalidUsage(f"the header {PURPOSE} is no UTF-8 once its percent signs are read") from error
    return Caller(who, checked_purpose(f"the header {PURPOSE}", plain), told)


def _one(headers: Headers, name: str) -> str | None:
    given = headers.getlist(name)
    if len(given) > 1:
        raise InvalidUsage(f"the header {name} is given more than once; give it once")
    if not given:
        return None
    try:
        return given[0].encode("latin-1").decode()
    except UnicodeDecodeError as error:
        raise InvalidUsage(f"the header {name} is no UTF-8") from error
