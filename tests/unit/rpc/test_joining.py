"""What a connection's answers cost: one send each, and none of them is held back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from rpc.http_protocol import ConnectionBounds, JoiningProtocol
from rpc.settings import Limits
from tests.support.waiting import WAIT_S

GET = b"GET /%s HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = b"y" * 1000


class Sends(asyncio.Transport):
    """A connection that notes what is sent at once, and when it is closed."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 80)})
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        assert not self.closed
        self.sent.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        return

    def resume_reading(self) -> None:
        return


async def app(scope: Any, receive: Any, send: Any) -> None:
    """`/n` answers in n pieces, at once; `/slow` in two, with a pause between them."""
    pieces = 2 if scope["path"] == "/slow" else int(scope["path"][1:])
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for left in reversed(range(pieces)):
        await send({"type": "http.response.body", "body": BODY, "more_body": left > 0})
        if scope["path"] == "/slow":
            await asyncio.sleep(0.01)


def talk(protocol: Callable[..., Any], *said: bytes, ends: int) -> Sends:
    """Say this on one connection, one thing after the other is answered; `ends` is how many answers end."""

    async def scene() -> Sends:
        config = uvicorn.Config(app, http=protocol, log_config=None, lifespan="off", limit_concurrency=100)
        config.load()
        connection = protocol(config=config, server_state=ServerState(), app_state={}, _loop=asyncio.get_running_loop())
        transport = Sends()
        connection.connection_made(transport)
        for number, data in enumerate(said, start=1):
            connection.data_received(data)
            async with asyncio.timeout(WAIT_S):
                while b"".join(transport.sent).count(b"0\r\n\r\n") < min(number, ends):
                    await asyncio.sleep(0)
        connection.connection_lost(None)
        return transport

    return asyncio.run(scene())


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_what_is_written_in_one_turn_of_the_loop_is_sent_at_once(pieces: int) -> None:
    transport = talk(JoiningProtocol, GET % b"%d" % pieces, ends=1)
    assert len(transport.sent) == 1
    assert transport.sent[0].count(BODY) == pieces


def test_each_answer_of_a_connection_is_sent_by_itself() -> None:
    transport = talk(JoiningProtocol, GET % b"1", GET % b"1", GET % b"1", ends=3)
    assert [data.count(b"HTTP/1.1 200") for data in transport.sent] == [1, 1, 1]


def test_a_stream_is_not_held_back() -> None:
    transport = talk(JoiningProtocol, GET % b"slow", ends=1)
    assert [data.count(BODY) for data in transport.sent] == [1, 1]


def test_a_stream_waits_for_its_client_within_one_turn_of_the_loop() -> None:
    """All of it was joined in memory: only what is sent makes the system say that the client takes no more."""

    class Stalls(Sends):
        def write(self, data: Any) -> None:
            super().write(data)
            connection.pause_writing()

    async def scene() -> int:
        nonlocal connection
        config = uvicorn.Config(app, log_config=None, lifespan="off")
        config.load()
        connection = JoiningProtocol(config=config, server_state=ServerState(), app_state={})
        transport = Stalls()
        connection.connection_made(transport)
        connection.data_received(GET % b"5000")
        for _ in range(100):
            await asyncio.sleep(0)
        connection.connection_lost(None)
        return sum(map(len, transport.sent))

    connection: JoiningProtocol
    assert asyncio.run(scene()) < 100 * len(BODY)


def test_what_was_written_before_the_end_of_a_connection_is_sent() -> None:
    last = b"GET /1 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    transport = talk(JoiningProtocol, last, ends=1)
    assert (len(transport.sent), transport.closed) == (1, True)


def test_a_body_that_still_comes_is_that_of_the_last_request() -> None:
    """The answer to the one before ended the connection: the last one was never answered."""
    behind = b"POST /1 HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nab"
    transport = talk(JoiningProtocol, GET % b"1" + behind, b"cd", ends=2)
    assert b"".join(transport.sent).count(BODY) == 2


class Skewed(asyncio.SelectorEventLoop):
    """A loop whose clock can be set forward."""

    skew_s = 0.0

    def time(self) -> float:
        return super().time() + self.skew_s

    async def passes(self, seconds: float) -> None:
        """Let so much time pass at once, and the loop notice it."""
        self.skew_s += seconds
        for _ in range(5):
            await asyncio.sleep(0)


class Unread(Sends):
    """A connection whose client takes nothing."""

    def get_write_buffer_size(self) -> int:
        return 1 + sum(map(len, self.sent))

    def can_write_eof(self) -> bool:
        return False


POST = b"POST /1 HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"
WAITS = {  # by why the server cuts it off: what was said, the connection, the limit in seconds
    "head": (GET[:10], Sends, 20),
    "body": (POST, Sends, 20),
    "answer": (GET % b"1", Unread, 60),
    "idle": (GET % b"1", Sends, 120),
}


@pytest.mark.parametrize("why", WAITS)
def test_time_in_which_the_server_stood_still_counts_for_nobody(why: str) -> None:
    """A server that was stopped for longer than its limits cut off clients that were as fast as ever."""
    said, kind, limit_s = WAITS[why]

    async def waiting(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await app(scope, receive, send)

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Skewed)
        config = uvicorn.Config(waiting, log_config=None, lifespan="off")
        config.load()
        bounds = ConnectionBounds(Limits())
        connection = JoiningProtocol(config=config, server_state=ServerState(), app_state={}, bounds=bounds)
        transport = kind()
        connection.connection_made(transport)
        connection.data_received(said)
        await loop.passes(1.1)
        for _ in range(3):
            await loop.passes(10_000.0)
        assert not bounds.cut
        for _ in range(limit_s):
            await loop.passes(1.1)
        assert why in bounds.cut, "the limit itself holds"
        connection.connection_lost(None)
        await loop.passes(0.0)

    with asyncio.Runner(loop_factory=Skewed) as runner:
        runner.run(scene())
