"""Clients that hold no credentials of the S3 bucket: their parts go straight to it by URLs that the server signs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from blob.metrics import MeteredBlob
from persist.client.connect import Client
from rpc.client.http_blob import HttpBlob
from tests.support.server import Server

SCHEMA = pa.schema([pa.field("id", pa.string()), pa.field("n", pa.int64())])
ROWS = 50_000


@pytest.fixture
def server(tmp_path: Path, s3_url: str) -> Iterator[Server]:
    with Server(tmp_path, "--blob", s3_url, "--consensus", f"sqlite:///{tmp_path}/log.db") as server:
        yield server


@pytest.fixture
def client(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not the secret")
    with persist.connect(server.url) as connected:
        metered = connected.transport.blob
        assert isinstance(metered, MeteredBlob)
        assert isinstance(metered.inner, HttpBlob)
        yield connected


def test_parts_go_straight_to_the_bucket(server: Server, client: Client) -> None:
    shard = client.create_shard("far", SCHEMA, ["id"])
    shard.insert(pa.table({"id": [f"row-{n}" for n in range(ROWS)], "n": list(range(ROWS))}))
    with shard.snapshot(num_splits=2, columns=["n"]) as snapshot:
        found = snapshot.to_arrow().column("n").to_pylist()
    assert sorted(found) == list(range(ROWS))
    assert server.requests("put-blob") == 0  # no part went through the server
    assert server.requests("get-blob") > 0  # which was asked for signatures
