"""Constraints over HTTP and by commands, with what is wrong as docs/constraints.md tells it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

import persist
from persist import ConstraintViolated
from rpc.app import create_app
from rpc.cli.program import main
from rpc.settings import ServerSettings
from tests.support.clocks import World
from tests.support.server import Server

COLUMNS = pa.schema([("id", pa.int64()), ("n", pa.int64())])
FIELDS = [{"name": "id", "type": "int64", "key": True}, {"name": "n", "type": "int64"}]
ORDERS = "/v1/shards/orders"


@pytest.fixture
def http() -> Iterator[TestClient]:
    machine = World().machine()
    with TestClient(create_app(machine.location, ServerSettings()), base_url="http://127.0.0.1") as client:
        made = client.put(ORDERS, json={"fields": FIELDS, "unique": True, "checks": {"positive": "n > 0"}})
        assert made.status_code == 200, made.text
        yield client


def insert(http: TestClient, *rows: dict[str, Any], verb: str = "insert", **params: Any) -> Any:
    body = "\n".join(map(json.dumps, rows))
    headers = {"Content-Type": "application/x-ndjson"}
    return http.post(f"{ORDERS}/{verb}", content=body, headers=headers, params=params)


def test_rows_that_are_posted_obey_them(http: TestClient) -> None:
    assert insert(http, {"id": 1, "n": 1}).json()["upper"] == [1]
    for bad, constraint in (({"id": 1, "n": 2}, "unique"), ({"id": 2, "n": 0}, "positive")):
        for verb, params in (
            ("insert", {}),
            ("append", {"lower": 1, "upper": 2}),
            ("compare-and-append", {"expected_upper": 1, "new_upper": 2}),
        ):
            answer = insert(http, bad, verb=verb, **params)
            told = answer.json()
            assert (answer.status_code, told["kind"]) == (400, "constraint_violated"), told
            assert told["details"] == {"constraint": constraint, "count": 1, "keys": [[bad["id"]]]}
    answer = insert(http, {"id": 1, "n": 1, "__diff": -1}, {"id": 1, "n": 5})
    assert (answer.json()["lower"], answer.json()["upper"]) == ([1], [2])


def test_a_repeated_token_is_answered_as_the_first_time(http: TestClient) -> None:
    first = insert(http, {"id": 1, "n": 1}, token="load-7")
    assert first.status_code == 200, first.text
    assert insert(http, {"id": 1, "n": 1}, token="load-7").json() == first.json()


def test_they_are_read_and_changed(http: TestClient) -> None:
    shown = {"unique": True, "not_null": [], "checks": {"positive": "n > 0"}}
    assert http.get(f"{ORDERS}/constraints").json() == shown
    insert(http, {"id": 1, "n": None})
    answer = http.put(f"{ORDERS}/constraints", json={"not_null": ["n"]})
    assert (answer.status_code, answer.json()["details"]["keys"]) == (400, [[1]])
    answer = http.put(f"{ORDERS}/constraints", json={"checks": {}, "unique": False})
    assert answer.json() == {"unique": False, "not_null": [], "checks": {}}
    assert insert(http, {"id": 1, "n": -1}).status_code == 200


BODIES = [
    ([], "the body must be a JSON object"),
    ({}, "the body must be a JSON object"),
    ({"uniq": True}, "unknown field `uniq`"),
    ({"unique": 1}, "unique is 1; it is true or false"),
    ({"checks": {"a": "x > 0"}}, "check 'a': where names 'x'"),
    ({"not_null": "n"}, "it is a list of columns"),
]


@pytest.mark.parametrize(("body", "message"), BODIES, ids=[str(body) for body, _ in BODIES])
def test_a_body_that_is_none_is_refused(http: TestClient, body: Any, message: str) -> None:
    answer = http.put(f"{ORDERS}/constraints", json=body)
    assert answer.status_code in (400, 422)
    assert answer.json()["kind"] == "invalid_usage"
    assert message in answer.json()["detail"]


def test_a_client_of_a_server_obeys_them(tmp_path: Path) -> None:
    with Server(tmp_path) as server, persist.connect(server.url) as client:
        shard = client.create_shard("s", COLUMNS, ["id"], unique=True)
        shard.insert([{"id": 1, "n": 1}])
        with pytest.raises(ConstraintViolated) as refused:
            shard.insert([{"id": 1, "n": 2}])
        assert refused.value.details == {"constraint": "unique", "count": 1, "keys": [[1]]}
        assert shard.set_constraints(checks={"small": "n < 5"}).details.unique


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--dir", str(tmp_path)]

    def run(*words: str, code: int = 0) -> list[dict[str, Any]]:
        capsys.readouterr()
        assert main([*words, *where]) == code, capsys.readouterr().err
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    run("create", "s", "--schema", "id int64, n int64", "--key", "id", "--unique", "--check", "positive: n > 0")
    asked = {"unique": True, "not_null": [], "checks": {"positive": "n > 0"}}
    assert run("schema", "constraints", "s") == [{"shard": "s", **asked}]
    [shown] = run("shards", "s", "--json")
    assert shown["constraints"] == asked
    options = ["--not-unique", "--not-null", "n", "--check", "small: n < 9", "--drop-check", "positive"]
    changed = run("schema", "constraints", "s", *options)
    assert changed == [{"shard": "s", "unique": False, "not_null": ["n"], "checks": {"small": "n < 9"}}]
    [allowed] = run("schema", "constraints", "s", "--allow-null", "n")
    assert allowed["not_null"] == []
    run("schema", "constraints", "s", "--unique")
    with persist.connect(f"persist://{tmp_path}") as client:
        writer = client.shard("s").open_writer()
        writer.commit_insert(writer.stage([{"id": 1, "n": 1}, {"id": 1, "n": 2}], None))
    _, found = run("schema", "constraints", "s", "--look", code=1)
    assert (found["constraint"], found["count"], found["keys"]) == ("unique", 1, [[1]])
    for wrong in (["--check", "n > 0"], ["--check", "a: n > 0", "--check", "a: n < 5"], ["--drop-check", "gone"]):
        assert run("schema", "constraints", "s", *wrong, code=1) == []
