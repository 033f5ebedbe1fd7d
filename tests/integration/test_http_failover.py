"""Several servers over one location, and servers that are killed."""

from __future__ import annotations

import signal
import socket
import threading
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from persist.core.frontier import Antichain
from persist.http_client.http_calls import rendezvous
from tests.services.fault_proxy import FaultProxy
from tests.support.server import Server
from tests.support.waiting import WAIT_S

SCHEMA = pa.schema([("id", pa.string())])


def count(directory: Path, name: str) -> dict[str, int]:
    with persist.connect(f"persist://{directory}") as local:
        table = local.shard(name).snapshot().to_arrow()
    return dict(zip(table["id"].to_pylist(), table["__diff"].to_pylist(), strict=True))


def test_a_server_that_hangs_is_passed_over_before_its_answer_is_given_up(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    with (
        Server(directory) as a,
        Server(directory) as b,
        persist.connect(f"{a.url},{b.url}", timeout_s=WAIT_S) as client,
    ):
        shard = client.create_shard("orders", SCHEMA, ["id"])
        shard.insert([{"id": "before"}])
        home, other = (a, b) if rendezvous([a.url, b.url], "orders")[0] == a.url else (b, a)
        home.process.send_signal(signal.SIGSTOP)
        inserting = threading.Thread(target=lambda: shard.insert([{"id": "meanwhile"}]))
        inserting.start()
        inserting.join(WAIT_S / 2)  # the answer itself would be given up after WAIT_S
        waited_for_the_answer = inserting.is_alive()
        home.process.send_signal(signal.SIGCONT)
        inserting.join(WAIT_S)
        assert not waited_for_the_answer
        assert other.requests("commands") > 0
    assert count(directory, "orders") == {"before": 1, "meanwhile": 1}


def test_connecting_asks_no_other_server_than_the_one_that_answers(tmp_path: Path) -> None:
    """Each of the others was asked for its ports, one after the other, and one that hangs cost a second."""
    with Server(tmp_path / "d") as server, socket.create_server(("", 0)) as hangs:
        port = hangs.getsockname()[1]
        hanging = [f"http://127.0.0.{number}:{port}" for number in range(2, 22)]
        after = [url for url in hanging if rendezvous([server.url, url], "")[0] == server.url]
        with persist.connect(",".join([server.url, *after])) as client:
            assert client.transport.servers == (server.url, *after)
        hangs.settimeout(0)
        with pytest.raises(BlockingIOError):
            hangs.accept()


SPOILT = {
    "a length that is no number": (b"content-length: ", b"content-length: x"),
    "chunks that are none": (b"content-length: ", b"transfer-encoding: chunked\r\nx-length: "),
    "no HTTP": (b"HTTP/1.1 200", b"220 mail ready"),
}


class Spoiler:
    """Replaces `good` by `bad` in the next answer that comes by, and leaves those after it alone."""

    def __init__(self, good: bytes, bad: bytes) -> None:
        self._good, self._bad = good, bad
        self.spoilt = 0

    def __call__(self, data: bytes) -> bytes:
        if self.spoilt or not data.startswith(b"HTTP/1.1 200"):
            return data
        self.spoilt = data.count(self._good)
        return data.replace(self._good, self._bad, 1)


def test_a_write_whose_answer_is_spoilt_is_repeated_with_its_token_and_lands_once(tmp_path: Path) -> None:
    with Server(tmp_path / "d") as server:
        proxy = FaultProxy(server.port)
        try:
            with persist.connect(f"http://127.0.0.1:{proxy.port}") as client:
                for number, (what, (good, bad)) in enumerate(SPOILT.items()):
                    shard = client.create_shard(f"s{number}", SCHEMA, ["id"])
                    shard.insert([{"id": "a"}])
                    before = server.requests("commands")
                    proxy.rewrite = spoiler = Spoiler(good, bad)
                    done = shard.insert([{"id": "b"}])
                    assert (spoiler.spoilt, done.lower, shard.upper()) == (1, Antichain(1), Antichain(2)), what
                    assert server.requests("commands") == before + 2, f"{what}: carried out, and asked again"
                    proxy.rewrite = None
        finally:
            proxy.close()
    for number, what in enumerate(SPOILT):
        assert count(tmp_path / "d", f"s{number}") == {"a": 1, "b": 1}, what
