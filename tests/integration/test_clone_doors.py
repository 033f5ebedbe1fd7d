"""Clones over HTTP and by the command, with what is wrong as docs/copies.md tells it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

import persist
from persist.client.shard import Shard
from persist.core.errors import InvalidUsage, NotReadable
from rpc.cli.program import main
from tests.support.clocks import Machine, World
from tests.support.pages import page
from tests.support.server import Server

NAME = "orders"
SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])
ROWS = [{"id": number, "v": f"row {number}"} for number in range(5)]


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    return World()


@pytest.fixture
def shard(machine: Machine) -> Shard:
    found = machine.client.create_shard(NAME, SCHEMA, ["id"])
    found.insert(ROWS)
    return found


def ids(shard: Shard, as_of: int | None = None) -> list[int]:
    return sorted(shard.snapshot(as_of).to_arrow().column("id").to_pylist())


def test_over_http_a_clone_lives_on_alone(world: World, machine: Machine, shard: Shard, http: TestClient) -> None:
    answer = http.post("/v1/clones", json={"source": NAME, "name": "test"})
    assert (answer.status_code, answer.json()["upper"]) == (200, [1])
    made = machine.client.shard("test")
    world.pass_ms(1_000)
    made.insert([{"id": 9, "v": "mine"}])
    shard.insert([{"id": 8, "v": "yours"}])
    assert (ids(made), ids(shard)) == ([0, 1, 2, 3, 4, 9], [0, 1, 2, 3, 4, 8])
    assert http.post("/v1/clones", json={"source": NAME, "name": "test"}).status_code == 409


def test_a_client_of_a_server_clones_and_tags_are_times(tmp_path: Path) -> None:
    with Server(tmp_path / "data") as server, persist.connect(server.url) as client:
        shard = client.create_shard(NAME, SCHEMA, ["id"], history="forever")
        shard.insert(ROWS)
        shard.tag("may")
        shard.insert([{"id": 7, "v": "june"}])
        assert ids(client.clone(NAME, "now")) == [0, 1, 2, 3, 4, 7]
        assert ids(client.clone(NAME, "may", tag="may")) == [0, 1, 2, 3, 4]
        assert ids(client.clone(NAME, "first", as_of=0)) == [0, 1, 2, 3, 4]
        for wrong in ({"tag": "june"}, {"tag": "may", "as_of": 0}, {"keep_policies": 1}, {"as_of": 9}):
            with pytest.raises(InvalidUsage):
                client.clone(NAME, "none", **wrong)  # type: ignore[arg-type]
        shard.untag("may")
        shard.forget(1)
        with pytest.raises(NotReadable):
            client.clone(NAME, "none", as_of=0)
        assert client.shards() == ["first", "may", "now", NAME]


WRONG: dict[str, dict[str, Any]] = {
    "a body without `source` and `name`, or with something else": {"source": NAME},
    "a name that no shard can have": {"source": NAME, "name": "no name"},
    "a clone of itself": {"source": NAME, "name": NAME},
    "a source that is not there, or was dropped": {"source": "nothing", "name": "test"},
    "a source that is closed to reads": {"source": NAME, "name": "test"},
    "a name that a shard has": {"source": NAME, "name": "other"},
}
MORE: list[tuple[str, Any]] = [
    ("a body without `source` and `name`, or with something else", [1]),
    ("a body without `source` and `name`, or with something else", {"source": NAME, "name": "test", "as_of": 1}),
    ("a body without `source` and `name`, or with something else", {"source": NAME, "name": "a", "keep_policies": 1}),
    ("a name that no shard can have", {"source": 5, "name": "test"}),
    ("a source that is not there, or was dropped", {"source": "dropped", "name": "test"}),
]


def documented() -> dict[str, tuple[str, int]]:
    table = page("docs/copies.md").partition("| what of a clone |")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*?) \| `(\w+)` \| (\d+) \|$", table, re.MULTILINE)
    return {row: (kind, int(status)) for row, kind, status in rows}


def test_every_row_of_the_page_has_its_test() -> None:
    assert list(documented()) == list(WRONG)


@pytest.mark.parametrize(("row", "body"), [*WRONG.items(), *MORE])
def test_what_is_wrong_is_refused_as_the_page_says_and_nothing_is_written(
    world: World, machine: Machine, shard: Shard, http: TestClient, row: str, body: Any
) -> None:
    machine.client.create_shard("other", SCHEMA, ["id"])
    machine.client.create_shard("dropped", SCHEMA, ["id"]).drop()
    if "closed to reads" in row:
        shard.critical_reader("last").downgrade_since(None)
    before = {stat.key for stat in world.blob.list("")}
    seqno = machine.location.machine(NAME).refresh().seqno
    answer = http.post("/v1/clones", json=body)
    assert (answer.json()["kind"], answer.status_code) == documented()[row], answer.text
    assert {stat.key for stat in world.blob.list("")} == before
    assert machine.location.machine(NAME).refresh().seqno == seqno
    assert machine.client.shards() == [NAME, "other"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--dir", str(tmp_path / "data")]
    with persist.connect(f"persist://{tmp_path / 'data'}") as client:
        shard = client.create_shard(NAME, SCHEMA, ["id"], history="forever")
        shard.insert(ROWS)
        shard.insert([{"id": 7, "v": "june"}])
    assert main(["clone", NAME, "test", *where]) == 0
    assert json.loads(capsys.readouterr().out) == {"shard": "test", "source": NAME, "since": [0], "upper": [2]}
    assert main(["clone", NAME, "first", "--at", "0", *where]) == 0
    assert main(["clone", NAME, "test", *where]) == 1
    assert main(["clone", NAME, "late", "--at", "99", *where]) == 1
    assert main(["clone", NAME, "late", "--at", "soon", *where]) == 1
    assert "Traceback" not in capsys.readouterr().err
    with persist.connect(f"persist://{tmp_path / 'data'}") as client:
        assert client.shards() == ["first", NAME, "test"]
        assert ids(client.shard("first")) == [0, 1, 2, 3, 4]
