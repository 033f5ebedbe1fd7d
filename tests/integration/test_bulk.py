"""Many shards at once: what they hold, and dropping them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

import persist
from persist.core.errors import InvalidUsage
from persist.core.frontier import Antichain
from rpc.app import create_app
from rpc.cli.program import main
from rpc.settings import ServerSettings
from tests.support.clocks import Machine, World
from tests.support.token_file import bearer, write_tokens

SCHEMA = pa.schema([("id", pa.int64())])
NAMES = ["tmp/a", "tmp/b", "eu/orders"]


@pytest.fixture
def machine() -> Machine:
    world = World()
    found = world.machine()
    for number, name in enumerate(NAMES):
        shard = found.client.create_shard(name, SCHEMA, ["id"], history="7d")
        for row in range(number):
            shard.insert([{"id": row}])
            world.pass_ms(1_000)
    return found


@pytest.fixture
def http(machine: Machine) -> Iterator[TestClient]:
    with TestClient(create_app(machine.location, ServerSettings()), base_url="http://127.0.0.1") as client:
        yield client


def test_summaries_tell_what_each_shard_holds(machine: Machine, http: TestClient) -> None:
    machine.shard("tmp/b").retain({"age": "90d", "cut_every": "1d"})
    found = list(machine.client.summaries())
    assert [(one.name, one.rows, one.upper) for one in found] == [
        ("eu/orders", 2, Antichain(2)), ("tmp/a", 0, Antichain(0)), ("tmp/b", 1, Antichain(1)),
    ]  # fmt: skip
    assert (found[0].oldest is not None, found[1].oldest, found[0].bytes > 0) == (True, None, True)
    assert found[2].policy == {"age": "90d", "cut_every": "1d"}
    told = http.get("/v1/shards", params={"details": True}).json()
    assert told == {"shards": [one.to_json() for one in found], "more": False}
    first = http.get("/v1/shards", params={"details": True, "limit": 2}).json()
    assert ([one["name"] for one in first["shards"]], first["more"], first["after"]) == (
        ["eu/orders", "tmp/a"], True, "tmp/a",
    )  # fmt: skip
    assert http.get("/v1/shards").json()["shards"] == ["eu/orders", "tmp/a", "tmp/b"], "as before"


def test_nothing_is_dropped_without_confirming_how_many(machine: Machine, http: TestClient) -> None:
    tried = machine.client.drop_shards(prefix="tmp/")
    assert ([one.shard for one in tried.outcomes], tried.done, tried.complete) == (["tmp/a", "tmp/b"], False, False)
    told = http.post("/v1/shards:delete", json={"prefix": "tmp/"}).json()
    assert (told["count"], told["done"]) == (2, False)
    with pytest.raises(InvalidUsage, match="2 shards are selected"):
        machine.client.drop_shards(prefix="tmp/", confirm=3)
    assert sorted(machine.client.shards()) == sorted(NAMES)
    done = http.post("/v1/shards:delete", json={"prefix": "tmp/", "confirm": 2}).json()
    assert (done["complete"], machine.client.shards()) == (True, ["eu/orders"])


def test_what_one_shard_refuses_keeps_no_other(machine: Machine) -> None:
    machine.shard("tmp/a").critical_reader("billing")
    done = machine.client.drop_shards([*NAMES, "nobody"])
    kinds = {one.shard: one.error.kind for one in done.outcomes if one.error}
    assert (kinds, done.complete) == ({"nobody": "unknown_shard", "tmp/a": "conflict"}, False)
    assert machine.client.shards() == ["tmp/a"]
    assert machine.client.drop_shards(["tmp/a"], force=True).complete
    assert machine.client.drop_shards(["tmp/a"]).complete, "it is gone already"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prefix": 7},
        {"shards": "tmp/a"},
        {"shards": ["tmp/a"], "prefix": "tmp/"},
        {"prefix": "tmp/", "confirm": 1},
        {"prefix": "tmp/", "confirm": True},
        {"prefix": "tmp/", "sure": True},
        {"shards": [f"s{number}" for number in range(1_001)], "confirm": 1_001},
    ],
)
def test_what_is_refused(machine: Machine, http: TestClient, body: Any) -> None:
    answer = http.post("/v1/shards:delete", json=body)
    assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_usage"), answer.text
    assert sorted(machine.client.shards()) == sorted(NAMES)


def test_tokens_reach_their_prefixes_only(machine: Machine, tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    tokens = write_tokens(file, {"write": ("write", "tmp/"), "admin": ("admin", "tmp/")})
    with TestClient(create_app(machine.location, ServerSettings(tokens_file=str(file)))) as http:

        def asked(scope: str, body: Any) -> int:
            return int(http.post("/v1/shards:delete", json=body, headers=bearer(tokens[scope])).status_code)

        assert asked("write", {"prefix": "tmp/", "confirm": 2}) == 403
        for body in ({"prefix": "t", "confirm": 2}, {"shards": ["tmp/a", "eu/orders"], "confirm": 2}):
            assert asked("admin", body) == 403
        assert http.get("/v1/shards", params={"details": True}, headers=bearer(tokens["admin"])).status_code == 403
        assert sorted(machine.client.shards()) == sorted(NAMES)
        assert asked("admin", {"prefix": "tmp/", "confirm": 2}) == 200
    assert machine.client.shards() == ["eu/orders"]


def test_by_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--dir", str(tmp_path / "data")]
    with persist.connect(f"persist://{tmp_path}/data") as client:
        for name in ("tmp/a", "tmp/b"):
            client.create_shard(name, SCHEMA, ["id"])
    assert main(["drop", "--prefix", "tmp/", *where]) == 2, "it asks for --yes where nobody can be asked"
    said = capsys.readouterr()
    assert (said.out, "2 would be; give --yes" in said.err) == ("", True)
    assert main(["drop", *where]) == 1
    assert main(["drop", "tmp/a", "nobody", "--yes", *where]) == 1
    assert main(["drop", "tmp/b", "--yes", *where]) == 0
    with persist.connect(f"persist://{tmp_path}/data") as client:
        assert client.shards() == []
