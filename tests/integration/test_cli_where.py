"""By which words and variables a command finds its shards."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import persist
from rpc.cli.program import main
from tests.support.server import Server
from tests.support.token_file import write_tokens

SCHEMA = pa.schema([("id", pa.int64())])


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("URL", "TOKEN", "DIRECTORY", "BLOB", "CONSENSUS"):
        monkeypatch.delenv(f"PERSIST_{name}", raising=False)
    with persist.connect(f"persist://{tmp_path / 'data'}") as client:
        client.create_shard("orders", SCHEMA, ["id"])
    return tmp_path


def names(capsys: pytest.CaptureFixture[str], *where: str) -> list[str]:
    assert main(["shards", "--names", *where]) == 0, capsys.readouterr().err
    return capsys.readouterr().out.split()


def test_two_stores_are_a_place_too(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stores = ("--blob", f"file://{directory}/blobs", "--consensus", f"sqlite:///{directory}/log.db")
    assert main(["create", "orders", "--schema", "id int64", "--key", "id", *stores]) == 0
    capsys.readouterr()
    assert names(capsys, *stores) == ["orders"]


def test_a_server_with_tokens_is_asked_with_the_one_of_the_environment(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    token = write_tokens(Path("tokens.json"), {"me": ("write",)})["me"]
    with Server(directory / "data", "--tokens", "tokens.json") as server:
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
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cat", "orders", "--url", ""]) == 1
    assert capsys.readouterr().err == "persist cat: --url is empty: give a value, or leave it out\n"
    assert not (directory / "persist-data").exists()


def test_a_server_does_not_tell_of_dropped_names(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shards", "--dropped", "--url", "http://127.0.0.1:1"]) == 1
    assert "a server does not list dropped shards" in capsys.readouterr().err
