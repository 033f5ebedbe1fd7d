"""Who listens over HTTP hears that the log has lost what it was given, from its own server and from any other."""

from __future__ import annotations

import http.client
import json
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist
from tests.support.server import Server
from tests.support.waiting import WAIT_S

SCHEMA = pa.schema([("id", pa.int64())])
EVENTS = {"accept": "text/event-stream"}


def lose(directory: Path, first: int) -> None:
    """As a failover to a replica that lacks the entries of the log from this seqno on."""
    with closing(sqlite3.connect(directory / "consensus.db", timeout=WAIT_S)) as database:
        database.execute("DELETE FROM consensus_log WHERE key = 'orders' AND seqno >= ?", (first,))
        database.commit()


def insert(url: str, *ids: int) -> None:
    with persist.connect(url) as client:
        for number in ids:
            client.create_shard("orders", SCHEMA, ["id"]).insert([{"id": number}])


def ask(url: str, headers: dict[str, str]) -> Any:
    return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=WAIT_S)


def events(stream: Any) -> Iterator[tuple[str, str, Any]]:
    """(event, id, data) of each event, until the stream ends or is cut off."""
    found = {"id": ""}
    while True:
        try:
            line = stream.readline().decode().rstrip("\n")
        except (http.client.HTTPException, OSError):
            return
        if line:
            name, _, value = line.partition(": ")
            found[name] = value
        elif "event" in found:
            yield found["event"], found["id"], json.loads(found["data"])
            found = {"id": ""}
        else:
            return


def refused(url: str, headers: dict[str, str]) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as told:
        ask(url, headers)
    return told.value.code, json.loads(told.value.read())["kind"]


def test_a_stream_of_events_tells_it_and_ends_and_is_not_resumed_anywhere(tmp_path: Path) -> None:
    """It was cut off without a word, and went on at another server with rows of the other history."""
    directory = tmp_path / "data"
    embedded = f"persist://{directory}"
    with Server(directory) as server:
        insert(server.url, 0, 1, 2)
        listen = f"{server.url}/v1/shards/orders/listen"
        with closing(ask(listen, EVENTS)) as stream:
            coming = events(stream)
            next(coming)
            insert(server.url, 3, 4)
            last = ""
            while not last.startswith("5."):
                _, last, _ = next(coming)
            resumed = {**EVENTS, "last-event-id": last}
            with closing(ask(f"{listen}?until=5", resumed)) as sound:
                assert list(events(sound)) == [], "nothing is lost yet, and nothing is new"
            lose(directory, int(last.split(".")[1]))
            insert(embedded, 100, 101, 102, 103)
            told = list(coming)
        assert [(event, data["kind"], data["status"]) for event, _, data in told] == [("error", "history_lost", 500)]
        with Server(directory) as other:
            for url in (server.url, other.url):
                assert refused(f"{url}/v1/shards/orders/listen", resumed) == (500, "history_lost")
            with closing(ask(f"{other.url}/v1/shards/orders/listen?until=7", EVENTS)) as anew:
                rows = [row["id"] for _, _, data in events(anew) for row in data["rows"]]
            assert rows == [0, 1, 2, 3, 100, 101, 102]


def test_what_was_seen_has_one_form(tmp_path: Path) -> None:
    with Server(tmp_path / "data") as server:
        insert(server.url, 0)
        for given in ("7", "7.x", "x." + "0" * 32, "1." + "0" * 31):
            assert refused(f"{server.url}/v1/shards/orders", {"persist-seen": given}) == (400, "invalid_usage")
            resumed = {"last-event-id": f"1.{given}"}
            assert refused(f"{server.url}/v1/shards/orders/listen", resumed) == (400, "invalid_usage")
