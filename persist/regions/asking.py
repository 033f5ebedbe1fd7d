"""Asks a server what it tells of its region: `GET /v1/regions`; and whether anybody is there at all."""

from __future__ import annotations

import errno
import http.client
import json
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from persist.client.trust import Trust
from persist.core.errors import Unavailable

ANSWER_S = 10.0
ANSWER_BYTES_MAX = 16 * 1024 * 1024
_NOBODY = frozenset({errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN})


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it would send the token to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


def opener_for(urls: Iterable[str], trust: Trust | None = None) -> urllib.request.OpenerDirector:
    """Opens the URLs of these servers: without redirects, and without the proxies that the environment names.

    Raises InvalidUsage: a PEM file cannot be used.
    """
    trust = trust or Trust()
    is_secure = trust.ca_file is not None or any(url.lower().startswith("https:") for url in urls)
    https = urllib.request.HTTPSHandler(context=trust.context() if is_secure else None)
    return urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}), https)


def asked(
    url: str,
    token: str | None = None,
    timeout_s: float = ANSWER_S,
    opener: urllib.request.OpenerDirector | None = None,
) -> dict[str, Any]:
    """What the server tells of its region, and of the index. Raises Unavailable: it does not answer, or not this."""
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    opener = opener or opener_for([url])
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/v1/regions", headers=headers)
        with opener.open(request, timeout=timeout_s) as answer:
            told = json.loads(answer.read(ANSWER_BYTES_MAX))
    except urllib.error.HTTPError as error:
        with error:
            if 300 <= error.code < 400:
                raise Unavailable(f"{url} redirects elsewhere: name the server itself") from error
            raise Unavailable(f"{url} does not answer: {error}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise Unavailable(f"{url} does not answer: {_said(error)}") from error
    if not isinstance(told, dict):
        raise Unavailable(f"{url} does not answer as a server of persist")
    return told


@dataclass(frozen=True, slots=True)
class Presence:
    """Whether anybody may be at a URL, and what tells. `is_silent`: nothing came, which is not proof."""

    url: str
    is_silent: bool
    why: str

    def __str__(self) -> str:
        return f"{self.url} ({self.why})"


def presence(url: str, timeout_s: float = ANSWER_S) -> Presence:
    """Whether anything answers there, whatever it says.

    Only a connection that is refused, a machine that cannot be reached, and no answer in time count as silence. Who
    shows a certificate that is not known here, refuses, fails, or does not speak HTTP is there. A name that cannot be
    found tells nothing: it may be misspelt.
    """
    try:
        with opener_for([url]).open(f"{url.rstrip('/')}/v1/regions", timeout=timeout_s) as answer:
            return Presence(url, False, f"it answers with HTTP {answer.status}")
    except urllib.error.HTTPError as error:
        with error:
            return Presence(url, False, f"it answers with HTTP {error.code}")
    except (OSError, ValueError, http.client.HTTPException) as error:
        return _presence(url, _cause(error), timeout_s)


def _presence(url: str, error: Exception, timeout_s: float) -> Presence:
    said = _said(error)
    if isinstance(error, ssl.SSLError) and not isinstance(error, TimeoutError):
        return Presence(url, False, f"it answers, and TLS fails: {said}")
    if isinstance(error, TimeoutError):
        return Presence(url, True, f"it did not answer within {timeout_s:g} s")
    if isinstance(error, socket.gaierror):
        return Presence(url, False, f"or may: its name cannot be found, which tells nothing: {said}")
    if isinstance(error, OSError) and error.errno in _NOBODY:
        return Presence(url, True, said)
    return Presence(url, False, f"it answers, and not as HTTP: {said}")


def _cause(error: Exception) -> Exception:
    """What has gone wrong, without the error around it."""
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, Exception):
        return error.reason
    return error


def _said(error: Exception) -> str:
    """In one line: a server may say anything."""
    cause = _cause(error)
    return " ".join(f"{cause}".split())[:200] or type(cause).__name__
