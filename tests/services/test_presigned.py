"""Clients that hold no credentials of the S3 bucket: their parts go straight to it by URLs that the server signs."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pyarrow as pa
import pytest

import persist
from blob import Blob, BlobExists, open_blob
from blob.metrics import MeteredBlob
from blob.s3 import S3Blob
from persist.client.client import Client
from persist.core.blob_keys import is_part_key, part_key
from persist.core.ids import PartId, WriterId, shard_id_of
from rpc.client.http_stores import HttpBlob
from tests.support.server import Server
from tests.support.waiting import WAIT_S

SCHEMA = pa.schema([pa.field("id", pa.string()), pa.field("n", pa.int64())])
ROWS = 50_000


@pytest.fixture
def server(tmp_path: Path, s3_url: str) -> Iterator[Server]:
    with Server(tmp_path, "--blob", s3_url, "--consensus", f"sqlite:///{tmp_path}/log.db") as server:
        yield server


@pytest.fixture
def store(s3_url: str) -> Iterator[Blob]:
    """The bucket, opened with credentials: ask for it before `client`, which takes them away."""
    with closing(open_blob(s3_url)) as opened:
        yield opened


@pytest.fixture
def client(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not the secret")
    with persist.connect(server.url) as connected:
        metered = connected.transport.blob
        assert isinstance(metered, MeteredBlob)
        assert isinstance(metered.inner, HttpBlob)
        yield connected


def test_credentials_go_to_no_endpoint_that_the_client_does_not_have_itself(
    server: Server, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = dict(parse_qsl(urlsplit(s3_url).query)).get("endpoint")
    if endpoint is None:
        pytest.skip("this is a bucket of AWS, where every client goes")
    found: list[int] = []
    for name, own, is_straight in (
        ("AWS_ENDPOINT_URL_S3", None, False),
        ("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1", False),
        ("AWS_ENDPOINT_URL_S3", endpoint, True),
        ("AWS_ENDPOINT_URL", endpoint, True),
    ):
        with monkeypatch.context() as environment:
            if own is not None:
                environment.setenv(name, own)
            with persist.connect(server.url, connect_s=WAIT_S) as client:  # a slow bucket is left to the server
                metered = client.transport.blob
                shard = client.create_shard("one", SCHEMA, ["id"])
                shard.insert(pa.table({"id": ["a"] * ROWS, "n": list(range(ROWS))}))
                with shard.snapshot() as snapshot:
                    found.append(snapshot.to_arrow().num_rows)
        assert isinstance(metered, MeteredBlob)
        assert isinstance(metered.inner, S3Blob if is_straight else HttpBlob), (name, own)
    assert found == [ROWS] * 4  # the same rows, more often


def test_parts_go_straight_to_the_bucket(server: Server, client: Client) -> None:
    shard = client.create_shard("far", SCHEMA, ["id"])
    shard.insert(pa.table({"id": [f"row-{n}" for n in range(ROWS)], "n": list(range(ROWS))}))
    with shard.snapshot(num_splits=2, columns=["n"]) as snapshot:
        found = snapshot.to_arrow().column("n").to_pylist()
    assert sorted(found) == list(range(ROWS))
    assert server.requests("put-blob") == 0  # no part went through the server
    assert server.requests("get-blob") > 0  # which was asked for signatures


def test_a_leaked_url_changes_no_committed_part(server: Server, store: Blob, client: Client) -> None:
    """A14: the URL of a part, once signed, overwrote it."""
    shard = client.create_shard("leaked", SCHEMA, ["id"])
    shard.insert(pa.table({"id": [f"row-{n}" for n in range(ROWS)], "n": list(range(ROWS))}))
    key = next(found.key for found in store.list("") if is_part_key(found.key))
    with urllib.request.urlopen(f"{server.url}/v1/blobs/{key}?presign=true") as answer:
        signed = json.load(answer)
    assert signed["put_headers"] == {"If-None-Match": "*"}
    request = urllib.request.Request(
        signed["put"], b"evil", {"content-type": "", **signed["put_headers"]}, method="PUT"
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request)
    assert refused.value.code == 412
    refused.value.close()
    with shard.snapshot() as snapshot:
        assert snapshot.to_arrow().num_rows == ROWS


def test_a_part_that_lies_there_is_compared(client: Client) -> None:
    """A put that is tried again meets what it wrote itself."""
    blob, key = client.transport.blob, part_key(shard_id_of("far"), WriterId("w" + "0" * 32), PartId("p" + "0" * 32))
    client.create_shard("far", SCHEMA, ["id"])
    blob.put(key, b"a part")
    blob.put(key, b"a part")
    with pytest.raises(BlobExists):
        blob.put(key, b"another")
    assert blob.get(key) == b"a part"
