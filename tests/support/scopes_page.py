"""Writes docs/scopes.md from the code: `python -m tests.support.scopes_page`, or `make docs`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from persist.core import commands as c
from persist.core.frontier import Antichain
from persist.core.ids import Token, WriterId
from persist.core.results import snake
from persist.core.state import SchemaRecord
from rpc.routes.table import TABLE
from tests.support.pages import ROOT

BY_COMMAND = "POST /v1/shards/{name}/commands"
OPEN = tuple(route.key for route in TABLE.routes if route.scopes is None and not route.path.startswith("/console"))
SCOPES_OF_ROUTES = {
    route.key: route.scopes
    for route in sorted(TABLE.routes, key=lambda route: c.SCOPES.index((route.scopes or c.SCOPES)[0]))
    if route.scopes is not None
}
PAGE = ROOT / "docs" / "scopes.md"
YES, NO = "yes", "no"
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
# Scopes

What a token may do. The tables are made from the code by `make docs`, and a test compares the two. `persist
token ID --scope SCOPE` mints [tokens](http.md#tokens).

| scope | includes | is for |
| --- | --- | --- |
| `read` | nothing else | who reads and listens: it changes nothing for anybody |
| `write` | `read` | who creates shards and writes to them |
| `manage` | `read`, `write` | who moves frontiers, keeps cursors, changes schemas, settings, policies and tags |
| `maintain` | `read` | maintenance that runs elsewhere (`persist maintain run --url`) |
| `admin` | all of them | who drops shards, erases rows, looks inside |

- **`read` holds its own leases only.** A lease keeps history from being forgotten while it lasts. It never
  moves the shard's since or upper, neither by a command, nor by `listen`, nor when it ends. One token may
  hold 1,000 leases on a shard and 20,000 in all at one server. The next one is refused (429, `overloaded`).
- **`write` appends.** Its rows move the upper. It closes no shard: an append up to `[]` needs `manage`. Its
  readers move their own holds, as those of `read` do, and since stays.
- **`manage` moves what cannot be moved back.** A reader with this scope moves since as it goes on, if nothing
  else holds it, and so does `listen`.
- **`maintain`** carries out what was decided: it merges, collects, lets history go by its age, and takes rows
  away by the policy of a shard. It has no door to insert by, and no cursors. It is trusted with rows all the
  same: what a merge or a removal writes is not compared row by row.
- A prefix limits each of them to the shards whose names begin with it. `/metrics` and listings show those
  only.
- Who has none of the scopes of a row is answered with 403 (`forbidden`), before the body is read. Which
  command a body holds is known only once it is read.

## Tokens of before

Files of tokens stay as they are. There were `read`, `write` and `admin`.

| a token with | may now | instead |
| --- | --- | --- |
| `read` | do what it could | |
| `write` | not move since, have cursors, close or advance the upper, or change a schema | give it `manage` |
| `admin` | do what it could | `maintain` is enough for maintenance |

`manage` opens some things that only `admin` could do: settings, policies, tags and `forget`. To change a
scope, write the other one in its place into the file: the token stays as it is.
"""


def page() -> str:
    """The whole page."""
    opened = [f"`{door}`" for door in OPEN]
    lines = [
        HEAD,
        "## Requests\n",
        f"Open to everybody, without a token: {', '.join(opened[:-1])} and {opened[-1]}.\n"
        "So are the files of the [console](console.md), which tell nothing.\n"
        "`/readyz` tells `admin` on all shards where the stores are, too, and what is wrong with one.\n",
        *_table("request", ((door, scopes) for door, scopes in SCOPES_OF_ROUTES.items() if door != BY_COMMAND)),
        "",
        "## Commands\n",
        f"`{BY_COMMAND}` takes one [command](phases.md). Clients in Python and\nSpark send most of what they "
        "do as commands.\n",
        *_table("command", commands()),
    ]
    return "\n".join(lines).rstrip() + "\n"


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


def _table(what: str, rows: Iterable[tuple[str, tuple[str, ...]]]) -> list[str]:
    names = " | ".join(f"`{scope}`" for scope in c.SCOPES)
    lines = [f"| {what} | {names} |", "| --- |" + " --- |" * len(c.SCOPES)]
    for name, scopes in rows:
        cells = [NO if c.INCLUDED[scope].isdisjoint(scopes) else YES for scope in c.SCOPES]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
