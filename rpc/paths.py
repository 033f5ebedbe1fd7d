"""Shard names in paths. A name may hold one slash, so what a path means is decided here, once.

After `/v1/shards/`, the last segment is a verb if it is one of `VERBS` and a name is before it; the rest is the name.
After the verbs tags and erasures the name of one of them may come, after inspect what to look at, and after retention
the word run.
`eu/orders/insert` is the verb insert on `eu/orders`; `eu/listen` is the verb listen on `eu`. A shard that is itself
called `eu/listen` is written `eu%2Flisten`: an encoded slash always belongs to the name.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

PREFIX = "/v1/shards/"
VERBS = frozenset(
    {
        "commands",
        "insert",
        "append",
        "compare-and-append",
        "snapshot",
        "count",
        "listen",
        "trace",
        "advance-upper",
        "downgrade-since",
        "receipts",
        "time-at",
        "timestamp-of",
        "settings",
        "history",
        "forget",
        "changes",
        "restore",
        "truncate",
        "upsert",
        "delete",
        "update",
        "replace-where",
        "overwrite",
        "merge",
        "tags",
        "constraints",
        "retention",
        "schema",
        "erasures",
        "optimize",
        "vacuum",
    }
)
OF_ONE = ("tags", "erasures", "inspect")  # after these a name may come, of one of them, or of what is looked at
# What the router sees instead of the name's slash. No name holds it.
_JOINT = ":"


def split(raw: str) -> tuple[str, str] | None:
    """(name, verb or "") of a path that is still percent-encoded; None when it is no shard's path."""
    if not raw.startswith(PREFIX):
        return None
    segments = raw[len(PREFIX) :].split("/")
    verb = ""
    if len(segments) > 2 and segments[-2] in OF_ONE:
        verb = "/".join(segments[-2:])
        del segments[-2:]
    elif len(segments) > 2 and segments[-2:] == ["retention", "run"]:
        verb = "retention/run"
        del segments[-2:]
    elif len(segments) > 1 and segments[-1] in VERBS:
        verb = segments.pop()
    name = unquote("/".join(segments))
    return (name, verb) if name else None


def resolve(scope: dict[str, Any]) -> tuple[str, str] | None:
    """(name, verb) of a request to a shard; its scope's path is rewritten so that the router finds one segment."""
    raw: bytes | None = scope.get("raw_path")
    path = scope["path"] if raw is None else raw.partition(b"?")[0].decode("latin-1")
    found = split(path)
    if found is not None:
        name, verb = found
        scope["persist.shard"] = name
        scope["path"] = PREFIX + name.replace("/", _JOINT) + (f"/{verb}" if verb else "")
    elif scope["path"].startswith(PREFIX):  # only once it is decoded: `/v1/shards%2Ft` is no shard's path
        scope["path"] = path
    return found
