"""What a web page in somebody's browser may send here: nothing that changes anything, unless the page is our own.

A browser lets any page post forms anywhere, and reads the answer to nobody but pages of the same origin. So what can
change something has a content type that no form has, and its Origin is the host that is asked. A program sends no
Origin, and no Sec-Fetch-Site: it passes. A token passes too: no browser adds one by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from persist.core.errors import Forbidden, InvalidUsage
from persist.formats.http_messages import RECORD
from rpc.settings import is_local

SAFE_METHODS = frozenset({"GET", "HEAD"})
_ASKED_FIRST = frozenset({"PUT", "DELETE", "PATCH"})  # a browser first asks whether a page may, and is not told so
FORM_TYPES = frozenset({b"application/x-www-form-urlencoded", b"multipart/form-data", b"text/plain"})
SAFE_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
"""Of every answer: nothing of it is run as a page, shown in one, or taken for another type than it has."""
SAFE_HEADERS_OF_PAGES = tuple(one for one in SAFE_HEADERS if one[0] != b"content-security-policy")
"""Of the pages that are ours, which bring a policy of their own. Two of them would hold both."""

_GOOD_TYPES = frozenset({RECORD.encode(), b"application/json", b"application/x-ndjson", b"application/octet-stream"})
_CHARSET = re.compile(rb""";\s*charset\s*=\s*["']?([^"';,\s]*)""", re.IGNORECASE)
_CHARSETS = (b"utf-8", b"utf8", b"us-ascii", b"ascii")
_ONCE = (b"host", b"origin", b"content-type", b"sec-fetch-site", b"authorization")
_ELSEWHERE = (b"cross-site", b"same-site")
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,255})(?::([0-9]{1,5}))?\Z")
_PORTS = {"http": 80, "https": 443}
HOSTS_MAX = 64  # Hosts of which is remembered whether they are of this machine; each is a header at most
_Headers = Mapping[bytes, bytes]


class FormRefused(InvalidUsage):
    """The body has a content type that any web page can send, or none, or an encoding that no route decodes."""

    kind = "form_refused"


def check_type(method: str, headers: _Headers, *, has_token: bool) -> None:
    """Of a request that can change something. Raises FormRefused where a plain form could have sent it.

    A form posts, with one of three types. A script of any page can post a body without a type, too, but adds no token.
    """
    given = headers.get(b"content-type", b"")
    if given in _GOOD_TYPES or method in _ASKED_FIRST:
        return
    kind = given.partition(b";")[0].strip().lower()
    if not kind:
        is_empty = headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers
        if has_token or is_empty:
            return
    if kind in FORM_TYPES or b"/" not in kind:
        shown = repr(kind.decode("latin-1")[:100]) if kind else "none"
        raise FormRefused(
            f"the content type of the body is {shown}, which any web page may send; "
            "send the header Content-Type with that of the body, such as application/json or text/csv"
        )


def check_encoding(headers: _Headers) -> None:
    """Raises FormRefused where the body is compressed, or is text in another encoding than UTF-8."""
    coding = headers.get(b"content-encoding", b"identity").strip().lower()
    if coding not in (b"identity", b""):
        raise FormRefused(
            f"the body has the Content-Encoding {_shown(coding)}, which the server does not decode: send it "
            "without, or as Parquet, which compresses its columns"
        )
    found = _CHARSET.search(headers.get(b"content-type", b""))
    if found is not None and found[1].lower() not in _CHARSETS:
        raise FormRefused(f"the body has the charset {_shown(found[1])}: send it in UTF-8, which needs no charset")


def _shown(value: bytes) -> str:
    return repr(value.decode("latin-1")[:100])


def check_once(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises Forbidden where a header comes twice by which others are told apart."""
    seen: set[bytes] = set()
    for name, _ in headers:
        if name in seen and name in _ONCE:
            raise Forbidden(f"the header {name.decode()} comes more than once; send it once")
        seen.add(name)


def check_host(http_version: str, headers: _Headers) -> None:
    """Raises InvalidUsage where a request of HTTP/1.1 names no Host (RFC 9112, section 3.2)."""
    if http_version == "1.1" and b"host" not in headers:
        raise InvalidUsage("a request of HTTP/1.1 names the host that it asks: send the header Host")


def check_local(headers: _Headers) -> None:
    """Without tokens, only this machine is answered. Raises Forbidden unless Host is of it."""
    given = headers.get(b"host")
    if given is not None and not _is_here(given):
        text = given.decode("latin-1")
        raise Forbidden(f"without tokens this server answers requests to this machine only, not {text[:100]!r}")


def check_site(method: str, headers: _Headers) -> None:
    """Raises Forbidden for what a page of another origin has sent: another port of this machine is another origin."""
    origin = headers.get(b"origin")
    if origin is not None:
        if _is_own(origin.decode("latin-1"), headers.get(b"host", b"").decode("latin-1")):
            return
        raise Forbidden(f"a web page of {origin.decode('latin-1')[:100]!r} may not use this server; send no Origin")
    if headers.get(b"sec-fetch-site", b"").strip().lower() not in _ELSEWHERE:
        return
    how = headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")
    if method in SAFE_METHODS and how == (b"navigate", b"document"):
        return  # somebody follows a link to us
    raise Forbidden("a web page of another site may not use this server; open its address yourself")


@lru_cache(HOSTS_MAX)
def _is_here(given: bytes) -> bool:
    """Whether this Host is of this machine. Nearly all requests bring the same one."""
    found = _authority(given.decode("latin-1"))
    return found is not None and is_local(found[0])


def _is_own(origin: str, host: str) -> bool:
    """Whether the origin is the host that is asked. A port that is left out is that of the origin's scheme."""
    page, asked = _origin(origin), _authority(host)
    if page is None or asked is None:
        return False
    usual = _PORTS[origin.partition(":")[0].lower()]
    return (page[0], page[1] or usual) == (asked[0], asked[1] or usual)


def _origin(text: str) -> tuple[str, int] | None:
    scheme, colon, rest = text.partition("://")
    return _authority(rest) if colon and scheme.lower() in _PORTS else None


def _authority(text: str) -> tuple[str, int] | None:
    """Host and port (0: none is given) of what has nothing else: no user, no path. None: it is something else."""
    found = _AUTHORITY.match(text)
    if found is None:
        return None
    port = int(found.group(2) or 0)
    return (found.group(1).removesuffix(".").lower(), port) if port < 65536 else None
