"""What a server's log tells of its failures, at its default level."""

from __future__ import annotations

import http.client
import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from persist.core.errors import Indeterminate, Unavailable
from rpc.app import create_app
from tests.support.location import memory_location
from tests.support.server import Server
from tests.support.waiting import WAIT_S

FIELDS = {"fields": [{"name": "id", "type": "int64", "key": True, "nullable": False}, {"name": "v", "type": "string"}]}
NDJSON = {"content-type": "application/x-ndjson"}


def ask(server: Server, method: str, path: str, request_id: str, body: str | None = None) -> tuple[int, Any]:
    """The status and the body of an answer; status 0 when it is cut off."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)) as connection:
        connection.request(method, path, body, {**NDJSON, "x-request-id": request_id})
        answer = connection.getresponse()
        try:
            return answer.status, answer.read()
        except http.client.IncompleteRead:
            return 0, None


def failures(said: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return [line for line in lines if line["message"] == "request failed"]


def test_every_5xx_leaves_one_line_with_its_id_kind_and_reason_and_no_4xx_does(tmp_path: Path) -> None:
    """Corruption, 503 and 504 left nothing: the id that a client was told could not be found."""
    with Server(tmp_path / "d") as server:
        assert ask(server, "PUT", "/v1/shards/x", "made", json.dumps(FIELDS))[0] == 200
        rows = "\n".join(json.dumps({"id": n, "v": f"{n * 7919:0100d}"}) for n in range(3000))
        assert ask(server, "POST", "/v1/shards/x/insert", "written", rows)[0] == 200
        for n in range(20):
            assert ask(server, "GET", f"/v1/shards/missing{n}", f"absent-{n}")[0] == 404
        _damage(tmp_path / "d" / "blob")
        for n in range(3):
            assert ask(server, "GET", "/v1/shards/x/snapshot", f"damaged-{n}")[0] in (500, 0)
        with closing(sqlite3.connect(tmp_path / "d" / "consensus.db", isolation_level=None)) as other:
            other.execute("DROP TABLE consensus_log")
        assert ask(server, "POST", "/v1/shards/x/insert", "lost", '{"id": -1, "v": "a"}')[0] == 500
        assert server.stop() == 0
    found = failures(server.said())
    assert Counter(line["request_id"] for line in found) == Counter(
        {"damaged-0": 1, "damaged-1": 1, "damaged-2": 1, "lost": 1}
    )
    assert {line["kind"] for line in found} == {"corruption"}
    assert all(line["level"] == "error" and len(line["reason"]) > 20 for line in found)
    assert {line["shard"] for line in found} == {"x"}


def _damage(blobs: Path) -> None:
    (part,) = blobs.rglob("*.parquet")
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.unlink()
    part.write_bytes(data)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Unavailable("the store is away"), 503, "unavailable"),
        (Indeterminate("perhaps"), 504, "indeterminate"),
        (ZeroDivisionError("a bug"), 500, "persist_error"),
    ],
)
def test_the_line_tells_what_the_answer_tells_and_the_place_of_a_bug(
    error: Exception, status: int, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise error

    with closing(memory_location()) as location:
        monkeypatch.setattr(location, "names", broken)
        with TestClient(create_app(location), base_url="http://127.0.0.1", raise_server_exceptions=False) as http:
            answer = http.get("/v1/shards")
    assert (answer.status_code, answer.json()["kind"]) == (status, kind)
    (line,) = (vars(record) for record in caplog.records if record.message == "request failed")
    assert (line["request_id"], line["status"], line["kind"]) == (answer.headers["x-request-id"], status, kind)
    assert str(error) in line["reason"]
    assert (line["exc_info"] is not None) == isinstance(error, ZeroDivisionError)
