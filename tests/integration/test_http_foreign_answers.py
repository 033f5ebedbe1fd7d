"""Answers that are not persist's own: a proxy's 5xx proves nothing about what happened behind it."""

from __future__ import annotations

import http.client
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest
import uvicorn

import persist
from persist.client.shard import HandleSettings
from persist.client.snapshot import ReadSettings
from persist.client.write import WriteSettings
from persist.core.errors import Indeterminate, Unavailable
from persist.core.ids import Token, mint
from rpc import connection_limits
from rpc.app import create_app
from rpc.connection_limits import ConnectionBounds
from rpc.http_protocol import JoiningProtocol
from rpc.server import bind
from rpc.settings import Limits
from tests.support.location import memory_location
from tests.support.server import Server
from tests.support.waiting import WAIT_S

SCHEMA = pa.schema([("id", pa.int64())])
IMPATIENT = HandleSettings(write=WriteSettings(retry_s=0.5), read=ReadSettings(retry_s=0.5))
FOREIGN = [
    (503, "text/plain", b"upstream connect error or disconnect/reset before headers"),
    (503, "application/json", b'{"message": "no healthy upstream"}'),
    (503, "application/problem+json", b'{"type": "about:blank", "title": "Service Unavailable", "status": 503}'),
    (500, "text/html", b"<h1>Internal Server Error</h1>"),
    (502, "text/html", b"<h1>Bad Gateway</h1>"),
    (504, "text/plain", b""),
]


class _Proxy(http.server.BaseHTTPRequestHandler):
    """Forwards everything. While `lost` is set it drops the answers of that method and tells its own."""

    protocol_version = "HTTP/1.1"
    upstream: ClassVar[int]
    lost: ClassVar[dict[str, tuple[int, str, bytes]]]

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        upstream = http.client.HTTPConnection("127.0.0.1", self.upstream)
        upstream.request(self.command, self.path, body, dict(self.headers))
        answer = upstream.getresponse()
        data, status, media_type = answer.read(), answer.status, answer.getheader("content-type") or ""
        upstream.close()
        if self.command in self.lost:
            status, media_type, data = self.lost[self.command]
        self.send_response(status)
        self.send_header("content-type", media_type)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = _forward  # noqa: N815

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[tuple[str, dict[str, tuple[int, str, bytes]]]]:
    """The URL of a proxy before a server, and the answers that it loses: method -> what it says instead."""
    lost: dict[str, tuple[int, str, bytes]] = {}
    with Server(tmp_path / "d") as server:
        handler = type("Handler", (_Proxy,), {"upstream": server.port, "lost": lost})
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
            threading.Thread(target=listening.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{listening.server_port}", lost
            listening.shutdown()


def test_a_5xx_of_a_proxy_after_a_write_is_indeterminate_and_before_a_read_unavailable(
    proxy: tuple[str, dict[str, tuple[int, str, bytes]]],
) -> None:
    """A 503 was told as Unavailable, "did not happen", though the write had happened."""
    url, lost = proxy
    with persist.connect(url, timeout_s=WAIT_S, handles=IMPATIENT) as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        writer = shard.open_writer()
        for number, answer in enumerate(FOREIGN):
            token = mint(Token, client.transport.ids)
            lost["POST"] = answer
            with pytest.raises(Indeterminate, match="same token"):
                writer.insert([{"id": number}], token=token)
            del lost["POST"]
            writer.insert([{"id": number}], token=token)
            lost["GET"] = answer
            with pytest.MonkeyPatch.context() as hasty:  # a read is repeated until its time is over
                hasty.setattr(client.transport._calls, "_timeout_s", 0.1)  # type: ignore[attr-defined]
                with pytest.raises(Unavailable):
                    shard.upper()
            del lost["GET"]
        rows = shard.snapshot().to_arrow()
    assert rows["id"].to_pylist() == list(range(len(FOREIGN)))
    assert rows["__diff"].to_pylist() == [1] * len(FOREIGN), "each happened once"


def test_beyond_the_most_connections_the_answer_is_persists_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was uvicorn's plain text, by which no client can know that nothing happened."""
    monkeypatch.setattr(connection_limits, "ADDRESS_PERCENT", 200)
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
