"""`persist serve --workers`: several processes behind one port, each shard in one of them."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import persist
from persist.client.trust import Trust
from tests.integration.test_client_certificates import Place
from tests.integration.test_ending import wait_until_gone
from tests.integration.test_http_failover import SCHEMA, Writer, count
from tests.support.server import Server
from tests.support.waiting import WAIT_S, wait_until

FIELDS = json.dumps({"fields": [{"name": "id", "type": "string", "key": True}]}).encode()
NDJSON = "application/x-ndjson"


def name_in(worker: int, number: int, prefix: str = "") -> str:
    """The name of a shard that is in this worker of two; another one for each number."""
    every = (f"{prefix}n{n}" for n in range(1_000))
    mine = [name for name in every if int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) % 2 == worker]
    return mine[number]


def figures(server: Server) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def given(server: Server, what: str) -> float:
    return figures(server)[f'persist_workers_given_total{{what="{what}"}}']


def workers_of(server: Server) -> list[int]:
    listed = subprocess.run(["pgrep", "-P", str(server.process.pid)], check=False, capture_output=True, text=True)
    return [int(pid) for pid in listed.stdout.split()]


def ask(
    connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, Any]:
    kind = {"content-type": NDJSON if path.endswith("insert") else "application/json"}
    connection.request(method, path, body, {**kind, **headers})
    answer = connection.getresponse()
    return answer.status, answer.read()


def create(connection: http.client.HTTPConnection, name: str) -> str:
    status, told = ask(connection, "PUT", f"/v1/shards/{name}", FIELDS)
    assert status == 200, told
    return name


def connected(server: Server) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("workers") / "d", "--workers", "2") as server:
        yield server


class Raw:
    """One connection, by hand. It begins in the worker that has `at`."""

    def __init__(self, server: Server, at: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)
        self._file = self._socket.makefile("rb")
        self.send(f"GET /v1/shards/{at} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        assert self.answer()[0] == 200

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def line(self) -> bytes:
        return self._file.readline()

    def answer(self) -> tuple[int, bytes]:
        status, length = int(self.line().split()[1]), 0
        while (line := self.line().strip().lower()) not in (b"", b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        return status, self._file.read(length)

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture(scope="module")
def pair(server: Server) -> tuple[str, str]:
    """A shard in each worker."""
    connection = connected(server)
    found = create(connection, name_in(0, 0)), create(connection, name_in(1, 0))
    connection.close()
    return found


def insert_head(name: str, length: int, more: str = "", version: str = "1.1") -> bytes:
    lines = [f"POST /v1/shards/{name}/insert HTTP/{version}", "host: localhost", f"content-type: {NDJSON}"]
    return "\r\n".join([*lines, f"content-length: {length}", *filter(None, [more]), "", ""]).encode()


def rows_of(server: Server, name: str) -> int:
    connection = connected(server)
    status, told = ask(connection, "GET", f"/v1/shards/{name}/count")
    connection.close()
    assert status == 200, told
    return int(json.loads(told)["count"])


def test_each_of_many_shards_is_in_one_process_whatever_connection_asks(server: Server) -> None:
    before = figures(server)
    connections = [connected(server) for _ in range(3)]
    names = [create(connections[0], name_in(worker, 1 + n)) for n in range(6) for worker in (0, 1)]
    for connection in connections:
        for name in names:
            status, told = ask(connection, "POST", f"/v1/shards/{name}/insert", b'{"id": "a"}\n')
            assert status == 200, told
    after = figures(server)
    for connection in connections:
        connection.close()

    def more(figure: str) -> float:
        return after[figure] - before.get(figure, 0.0)

    assert more("persist_machines") == len(names), "each has its State in one process alone"
    assert more("persist_races_lost_total") == 0
    assert more('persist_requests_total{status="200",verb="insert"}') == 3 * len(names)
    assert more('persist_workers_given_total{what="connection"}') >= 4 * len(names) - 4
    assert after["persist_workers"] == 2
    assert {after[f'persist_shard_upper{{shard="{name}"}}'] for name in names} == {3.0}


@pytest.mark.parametrize("worker", [0, 1])
def test_a_body_that_was_partly_read_goes_over_with_its_connection(
    server: Server, pair: tuple[str, str], worker: int
) -> None:
    name, at = pair[worker], pair[1 - worker]
    body = b"".join(b'{"id": "%06d-%d"}\n' % (n, worker) for n in range(20_000))
    before = rows_of(server, name)
    with Raw(server, at) as raw:
        raw.send(insert_head(name, len(body)) + body[:100_000])
        raw.send(body[100_000:])
        assert raw.answer()[0] == 200
        raw.send(insert_head(at, 13) + b'{"id": "b1"}\n')
        assert raw.answer()[0] == 200
    assert rows_of(server, name) == before + 20_000


def test_a_head_in_pieces_goes_over_once_it_is_whole(server: Server, pair: tuple[str, str]) -> None:
    whole, before = insert_head(pair[1], 13) + b'{"id": "b2"}\n', given(server, "connection")
    with Raw(server, pair[0]) as raw:
        for start in range(0, len(whole), 7):
            raw.send(whole[start : start + 7])
        assert raw.answer()[0] == 200
    assert given(server, "connection") > before


def test_a_client_that_asks_first_is_told_to_send_its_body(server: Server, pair: tuple[str, str]) -> None:
    with Raw(server, pair[0]) as raw:
        raw.send(insert_head(pair[1], 13, "expect: 100-continue"))
        assert raw.line().startswith(b"HTTP/1.1 100")
        assert raw.line() == b"\r\n"
        raw.send(b'{"id": "b3"}\n')
        assert raw.answer()[0] == 200


def test_http_1_0_is_answered_by_the_worker_of_the_shard_and_closed(server: Server, pair: tuple[str, str]) -> None:
    with Raw(server, pair[0]) as raw:
        raw.send(insert_head(pair[1], 13, version="1.0") + b'{"id": "b4"}\n')
        assert raw.answer()[0] == 200
        assert raw.line() == b""


def test_requests_that_came_behind_others_are_answered_in_their_order(server: Server, pair: tuple[str, str]) -> None:
    before = given(server, "request")
    with Raw(server, pair[0]) as raw:
        many = [pair[n % 2] for n in range(6)]
        raw.send(b"".join(f"GET /v1/shards/{name} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode() for name in many))
        answers = [raw.answer() for _ in many]
    assert [json.loads(body)["name"] for _, body in answers] == many
    assert given(server, "request") > before


def test_heads_that_never_end_and_clients_that_go_away_leave_nothing(server: Server, pair: tuple[str, str]) -> None:
    half = [Raw(server, pair[0]) for _ in range(8)]
    for number, raw in enumerate(half):
        raw.send(insert_head(pair[1], 50_000)[: -4 if number % 2 else None] + b"x" * (number % 2) * 1_000)
    assert rows_of(server, pair[1]) >= 0
    for raw in half:
        raw.close()
    wait_until(lambda: figures(server)['persist_pool_used{pool="connections"}'] == 1, "they are gone")
    assert figures(server)['persist_pool_used{pool="body_bytes"}'] == 0


def test_a_hostile_head_is_refused_wherever_it_would_go(server: Server, pair: tuple[str, str]) -> None:
    with Raw(server, pair[0]) as raw:
        raw.send(f"POST /v1/shards/{pair[1]}/insert HTTP/1.1\r\nhost: x\r\nbad header\r\n\r\n".encode())
        assert raw.answer()[0] == 400
    with Raw(server, pair[0]) as raw:
        raw.send(f"GET /v1/shards/{pair[1]}?{'x' * 40_000} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        assert raw.answer()[0] == 414


def test_a_listen_stream_goes_to_the_worker_of_its_shard(server: Server) -> None:
    with persist.connect(server.url) as client:
        shards = [client.create_shard(name_in(worker, 20), SCHEMA, ["id"]) for worker in (0, 1)]
        for shard in shards:
            shard.insert([{"id": "a"}])
            listen = shard.listen(0)
            shard.insert([{"id": "b"}])
            event = next(event for event in listen if event.updates.num_rows)
            assert event.updates["id"].to_pylist() == ["b"]
            listen.close()


def test_activity_is_what_the_worker_of_each_shard_knows(server: Server) -> None:
    """Whichever worker is asked, and whatever it has read of the shard before."""
    connection = connected(server)
    names = [create(connection, name_in(worker, 0, "active/")) for worker in (0, 1)]

    def told() -> dict[str, list[int]]:
        asking = connected(server)
        status, body = ask(asking, "GET", "/v1/activity?cached=true&prefix=active/")
        asking.close()
        assert status == 200
        return {one["name"]: one["upper"] for one in json.loads(body)["shards"]}

    for _ in range(20):  # by now each of them has read both
        assert told() == {name: [0] for name in names}
    for name in names:
        assert ask(connection, "POST", f"/v1/shards/{name}/insert", b'{"id": "a"}\n')[0] == 200
    connection.close()
    for _ in range(20):
        assert told() == {name: [1] for name in names}


def test_a_worker_that_is_killed_loses_and_repeats_nothing_and_sigterm_answers_all(tmp_path: Path) -> None:
    names = [name_in(worker, number) for number in range(2) for worker in (0, 1)]
    with Server(tmp_path / "d", "--workers", "2") as server, persist.connect(server.url) as client:
        for name in names:
            client.create_shard(name, SCHEMA, ["id"])
        writers = [Writer(client, name, number) for number, name in enumerate(names)]
        for writer in writers:
            writer.start()
        wait_until(lambda: all(len(writer.acknowledged) > 3 for writer in writers), "all write")
        victim = workers_of(server)[0]
        os.kill(victim, signal.SIGKILL)
        reached = [len(writer.acknowledged) for writer in writers]
        wait_until(
            lambda: all(len(w.acknowledged) > at + 3 for w, at in zip(writers, reached, strict=True)), "all go on"
        )
        wait_until(lambda: len(workers_of(server)) == 2 and victim not in workers_of(server), "it is started again")
        wait_until(lambda: figures(server)["persist_workers"] == 2, "and answers")
        for writer in writers:
            writer.enough.set()
        for writer in writers:
            writer.join(WAIT_S)
            assert writer.failed == []
        with Raw(server, names[0]) as first, Raw(server, names[1]) as second:
            for raw, name in ((first, names[1]), (second, names[0])):
                raw.send(insert_head(name, 18) + b'{"id": ')
            both = 2 * len(b'{"id": ')
            wait_until(lambda: figures(server)['persist_pool_used{pool="body_bytes"}'] == both, "bodies are under way")
            server.process.send_signal(signal.SIGTERM)
            for raw in (first, second):
                raw.send(b'"drained"}\n')
                assert raw.answer()[0] == 200
        assert server.stop() == 0
    for writer, name in zip(writers, names, strict=True):
        expected = dict.fromkeys(writer.acknowledged, 1)
        assert count(tmp_path / "d", name) == expected | ({"drained": 1} if name in names[:2] else {})


def test_a_supervisor_that_is_killed_leaves_no_worker_behind(tmp_path: Path) -> None:
    server = Server(tmp_path / "d", "--workers", "2")
    workers = workers_of(server)
    assert len(workers) == 2
    server.kill()
    for pid in workers:
        wait_until_gone(pid)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("tls"))


def forwarded(metrics: bytes) -> float:
    """How many requests other workers have answered, as the server's metrics tell."""
    return float(re.findall(rb'persist_workers_given_total\{what="request"\} ([0-9.]+)', metrics)[0])


