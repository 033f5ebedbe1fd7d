"""docs/troubleshooting.md: every kind of the error tree has its row, and every message in its tables is real."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

import persist
import rpc.errors
from persist import PersistError
from persist.core.errors import kinds
from persist.formats.http_messages import BlobMissing
from rpc.settings import ServerSettings
from tests.support.pages import page
from tests.support.rewrites import before_rewrites

TEXT = page("docs/troubleshooting.md")
COLUMNS = pa.schema([("id", pa.int64()), ("state", pa.string())])
ROW = {"id": 1, "state": "new"}


def rows(heading: str) -> list[str]:
    """The first cells of the table under a heading, without their code marks."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("| `")]


def test_every_kind_has_a_row_and_every_row_is_a_kind() -> None:
    assert rpc.errors.BodyTooLarge.kind in kinds()
    assert BlobMissing.kind in kinds()
    assert sorted(cell.strip("`") for cell in rows("Errors by kind")) == sorted(kinds())


def closed(shard: Any) -> None:
    shard.advance_upper(None)
    shard.insert([ROW])


def forgotten(shard: Any) -> None:
    for _ in range(3):
        shard.insert([ROW])
    shard.configure(history="none")
    shard.downgrade_since(3)
    shard.snapshot(as_of=0)


def negative(shard: Any) -> None:
    shard.insert([{**ROW, "__diff": -1}])
    shard.snapshot().to_pandas()


def written(shard: Any, times: int) -> Any:
    for _ in range(times):
        shard.insert([ROW])
    return shard


def overtaken(shard: Any) -> None:
    """Somebody writes in the moment before a restore commits."""
    written(shard, 2)
    with pytest.MonkeyPatch.context() as patched:
        before_rewrites(patched, lambda: written(shard, 1))
        shard.restore(0)


def held(shard: Any) -> None:
    shard.critical_reader("billing")
    shard.drop()


PROVOKED: list[tuple[str, Callable[[Any, Any], object]]] = [
    ("Writing", lambda _, s: written(s, 2).compare_and_append([ROW], 1, 2)),
    ("Writing", lambda _, s: closed(s)),
    ("Writing", lambda _, s: (s.drop(), s.insert([ROW]))),
    ("Writing", lambda c, s: (s.drop(), c.create_shard("orders", COLUMNS, key=["id"]), s.insert([ROW]))),
    ("Writing", lambda _, s: overtaken(s)),
    ("Writing", lambda _, s: s.insert(pa.table({"id": [1.5], "state": ["new"]}))),
    ("Writing", lambda _, s: s.insert([{**ROW, "id": 1.5}])),
    ("Writing", lambda _, s: s.insert(pa.table({"state": ["new"]}))),
    ("Writing", lambda _, s: (s.rename_column("state", "status"), s.insert([ROW]))),
    ("Writing", lambda _, s: (s.drop_column("state"), s.insert([ROW]))),
    ("Writing", lambda _, s: (s.add_column("n", pa.int64()), s.widen_column("n", pa.string()))),
    ("Writing", lambda _, s: s.insert([{"id": 1, "stat": "new"}])),
    ("Writing", lambda _, s: s.insert(5)),
    ("Reading", lambda _, s: s.tag("eom")),
    ("Reading", lambda _, s: forgotten(s)),
    ("Reading", lambda _, s: written(s, 3).snapshot(as_of=9, wait_s=0.1)),
    ("Reading", lambda _, s: negative(s)),
    ("Connections and servers", lambda c, s: c.shard("nothing")),
    ("Connections and servers", lambda c, s: c.create_shard("orders", pa.schema([("x", pa.int64())]), key=["x"])),
    ("Connections and servers", lambda _, s: held(s)),
    ("Connections and servers", lambda *_: persist.connect("shop")),
]


@pytest.mark.parametrize("number", range(len(PROVOKED)))
def test_a_message_of_the_page_is_what_a_program_sees(number: int) -> None:
    heading, provoke = PROVOKED[number]
    place = number - [heading for heading, _ in PROVOKED].index(heading)
    shown = rows(heading)[place].strip("`")
    with persist.connect(blob="mem:", consensus="mem:") as client:
        shard = client.create_shard("orders", COLUMNS, key=["id"])
        with pytest.raises(PersistError) as raised:
            provoke(client, shard)
    assert plain(str(raised.value)).startswith(plain(shown))


def plain(message: str) -> str:
    return re.sub(r"'nothing'", "'orders'", message)


def test_a_server_says_why_it_does_not_listen_for_everybody() -> None:
    [shown] = [row.strip("`") for row in rows("Connections and servers") if "loopback" in row]
    with pytest.raises(PersistError) as raised:
        ServerSettings(host="0.0.0.0").check()
    assert str(raised.value).startswith(shown)
