"""Erasure over HTTP and by commands, on files, and how they refuse."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

import persist
from compactor.tasks import Eraser
from compactor.worker import Worker
from persist.client.shard import Shard
from persist.core.errors import InvalidUsage
from persist.maintenance.collector import Collector
from rpc.app import create_app
from rpc.cli.program import main
from rpc.settings import ServerSettings
from tests.support.clocks import Machine, World
from tests.support.markers import in_files, marker, uncompressed, where

NAME = "orders"
SCHEMA = pa.schema([("id", pa.string()), ("v", pa.string())])
PATH = f"/v1/shards/{NAME}"


@pytest.fixture
def shard(machine: Machine) -> Shard:
    found = machine.client.create_shard(NAME, SCHEMA, ["id"])
    found.insert([{"id": "margaret", "v": "1"}, {"id": "bob", "v": "2"}])
    return found


def maintained(machine: Machine) -> None:
    collector = Collector(machine.location)
    for _ in range(3):
        Worker(machine.location).run(NAME)
        Eraser(machine.location, collector).run(NAME)
        collector.run(NAME)


def test_over_http_rows_go_for_good(machine: Machine, shard: Shard, http: TestClient) -> None:
    body = {"keys": [["margaret"]], "deadline": "30d", "reason": "dsr-1"}
    answer = http.post(f"{PATH}/erasures", json=body, headers={"idempotency-key": "dsr-1"})
    told = answer.json()
    assert (answer.status_code, told["phase"], told["removed"], told["at"]) == (200, "retracted", 1, 1)
    assert http.post(f"{PATH}/erasures", json=body, headers={"idempotency-key": "dsr-1"}).json()["id"] == told["id"]
    left = http.get(f"{PATH}/erasures", params={"before": 2}).json()
    assert (left["phase"], left["at"]) == ("retracted", 1)
    maintained(machine)
    receipt = http.get(f"{PATH}/erasures/{told['id']}").json()
    assert receipt["phase"] == "erased"
    assert receipt["proof"]["horizon_seqno"] >= receipt["rewritten"]["seqno"]
    assert http.get(f"{PATH}/erasures").json()["erasures"] == [receipt]
    assert http.get(f"{PATH}/erasures", params={"before": 2}).json()["phase"] == "erased"
    assert "margaret" not in answer.text + json.dumps(receipt)


def test_over_http_an_erasure_waits_for_the_writer_who_appends(
    machine: Machine, shard: Shard, http: TestClient
) -> None:
    shard.append([{"id": "carol", "v": "3"}], 1, 2)
    pending = http.post(f"{PATH}/erasures", json={"keys": [["margaret"]]}).json()
    assert (pending["phase"], pending["at"], pending["removed"], pending["pending_s"]) == ("pending", 2, 1, 0.0)
    assert pending["waits"] == [{"kind": "writer", "name": "append", "time": 2, "until": None}]
    assert any("an erasure" in one for one in http.get(f"{PATH}/retention").json()["held_by"])
    shard.append([{"id": "dan", "v": "4"}], 2, 3)
    told = http.get(f"{PATH}/erasures/{pending['id']}").json()
    assert (told["phase"], "pending_s" in told) == ("retracted", False)
    forced = http.post(f"{PATH}/erasures", json={"keys": [["dan"]], "force": True}).json()
    assert (forced["phase"], forced["at"], forced["removed"]) == ("retracted", 3, 1)
    refused = http.post(f"{PATH}/erasures", json={"keys": [["bob"]], "force": 1})
    assert (refused.status_code, refused.json()["kind"]) == (400, "invalid_usage")
    assert sorted(shard.snapshot().to_arrow()["id"].to_pylist()) == ["bob", "carol"]


def test_after_a_truncation_it_is_told_who_holds_the_rows(machine: Machine, shard: Shard, http: TestClient) -> None:
    shard.tag("eom", 0)
    shard.truncate(1)
    shard.forget(1)
    told = http.get(f"{PATH}/erasures", params={"before": 1}).json()
    assert (told["phase"], told["at"]) == ("retracted", 1)
    assert ("tag", "eom") in [(wait["kind"], wait["name"]) for wait in told["waits"]]
    shard.untag("eom")
    shard.erase(gone=True)
    maintained(machine)
    told = http.get(f"{PATH}/erasures", params={"before": 1}).json()
    assert (told["phase"], told["blobs_to_delete"]["count"], told["unnamed_blobs"]["count"]) == ("erased", 0, 0)


def test_after_a_drop_it_is_told_when_nothing_is_left(machine: Machine, shard: Shard, http: TestClient) -> None:
    shard.erase(keys=["margaret"])
    shard.drop()
    assert http.get(f"{PATH}/erasures", params={"before": 2}).json()["phase"] != "erased"
    maintained(machine)
    told = http.get(f"{PATH}/erasures", params={"before": 2}).json()
    assert (told["phase"], told["blobs_to_delete"]["count"], told["waits"]) == ("erased", 0, [])


def test_python_tells_what_shows_rows_that_went_before_a_time(machine: Machine, shard: Shard, http: TestClient) -> None:
    shard.erase(keys=["margaret"])
    left = shard.erased(before=2)
    assert (left["phase"], left["at"]) == ("retracted", 1)
    maintained(machine)
    told = shard.erased(before=2)
    assert told["phase"] == "erased"
    answer = http.get(f"{PATH}/erasures", params={"before": 2}).json()
    assert {**answer, "scanned_at": ""} == {**told, "scanned_at": ""}
    for wrong in ({}, {"erasure": "e1", "before": 2}, {"before": "2"}, {"before": -1}, {"before": 9}):
        with pytest.raises(InvalidUsage):
            shard.erased(**wrong)  # type: ignore[call-overload]
    detail = http.get(f"{PATH}/erasures", params={"before": 9}).json()["detail"]
    assert detail.startswith("a time before 9 of shard"), "the caller gave no time 8"


# One for each way in which a path refuses; the rules have their tests in Python.
WRONG: list[tuple[str, str, Any]] = [
    ("GET", "erasures/e1", None),
    ("GET", "erasures?before=9", None),
    ("POST", "erasures", [1]),
    ("POST", "erasures", {}),
    ("POST", "erasures", {"gone": False}),
    ("POST", "erasures", {"gone": True, "keys": ["margaret"]}),
    ("POST", "erasures", {"gone": "yes"}),
    ("POST", "erasures", {"where": "id ="}),
    ("POST", "erasures", {"keys": ["margaret"], "reason": "\ud800"}),
    ("POST", "erasures", {"keys": ["margaret"], "deadline": 5}),
]


@pytest.mark.parametrize(("verb", "path", "body"), WRONG, ids=str)
def test_what_is_wrong_is_refused_and_nothing_is_erased(
    machine: Machine, shard: Shard, http: TestClient, verb: str, path: str, body: Any
) -> None:
    before = machine.location.machine(NAME).refresh()
    answer = http.request(verb, f"{PATH}/{path}", content=None if body is None else json.dumps(body))
    assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_usage"), answer.text
    assert "margaret" not in answer.text
    after = machine.location.machine(NAME).refresh()
    assert (after.trace, after.since, after.leased_readers, after.erasures) == (
        before.trace, before.since, before.leased_readers, before.erasures,
    )  # fmt: skip


NOON = datetime(2020, 1, 1, 12, 0, 0, 7, tzinfo=UTC)


def test_a_key_that_its_column_would_cut_off_is_refused(machine: Machine) -> None:
    """It would mean another row, which would be gone for good."""
    for number, (kind, row, key) in enumerate([(pa.int64(), 1, 1.9), (pa.date32(), NOON.date(), NOON)]):
        shard = machine.client.create_shard(f"exact{number}", pa.schema([("id", kind)]), ["id"])
        shard.insert(pa.table({"id": pa.array([row], kind)}))
        with pytest.raises(InvalidUsage):
            shard.erase(keys=[[key]])
        assert shard.erase(keys=[[row]]).removed == 1


def test_a_key_over_http_is_written_as_its_type_is(machine: Machine, http: TestClient) -> None:
    shard = machine.client.create_shard("days", pa.schema([("day", pa.date32())]), ["day"])
    shard.insert([{"day": NOON.date()}])
    told = http.post("/v1/shards/days/erasures", json={"keys": [["2020-01-01"]]}).json()
    assert told["removed"] == 1
    assert http.post("/v1/shards/days/erasures", json={"gone": True}).json()["removed"] == 0


# --- commands, on files


def told(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> list[dict[str, Any]]:
    assert main(list(arguments)) == code
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_commands_erase_and_no_file_has_a_byte_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uncompressed(monkeypatch)
    one, two, directory = marker(), marker(), tmp_path / "data"
    with persist.connect(f"persist://{directory}") as client:
        shard = client.create_shard(NAME, SCHEMA, ["id"])
        shard.insert([{"id": one, "v": "inline"}], info={"who": one})
        shard.insert([{"id": number, "v": "." * 70_000} for number in ("a", two, "z")])
        for number in range(50):
            shard.insert([{"id": f"n{number}", "v": f"{one}{number}"}])
            shard.insert([{"id": f"n{number}", "v": f"{one}{number}", "__diff": -1}])
    assert where(in_files(directory), one)
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps([[one], [two]]))
    at = ("--dir", str(directory))
    for wrong in (["start", NAME], ["start", NAME, "--keys", "nothing.json"], ["status", NAME, "--id", "e1"]):
        assert told(capsys, 1, "erase", *wrong, *at) == []
    [done] = told(capsys, 0, "erase", "start", NAME, *at, "--keys", str(keys), "--reason", "dsr-1")
    assert (done["removed"], done["phase"]) == (2, "retracted")
    assert told(capsys, 3, "erase", "status", NAME, *at, "--id", done["id"])[0]["phase"] == "retracted"
    assert told(capsys, 3, "erase", "status", NAME, *at, "--before", str(done["at"] + 1))[0]["phase"] != "erased"
    for _ in range(3):
        assert main(["maintain", "run", *at, "--once", "--publish-every", "1h"]) == 0
    capsys.readouterr()
    assert told(capsys, 3, "erase", "status", NAME, *at)[0]["phase"] == "rewritten", (
        "others may yet publish what they committed"
    )
    assert main(["maintain", "run", *at, "--once", "--publish-every", "none"]) == 0
    capsys.readouterr()
    [receipt] = told(capsys, 0, "erase", "status", NAME, *at)
    assert receipt["proof"]["left_by_the_consensus_store"] == ""
    assert [where(in_files(directory), wanted) for wanted in (one, two)] == [[], []]
    assert told(capsys, 0, "erase", "status", NAME, *at, "--before", str(done["at"] + 1))[0]["phase"] == "erased"
    with persist.connect(f"persist://{directory}") as client:
        assert [row["id"] for row in client.shard(NAME).snapshot().to_arrow().to_pylist()] == ["a", "z"]


# --- keys of bytes come in base64 over HTTP and in files, as rows are shown: anything else would mean another row


ROWS = [{"id": b"a", "n": 1}, {"id": b"YQ==", "n": 2}]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view()])
@pytest.mark.parametrize("key", [["YQ=="], "YQ=="])
def test_the_row_that_is_shown_so_goes(kind: pa.DataType, key: object) -> None:
    machine = World().machine()
    shard = machine.client.create_shard("orders", pa.schema([("id", kind), ("n", pa.int64())]), ["id"])
    shard.insert(ROWS)
    with TestClient(create_app(machine.location, ServerSettings()), base_url="http://127.0.0.1") as http:
        shown = http.get("/v1/shards/orders/snapshot?format=ndjson").text
        assert '"YQ=="' in shown
        for wrong in ("!!", "YQ", "YR==", "Y\u00e4==", ""):
            if wrong:
                answer = http.post("/v1/shards/orders/erasures", json={"keys": [[wrong]]})
                assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_usage")
                assert wrong not in answer.text
        assert http.post("/v1/shards/orders/erasures", json={"keys": [key]}).json()["removed"] == 1
    assert [row["n"] for row in shard.snapshot().to_arrow().to_pylist()] == [2]


def test_a_key_of_times_is_given_as_it_is_written_in_rows(machine: Machine, http: TestClient) -> None:
    """Times of day, durations and points in time beyond ISO 8601 could be selected by no key, and by no `where`."""
    kinds = {"at": pa.time64("us"), "took": pa.duration("ms"), "end": pa.timestamp("us", "UTC")}
    shard = machine.client.create_shard("times", pa.schema([*kinds.items(), ("n", pa.int64())]), list(kinds))
    key = {"at": "12:00:00.000001", "took": "PT1.500S", "end": "@4611686018427387904"}
    lines = "\n".join(json.dumps({**key, "took": f"PT{n}.500S", "n": n}) for n in range(3))
    written = http.post("/v1/shards/times/insert", content=lines, headers={"content-type": "application/x-ndjson"})
    assert written.status_code == 200, written.text
    read = http.get("/v1/shards/times/snapshot", params={"key": json.dumps(list(key.values())), "format": "ndjson"})
    assert read.status_code == 200, read.text
    assert read.json() == {**key, "n": 1, "__diff": 1}
    assert http.post("/v1/shards/times/delete", json={"keys": [list(key.values())]}).json()["removed"] == 1
    body = {"keys": [[key["at"], "PT0.500S", key["end"]]]}
    assert http.post("/v1/shards/times/erasures", json=body).json()["removed"] == 1
    assert shard.count() == 1
