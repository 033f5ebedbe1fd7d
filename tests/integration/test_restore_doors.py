"""Changes and restore over HTTP and by commands, and how they refuse."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient

import persist
from persist import Antichain, Shard, named_key
from persist.client.timestamps import to_datetime
from rpc.app import create_app
from rpc.cli.program import main
from rpc.settings import ServerSettings
from tests.support.clocks import Machine, World
from tests.support.token_file import bearer, write_tokens

NAME = "orders"
SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])


@pytest.fixture
def shard(world: World, machine: Machine) -> Shard:
    found = machine.client.create_shard(NAME, SCHEMA, ["id"])
    for rows in ([(1, "a", 1)], [(2, "b", 1)], [(1, "a", -1), (9, "bad", 2)]):
        found.insert([{"id": number, "v": value, "__diff": diff} for number, value, diff in rows])
        world.pass_ms(1_000)
    return found


PATH = f"/v1/shards/{NAME}"


def test_over_http_changes_come_in_every_format(world: World, http: TestClient) -> None:
    answer = http.get(f"{PATH}/changes", params={"start": 1, "format": "ndjson"})
    assert answer.text == '{"id":1,"v":"a","__diff":-1}\n{"id":9,"v":"bad","__diff":2}\n'
    assert (answer.headers["persist-start"], answer.headers["persist-end"]) == ("1", "2")
    assert http.get(f"{PATH}/changes", params={"start": -1, "end": 0}).headers["persist-start"] == "-1"
    csv = http.get(f"{PATH}/changes", params={"start": 2, "end": 1, "columns": "v"}, headers={"accept": "text/csv"})
    assert csv.text == '"v","__diff"\n"a",1\n"bad",-2\n'
    arrow = pa.ipc.open_stream(http.get(f"{PATH}/changes", params={"start": 0}).content).read_all()
    assert arrow["__diff"].to_pylist() == [-1, 1, 2]
    parquet = http.get(f"{PATH}/changes", params={"start": 0, "format": "parquet"})
    assert pq.read_table(io.BytesIO(parquet.content)).num_rows == 3
    instants = {"start": to_datetime(world.true_ms - 1_000).isoformat(), "end": "2", "format": "ndjson"}
    told = http.get(f"{PATH}/changes", params=instants)
    assert (told.headers["persist-start"], "persist-start-timestamp" in told.headers) == ("1", True)
    assert "persist-end-timestamp" not in told.headers


def test_over_http_a_restore_happens_once_for_its_key(machine: Machine, shard: Shard, http: TestClient) -> None:
    asked = {"params": {"as_of": 1}, "headers": {"Idempotency-Key": "undo"}}
    first = http.post(f"{PATH}/restore", **asked)  # type: ignore[arg-type]
    assert first.json() == {
        "as_of": 1, "timestamp": "2025-10-09T08:53:22.000Z", "lower": [3], "upper": [4], "added": 1, "removed": 2,
        "attributes": {"changed": [], "others": "kept"},
    }  # fmt: skip
    assert http.post(f"{PATH}/restore", **asked).json() == first.json()  # type: ignore[arg-type]
    assert shard.upper() == Antichain(4)
    assert http.post(f"{PATH}/restore", params={"as_of": 1}).json()["added"] == 0
    assert shard.upper() == Antichain(4)
    undone = http.post(f"{PATH}/restore", params={"timestamp": to_datetime(1_760_000_003_000).isoformat()})
    assert (undone.json()["as_of"], undone.json()["lower"]) == (2, [4])


def test_over_http_a_restore_sets_attributes(shard: Shard, http: TestClient) -> None:
    asked = {"as_of": 1, "attributes": '{"position": 7, "gone": null}', "token": "undo"}
    for _ in range(2):
        done = http.post(f"{PATH}/restore", params=asked).json()
        assert done["attributes"] == {"changed": [named_key("position"), named_key("gone")], "others": "kept"}
        assert (done["lower"], shard.attributes.get(named_key("position"))) == ([3], 7)
    for wrong in ("position", "[]", '{"position": "7"}', '{"position": 7.5}', '{"a": 1, "a": 2}', f'{{"a": {2**63}}}'):
        refused = http.post(f"{PATH}/restore", params={"as_of": 0, "attributes": wrong})
        assert (refused.status_code, refused.json()["kind"]) == (400, "invalid_usage"), wrong


def test_over_http_who_compares_two_shards_may_read_both(tmp_path: Path, machine: Machine, shard: Shard) -> None:
    machine.client.create_shard("secret", SCHEMA, ["id"]).insert([{"id": 1, "v": "a"}])
    file = tmp_path / "tokens.json"
    headers = bearer(write_tokens(file, {"reader": ("read", NAME)})["reader"])
    with TestClient(create_app(machine.location, ServerSettings(tokens_file=str(file)))) as http:
        for other, status in ((NAME, 200), ("secret", 403)):
            asked = {"start": 1, "other": other}
            assert http.get(f"{PATH}/changes", params=asked, headers=headers).status_code == status


def test_every_path_refuses_times_with_the_statuses_of_the_page(http: TestClient, shard: Shard) -> None:
    missing = [("GET", "changes"), ("GET", "time-at"), ("GET", "timestamp-of"), ("POST", "forget")]
    unread = [
        ("POST", "restore?as_of=-1"), ("GET", "snapshot?as_of=-2"), ("GET", "snapshot?as_of=x"),
        ("GET", "listen?after=-2"), ("GET", "timestamp-of?time=-1"),
    ]  # fmt: skip
    malformed = [
        ("GET", "changes?start=-2"), ("GET", "changes?start=1&end=-2"), ("GET", "time-at?timestamp=7"),
        ("POST", "forget?before=-1"),
    ]  # fmt: skip
    for requests, status in ((missing, 422), (unread, 422), (malformed, 400)):
        for verb, path in requests:
            answer = http.request(verb, f"{PATH}/{path}")
            assert (answer.status_code, answer.json()["kind"]) == (status, "invalid_usage"), path


def test_a_dry_run_promises_nothing_that_is_refused(machine: Machine, shard: Shard, http: TestClient) -> None:
    for _ in range(2):
        shard.insert([{"id": 9, "v": "bad", "__diff": 2**32}])
    answer = http.post(f"{PATH}/truncate", params={"before": 5, "dry_run": True})
    assert (answer.status_code, answer.json()["kind"]) == (400, "invalid_usage"), answer.text


# One for each way in which the path refuses; the rules have their tests in Python.
WRONG: list[tuple[str, str, dict[str, Any], int, str]] = [
    ("GET", "changes", {"start": "yesterday"}, 400, "invalid_usage"),
    ("GET", "changes", {"start": 99, "wait": 0}, 409, "not_complete"),
    ("GET", "changes", {"start": "2001-01-01T00:00:00Z"}, 410, "not_readable"),
    ("GET", "changes", {"start": 1, "other": "nothing"}, 404, "unknown_shard"),
    ("POST", "restore", {}, 400, "invalid_usage"),
    ("POST", "restore", {"as_of": 1, "token": "used"}, 422, "token_reused"),
    ("POST", "truncate", {"before": 1, "mode": "erase"}, 400, "invalid_usage"),
]


def test_what_is_wrong_is_refused_and_nothing_is_written(machine: Machine, shard: Shard, http: TestClient) -> None:
    http.post(f"{PATH}/insert", params={"token": "used", "format": "ndjson"}, content=b'{"id": 5, "v": "x"}\n')
    before = machine.location.machine(NAME).refresh()
    for verb, path, params, status, kind in WRONG:
        answer = http.request(verb, f"{PATH}/{path}", params=params)
        assert (answer.status_code, answer.json()["kind"]) == (status, kind), (path, params)
    after = machine.location.machine(NAME).refresh()
    assert (after.upper, after.since, after.leased_readers, after.outcomes) == (
        before.upper, before.since, before.leased_readers, before.outcomes,
    )  # fmt: skip


# --- commands


@pytest.fixture
def directory(tmp_path: Path) -> str:
    with persist.connect(f"persist://{tmp_path / 'data'}") as client:
        shard = client.create_shard(NAME, SCHEMA, ["id"])
        shard.insert([{"id": 1, "v": "a"}])
        shard.insert([{"id": 9, "v": "bad"}, {"id": 1, "v": "a", "__diff": -1}])
    return str(tmp_path / "data")


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(list(arguments)) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_commands_show_changes_and_restore(directory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--dir", directory)
    changes = told(capsys, "diff", NAME, "0", *where)
    assert changes == [{"id": 1, "v": "a", "__diff": -1}, {"id": 9, "v": "bad", "__diff": 1}]
    file = tmp_path / "changes.parquet"
    assert told(capsys, "diff", NAME, "1", "0", *where, "--parquet", str(file)) == []
    assert pq.read_table(file).to_pylist() == [{"id": 1, "v": "a", "__diff": 1}, {"id": 9, "v": "bad", "__diff": -1}]
    [done] = told(capsys, "restore", NAME, *where, "--at", "0")
    assert (done["as_of"], done["lower"], done["upper"], done["added"], done["removed"]) == (0, [2], [3], 1, 1)
    assert told(capsys, "diff", NAME, "0", "2", *where) == []
    [again] = told(capsys, "restore", NAME, *where, "--at", "0", "--attribute", "position=0")
    assert again["attributes"] == {"changed": [named_key("position")], "others": "kept"}
    assert again["lower"] == again["upper"] == [3]
