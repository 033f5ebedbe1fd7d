"""How a server is named: one spelling, and what a token may be made of."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from blob import without_secrets
from persist.core.errors import InvalidUsage

_TOKEN = re.compile(r"[\x20-\x7e]+")


def normal(url: str) -> str:
    """One spelling of a server's base URL. Raises InvalidUsage."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:  # which quotes what it takes for a port, and that may be a part of a password
        raise InvalidUsage(f"{without_secrets(url)!r} has no valid host and port") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.path not in ("", "/"):
        raise InvalidUsage(f"a server is named http(s)://host:port, not {without_secrets(url)!r}")
    if parts.username or parts.password:
        raise InvalidUsage("a server's URL takes no user and password; give a token")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}"


def checked_token(name: str, token: str | None) -> str | None:
    """The token, None where there is none. Raises InvalidUsage, which does not show it: no header can hold it."""
    if not token:
        return None
    if not _TOKEN.fullmatch(token):
        raise InvalidUsage(f"{name} holds no token: it has a line break, or another character that no header has")
    return token
