"""What a server's log tells of its failures, at its default level."""

from __future__ import annotations

import http.client
import json
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from persist.core.errors import Corruption, Indeterminate, Unavailable, UnknownShard
from rpc.app import create_app
from rpc.routes import row_routes
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


ERRORS = [Corruption("a part is damaged"), UnknownShard("it was dropped"), ZeroDivisionError("a bug")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("path", ["/v1/shards/x/snapshot?format=ndjson", "/v1/shards/x/listen"])
def test_an_answer_that_is_cut_off_is_logged_and_counted_as_what_went_wrong(
    path: str, error: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was `persist_error` with a traceback, a bug of the server's, whatever had happened."""

    def broken(*_: object) -> Iterator[bytes]:
        yield b"rows"
        raise error

    async def broken_stream(*_: object) -> AsyncIterator[bytes]:
        for piece in broken():
            yield piece

    monkeypatch.setattr(row_routes, "_pieces", broken)
    with closing(memory_location()) as location:
        app = create_app(location)
        monkeypatch.setattr(app.state.service.listening, "stream", broken_stream)
        with TestClient(app, base_url="http://127.0.0.1") as http:
            http.put("/v1/shards/x", json=FIELDS)
            http.post("/v1/shards/x/advance-upper?upper=1")
            http.get(path)
            counted = http.get("/metrics").text
    (line,) = (vars(record) for record in caplog.records if record.message == "request failed")
    kind = getattr(error, "kind", "persist_error")
    assert (line["status"], line["kind"], str(error) in line["reason"]) == (200, kind, True)
    assert (line["exc_info"] is not None) == isinstance(error, ZeroDivisionError)
    verb = path.partition("?")[0].rpartition("/")[2]
    assert f'persist_errors_total{{kind="{kind}",verb="{verb}"}} 1.0' in counted


def test_a_cut_off_answer_leaves_no_traceback_of_a_server(tmp_path: Path) -> None:
    with Server(tmp_path / "d") as server:
        ask(server, "PUT", "/v1/shards/x", "made", json.dumps(FIELDS))
        with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)) as connection:
            connection.request("GET", "/v1/shards/x/listen", headers={"x-request-id": "listening"})
            stream = connection.getresponse()
            assert ask(server, "DELETE", "/v1/shards/x?force=true", "dropped")[0] == 200
            with pytest.raises(http.client.IncompleteRead):
                stream.read()
        assert server.stop() == 0
    (line,) = failures(server.said())
    assert (line["request_id"], line["kind"]) == ("listening", "unknown_shard")
    assert "Traceback" not in server.said()


def test_a_snapshot_whose_first_rows_cannot_be_read_is_an_error_in_every_format(tmp_path: Path) -> None:
    """CSV answered 200 with its header."""
    with Server(tmp_path / "d") as server:
        ask(server, "PUT", "/v1/shards/x", "made", json.dumps(FIELDS))
        rows = "\n".join(json.dumps({"id": n, "v": f"{n * 7919:0100d}"}) for n in range(3000))
        assert ask(server, "POST", "/v1/shards/x/insert", "written", rows)[0] == 200
        _damage(tmp_path / "d" / "blob")
        for form in ("csv", "ndjson", "arrow", "parquet"):
            status, body = ask(server, "GET", f"/v1/shards/x/snapshot?format={form}", form)
            assert (status, json.loads(body)["kind"]) == (500, "corruption")


def test_what_is_refused_is_counted_by_its_kind() -> None:
    """Nearly all were counted by their status."""
    with closing(memory_location()) as location, TestClient(create_app(location), base_url="http://127.0.0.1") as http:
        http.put("/v1/shards/x", json=FIELDS)
        for method, path in (
            ("GET", "/v1/shards/nope"),
            ("GET", "/nowhere"),
            ("PATCH", "/v1/shards/x"),
            ("GET", "/v1/shards/x?past=x"),
            ("POST", "/v1/shards/x/advance-upper?upper=x"),
        ):
            assert http.request(method, path).status_code >= 400
        lines = http.get("/metrics").text.splitlines()
    counted = [line.partition("{")[2] for line in lines if line.startswith("persist_errors_total{")]
    assert sorted(counted) == [
        'kind="invalid_usage",verb="advance-upper"} 1.0',
        'kind="invalid_usage",verb="get-shard"} 1.0',
        'kind="invalid_usage",verb="other"} 1.0',
        'kind="invalid_usage",verb="other-shard"} 1.0',
        'kind="unknown_shard",verb="get-shard"} 1.0',
    ]
