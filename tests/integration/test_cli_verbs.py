"""The commands about history, rows that go, and copies answer the same through a server as in a directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist
from rpc.cli.program import main
from tests.support.server import Server

SCHEMA = pa.schema([("id", pa.int64()), ("n", pa.int64())])
Command = Callable[..., list[dict[str, Any]]]


@pytest.fixture(params=["directory", "server"])
def command(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Command]:
    """Runs a command on a location with the shard `orders`; what it printed."""
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data"
    with persist.connect(f"persist://{data}") as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        for n in range(4):
            shard.insert([{"id": n, "n": 0}])

    def run(where: list[str], *words: str, code: int = 0) -> list[dict[str, Any]]:
        capsys.readouterr()
        assert main([*words, *where]) == code, capsys.readouterr().err
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    if request.param == "directory":
        yield lambda *words, **code: run(["--dir", str(data)], *words, **code)
        return
    with Server(data) as server:
        yield lambda *words, **code: run(["--url", server.url], *words, **code)


def test_a_day_of_an_operator(command: Command) -> None:
    assert command("tag", "set", "orders", "eom", "--at", "1") == [
        {"shard": "orders", "tag": "eom", "time": 1, "until": None}
    ]
    assert command("tag", "remove", "orders", "eom") == []
    [kept] = command("history", "orders", "--keep", "30d", "--forget", "1")
    assert (kept["history"], kept["since"]) == ("30d", [1])
    *commits, _ = command("history", "orders", "--commits", "2")
    assert [one["operation"] for one in commits] == ["forget", "set_settings"]
    [cut] = command("retention", "cut", "orders")
    Path("cut.json").write_text(json.dumps(cut))
    assert command("retention", "truncate", "--cut", "cut.json", "--dry-run")[0]["shard"] == "orders"
    [made] = command("clone", "orders", "copied", "--at", "3")
    assert (made["shard"], made["source"], made["upper"]) == ("copied", "orders", [4])
    [gone] = command("retention", "truncate", "orders", "--before", "2")
    assert gone["removed"] == 2
    [done] = command("restore", "orders", "--at", "3")
    assert done["added"] == 2
    [policy] = command("retention", "set", "orders", "--rows", "3")
    assert policy["policy"]["rows"] == 3
    assert command("retention", "show", "orders")[0]["policy"]["rows"] == 3
    assert command("retention", "run", "orders", "--dry-run")[0]["shard"] == "orders"
    Path("keys.json").write_text("[[3]]")
    [erasure] = command("erase", "start", "orders", "--keys", "keys.json", "--reason", "dsr-1")
    assert command("erase", "status", "orders", "--id", erasure["id"], code=3)[0]["reason"] == "dsr-1"
    assert command("erase", "status", "orders", "--before", "2", code=3)[0]["phase"] != "erased"


def test_what_needs_the_stores_themselves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Server(tmp_path / "data") as server:
        with persist.connect(server.url) as client:
            client.create_shard("orders", SCHEMA, ["id"]).insert([{"id": 1, "n": 1}])
        assert main(["history", "orders", "--repair-clock", "--url", server.url]) == 1
        assert "needs the stores themselves" in capsys.readouterr().err
        assert main(["history", "orders", "--forget", "1", "--keep", "1d", "--url", server.url]) == 1
        assert "lies beyond the latest complete time" in capsys.readouterr().err
        with persist.connect(server.url) as client:
            assert client.shard("orders").settings.history_ms == 7 * 24 * 3_600_000
