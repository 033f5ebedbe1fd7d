"""The same verbs over HTTP, and what is refused there."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

from persist import Shard
from tests.support.clocks import Machine

SCHEMA = pa.schema([("id", pa.int64()), ("state", pa.string()), ("at", pa.date32())])
PATH = "/v1/shards/orders"
NDJSON = {"content-type": "application/x-ndjson"}


@pytest.fixture
def shard(machine: Machine) -> Shard:
    found = machine.client.create_shard("orders", SCHEMA, ["id"])
    found.insert([{"id": 1, "state": "new"}, {"id": 2, "state": "new"}])
    return found


def rows(shard: Shard) -> list[tuple[Any, ...]]:
    found = shard.snapshot().to_arrow(expand=True).to_pylist()
    return [(row["id"], row["state"], None if row["at"] is None else str(row["at"])) for row in found]


def done(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert set(found) == {"verb", "as_of", "lower", "upper", "added", "removed", "retries"}
    return found  # type: ignore[no-any-return]


def ndjson(*lines: dict[str, Any]) -> dict[str, Any]:
    data = "\n".join(map(json.dumps, lines))
    return {"content": data, "headers": NDJSON}


def test_every_verb_over_http(http: TestClient, shard: Shard) -> None:
    found = done(http.post(f"{PATH}/upsert", **ndjson({"id": 2, "state": "paid"}, {"id": 3, "state": "new"})))
    assert (found["verb"], found["lower"], found["added"], found["removed"]) == ("upsert", [1], 2, 1)
    done(http.post(f"{PATH}/upsert", params={"columns": "id,at"}, **ndjson({"id": 1, "at": "2026-11-20"})))
    assert rows(shard) == [(1, "new", "2026-11-20"), (2, "paid", None), (3, "new", None)]
    done(http.post(f"{PATH}/update", json={"set": {"at": "2026-01-02", "state": None}, "where": "id = 3"}))
    assert rows(shard)[2] == (3, None, "2026-01-02")
    assert done(http.post(f"{PATH}/delete", json={"where": "state = 'paid'"}))["removed"] == 1
    assert done(http.post(f"{PATH}/delete", json={"keys": [3]}))["removed"] == 1
    done(http.post(f"{PATH}/replace-where", params={"where": "id < 5"}, **ndjson({"id": 4, "state": "x"})))
    assert rows(shard) == [(4, "x", None)]
    assert done(http.post(f"{PATH}/overwrite", content="id,state,at\n7,csv,\n", params={"format": "csv"}))["added"] == 1
    gone = {"params": {"columns": "id", "delete_column": "gone"}, **ndjson({"id": 7, "gone": True})}
    done(http.post(f"{PATH}/upsert", **gone))
    assert rows(shard) == []


def test_a_merge_over_http(http: TestClient, shard: Shard) -> None:
    clauses = [
        {"when": "matched", "if": "source.state = 'gone'", "then": "delete"},
        {"when": "matched", "then": "update", "set": {"state": {"source": "state"}, "at": {"value": "2026-01-02"}}},
        {"when": "not matched", "then": "insert"},
        {"when": "not matched by source", "then": "delete"},
    ]
    shard.insert([{"id": 5, "state": "unknown"}])
    body = {"rows": [{"id": 1, "state": "gone"}, {"id": 2, "state": "s"}, {"id": 9, "state": "t"}], "clauses": clauses}
    done(http.post(f"{PATH}/merge", json=body))
    assert rows(shard) == [(2, "s", "2026-01-02"), (9, "t", None)]


def test_a_merge_inserts_the_defaults_of_columns_that_some_rows_lack(http: TestClient, shard: Shard) -> None:
    """It inserted nulls, where an insert of the same rows, or a merge of rows that all lack it, inserts the default."""
    shard.add_column("extra", pa.int64(), default=7)
    sparse: list[dict[str, Any]] = [{"id": 7}, {"id": 8, "extra": 1}, {"id": 9, "extra": None}]
    body = {"rows": sparse, "clauses": [{"when": "not matched", "then": "insert"}]}
    done(http.post(f"{PATH}/merge", json=body))
    shard.merge([{**row, "id": row["id"] + 10} for row in sparse]).when_not_matched_insert().execute()
    merged = shard.snapshot(where="id >= 7").to_arrow().to_pylist()
    assert {row["id"]: row["extra"] for row in merged} == {7: 7, 8: 1, 9: None, 17: 7, 18: 1, 19: None}


def test_what_was_read_and_tokens_count_over_http(http: TestClient, shard: Shard) -> None:
    params = {"read_time": 0, "token": "load-1"}
    first = http.post(f"{PATH}/delete", json={"keys": [1]}, params=params)
    assert http.post(f"{PATH}/delete", json={"keys": [1]}, params=params).json() == first.json()
    late = http.post(f"{PATH}/delete", json={"keys": [2]}, params={"read_time": 0})
    assert (late.status_code, late.json()["kind"]) == (409, "upper_mismatch")
    assert len(rows(shard)) == 1


def test_numbers_of_json_keep_their_sign_and_their_digits(http: TestClient, machine: Machine) -> None:
    """`-0` is another value of a float than `0`, and a key whose digits a double would lose is refused."""
    schema = pa.schema([("k", pa.float64()), ("f", pa.float64()), ("n", pa.int64()), ("d", pa.decimal128(5, 2))])
    shard = machine.client.create_shard("numbers", schema, ["k"])
    shard.insert([{"k": 2.0**53}, {"k": 0.0}, {"k": -0.0}, {"k": 0.1}])
    path = "/v1/shards/numbers"
    for zero in ("-0", "-0.0"):
        shard.upsert([{"k": 0.1, "f": 1.0}])
        body = f'{{"set": {{"f": {zero}, "n": {zero}, "d": -0}}, "where": "k = 0.1"}}'
        assert done(http.post(f"{path}/update", content=body))["added"] == 1
        [row] = shard.get(0.1)
        assert (str(row["f"]), row["n"], row["d"]) == ("-0.0", 0, 0)
    then = '{"when": "matched", "then": "update", "set": {"f": {"value": -0}, "n": {"source": "n"}}}'
    merged = f'{{"rows": [{{"k": -0, "n": -0, "x": -0}}], "clauses": [{then}]}}'
    assert done(http.post(f"{path}/merge", content=merged))["added"] == 1
    assert [str(row["f"]) for row in shard.get(-0.0)] == ["-0.0"]
    for wrong in ("9007199254740993.0", "1e-400", "0.10000000000000000001"):
        answer = http.post(f"{path}/delete", content=f'{{"keys": [[{wrong}]]}}')
        assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_usage"), answer.text
        answer = http.get(f"{path}/snapshot", params={"key": f"[{wrong}]"})
        assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_usage"), answer.text
    found = http.get(f"{path}/snapshot", params={"key": "[-0]", "format": "ndjson"}).text
    assert [str(json.loads(line)["k"]) for line in found.splitlines()] == ["-0.0"]
    assert done(http.post(f"{path}/delete", content='{"keys": [[-0], [9007199254740992.0]]}'))["removed"] == 2
    assert [str(row["k"]) for row in shard.snapshot().to_arrow().to_pylist()] == ["0.0", "0.1"]
    changed = http.post(f"{path}/schema", content='{"changes": [{"add": "g", "type": "double", "default": -0}]}')
    assert changed.status_code == 200, changed.text
    assert {str(row["g"]) for row in shard.snapshot().to_arrow().to_pylist()} == {"-0.0"}


def test_a_compressed_body_is_refused_by_what_it_is(http: TestClient, shard: Shard) -> None:
    compressed = [{"content-encoding": "gzip"}, {"content-encoding": "deflate"}]
    for headers in (*compressed, {"content-type": "text/csv; charset=latin1"}):
        for verb in ("insert", "upsert"):
            sent = {"content-type": "text/csv", **headers}
            answer = http.post(f"{PATH}/{verb}", content=gzip.compress(b"id\n5\n"), headers=sent)
            assert (answer.status_code, answer.json()["kind"]) == (415, "form_refused"), headers
    assert len(rows(shard)) == 2


# What HTTP itself has to read; the first stands for all that the verbs refuse in `test_verbs.py`.
BAD: dict[str, tuple[str, dict[str, Any], int]] = {
    "a key that comes twice": ("upsert", ndjson({"id": 1}, {"id": 1}), 400),
    "a body that is none": ("upsert", {"content": b"\xff", "headers": NDJSON}, 400),
    "a read_time before all times": ("overwrite", {"params": {"read_time": -2}, **ndjson({"id": 1})}, 422),
    "no where": ("replace-where", ndjson({"id": 1}), 422),
    "a number that is zero as a double": ("delete", {"content": '{"keys": [1e-400]}'}, 400),
    "a field that means nothing": ("delete", {"json": {"where": "id = 1", "wher": 1}}, 400),
    "a body that is no object": ("delete", {"json": [1]}, 400),
    "where that is no text": ("update", {"json": {"set": {"state": "x"}, "where": 7}}, 400),
    "rows that are no list": ("merge", {"json": {"rows": 1, "clauses": []}}, 400),
    "no clauses": ("merge", {"json": {"rows": [], "clauses": []}}, 400),
    "an unknown parameter": ("delete", {"json": {"where": "id = 1"}, "params": {"wher": 1}}, 400),
}
BAD |= {
    f"a clause: {clause}": ("merge", {"json": {"rows": [], "clauses": [{"when": "matched", **clause}]}}, 400)
    for clause in (
        {"then": "insert"},
        {"then": "delete", "set": {"state": {"value": 1}}},
        {"then": "update", "set": {"state": "x"}},
    )
}


def test_what_is_refused_over_http_writes_nothing(http: TestClient, shard: Shard) -> None:
    for what, (verb, request, status) in BAD.items():
        answer = http.post(f"{PATH}/{verb}", **request)
        assert (answer.status_code, answer.json()["kind"]) == (status, "invalid_usage"), what
    assert (shard.upper().element, len(rows(shard))) == (1, 2)
