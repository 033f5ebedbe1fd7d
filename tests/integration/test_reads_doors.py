"""The same selections over HTTP, for a far shard and for Spark's planner; and what is refused there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

import persist
from persist import Shard
from persist.client.client import AT_HOME, FarShard
from persist.client.read_api import ReadMethods
from rpc.cli.program import main
from tests.support.clocks import Machine
from tests.support.server import Server

SCHEMA = pa.schema([("id", pa.int64()), ("raw", pa.binary()), ("name", pa.string())])
PATH = "/v1/shards/orders"


@pytest.fixture
def shard(machine: Machine) -> Shard:
    found = machine.client.create_shard("orders", SCHEMA, ["id", "raw"])
    found.insert([{"id": 1, "raw": b"\xff\x00", "name": "a"}, {"id": 2, "raw": b"x", "name": "b", "__diff": 3}])
    found.insert([{"id": 3, "raw": b"y", "name": "a"}])
    return found


def ids(http: TestClient, verb: str = "snapshot", **params: Any) -> list[int]:
    answer = http.get(f"{PATH}/{verb}", params={"format": "ndjson", "expand": True, **params})
    assert answer.status_code == 200, answer.text
    return [json.loads(line)["id"] for line in answer.text.splitlines()]


def test_rows_over_http_are_selected_as_in_python(http: TestClient) -> None:
    assert ids(http) == [1, 2, 2, 2, 3]
    assert ids(http, where="name = 'a'", columns="id") == [1, 3]
    assert ids(http, where="name = 'a'", as_of=0) == [1]
    assert ids(http, start_key=2) == [2, 2, 2, 3]
    assert ids(http, start_key="[2]", end_key="3") == ids(http, start_key='["2"]', end_key="3") == [2, 2, 2]
    assert ids(http, limit=2) == [1, 2]
    assert ids(http, limit=0) == []
    assert ids(http, where="id > 7") == []


def test_bytes_of_a_key_are_written_in_base64(http: TestClient) -> None:
    assert ids(http, key='[1, "/wA="]') == [1]
    assert ids(http, key='[2, "/wA="]') == []
    assert ids(http, key_prefix='[1, "/w=="]') == [1]


def test_count_over_http_tells_the_time_too(http: TestClient) -> None:
    def counted(**params: Any) -> Any:
        return http.get(f"{PATH}/count", params=params).json()

    assert counted() == {"as_of": 1, "count": 5}
    assert counted(where="name = 'b'") == {"as_of": 1, "count": 3}
    assert counted(as_of=0, start_key=2) == {"as_of": 0, "count": 3}
    assert counted(as_of=-1) == {"as_of": -1, "count": 0}


def test_a_shard_to_which_nothing_was_written_is_empty_over_http(machine: Machine, http: TestClient) -> None:
    machine.client.create_shard("fresh", SCHEMA, ["id"])
    answer = http.get("/v1/shards/fresh/snapshot", params={"format": "csv"})
    assert (answer.status_code, answer.headers["persist-as-of"]) == (200, "-1")
    assert answer.text.splitlines() == ['"id","raw","name","__diff"']
    again = http.get("/v1/shards/fresh/snapshot", params={"format": "csv", "as_of": -1})
    assert (again.status_code, again.text) == (200, answer.text)
    machine.client.shard("fresh").insert([{"id": 1}])
    events = listened(http, "fresh", after=-1, until=1)
    assert [one["id"] for event in events for one in event["rows"]] == [1]


def listened(http: TestClient, name: str = "orders", **params: Any) -> list[dict[str, Any]]:
    answer = http.get(f"/v1/shards/{name}/listen", params=params, headers={"accept": "text/event-stream"})
    assert answer.status_code == 200, answer.text
    lines = answer.text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def test_a_stream_has_the_updates_that_are_selected_and_every_interval(http: TestClient) -> None:
    [event] = listened(http, until=2, where="name = 'a'", columns="id")
    assert event == {"lower": [0], "upper": [2], "rows": [row(1, 0), row(3, 1)]}
    [event] = listened(http, until=2, where="name = 'z'", columns="id")
    assert event == {"lower": [0], "upper": [2], "rows": []}
    [event] = listened(http, until=2, columns="id")  # steps that are shared are those of the same selection
    assert [one["id"] for one in event["rows"]] == [1, 2, 3]
    [event] = listened(http, until=2, key='[1, "/wA="]', columns="id")
    assert event["rows"] == [row(1, 0)]


def row(number: int, time: int) -> dict[str, int]:
    return {"id": number, "__time": time, "__diff": 1}


REFUSED: list[tuple[dict[str, str], str]] = [
    ({"where": "nome = 1"}, "where names 'nome'"),
    ({"start_key": "x"}, "start_key: 'x' is not a value of int64"),
    ({"start_key": "[1"}, "parameter start_key is not valid JSON"),
    ({"key_prefix": '[1, "?"]'}, "bytes are written in base64"),
    ({"key": "1"}, "key has 1 values; it needs one for each of id, raw"),
    ({"wher": "id = 1"}, "unknown parameter 'wher'"),
]


@pytest.mark.parametrize("verb", ["snapshot", "count", "listen"])
def test_bad_input_is_400_and_leaves_no_hold(machine: Machine, http: TestClient, verb: str) -> None:
    before = machine.location.machine("orders").refresh().leased_readers
    for params, why in REFUSED:
        answer = http.get(f"{PATH}/{verb}", params=params)
        assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_usage"), params
        assert why in answer.json()["detail"]
    assert machine.location.machine("orders").refresh().leased_readers == before


def test_a_number_out_of_its_bounds_is_refused_as_everywhere(http: TestClient) -> None:
    for params in ({"limit": "-1"}, {"limit": "x"}, {"limit": str(2**31)}, {"as_of": "-2"}):
        answer = http.get(f"{PATH}/snapshot", params=params)
        assert (answer.status_code, answer.json()["kind"]) == (422, "invalid_usage"), params


def test_a_far_shard_reads_near_with_every_verb_of_reading(machine: Machine, shard: Shard) -> None:
    home = Mock(side_effect=AssertionError("a read went home"))
    far = FarShard(shard._transport, "orders", shard.view(), shard._settings, home)
    assert far.get((1, b"\xff\x00")) == [{"id": 1, "raw": b"\xff\x00", "name": "a"}]
    assert (far.count("name = 'a'"), len(far.head(2))) == (2, 2)
    assert far.snapshot(where="id = 3").to_arrow().num_rows == 1
    assert sum(len(event.updates) for event in far.listen(None, until=2, where="name = 'a'")) == 2
    assert sum(len(event.updates) for event in far.subscribe(until=3, where="name = 'a'").next_events(0)) == 2
    with far.scan(where="id = 3") as scan:
        assert scan.to_table().num_rows == 1
    verbs = {name for name in vars(ReadMethods) if not name.startswith("_") and name not in ("view", "name")}
    assert verbs == {"snapshot", "get", "head", "count", "listen", "subscribe", "scan"}
    assert not verbs & set(AT_HOME)


def test_a_client_of_a_server_reads_as_one_of_a_directory(tmp_path: Path) -> None:
    with Server(tmp_path / "data") as server, persist.connect(server.url) as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        assert (shard.snapshot().as_of, shard.get(1), shard.count()) == (-1, [], 0)
        subscription = shard.subscribe(where="name = 'a'", columns=["id"], until=2)
        shard.insert([{"id": 1, "name": "a"}, {"id": 2, "name": "b", "__diff": 2}])
        shard.insert([{"id": 1, "name": "a", "__diff": -1}])
        found = [one for event in subscription for one in event.updates.to_pylist()]
        assert found == [row(1, 0), {**row(1, 1), "__diff": -1}]
        assert shard.get(2, columns=["name"]) == [{"name": "b"}, {"name": "b"}]
        assert (shard.count("id = 1", as_of=0), shard.count(), len(shard.head(1))) == (1, 2, 1)
        with shard.snapshot(where="name = 'b'", num_splits=3) as snapshot:
            assert snapshot.to_arrow()["__diff"].to_pylist() == [2]
        with pytest.raises(persist.InvalidUsage, match="where names 'nome'"):
            shard.snapshot(where="nome = 1")


# --- on the command line


def cat(capfdbinary: pytest.CaptureFixture[bytes], *arguments: str) -> tuple[int, list[str], str]:
    code = main(["cat", "orders", *arguments])
    said = capfdbinary.readouterr()
    return code, said.out.decode().splitlines(), said.err.decode()


@pytest.fixture
def directory(tmp_path: Path) -> str:
    with persist.connect(f"persist://{tmp_path}/data") as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        shard.insert([{"id": 1, "raw": b"\xff", "name": "a"}, {"id": 2, "name": "b", "__diff": 2}])
        shard.insert([{"id": 3, "name": "a"}])
    return str(tmp_path / "data")


def test_cat_prints_the_rows_as_http_writes_them(directory: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    code, lines, _ = cat(capfdbinary, "--dir", directory)
    assert code == 0
    assert [json.loads(line)["id"] for line in lines] == [1, 2, 2, 3]
    assert json.loads(lines[0]) == {"id": 1, "raw": "/w==", "name": "a"}
    asked = ("--where", "name = 'a'", "--columns", "id", "--as-of", "0", "--format", "csv")
    assert cat(capfdbinary, "--dir", directory, *asked)[1] == ['"id"', "1"]
    assert cat(capfdbinary, "--dir", directory, "--limit", "2", "--columns", "id,name")[1] == [
        '{"id":1,"name":"a"}',
        '{"id":2,"name":"b"}',
    ]
    assert cat(capfdbinary, "--dir", directory, "--where", "id > 5", "--format", "csv")[1] == ['"id","raw","name"']
