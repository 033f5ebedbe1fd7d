"""Promises of the page on tables that did not follow from the code. Each test is named by what was wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

from persist import InvalidUsage, NotReadable, Shard
from rpc.app import create_app
from rpc.settings import ServerSettings
from tests.support.asking import typed
from tests.support.clocks import Machine

SCHEMA = pa.schema([("id", pa.int64()), ("x", pa.string()), ("n", pa.int64())])
PATH = "/v1/shards/t"


@pytest.fixture
def shard(machine: Machine) -> Shard:
    return machine.client.create_shard("t", SCHEMA, ["id"])


def rows(count: int, changed: int | None = None) -> pa.Table:
    numbers = [n + 1 if n == changed else n for n in range(count)]
    return pa.table({"id": list(range(count)), "x": ["x"] * count, "n": numbers})


@pytest.mark.parametrize("count", [10, 20_000])
def test_replace_where_wrote_rows_that_were_there_already(machine: Machine, shard: Shard, count: int) -> None:
    shard.insert(rows(count))
    done = shard.replace_where("id >= 0", rows(count))
    assert (done.changed, done.added, done.removed) == (False, 0, 0)
    token = machine.client.new_token()
    for _ in range(2):
        done = shard.replace_where("id >= 0", rows(count, changed=7), token=token)
        assert (done.added, done.removed) == (1, 1)
    assert shard.replace_where("id < 5", rows(2)).removed == 3
    assert shard.count() == count - 3


VERBS: list[Callable[[Shard], object]] = [
    lambda s: s.delete("id = 1"),
    lambda s: s.upsert([{"id": 1, "n": 2}]),
    lambda s: s.overwrite([{"id": 1}]),
    lambda s: s.merge([{"id": 1}]).when_matched_delete().execute(),
]


@pytest.mark.parametrize("verb", VERBS)
def test_history_that_was_let_go_entirely_was_waited_for(machine: Machine, verb: Callable[[Shard], object]) -> None:
    shard = machine.client.create_shard("forgets", SCHEMA, ["id"], history="none")
    shard.insert([{"id": 1, "n": 1}])
    shard.critical_reader("x").downgrade_since(shard.upper())
    with pytest.raises(NotReadable, match="after the next write"):
        verb(shard)
    shard.insert([{"id": 2}])
    verb(shard)


def test_an_upsert_of_some_columns_met_a_key_whose_rows_add_up_to_none(shard: Shard) -> None:
    shard.insert([{"id": 1, "x": "a", "n": 1}, {"id": 1, "x": "b", "n": 2, "__diff": -1}])
    with pytest.raises(InvalidUsage, match="takes one row per key"):
        shard.upsert([{"id": 1, "n": 5}])


VALUES: list[tuple[Any, Any]] = [
    (pa.list_(pa.int64()), [1]),
    (pa.list_(pa.float32()), [1.5]),
    (pa.map_(pa.string(), pa.int64()), [["a", 1]]),
    (pa.struct([("a", pa.int64())]), {"a": 1}),
    (pa.timestamp("us", tz="UTC"), "2026-11-20T12:00:00Z"),
    (pa.binary(), "eA=="),
    (pa.list_(pa.int64()), None),
]


@pytest.mark.parametrize(("kind", "value"), VALUES, ids=lambda value: str(value)[:40])
def test_values_that_a_row_may_have_could_not_be_set_over_http(machine: Machine, kind: Any, value: Any) -> None:
    shard = machine.client.create_shard("set", pa.schema([("id", pa.int64()), ("v", kind)]), ["id"])
    shard.insert([{"id": 1}])
    merge = [{"when": "matched", "then": "update", "set": {"v": {"value": value}}}]
    with typed(TestClient(create_app(machine.location, ServerSettings()), base_url="http://127.0.0.1")) as http:
        for verb, body in (
            ("update", {"set": {"v": value}}),
            ("merge", {"rows": [{"id": 1}], "clauses": merge}),
            ("update", {"set": {"v": value}, "where": "id = 7"}),
        ):
            answer = http.post(f"/v1/shards/set/{verb}", json=body)
            assert answer.status_code == 200, answer.text
    assert (shard.get(1)[0]["v"] is None) == (value is None)


def test_a_delete_column_that_no_line_has_was_taken_for_false(http: TestClient, shard: Shard) -> None:
    headers = {"content-type": "application/x-ndjson"}
    params = {"delete_column": "gone"}
    answer = http.post(f"{PATH}/upsert", params=params, content='{"id": 1, "n": 7}\n', headers=headers)
    assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_usage")
    assert shard.upper().element == 0
