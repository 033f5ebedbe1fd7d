"""`persist shards`: what there is, who holds what, and where a command looks for it."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from rpc.cli.program import main
from tests.support.server import Server
from tests.support.token_file import write_tokens

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
    printed = capsys.readouterr().out.splitlines()
    purpose, report = printed[printed.index("readers:") + 1 :][:2]
    assert "purpose" in purpose
    assert "report" in report


# --- by which words and variables a command finds its shards


NUMBERS = pa.schema([("id", pa.int64())])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("URL", "TOKEN", "DIRECTORY", "BLOB", "CONSENSUS"):
        monkeypatch.delenv(f"PERSIST_{name}", raising=False)
    with persist.connect(f"persist://{tmp_path / 'data'}") as client:
        client.create_shard("orders", NUMBERS, ["id"])
    return tmp_path


def names(capsys: pytest.CaptureFixture[str], *where: str) -> list[str]:
    assert main(["shards", "--names", *where]) == 0, capsys.readouterr().err
    return capsys.readouterr().out.split()


def test_two_stores_are_a_place_too(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stores = ("--blob", f"file://{here}/blobs", "--consensus", f"sqlite:///{here}/log.db")
    assert main(["create", "orders", "--schema", "id int64", "--key", "id", *stores]) == 0
    capsys.readouterr()
    assert names(capsys, *stores) == ["orders"]


def test_a_server_with_tokens_is_asked_with_the_one_of_the_environment(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    token = write_tokens(Path("tokens.json"), {"me": ("write",)})["me"]
    with Server(here / "data", "--tokens", "tokens.json") as server:
        assert main(["cat", "orders", "--url", server.url]) == 1
        assert capsys.readouterr().err.startswith("persist cat: ")
        monkeypatch.setenv("PERSIST_TOKEN", token)
        assert names(capsys, "--url", server.url) == ["orders"]
        monkeypatch.setenv("PERSIST_URL", server.url)
        assert names(capsys) == ["orders"]
        assert names(capsys, "--dir", "data") == ["orders"], "an argument counts more than a variable"
        assert main(["drop", "orders", "--yes"]) == 1
        assert "forbidden" in capsys.readouterr().out
        monkeypatch.setenv("PERSIST_DIRECTORY", "data")
        assert main(["shards"]) == 1
        assert "PERSIST_URL and PERSIST_DIRECTORY are both set" in capsys.readouterr().err


def test_a_variable_of_the_shell_that_is_empty_is_not_the_default(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cat", "orders", "--url", ""]) == 1
    assert capsys.readouterr().err == "persist cat: --url is empty: give a value, or leave it out\n"
    assert not (here / "persist-data").exists()


def test_a_server_does_not_tell_of_dropped_names(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shards", "--dropped", "--url", "http://127.0.0.1:1"]) == 1
    assert "a server does not list dropped shards" in capsys.readouterr().err
