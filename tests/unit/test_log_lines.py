"""Log lines: one format, one line for a storm of retries, all that is damaged, and no flood."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pyarrow as pa
import pytest
from starlette.testclient import TestClient

from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist.cli.long_running import (
    ALL_LINES_MAX,
    LINES_MAX,
    TRACE_CHARS_MAX,
    TROUBLES_MAX,
    WINDOW_S,
    FloodFilter,
    JsonFormatter,
)
from persist.client.embedded import EmbeddedTransport
from persist.client.idempotency import RetriedCall, call_with_retries
from persist.commit.clocks_and_ids import SystemClock
from persist.core import commands as c
from persist.core.errors import Corruption, Overloaded, Unavailable
from persist.core.frontier import Antichain
from persist.http_client.http_calls import Call, HttpCalls, Servers
from persist.telemetry.metrics import LOG_EVERY_S, STORM_TRIES, Storms
from persist.telemetry.metrics import LOGGED_MAX as STORMS_MAX
from rpc.app import create_app
from tests.support.answering import Answering, answer
from tests.support.asking import typed
from tests.support.blob_faults import FaultPlan
from tests.support.consensus_faults import FaultyConsensus
from tests.support.location import TestClock, client_of, memory_location

SCHEMA = pa.schema([("id", pa.int64())])
FIELDS = {"fields": [{"name": "id", "type": "int64", "key": True}]}
NDJSON = {"content-type": "application/x-ndjson"}


def lines(caplog: pytest.LogCaptureFixture, message: str) -> list[dict[str, Any]]:
    return [vars(record) for record in caplog.records if record.message.startswith(message)]


def storm(storms: Storms, shard: str = "orders", tries: int = STORM_TRIES + 4) -> None:
    for number in range(1, tries + 1):
        storms.again("client", shard, number, Unavailable("the store is away"), "r-1")


# --- storms


def test_a_storm_is_one_line_with_its_shard_kind_reason_and_request(caplog: pytest.LogCaptureFixture) -> None:
    storms = Storms(TestClock().monotonic)
    storm(storms)
    (line,) = lines(caplog, "retry storm")
    told = {name: line[name] for name in ("who", "shard", "kind", "reason", "request_id", "tries", "left_out")}
    assert told == {
        "who": "client", "shard": "orders", "kind": "unavailable", "reason": "the store is away",
        "request_id": "r-1", "tries": STORM_TRIES + 1, "left_out": 0,
    }  # fmt: skip
    assert (storms.storms, storms.retries) == (1, {"client": STORM_TRIES + 4})


def test_many_callers_with_the_same_trouble_are_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = TestClock()
    storms = Storms(clock.monotonic)
    for _ in range(50):
        storm(storms)
    storm(storms, "other")
    clock.advance_ms(int(LOG_EVERY_S * 1000))
    storm(storms)
    assert [(line["shard"], line["left_out"]) for line in lines(caplog, "retry storm")] == [
        ("orders", 0),
        ("other", 0),
        ("orders", 49),
    ]
    assert storms.storms == 52


def test_a_storm_of_very_many_shards_is_remembered_within_a_bound() -> None:
    storms = Storms(TestClock().monotonic)
    for number in range(STORMS_MAX + 5):
        storm(storms, f"s{number}")
    assert len(storms._logged) == STORMS_MAX


def test_a_client_that_retries_logs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with closing(memory_location()) as location:
        tries = iter(range(100))

        def ask() -> str:
            if next(tries) < STORM_TRIES + 3:
                raise Overloaded("slow down")
            return "done"

        transport = EmbeddedTransport(location)
        assert call_with_retries(ask, RetriedCall("a command", "orders"), transport, 60.0, remedy="") == "done"
    (line,) = lines(caplog, "retry storm")
    assert (line["who"], line["shard"], line["kind"]) == ("client", "orders", "overloaded")


def _away(inner: MemoryConsensus) -> tuple[FaultyConsensus, FaultPlan]:
    plan = FaultPlan(1, {"fail_before": 1.0})
    plan.heal()
    return FaultyConsensus(inner, plan), plan


def test_a_committer_whose_store_is_away_logs_one_line_for_the_request(caplog: pytest.LogCaptureFixture) -> None:
    consensus, plan = _away(MemoryConsensus("mem:"))
    with closing(memory_location(consensus=consensus)) as location:
        with typed(TestClient(create_app(location), base_url="http://127.0.0.1")) as http:
            assert http.put("/v1/shards/orders", json=FIELDS).status_code == 200
            assert http.post("/v1/shards/orders/insert", content=b'{"id": 1}', headers=NDJSON).status_code == 200
            plan.resume()
            header = {**NDJSON, "x-request-id": "mine-17"}
            answered = http.post("/v1/shards/orders/insert", content=b'{"id": 2}', headers=header)
            plan.heal()
        assert answered.status_code == 503
        assert location.counted().retries > STORM_TRIES
    storms = lines(caplog, "retry storm")
    assert [(line["who"], line["shard"], line["kind"], line["request_id"]) for line in storms] == [
        ("committer", "orders", "ConsensusUnavailable", "mine-17")
    ]
    (failed,) = lines(caplog, "request failed")
    assert (failed["request_id"], failed["shard"], failed["kind"]) == ("mine-17", "orders", "unavailable")
    assert answered.headers["x-request-id"] == "mine-17"


def test_a_committer_that_keeps_losing_races_logs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    class Losing(MemoryConsensus):
        losing = False

        def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
            return not self.losing and super().compare_and_set(key, seqno, data, after)

    consensus = Losing("mem:")
    with closing(memory_location(consensus=consensus)) as location:
        shard = client_of(location).create_shard("orders", SCHEMA, ["id"])
        consensus.losing = True
        with pytest.raises(Unavailable, match="lost the race"):
            location.machine("orders").apply(c.AdvanceUpper(Antichain(5)))
        assert shard.name == "orders"
    (line,) = lines(caplog, "retry storm")
    assert (line["who"], line["kind"]) == ("committer", "unavailable")
    assert "lost the race" in line["reason"]


# --- what is damaged


def test_upkeep_that_meets_something_damaged_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """It was a count and no word."""

    class Damaged(MemoryBlob):
        damaged = False

        def put(self, key: str, data: bytes | memoryview) -> None:
            if self.damaged:
                raise Corruption("a part of it is damaged")
            super().put(key, data)

    blob = Damaged("mem:")
    with closing(memory_location(blob=blob)) as location:
        shard = client_of(location).create_shard("orders", SCHEMA, ["id"])
        blob.damaged = True
        for number in range(40):  # until a rollup is due
            shard.insert([{"id": number}])
        assert location.counted().upkeep_failed > 0
        assert location.sight.storms.corruptions > 0
    found = lines(caplog, "corruption")
    assert found
    assert {(line["shard"], line["kind"], line["levelname"]) for line in found} == {("orders", "corruption", "ERROR")}
    assert all(line["doing"].startswith("upkeep: ") and line["reason"] for line in found)


def test_a_command_that_meets_something_damaged_says_so_in_an_embedded_program(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def damaged() -> None:
        raise Corruption("the log is damaged")

    with closing(memory_location()) as location, pytest.raises(Corruption):
        call_with_retries(damaged, RetriedCall("a command", "orders"), EmbeddedTransport(location), 1.0, remedy="")
    (line,) = lines(caplog, "corruption")
    assert (line["shard"], line["doing"]) == ("orders", "a command")


# --- one id of a request, from the client on


def test_all_tries_of_a_request_have_one_id() -> None:
    with closing(Answering(answer(503), answer(503), answer(200, b"{}"))) as server:
        calls = HttpCalls(Servers([server.url], SystemClock()), SystemClock(), token=None, timeout_s=30.0)
        with closing(calls):
            calls.call(Call("GET", "/v1/shards"))
            calls.call(Call("GET", "/v1/shards"))
        ids = [_header(request, "x-request-id") for request in server.requests]
    assert len(ids) == 4
    assert len(set(ids[:3])) == 1, "three tries of the first"
    assert ids[3] not in ids[:3]


def _header(request: bytes, name: str) -> str:
    headers = dict(line.split(": ", 1) for line in request.decode().split("\r\n")[1:] if ": " in line)
    return headers[name]


# --- floods


@pytest.fixture
def flood() -> tuple[FloodFilter, TestClock]:
    clock = TestClock()
    return FloodFilter(clock.monotonic), clock


def record(message: str = "request failed", name: str = "persist.rpc", **fields: object) -> logging.LogRecord:
    return logging.makeLogRecord({"name": name, "msg": message, "levelno": logging.ERROR, **fields})


def passed(flood: FloodFilter, count: int, make: Callable[[], logging.LogRecord]) -> int:
    return sum(bool(flood.filter(make())) for _ in range(count))


def test_a_flood_of_one_trouble_is_cut_and_the_next_line_says_by_how_much(flood: tuple[FloodFilter, TestClock]) -> None:
    bounded, clock = flood
    assert passed(bounded, LINES_MAX + 50, lambda: record(shard="x", kind="unavailable")) == LINES_MAX
    assert passed(bounded, 1, lambda: record(shard="y", kind="unavailable")) == 1, "another shard has lines of its own"
    clock.advance_ms(int(WINDOW_S * 1000))
    following = record(shard="x", kind="unavailable")
    assert bounded.filter(following)
    assert json.loads(JsonFormatter().format(following))["left_out"] == 50
    assert not hasattr(record(shard="x", kind="unavailable"), "left_out")


def test_all_troubles_together_are_bounded_and_what_is_damaged_passes(flood: tuple[FloodFilter, TestClock]) -> None:
    bounded, _ = flood
    names = iter(range(10 * ALL_LINES_MAX))
    assert (
        passed(bounded, ALL_LINES_MAX + 10, lambda: record(shard=f"s{next(names)}", kind="unavailable"))
        == ALL_LINES_MAX
    )
    assert passed(bounded, 3, lambda: record(shard="x", kind="corruption")) == 1
    assert len(bounded._troubles) == TROUBLES_MAX


def test_lines_for_each_request_are_not_bounded(flood: tuple[FloodFilter, TestClock]) -> None:
    bounded, _ = flood
    assert passed(bounded, 2 * LINES_MAX, lambda: record("request", "persist.access")) == 2 * LINES_MAX


def test_a_trace_is_bounded_and_keeps_its_end() -> None:
    try:
        raise ValueError("x" * TRACE_CHARS_MAX + "the end")
    except ValueError as error:
        line = json.loads(JsonFormatter().format(record(exc_info=(type(error), error, error.__traceback__))))
    assert len(line["error"]) == TRACE_CHARS_MAX
    assert line["error"].endswith("the end")


def test_a_line_keeps_its_own_fields_whatever_a_caller_adds() -> None:
    """`erased` had the time of the erasure where the wall clock belongs."""
    plain = json.loads(JsonFormatter().format(record()))
    line = json.loads(JsonFormatter().format(record(at=45, level="x", logger="y", more=1)))
    assert {name: line[name] for name in ("level", "logger", "message")} == {
        name: plain[name] for name in ("level", "logger", "message")
    }
    assert isinstance(line["at"], str)
    assert line["more"] == 1


def test_a_program_that_configures_no_logs_sees_none() -> None:
    """A server that was off showed warnings of a retry storm in a notebook."""
    program = "import logging, persist; logging.getLogger('persist.retries').warning('retry storm')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stderr == b""