def test_over_tls_requests_are_answered_for_who_shows_the_certificate(place: Place) -> None:
    with place.start("workers", "--workers", "2") as server:
        context: ssl.SSLContext = Trust(place.ca, place.etl).context()
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, context=context, timeout=WAIT_S)
        names = [name_in(worker, number, "eu/") for number in range(2) for worker in (0, 1)]
        body = b"".join(b'{"id": "%06d"}\n' % n for n in range(8_000))
        for name in names:
            assert ask(connection, "PUT", f"/v1/shards/{name}", FIELDS)[0] == 200
            assert ask(connection, "POST", f"/v1/shards/{name}/insert", body)[0] == 200
            status, told = ask(connection, "GET", f"/v1/shards/{name}/snapshot", accept=NDJSON)
            assert (status, told.count(b"\n")) == (200, 8_000)
        for worker in (0, 1):
            status, told = ask(connection, "PUT", f"/v1/shards/{name_in(worker, 0, 'us/')}", FIELDS)
            assert (status, json.loads(told)["kind"]) == (403, "forbidden")
            connection.close()  # it was answered before its body was there: the server closes it, too
        nobody = http.client.HTTPSConnection(
            "127.0.0.1", server.port, context=Trust(place.ca).context(), timeout=WAIT_S
        )
        for name in names[:2]:
            assert ask(nobody, "GET", f"/v1/shards/{name}/count")[0] == 401
        bearer = {"authorization": f"Bearer {place.token}"}
        status, told = ask(nobody, "GET", "/metrics", **bearer)
        nobody.close()
        assert (status, forwarded(told) > 0) == (200, True)
        assert b'persist_requests_total{status="200",verb="insert"} 4.0\n' in told


