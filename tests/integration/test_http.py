"""The service through the real client, over a real socket."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from blob.file import FileBlob
from blob.metrics import MeteredBlob
from persist.client.client import Client
from persist.client.shard import HandleSettings
from persist.client.write import WriteSettings
from persist.core.errors import InvalidUsage
from persist.core.shard_view import ViewRequest
from persist.core.state import Policy
from rpc.client.http_stores import HttpBlob
from tests.support.server import Server
from tests.support.waiting import WAIT_S

SCHEMA = pa.schema([("id", pa.string()), ("amount", pa.int64())])


def rows(*ids: str, amount: int = 1) -> pa.Table:
    return pa.table({"id": list(ids), "amount": [amount] * len(ids)}, schema=SCHEMA)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("http") / "data") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with persist.connect(server.url) as connected:
        yield connected


def test_a_client_on_the_same_machine_uses_the_store_itself(client: Client) -> None:
    metered = client.transport.blob
    assert isinstance(metered, MeteredBlob)
    assert isinstance(metered.inner, FileBlob)


# --- bad input: one clear sentence each, and nothing is lost


def test_somebody_else_there(server: Server) -> None:
    with pytest.raises(InvalidUsage, match="http"):
        persist.connect(f"{server.url}/some/path")


# --- a client that cannot reach the store


@pytest.fixture
def far_client(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """A client to which the server's directory looks as if it were on another machine."""
    monkeypatch.setattr("persist.client.transport.is_same", lambda blob, proof: False)
    with persist.connect(server.url) as connected:
        metered = connected.transport.blob
        assert isinstance(metered, MeteredBlob)
        assert isinstance(metered.inner, HttpBlob)
        yield connected


def test_parts_go_through_the_servers_door(far_client: Client) -> None:
    shard = far_client.create_shard("far", SCHEMA, ["id"])
    shard.insert(rows(*[f"row-{n}" for n in range(50_000)]))
    shard.insert(rows("small"))
    snapshot = shard.snapshot(num_splits=4, columns=["id"])
    with snapshot:
        assert sum(table.num_rows for table in snapshot.batches()) == 50_001


def test_the_proof_tells_a_copy_from_the_original(server: Server, tmp_path: Path) -> None:
    from blob import open_blob
    from persist.client import transport

    with urllib.request.urlopen(f"{server.url}/v1/location") as answer:
        told = json.load(answer)["blob"]
    original = open_blob(told["url"])
    assert transport.is_same(original, told["proof"])
    copy = open_blob((tmp_path / "copy").as_uri())
    copy.put(transport.ID_KEY, original.get(transport.ID_KEY))
    assert not transport.is_same(copy, told["proof"])
    assert not transport.is_same(open_blob((tmp_path / "other").as_uri()), told["proof"])


def test_a_client_takes_the_servers_inline_limits(client: Client) -> None:
    assert client.transport.policy == Policy()


# --- its end


def test_sigterm_answers_what_was_accepted_and_ends_waits(tmp_path: Path) -> None:
    settings = HandleSettings(write=WriteSettings(retry_s=0.5))
    with Server(tmp_path / "data") as server, persist.connect(server.url, handles=settings) as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        started = threading.Event()
        acknowledged: list[int] = []

        def write() -> None:
            for n in range(1_000_000):
                try:
                    acknowledged.append(shard.insert(rows(f"r{n}")).lower.element or 0)
                except persist.core.errors.PersistError:
                    return
                started.set()

        waiting = threading.Thread(
            target=lambda: client.transport.view("orders", ViewRequest(past=10**9, timeout_s=60))
        )
        waiting.start()
        writer = threading.Thread(target=write)
        writer.start()
        started.wait(WAIT_S)
        assert server.stop() == 0
        writer.join(WAIT_S)
        waiting.join(WAIT_S)
    with persist.connect(f"persist://{tmp_path / 'data'}") as local:
        found = local.shard("orders").snapshot().to_arrow(expand=True).num_rows
    assert len(acknowledged) <= found <= len(acknowledged) + 1
