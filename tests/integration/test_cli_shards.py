"""`persist shards`: what there is, and who holds what."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from rpc.cli.program import main

SCHEMA = pa.schema([("id", pa.string())])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    with persist.connect(f"persist://{tmp_path / 'data'}") as client:
        shard = client.create_shard("eu/orders", SCHEMA, ["id"])
        shard.insert([{"id": "a"}, {"id": "b"}])
        shard.critical_reader("billing")
        shard.open_reader(purpose="report")
        client.create_shard("us/orders", SCHEMA, ["id"])
    return tmp_path / "data"


def test_lists_shards(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shards", "--dir", str(directory), "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(shard["name"], shard["upper"], shard["updates"]) for shard in found] == [
        ("eu/orders", [1], 2),
        ("us/orders", [0], 0),
    ]
    assert main(["shards", "--dir", str(directory), "--prefix", "us/"]) == 0
    assert "eu/orders" not in capsys.readouterr().out


def test_lists_dropped_names_where_asked(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with persist.connect(f"persist://{directory}") as client:
        client.shard("us/orders").drop()
    assert main(["shards", "--dir", str(directory)]) == 0
    assert "us/orders" not in capsys.readouterr().out
    assert main(["shards", "--dir", str(directory), "--dropped"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(line[0], line[-1]) for line in lines[1:]] == [("eu/orders", "no"), ("us/orders", "yes")]
    assert main(["shards", "--dir", str(directory), "--dropped", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(shard["name"], shard["dropped"]) for shard in found] == [("eu/orders", False), ("us/orders", True)]


def test_shows_who_holds_one(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shards", "eu/orders", "--dir", str(directory), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [reader["purpose"] for reader in found["readers"]] == ["report"]
    assert [reader["purpose"] for reader in found["critical_readers"]] == ["billing"]
    assert found["rollups"][0]["seqno"] == 1
    assert found["columns"] == [{"name": "id", "type": "string", "nullable": True, "key": True}]
    assert main(["shards", "eu/orders", "--dir", str(directory)]) == 0
    assert "purpose report" in capsys.readouterr().out
