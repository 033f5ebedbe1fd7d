"""Whether the old home is there, before a copy becomes home: who answers anything at all is there."""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from persist.core.errors import Conflict, Unavailable
from persist.regions.failover import OldHome
from persist.regions.region_index import RegionServer, probe_server
from tests.integration.test_http_security import certificate

LONG_S = 60.0
SHORT_S = 0.2


@contextmanager
def somebody(says: bytes | None, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Somebody who says this to each who comes, whatever he is asked, and hangs up. None: he says nothing."""
    ends = threading.Event()

    def answer(listener: socket.socket) -> None:
        while not ends.is_set():
            with suppress(OSError):
                found, _ = listener.accept()
                with found, found if tls is None else tls.wrap_socket(found, server_side=True) as peer:
                    if says is None:
                        ends.wait(LONG_S)
                        continue
                    peer.recv(1_000)
                    peer.sendall(says)

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=answer, args=(listener,), daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            ends.set()
            with suppress(OSError):
                socket.create_connection(listener.getsockname(), timeout=1).close()
            thread.join(LONG_S)


def http(status: str) -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{{}}".encode()


ANSWERS: list[tuple[bytes, str]] = [
    (http("200 OK"), "it answers with HTTP 200"),
    (http("503 Service Unavailable"), "it answers with HTTP 503"),
    (b"220 smtp ready\r\n\r\n", "it answers, but not as HTTP: the response is not HTTP"),
    (b"", "it answers, but not as HTTP: the server closed the connection"),
]


@pytest.mark.parametrize(("says", "why"), ANSWERS, ids=[why for _, why in ANSWERS])
def test_who_answers_anything_is_there(says: bytes, why: str) -> None:
    with somebody(says) as port:
        url = f"http://127.0.0.1:{port}"
        found = probe_server(url, LONG_S)
        assert not found.is_silent
        assert why in found.why
        with pytest.raises(Conflict, match="answers at") as refused:
            OldHome((url,)).check_gone("eu")
        assert why in refused.value.message
        assert "\n" not in refused.value.message


def test_a_home_with_a_certificate_that_is_not_known_here_is_there(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate(tmp_path))
    with somebody(http("200 OK"), context) as port, pytest.raises(Conflict, match=r"TLS fails: .*self-signed"):
        OldHome((f"https://127.0.0.1:{port}",)).check_gone("eu")


def test_so_is_one_that_speaks_no_tls() -> None:
    with somebody(http("200 OK")) as port, pytest.raises(Conflict, match="TLS fails"):
        OldHome((f"https://127.0.0.1:{port}",)).check_gone("eu")


def test_a_name_that_cannot_be_found_tells_nothing() -> None:
    """It may be misspelt."""
    with pytest.raises(Conflict, match="its name cannot be resolved"):
        OldHome(("http://no-such-home.invalid:8787",)).check_gone("eu")


def test_a_connection_that_is_refused_is_silence(caplog: pytest.LogCaptureFixture) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    with caplog.at_level(logging.WARNING):
        OldHome((f"http://127.0.0.1:{port}",)).check_gone("eu")
    assert "is silent at" in caplog.text
    assert "refused" in caplog.text


def test_no_answer_in_time_is_silence_and_is_told() -> None:
    with somebody(None) as port:
        found = probe_server(f"http://127.0.0.1:{port}", SHORT_S)
    assert (found.is_silent, found.why) == (True, "it did not answer within 0.2 s")


ASKED: list[tuple[bytes, str]] = [
    (b"220 smtp ready\r\n\r\n", "does not answer: the response is not HTTP"),
    (http("200 OK").replace(b"{}", b"[]"), "does not answer as a server of persist"),
    (http("200 OK").replace(b"{}", b"{["), "does not answer"),
    (http("403 Forbidden"), "HTTP error 403"),
]


@pytest.mark.parametrize(("says", "why"), ASKED, ids=[why for _, why in ASKED])
def test_what_is_no_answer_of_a_server_is_one_kind_of_error(says: bytes, why: str) -> None:
    with somebody(says) as port, pytest.raises(Unavailable) as failed:
        RegionServer(f"http://127.0.0.1:{port}").ask()
    assert why in failed.value.message
