"""URLs of stores that tests make of others."""

from __future__ import annotations

from urllib.parse import urlsplit


def with_path(url: str, name: str) -> str:
    """The same store, a step deeper."""
    parts = urlsplit(url)
    return parts._replace(path=f"{parts.path.rstrip('/')}/{name}").geturl()