def test_a_client_that_leaves_is_no_failure_of_the_worker_that_answers(place: Place) -> None:
    """Each one whose stream another worker sends was told of as a 504: "the process that has this shard ended"."""
    with place.start("leaving", "--workers", "2") as server:
        context: ssl.SSLContext = Trust(place.ca, place.etl).context()
        names = [name_in(worker, 0, "eu/") for worker in (0, 1)]
        for number, name in enumerate(names * 4):
            connection = http.client.HTTPSConnection("127.0.0.1", server.port, context=context, timeout=WAIT_S)
            if number < len(names):
                assert ask(connection, "PUT", f"/v1/shards/{name}", FIELDS)[0] == 200
                assert ask(connection, "POST", f"/v1/shards/{name}/insert", b'{"id": "1"}\n')[0] == 200
            connection.request("GET", f"/v1/shards/{name}/listen", headers={"accept": "text/event-stream"})
            answer = connection.getresponse()
            assert (answer.status, answer.readline() != b"") == (200, True)
            answer.close()
            connection.close()
        bearer = {"authorization": f"Bearer {place.token}"}
        nobody = http.client.HTTPSConnection(
            "127.0.0.1", server.port, context=Trust(place.ca).context(), timeout=WAIT_S
        )
        wait_until(lambda: b'{pool="listeners"} 0.0' in ask(nobody, "GET", "/metrics", **bearer)[1], "all have left")
        told = ask(nobody, "GET", "/metrics", **bearer)[1]
        nobody.close()
        assert server.stop() == 0
    assert forwarded(told) > 0
    assert b'status="504"' not in told
    assert "request failed" not in server.said()
