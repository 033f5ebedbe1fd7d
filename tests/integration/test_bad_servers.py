"""Servers that answer wrongly, too much, or too slowly: what a client makes of it is an error of the tree, in time."""

from __future__ import annotations

import http.client
import http.server
import json
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvicorn

import persist
from blob import BlobUnavailable
from persist.client import deadlines
from persist.client.deadlines import Deadline
from persist.commit.clocks_and_ids import SystemClock
from persist.core.errors import Indeterminate, Unavailable
from persist.formats.http_messages import PROTOCOL_VERSION
from persist.http_client import http_connection
from persist.http_client.http_calls import Call, HttpCalls, Servers
from rpc import http_protocol
from rpc.app import bind, create_app
from rpc.client import http_stores
from rpc.client.http_stores import HttpBlob
from rpc.http_protocol import ConnectionBounds, JoiningProtocol
from rpc.settings import Limits
from tests.support.answering import Answering, answer, chunked
from tests.support.location import memory_location
from tests.support.of_aws import give_credentials
from tests.support.waiting import WAIT_S

LOCATION: dict[str, Any] = {
    "version": PROTOCOL_VERSION,
    "blob": {"url": "mem:x", "proof": "p"},
    "policy": {},
    "now_ms": 0,
}
MIB = 1024**2
ENDLESS = chunked(*[bytes(MIB)] * 8, is_whole=False)  # sent anew for each request


def told(**changed: object) -> bytes:
    """A location that is told with something else in it."""
    return answer(200, json.dumps({**LOCATION, **changed}).encode())


def calls_to(server: Answering, timeout_s: float = WAIT_S) -> HttpCalls:
    clock = SystemClock()
    return HttpCalls(Servers([server.url], clock), clock, token=None, timeout_s=timeout_s)


TOO_LONG = {"as told": answer(200, bytes(2 * MIB)), "without an end": ENDLESS}


@pytest.mark.parametrize("said", TOO_LONG.values(), ids=TOO_LONG)
def test_no_more_is_taken_than_what_was_asked_for_can_have(said: bytes) -> None:
    """All of it was taken, up to 2 GiB."""
    with Answering(said) as server, closing(calls_to(server)) as calls:
        tracemalloc.start()
        try:
            with pytest.raises(Indeterminate, match="1048576"):
                calls.call(Call("GET", "/x", safe=False, bytes_max=MIB))
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most < 4 * MIB


@pytest.mark.parametrize("said", TOO_LONG.values(), ids=TOO_LONG)
def test_a_call_that_may_be_repeated_ends_when_all_answers_are_too_long(said: bytes) -> None:
    with Answering(said) as server, closing(calls_to(server, 0.5)) as calls, pytest.raises(Unavailable):
        calls.call(Call("GET", "/x", bytes_max=MIB))


def test_the_body_of_an_error_has_a_bound_of_its_own() -> None:
    said = answer(503, bytes(http_connection.ERROR_BYTES_MAX + 1))
    with Answering(said) as server, closing(calls_to(server)) as calls, pytest.raises(Indeterminate, match="at most"):
        calls.call(Call("GET", "/x", safe=False))


def test_a_range_of_a_blob_is_not_longer_than_was_asked_for() -> None:
    with Answering(answer(206, bytes(11))) as server, closing(calls_to(server, 2.0)) as calls:
        blob = HttpBlob(calls, "mem:x")
        with pytest.raises(BlobUnavailable):
            blob.get_range("s1/p1", 0, 10)


STORE_TOO_LONG = {"as told": answer(206, bytes(11)), "in chunks": chunked(bytes(6), bytes(6))}


@pytest.mark.parametrize("said", STORE_TOO_LONG.values(), ids=STORE_TOO_LONG)
def test_a_store_sends_no_more_than_was_asked_for(said: bytes) -> None:
    """What came by a presigned URL had no bound at all."""
    with Answering(said) as store:
        signed = answer(200, json.dumps({"get": f"{store.url}/s1/p1?signed"}).encode())
        with Answering(signed) as server, closing(calls_to(server)) as calls:
            blob = HttpBlob(calls, "s3://bucket", presigned=True)
            with pytest.raises(BlobUnavailable, match=r"at most 10|longer than 10"):
                blob.get_range("s1/p1", 0, 10)
            blob.close()


