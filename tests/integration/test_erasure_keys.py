"""Keys of bytes come in base64 over HTTP and in files, as rows are shown: anything else would mean another row."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

import persist
from rpc.app import create_app
from rpc.cli.program import main
from rpc.settings import ServerSettings
from tests.support.clocks import World

ROWS = [{"id": b"a", "n": 1}, {"id": b"YQ==", "n": 2}]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view()])
@pytest.mark.parametrize("key", [["YQ=="], "YQ=="])
def test_the_row_that_is_shown_so_goes(kind: pa.DataType, key: object) -> None:
    machine = World().machine()
    shard = machine.client.create_shard("orders", pa.schema([("id", kind), ("n", pa.int64())]), ["id"])
    shard.insert(ROWS)
    with TestClient(create_app(machine.location, ServerSettings()), base_url="http://127.0.0.1") as http:
        shown = http.get("/v1/shards/orders/snapshot?format=ndjson").text
        assert '"YQ=="' in shown
        for wrong in ("!!", "YQ", "YR==", "Y\u00e4==", ""):
            if wrong:
                answer = http.post("/v1/shards/orders/erasures", json={"keys": [[wrong]]})
                assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_usage")
                assert wrong not in answer.text
        assert http.post("/v1/shards/orders/erasures", json={"keys": [key]}).json()["removed"] == 1
    assert [row["n"] for row in shard.snapshot().to_arrow().to_pylist()] == [2]


def test_a_key_of_several_columns() -> None:
    machine = World().machine()
    schema = pa.schema([("name", pa.string()), ("id", pa.binary(2))])
    shard = machine.client.create_shard("orders", schema, ["name", "id"])
    shard.insert([{"name": "YWI=", "id": b"ab"}, {"name": "ab", "id": b"cd"}])
    with TestClient(create_app(machine.location, ServerSettings()), base_url="http://127.0.0.1") as http:
        for wrong in (["YWI="], ["YWI=", "YWI=", "x"], ["YWI=", "YQ=="]):
            assert http.post("/v1/shards/orders/erasures", json={"keys": [wrong]}).status_code == 400
        assert http.post("/v1/shards/orders/erasures", json={"keys": [["YWI=", "YWI="]]}).json()["removed"] == 1
    assert shard.snapshot().to_arrow().column("name").to_pylist() == ["ab"]


def test_the_command_reads_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "data"
    with persist.connect(f"persist://{root}") as client:
        client.create_shard("orders", pa.schema([("id", pa.binary()), ("n", pa.int64())]), ["id"]).insert(ROWS)
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps([["YQ=="]])))
    assert main(["erase", "start", "orders", "--dir", str(root), "--keys", "-"]) == 0
    with persist.connect(f"persist://{root}") as client:
        assert [row["n"] for row in client.shard("orders").snapshot().to_arrow().to_pylist()] == [2]
