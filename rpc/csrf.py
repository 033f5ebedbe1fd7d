"""Protects the server from requests by web pages in a user's browser: only our own pages may change anything.

A browser lets any page post forms anywhere, but shows responses to pages of the same origin only. So a request that may
change something needs a content type that no form has, and an Origin that matches its Host. Programs send neither
Origin nor Sec-Fetch-Site, and pass. Requests with a token pass too: browsers do not add one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from persist.core.errors import Forbidden, InvalidUsage
from persist.formats.http_messages import RECORD
from rpc.settings import is_local

SAFE_METHODS = frozenset({"GET", "HEAD"})
_PREFLIGHTED = frozenset({"PUT", "DELETE", "PATCH"})  # a browser asks before it sends these, and is refused
FORM_TYPES = frozenset({b"application/x-www-form-urlencoded", b"multipart/form-data", b"text/plain"})
SAFE_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
"""Headers of every response: it is not run as a page, not shown in a frame, and keeps its content type."""
SAFE_HEADERS_OF_PAGES = tuple(header for header in SAFE_HEADERS if header[0] != b"content-security-policy")
"""Headers of our own pages, which set their own policy. A browser would enforce both."""

_GOOD_TYPES = frozenset({RECORD.encode(), b"application/json", b"application/x-ndjson", b"application/octet-stream"})
_CHARSET = re.compile(rb""";\s*charset\s*=\s*["']?([^"';,\s]*)""", re.IGNORECASE)
_CHARSETS = (b"utf-8", b"utf8", b"us-ascii", b"ascii")
_ONCE = (b"host", b"origin", b"content-type", b"sec-fetch-site", b"authorization")
_ELSEWHERE = (b"cross-site", b"same-site")
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,255})(?::([0-9]{1,5}))?\Z")
_PORTS = {"http": 80, "https": 443}
HOSTS_MAX = 64  # cached results of `_is_here`; each key is at most one header long
_Headers = Mapping[bytes, bytes]


class FormRefused(InvalidUsage):
    """The body has a missing content type, one that a form can send, or an encoding that no route decodes."""

    kind = "form_refused"


def check_type(method: str, headers: _Headers, *, has_token: bool) -> None:
    """Raises FormRefused if a form or script of any page could have sent this request, which may change something.

    A form posts with one of three types. A script can also post without a type, but cannot add a token.
    """
    content_type = headers.get(b"content-type", b"")
    if content_type in _GOOD_TYPES or method in _PREFLIGHTED:
        return
    kind = content_type.partition(b";")[0].strip().lower()
    if not kind:
        is_empty = headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers
        if has_token or is_empty:
            return
    if kind in FORM_TYPES or b"/" not in kind:
        raise FormRefused(
            f"the content type of the body is {_shown(kind) if kind else 'none'}, which any web page may send; "
            "set the header Content-Type to that of the body, such as application/json or text/csv"
        )


def check_encoding(headers: _Headers) -> None:
    """Raises FormRefused if the body is compressed, or is text in another encoding than UTF-8."""
    coding = headers.get(b"content-encoding", b"identity").strip().lower()
    if coding not in (b"identity", b""):
        raise FormRefused(
            f"the body has the Content-Encoding {_shown(coding)}, which the server does not decode: send it "
            "uncompressed, or as Parquet, which compresses its columns"
        )
    charset = _CHARSET.search(headers.get(b"content-type", b""))
    if charset is not None and charset[1].lower() not in _CHARSETS:
        raise FormRefused(f"the body has the charset {_shown(charset[1])}: send it in UTF-8 without a charset")


def _shown(value: bytes) -> str:
    return repr(value.decode("latin-1")[:100])


def check_once(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises Forbidden if a header that these checks rely on occurs twice."""
    seen: set[bytes] = set()
    for name, _ in headers:
        if name in seen and name in _ONCE:
            raise Forbidden(f"the header {name.decode()} occurs more than once; send it once")
        seen.add(name)


def check_host(http_version: str, headers: _Headers) -> None:
    """Raises InvalidUsage if a request of HTTP/1.1 has no Host (RFC 9112, section 3.2)."""
    if http_version == "1.1" and b"host" not in headers:
        raise InvalidUsage("a request of HTTP/1.1 must name its host: send the header Host")


def check_local(headers: _Headers) -> None:
    """A server without tokens answers this machine only. Raises Forbidden unless Host is a name of it."""
    host = headers.get(b"host")
    if host is not None and not _is_here(host):
        text = host.decode("latin-1")
        raise Forbidden(f"without tokens this server answers requests to this machine only, not {text[:100]!r}")


def check_site(method: str, headers: _Headers) -> None:
    """Raises Forbidden for a request by a page of another origin; another port is another origin."""
    origin = headers.get(b"origin")
    if origin is not None:
        if _is_own(origin.decode("latin-1"), headers.get(b"host", b"").decode("latin-1")):
            return
        raise Forbidden(f"a web page of {origin.decode('latin-1')[:100]!r} may not use this server; send no Origin")
    if headers.get(b"sec-fetch-site", b"").strip().lower() not in _ELSEWHERE:
        return
    how = headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")
    if method in SAFE_METHODS and how == (b"navigate", b"document"):
        return  # the user follows a link to the console
    raise Forbidden("a web page of another site may not use this server; open its address directly")


@lru_cache(HOSTS_MAX)
def _is_here(host: bytes) -> bool:
    """Whether this Host is this machine. Cached, since nearly all requests have the same one."""
    authority = _authority(host.decode("latin-1"))
    return authority is not None and is_local(authority[0])


def _is_own(origin: str, host: str) -> bool:
    """Whether the origin is the host of the request. The default port is that of the origin's scheme."""
    page, server = _origin(origin), _authority(host)
    if page is None or server is None:
        return False
    default = _PORTS[origin.partition(":")[0].lower()]
    return (page[0], page[1] or default) == (server[0], server[1] or default)


def _origin(text: str) -> tuple[str, int] | None:
    scheme, colon, rest = text.partition("://")
    return _authority(rest) if colon and scheme.lower() in _PORTS else None


def _authority(text: str) -> tuple[str, int] | None:
    """Host and port (0: none) of a text without user or path; None: it is not of this form."""
    match = _AUTHORITY.match(text)
    if match is None:
        return None
    port = int(match[2] or 0)
    return (match[1].removesuffix(".").lower(), port) if port < 65536 else None