def test_a_store_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte had two minutes."""
    monkeypatch.setattr(http_stores, "PRESIGNED_READ_S", 0.2)
    monkeypatch.setattr(http_stores, "SLOW_BYTES_PER_S", 1e12)
    with Answering(answer(206, bytes(10_000)), drip_s=0.05) as store:
        signed = answer(200, json.dumps({"get": f"{store.url}/s1/p1?signed"}).encode())
        with Answering(signed) as server, closing(calls_to(server)) as calls:
            blob = HttpBlob(calls, "s3://bucket", presigned=True)
            with pytest.raises(BlobUnavailable, match=r"too slowly|did not respond"):
                blob.get_range("s1/p1", 0, 10_000)
            blob.close()


def bounded(work: Callable[[], None]) -> None:
    """Do this within a time that is far below what the store of the test would take."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive(), "it waits for a store for as long as its server likes"


@pytest.fixture
def hanging() -> Iterator[tuple[str, socket.socket]]:
    """A store that takes connections, and never answers: its URL, and its listener."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        listener.setblocking(False)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", listener


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of AWS, in the environment of the client, where no endpoint is."""
    give_credentials(monkeypatch, tmp_path)


@pytest.mark.usefixtures("credentials")
@pytest.mark.parametrize("is_own", [False, True], ids=["the server's choice", "the client's own"])
def test_a_store_that_a_server_names_holds_no_client_up(
    is_own: bool, hanging: tuple[str, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client went there with its credentials, and stayed for as long as the server said."""
    endpoint, listener = hanging
    if is_own:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    options = f"endpoint={endpoint}&region=x&connect_timeout=3000&read_timeout=3000&attempts=100"
    said = told(blob={"url": f"s3://bucket/p?{options}", "proof": "p"})
    with Answering(said) as server:
        bounded(lambda: persist.connect(server.url, timeout_s=0.5).close())
    if not is_own:
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_a_store_behind_a_signed_url_hangs_no_longer_than_the_call(hanging: tuple[str, socket.socket]) -> None:
    """Each of four tries waited for two minutes."""
    signed = answer(200, json.dumps({"get": f"{hanging[0]}/s1/p1?signed"}).encode())

    found: list[BlobUnavailable] = []
    with Answering(signed) as server, closing(calls_to(server)) as calls:
        blob = HttpBlob(calls, "s3://bucket", presigned=True)

        def asks() -> None:
            with deadlines.within(Deadline(0.5, SystemClock())), pytest.raises(BlobUnavailable) as raised:
                blob.get_range("s1/p1", 0, 10)
            found.append(raised.value)

        bounded(asks)
        blob.close()
    assert len(found) == 1


# --- answers that are not persist's own: a proxy's 5xx proves nothing about what happened behind it


FOREIGN = [
    answer(503, b"upstream connect error or disconnect/reset before headers", "text/plain"),
    answer(503, b'{"message": "no healthy upstream"}'),
    answer(503, b'{"type": "about:blank", "title": "Service Unavailable", "status": 503}', "application/problem+json"),
    answer(500, b"<h1>Internal Server Error</h1>", "text/html"),
    answer(502, b"<h1>Bad Gateway</h1>", "text/html"),
    answer(504, b"", "text/plain"),
]


@pytest.mark.parametrize("said", FOREIGN)
def test_a_5xx_of_a_proxy_after_a_write_is_indeterminate_and_before_a_read_unavailable(said: bytes) -> None:
    """A 503 was told as Unavailable, "did not happen", though the write had happened."""
    with Answering(said) as server, closing(calls_to(server, 0.1)) as calls:
        with pytest.raises(Indeterminate):
            calls.call(Call("POST", "/x", safe=False))
        with pytest.raises(Unavailable):
            calls.call(Call("GET", "/x"))


def test_beyond_the_most_connections_the_answer_is_persists_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was uvicorn's plain text, by which no client can know that nothing happened."""
    monkeypatch.setattr(http_protocol, "ADDRESS_PERCENT", 200)
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with closing(memory_location()) as location:
        protocol: Any = partial(JoiningProtocol, bounds=ConnectionBounds(Limits(connections_max=2)))
        config = uvicorn.Config(create_app(location), http=protocol, log_config=None)
        server = uvicorn.Server(config)
        running = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        running.start()
        held = [http.client.HTTPConnection("127.0.0.1", port) for _ in range(3)]
        try:
            for connection, expected in zip(held, (200, 200, 503), strict=True):
                connection.request("GET", "/v1/shards")
                answer = connection.getresponse()
                told = json.loads(answer.read())
                assert answer.status == expected
            assert told["kind"] == "unavailable"
            assert answer.getheader("x-request-id")
            assert answer.getheader("connection") == "close"
        finally:
            for connection in held:
                connection.close()
            server.should_exit = True
            running.join()
