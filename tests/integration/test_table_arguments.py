"""What an attack on the verbs and reads of tables found. Each test is named by what was wrong."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

import persist
from persist import InvalidUsage, Shard
from tests.support.clocks import Machine
from tests.support.forked import Module
from tests.support.waiting import WAIT_S

SCHEMA = pa.schema(
    [
        ("id", pa.int64()), ("state", pa.string()), ("amount", pa.int64()), ("day", pa.date32()),
        ("at", pa.timestamp("us", tz="UTC")),
    ]
)  # fmt: skip
ROWS = [{"id": 1, "state": "new", "amount": 10}, {"id": 2, "state": "new", "amount": 20}]
PATH = "/v1/shards/orders"


@pytest.fixture
def shard(machine: Machine) -> Shard:
    found = machine.client.create_shard("orders", SCHEMA, ["id"])
    found.insert(ROWS)
    return found


def amounts(shard: Shard) -> dict[int, tuple[str, int]]:
    return {row["id"]: (row["state"], row["amount"]) for row in shard.head(10)}


# --- values that were cut


@pytest.mark.parametrize(
    "row", [{"id": 1.5}, {"id": 1, "amount": 2.7}, {"id": 1, "day": dt.datetime(2024, 1, 31, 12, tzinfo=dt.UTC)}]
)
def test_a_merge_of_dicts_cut_keys_and_values(shard: Shard, row: dict[str, Any]) -> None:
    with pytest.raises(InvalidUsage, match=r"column '(id|amount|day)' does not fit"):
        shard.merge([row]).when_matched_update().when_matched_delete().execute()
    assert shard.upper().element == 1


@pytest.mark.parametrize(
    ("kind", "value", "remedy"),
    [
        (
            pa.timestamp("us", tz="UTC"),
            dt.datetime(2024, 1, 31, 12),  # noqa: DTZ001
            "has no zone: give one",
        ),
        (pa.timestamp("us"), dt.datetime(2024, 1, 31, 12, tzinfo=dt.UTC), "has a zone: leave it out"),
    ],
)
def test_no_zone_was_taken_for_utc(machine: Machine, kind: pa.DataType, value: dt.datetime, remedy: str) -> None:
    found = machine.client.create_shard("at", pa.schema([("at", kind), ("n", pa.int64())]), ["at"])
    ways: list[Callable[[], object]] = [
        lambda: found.insert([{"at": value}]),
        lambda: found.upsert([{"at": value}]),
        lambda: found.get(value),
        lambda: found.delete(keys=[value]),
    ]
    for way in ways:
        with pytest.raises(InvalidUsage, match=remedy):
            way()
    assert found.upper().element == 0


# --- columns that a row lacks


@pytest.mark.parametrize("verb", ["upsert", "merge"])
def test_dicts_that_lack_different_columns_lost_the_values_of_these(shard: Shard, verb: str) -> None:
    patches = [{"id": 1, "state": "paid"}, {"id": 2, "amount": 25}]
    with pytest.raises(InvalidUsage, match="row 1 differs from others in whether it has column 'amount'"):
        shard.upsert(patches) if verb == "upsert" else shard.merge(patches).when_matched_update().execute()
    for patch in patches:
        shard.upsert([patch])
    assert amounts(shard) == {1: ("paid", 10), 2: ("new", 25)}


@pytest.mark.parametrize("form", [list, iter])
def test_tables_that_lack_different_columns_lost_the_values_of_these(shard: Shard, form: Any) -> None:
    before = amounts(shard)
    with pytest.raises(InvalidUsage, match="table 1 of the rows lacks column 'amount'"):
        shard.upsert(form([pa.table({"id": [1], "amount": [99]}), pa.table({"id": [2]})]))
    assert amounts(shard) == before


def test_rows_that_only_take_their_key_away_may_lack_columns(shard: Shard) -> None:
    shard.upsert([{"id": 2, "gone": True}, {"id": 1, "state": "paid"}], delete_column="gone")
    assert amounts(shard) == {1: ("paid", 10)}
    with pytest.raises(InvalidUsage, match="row 0 differs"):
        shard.upsert([{"id": 2, "gone": True, "amount": 1}, {"id": 1, "state": "x"}], delete_column="gone")


def ndjson(http: TestClient, verb: str, *lines: dict[str, Any], **params: str) -> Any:
    data, headers = "\n".join(map(json.dumps, lines)), {"content-type": "application/x-ndjson"}
    return http.post(f"{PATH}/{verb}", content=data, headers=headers, params=params)


def test_an_upsert_over_http_nulled_what_its_lines_left_out(http: TestClient, shard: Shard) -> None:
    assert ndjson(http, "upsert", {"id": 1, "state": "paid"}).status_code == 200
    assert ndjson(http, "upsert", {"id": 2, "gone": True}, delete_column="gone").json()["removed"] == 1
    assert amounts(shard) == {1: ("paid", 10)}
    both = ({"id": 1, "state": "sent"}, {"id": 2, "gone": True})
    assert ndjson(http, "upsert", *both, delete_column="gone").status_code == 200
    assert amounts(shard) == {1: ("sent", 10)}
    refused = ndjson(http, "upsert", {"id": 1, "state": "x"}, {"id": 2, "amount": 1})
    assert (refused.status_code, refused.json()["kind"]) == (400, "invalid_usage")
    assert ndjson(http, "upsert", {"id": 1, "state": "x"}, {"id": 3}, columns="id,state").status_code == 200
    assert amounts(shard) == {1: ("x", 10), 3: (None, None)}


def test_a_merge_over_http_refused_columns_of_the_source_alone(http: TestClient, shard: Shard) -> None:
    clauses = [{"when": "matched", "if": "source.op = 'd'", "then": "delete"}, {"when": "matched", "then": "update"}]
    rows = [{"id": 1, "op": "d"}, {"id": 2, "op": "u"}]
    done = http.post(f"{PATH}/merge", json={"rows": rows, "clauses": clauses})
    assert (done.status_code, done.json()["removed"]) == (200, 1)
    assert amounts(shard) == {2: ("new", 20)}


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a": ', "}")], ids=["lists", "objects"])
@pytest.mark.parametrize("depth", [31, 100, 100_000])
def test_a_source_that_is_nested_too_deep_is_refused(http: TestClient, opening: str, closing: str, depth: int) -> None:
    nested = f"{opening * depth}1{closing * depth}"
    body = '{"clauses": [{"when": "matched", "then": "delete"}], "rows": [{"id": 1, "q": ' + nested + "}]}"
    answer = http.post(f"{PATH}/merge", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_usage")


# --- what was looked at only where a row matched


@pytest.mark.parametrize(
    "verb",
    [
        lambda s: s.update({"amount": "abc"}, "id = 5"),
        lambda s: s.update({"amount": persist.source("nope")}, "id = 5"),
        lambda s: s.merge([{"id": 5}]).when_matched_update({"amount": persist.source("nope")}).execute(),
        lambda s: s.merge([{"id": 5}]).when_matched_delete("source.nope = 1").execute(),
        lambda s: s.merge([{"id": 1}]).when_not_matched_insert({"id": "abc"}).execute(),
    ],
)
def test_what_fits_no_row_was_refused_only_where_there_was_one(shard: Shard, verb: Callable[[Shard], object]) -> None:
    with pytest.raises(InvalidUsage):
        verb(shard)


# --- sentences


def test_where_had_no_way_to_write_an_apostrophe(shard: Shard) -> None:
    shard.insert([{"id": 7, "state": "O'Brien"}])
    assert shard.count("state = 'O''Brien'") == 1
    assert shard.count("state IN ('''', 'O''Brien')") == 1
    assert shard.delete("state LIKE 'O''%'").removed == 1


def test_the_contents_alone_could_not_be_subscribed_to(shard: Shard) -> None:
    with shard.subscribe(as_of=0, until=1) as events:
        assert [row["id"] for event in events for row in event.updates.to_pylist()] == [1, 2]
    with pytest.raises(InvalidUsage, match="must be later"):
        shard.subscribe(as_of=0, until=0)


# --- a program that could not end


def test_an_asyncio_program_waited_at_its_end_for_what_it_had_given_up(tmp_path: Path) -> None:
    said = tmp_path / "said"
    said.touch()
    program = Module("tests.support.giving_up", [f"persist://{tmp_path}/data"], said=said)
    try:
        assert program.wait(WAIT_S) == 0
    finally:
        program.kill()
    assert said.read_text() == "given up"
