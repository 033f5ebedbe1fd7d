"""The section about scopes of docs/settings.md, from the code."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from persist.core import commands as c
from persist.core.frontier import Antichain
from persist.core.ids import Token, WriterId
from persist.core.results import snake
from persist.core.state import SchemaRecord
from rpc.routes.table import TABLE

BY_COMMAND = "POST /v1/shards/{name}/commands"
OPEN = tuple(route.key for route in TABLE.routes if route.scopes is None and not route.path.startswith("/console"))
SCOPES_OF_ROUTES = {
    route.key: route.scopes
    for route in sorted(TABLE.routes, key=lambda route: c.SCOPES.index((route.scopes or c.SCOPES)[0]))
    if route.scopes is not None
}
GLUE = "\0"  # in the place of a space at which no line is broken
UPPER, _WRITER, _TOKEN = 10, WriterId("w" + "1" * 32), Token("i" + "1" * 32)


def _rewrite(operation: str, **parts: Any) -> c.Rewrite:
    return c.Rewrite(_WRITER, _TOKEN, Antichain(UPPER), UPPER - 1, operation, **parts)


REWRITES: Mapping[str, c.Rewrite] = {
    "rewrite: verbs": _rewrite("delete"),
    "rewrite: unique insert": _rewrite(c.INSERT, cut=0),
    "rewrite: restore": _rewrite(c.RESTORE, undoes=0),
    "rewrite: truncate": _rewrite(c.TRUNCATE, truncates=1),
    "rewrite: drop before a cut": _rewrite(c.DROP_BEFORE, tombstone=Antichain(1)),
    "rewrite: change columns": _rewrite("overwrite", schema=c.SchemaChange(1, SchemaRecord(b"", ()))),
    "rewrite: policy by a column": _rewrite(c.TRUNCATE, settings_version=1),
    "rewrite: erase": _rewrite(c.ERASE, erasure=c.NewErasure("e" + "1" * 32)),
}
"""One with each of the parts that decide who may send it."""

HEAD = """\
## Scopes

What a [token](http.md#tokens) may do. `persist token create ID --scope SCOPE` creates one.

| scope | includes | for |
| --- | --- | --- |
| `read` | | readers and listeners; changes nothing for others |
| `write` | `read` | creating shards and writing to them |
| `manage` | `read`, `write` | frontiers, cursors, schemas, settings, policies and tags |
| `maintain` | `read` | maintenance in another process (`persist maintain run --url`) |
| `admin` | all | dropping shards, erasing rows, inspection |

- **`read`** holds leases, which keep history while they last, and never moves since or upper: not by
  commands, by `listen`, or when a lease ends. A token has at most 1,000 leases per shard and 20,000 per
  server.
- **`write`** appends, which moves the upper. Closing a shard (an append up to `[]`) needs `manage`. Its
  readers do not move since.
- **`manage`** makes changes that cannot be reverted. Its readers and `listen` move since as they progress, if
  nothing else holds it.
- **`maintain`** merges, collects, removes history by age and rows by policy. It cannot insert or have
  cursors. It is trusted with rows: what merges and removals write is not compared row by row.
- A prefix limits a token to shards whose names begin with it, also in `/metrics` and listings.
- A request without a required scope is refused with 403 (`forbidden`) before the body is read, a command once
  it is decoded.
"""


def section() -> str:
    """The whole section."""
    opened = ", ".join(f"`{door}`" for door in OPEN)
    lines = [
        HEAD,
        "### Requests\n",
        f"Without a token: {opened}, and the files of the\n[console](operations.md#console). `/readyz` names the "
        "stores only for `admin` on all shards.\nBy scope, with `…` for the path of a shard, `/v1/shards/{name}`:\n",
        *_list((_shorter(door), scopes) for door, scopes in SCOPES_OF_ROUTES.items() if door != BY_COMMAND),
        "",
        "### Commands\n",
        f"`{BY_COMMAND}` takes one [command](internals.md#phases-of-a-shard). Python and\nSpark clients send most "
        "operations as commands.\n",
        *_list(commands()),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _shorter(door: str) -> str:
    return door.replace("/v1/shards/{name}", "…")


def commands() -> Iterable[tuple[str, tuple[str, ...]]]:
    """Every command with its scopes, in the order of the scopes."""
    named = {snake(kind.__name__): (kind.scopes,) for kind in c.kinds(c.Command) if kind is not c.Rewrite}
    every = named | {name: c.scopes_of(command) for name, command in REWRITES.items()}
    assert all(len(needed) == 1 for needed in every.values()), "a row tells of which scopes one is needed"
    rows = [(c.SCOPES.index(needed[0][0]), name, needed[0]) for name, needed in every.items()]
    return [(name, scopes) for _, name, scopes in sorted(rows)]


def name_of(command: c.Command) -> str:
    """What the page calls it."""
    named = (name for name, one in REWRITES.items() if one == command)
    return next(named, snake(type(command).__name__))


def _list(rows: Iterable[tuple[str, tuple[str, ...]]]) -> list[str]:
    """An item for each set of scopes, with what it opens."""
    opened: dict[str, list[str]] = {}
    for name, scopes in rows:
        allowed = [scope for scope in c.SCOPES if not c.INCLUDED[scope].isdisjoint(scopes)]
        opened.setdefault("any scope" if len(allowed) == len(c.SCOPES) else ", ".join(allowed), []).append(
            f"`{name.replace(' ', GLUE)}`"
        )
    return [
        line.replace(GLUE, " ")
        for scopes, names in opened.items()
        for line in textwrap.wrap(
            f"- **{scopes}**: {', '.join(names)}", 110, subsequent_indent="  ", break_on_hyphens=False
        )
    ]
