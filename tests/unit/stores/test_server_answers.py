"""What stores make of odd answers of their servers, and of connections that break."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest
import sqlalchemy as sa
from botocore.exceptions import ClientError

from blob import open_blob
from blob.s3 import Refused, translate
from consensus import ConsensusDamaged, ConsensusUnavailable, open_consensus


@pytest.mark.parametrize(("code", "status"), [("ConditionalRequestConflict", 409), ("NoSuchKey", 404)])
def test_a_put_that_meets_another_of_its_key_is_tried_again(code: str, status: int) -> None:
    """Ceph says `NoSuchKey`, which was told as a blob that is missing."""
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    refused = translate(ClientError(answer, "PutObject"), "key", "s3://bucket")
    assert isinstance(refused, Refused)
    assert refused.reason == "race"


class _Sloppy(BaseHTTPRequestHandler):
    """A small S3 server that heeds no condition of a put, or says that it knows none."""

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.server.knows_none and self.headers["if-none-match"]:  # type: ignore[attr-defined]
            self._say(501, b"<Error><Code>NotImplemented</Code></Error>")
            return
        self.server.objects[self.path] = body  # type: ignore[attr-defined]
        self._say(200)

    def do_HEAD(self) -> None:
        self._say(200 if self.path in self.server.objects else 404)  # type: ignore[attr-defined]

    def do_POST(self) -> None:
        """DeleteObjects."""
        self.rfile.read(int(self.headers["content-length"]))
        self.server.objects.clear()  # type: ignore[attr-defined]
        self._say(200, b"<DeleteResult/>")

    def _say(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("knows_none", [False, True])
def test_a_store_that_heeds_no_condition_signs_no_url_to_write(
    knows_none: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A14: such a URL could overwrite a part that is committed. Clients send parts through the server instead."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Sloppy)
    server.objects, server.knows_none = {}, knows_none  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    store = open_blob(f"s3://bucket/p?endpoint=http://127.0.0.1:{server.server_port}&region=us-east-1&attempts=1")
    try:
        assert store.presign_put("a/b", 60) is None
        assert store.presign_get("a/b", 60) is not None
        assert not server.objects  # type: ignore[attr-defined]
    finally:
        store.close()
        server.shutdown()
        thread.join()
        server.server_close()


# --- what etcd says of its own damage, by a server that says nothing else


class _Damaged(grpc.GenericRpcHandler):  # type: ignore[misc]
    def service(self, _details: object) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(
            lambda _request, context: context.abort(grpc.StatusCode.DATA_LOSS, "etcdserver: corrupt cluster")
        )


@pytest.fixture
def url() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2), handlers=(_Damaged(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"etcd://127.0.0.1:{port}/p"
    server.stop(None).wait()


def test_a_cluster_that_finds_its_data_damaged_is_not_asked_again(url: str) -> None:
    with closing(open_consensus(url)) as store:
        for call in (lambda: store.head("k"), lambda: store.compare_and_set("k", 1, b"x")):
            with pytest.raises(ConsensusDamaged, match="backup"):
                call()


# --- found by the crash tests: connections that break whenever the pool hands them out


def test_connections_that_break_as_soon_as_they_are_opened_are_bad_weather(tmp_path: Path) -> None:
    """The pool then raised an error of its own kind, which servers answered as a failure of theirs."""

    def breaks(*_: object) -> None:
        raise sa.exc.DisconnectionError("cut")

    first = open_consensus(f"sqlite:///{tmp_path}/consensus.db")
    assert first.compare_and_set("k", 1, b"first")
    first.close()
    store = open_consensus(f"sqlite:///{tmp_path}/consensus.db")
    store.check()
    sa.event.listen(sa.pool.Pool, "checkout", breaks)
    try:
        with pytest.raises(ConsensusUnavailable):
            store.head("k")
        with pytest.raises(ConsensusUnavailable):
            store.compare_and_set("k", 2, b"second")
    finally:
        sa.event.remove(sa.pool.Pool, "checkout", breaks)
    head = store.head("k")
    assert head is not None
    assert head.data == b"first"
    store.close()
