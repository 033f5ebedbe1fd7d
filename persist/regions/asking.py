"""Asks a server what it tells of its region: `GET /v1/regions`; and whether anything answers there at all."""

from __future__ import annotations

import errno
import json
import socket
import ssl
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from persist.client.server_address import Trust
from persist.core.errors import InvalidUsage, Unavailable
from persist.http_client.http_connection import Broken, NotSent, Pool, Reply, TimedOut, tls_of

ANSWER_S = 10.0
ANSWER_BYTES_MAX = 16 * 1024 * 1024
PATH = "/v1/regions"
_UNREACHABLE = frozenset({errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN})


class RegionServer:
    """A server, by its URL. It is asked rarely, so no connection is kept. Raises InvalidUsage: a bad PEM file."""

    def __init__(self, url: str, token: str | None = None, trust: Trust | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}
        self._tls = tls_of([url], trust)

    def ask(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """What it tells of its region, and of the index. Raises Unavailable: it does not answer, or not this."""
        url = self.url
        try:
            reply = _replied(url, self._headers, self._tls, ANSWER_S, timeout_s)
            if 300 <= reply.status < 400:  # it is not followed: the token is for this server
                raise Unavailable(f"{url} redirects elsewhere: name the server itself")
            if reply.status >= 400:
                raise Unavailable(f"{url} does not answer: HTTP error {reply.status}")
            told = json.loads(reply.data)
        except (NotSent, Broken, InvalidUsage, ValueError, RecursionError) as error:
            raise Unavailable(f"{url} does not answer: {_in_a_line(error)}") from error
        if not isinstance(told, dict):
            raise Unavailable(f"{url} does not answer as a server of persist")
        return told


@dataclass(frozen=True, slots=True)
class Presence:
    """Whether a server may be at a URL, and what tells. `is_silent`: nothing came, which is not proof."""

    url: str
    is_silent: bool
    why: str

    def __str__(self) -> str:
        return f"{self.url} ({self.why})"


def presence(url: str, timeout_s: float = ANSWER_S) -> Presence:
    """Whether anything answers there, whatever it says.

    Only a connection that is refused, a machine that cannot be reached, and no answer in time count as silence. A
    server that shows a certificate that is not known here, refuses, fails, or does not speak HTTP is there. A name that
    cannot be found tells nothing: it may be misspelt.
    """
    tls = tls_of([url], None)
    try:
        reply = _replied(url, {}, tls, timeout_s, timeout_s)
        return Presence(url, False, f"it answers with HTTP {reply.status}")
    except InvalidUsage as error:
        return Presence(url, False, f"it answers, and TLS fails: {_in_a_line(error)}")
    except (NotSent, Broken) as error:
        return _presence(url, error, timeout_s)


def _replied(
    url: str, headers: dict[str, str], tls: ssl.SSLContext | None, connect_s: float, timeout_s: float
) -> Reply:
    """The answer to one request, on a connection of its own. Raises as `Pool.request` does."""
    with closing(Pool(url, connect_s=connect_s, tls=tls, probes=False)) as pool:
        return pool.request("GET", PATH, headers, None, timeout_s, ANSWER_BYTES_MAX)


def _presence(url: str, error: NotSent | Broken, timeout_s: float) -> Presence:
    cause, text = error.__cause__, _in_a_line(error)
    if isinstance(error, TimedOut) or isinstance(cause, TimeoutError):
        return Presence(url, True, f"it did not answer within {timeout_s:g} s")
    if isinstance(cause, ssl.SSLError):
        return Presence(url, False, f"it answers, and TLS fails: {text}")
    if isinstance(cause, socket.gaierror):
        return Presence(url, False, f"or may: its name cannot be found, which tells nothing: {text}")
    if isinstance(cause, OSError) and cause.errno in _UNREACHABLE:
        return Presence(url, True, text)
    return Presence(url, False, f"it answers, and not as HTTP: {text}")


def _in_a_line(error: Exception) -> str:
    """A server may say anything."""
    return " ".join(f"{error}".split())[:200] or type(error).__name__
