"""Locations in messages: what `url` says without its user, password and options."""

from __future__ import annotations

import re


def without_secrets(url: str) -> str:
    """`url` fit for a message. Where a password may hold `?` or `#` itself, only the scheme is left."""
    scheme = re.match(r"[A-Za-z0-9+.-]*:", url)
    start = f"{scheme.group()}//…" if scheme else "…"
    place, *options = re.split(r"[?#]", url, maxsplit=1)
    if options and "@" in options[0]:
        return start
    return f"{start}@{place.rpartition('@')[2]}" if "@" in place else place
