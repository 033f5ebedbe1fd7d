"""What a notebook shows of a shard or a snapshot."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def html_table(title: str, rows: Iterable[tuple[str, object]]) -> str:
    """A title, and a table of names and what they stand for. Everything is escaped."""
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>" for name, value in rows)
    return f"<div><strong>{escape(title)}</strong><table>{cells}</table></div>"
