"""Listen streams: every update once and in order, pushed, resumable; idle ones cost nothing."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist
from persist.client.client import Client
from persist.client.shard import Shard
from persist.commit.location import open_location
from persist.core.errors import UnknownShard
from persist.core.frontier import Antichain
from persist.maintenance.collector import Collector
from persist.parts.schema_changes import RenameColumn
from tests.support.followed import follow_with
from tests.support.server import Server
from tests.support.waiting import WAIT_S

SCHEMA = pa.schema([("id", pa.string())])


def follow(client: Client, name: str, after: int | None = None, until: int | None = None) -> list[tuple[str, int]]:
    """(id, time) of all that comes."""
    found: list[tuple[str, int]] = []
    for event in follow_with(client, name, after, Antichain(until)):
        if event.updates.num_rows:
            found += zip(event.updates["id"].to_pylist(), event.updates["__time"].to_pylist(), strict=True)
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("listen") / "data"


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Server]:
    with Server(directory) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with persist.connect(server.url) as connected:
        yield connected


@pytest.fixture
def shard(client: Client, request: pytest.FixtureRequest) -> Shard:
    return client.create_shard(request.node.name[:100], SCHEMA, ["id"])


def test_server_sent_events(server: Server, shard: Shard) -> None:
    shard.compare_and_append([{"id": "a"}], 0, 3)
    shard.compare_and_append([{"id": "b"}], 3, 4)
    request = urllib.request.Request(
        f"{server.url}/v1/shards/{shard.name}/listen?until=4",
        headers={"accept": "text/event-stream", "last-event-id": "3"},
    )
    with urllib.request.urlopen(request) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        text = stream.read().decode()
    event, number, data, *_ = text.split("\n")
    assert event == "event: updates"
    assert number.startswith("id: 4."), "the time, and then the version that was read"
    told: dict[str, Any] = json.loads(data.removeprefix("data: "))
    assert told == {"lower": [3], "upper": [4], "rows": [{"id": "b", "__time": 3, "__diff": 1}]}


def events(server: Server, shard: Shard, query: str, last: str | None = None) -> str:
    headers = {"accept": "text/event-stream", **({} if last is None else {"last-event-id": last})}
    request = urllib.request.Request(f"{server.url}/v1/shards/{shard.name}/listen?{query}", headers=headers)
    with urllib.request.urlopen(request) as stream:
        try:
            data: bytes = stream.read()
        except http.client.IncompleteRead as cut:  # after an error
            data = cut.partial
    return data.decode()


def test_a_stream_that_is_resumed_keeps_the_columns_by_which_it_selects(server: Server, client: Client) -> None:
    schema = pa.schema([("id", pa.string()), ("a", pa.string()), ("b", pa.string())])
    for name, query in (("by-where", "where=a%3D'x'"), ("by-columns", "columns=a")):
        swapped = client.create_shard(name, schema, ["id"])
        swapped.insert([{"id": "r1", "a": "x", "b": "n"}])
        first = events(server, swapped, f"{query}&until=1")
        last = next(line.removeprefix("id: ") for line in first.splitlines() if line.startswith("id: "))
        swapped.insert([{"id": "r2", "a": "x", "b": "x"}])
        assert '"__time":1' in events(server, swapped, f"{query}&until=2", last)
        swapped.alter(RenameColumn("a", "t"), RenameColumn("b", "a"), RenameColumn("t", "b"))
        swapped.insert([{"id": "r3", "a": "x", "b": "x"}])
        refused = events(server, swapped, f"{query}&until=3", last)
        assert "event: error" in refused
        assert '"__time":2' not in refused
        assert '"__time":2' in events(server, swapped, f"{query}&until=3&after=1"), "a new stream has the names of now"


def test_commits_of_another_process_are_pushed_too(client: Client, shard: Shard, directory: Path) -> None:
    found: list[tuple[str, int]] = []
    listener = threading.Thread(target=lambda: found.extend(follow(client, shard.name, until=5)))
    listener.start()
    with persist.connect(f"persist://{directory}") as other:  # straight on the stores, past the server
        own = other.shard(shard.name)
        for n in range(5):
            own.compare_and_append([{"id": f"r{n}"}], n, n + 1)
    listener.join(WAIT_S)
    assert found == [(f"r{n}", n) for n in range(5)]


def test_who_lags_behind_a_forced_drop_is_told_and_never_sees_a_whole_stream(
    server: Server, client: Client, shard: Shard, directory: Path
) -> None:
    """The stream ended as one that has said everything, without rows that had been acknowledged."""
    shard.compare_and_append([{"id": "first"}], 0, 1)
    following = follow_with(client, shard.name, None, Antichain(None))
    next(following)
    stuck = urllib.request.urlopen(f"{server.url}/v1/shards/{shard.name}/listen")
    row = "x" * 1_000_000  # 20 MB in all: more than the sockets hold
    for n in range(1, 20):
        shard.compare_and_append([{"id": f"{n}{row}"}], n, n + 1)
    shard.drop(force=True)
    location = open_location(f"persist://{directory}")
    try:
        for _ in range(3):
            Collector(location).run(shard.name)
    finally:
        location.close()
    with pytest.raises(http.client.IncompleteRead):
        stuck.read()
    with pytest.raises(UnknownShard):
        for _ in following:
            pass
