"""What the worker processes of one server share: counts, connections that are handed over, figures."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from persist.core.errors import InvalidUsage, Overloaded
from persist.formats.exposition import COUNTER, GAUGE, HISTOGRAM, Family, Spread, exposition
from rpc.bounds import Bounds
from rpc.crew import letters, summing
from rpc.crew.board import Board, open_memory
from rpc.crew.forwarding import forward
from rpc.crew.letters import Identity
from rpc.crew.member import Crew, join
from rpc.joining import JoiningProtocol
from rpc.settings import Limits
from rpc.slots import CALLER, Slots, Turns


@pytest.fixture
def boards() -> Iterator[list[Board]]:
    memory = open_memory(3)
    found = [Board(memory, index, 3) for index in range(3)]
    yield found
    for board in found:
        board.close()
    os.close(memory)


def test_slots_of_several_workers_are_those_of_one_server(boards: list[Board]) -> None:
    here, there = (Slots(4, "many things", 3, board.pool("snapshots")) for board in boards[:2])
    CALLER.set("a")
    here.take(2)
    with pytest.raises(Overloaded, match="one caller gets 3 of 4"):
        there.take(2)
    CALLER.set("b")
    there.take(2)
    with pytest.raises(Overloaded, match="too many things"):
        here.take()
    there.give_back(2)
    here.take(2)
    assert (here.taken, there.taken) == (4, 0)
    assert boards[2].pool("snapshots").elsewhere() == 4


def test_what_a_worker_that_died_had_taken_is_free(boards: list[Board]) -> None:
    CALLER.set("a")
    Slots(4, "many things", None, boards[1].pool("snapshots")).take(4)
    boards[1].begins()
    assert boards[0].is_alive(1)
    boards[0].died(1)
    assert not boards[0].is_alive(1)
    assert boards[0].pool("snapshots").of_elsewhere("a") == 0
    Slots(4, "many things", None, boards[0].pool("snapshots")).take(4)


def test_who_waits_for_a_turn_gets_what_another_worker_gives_back(boards: list[Board]) -> None:
    async def run() -> None:
        here, there = (Turns(4, 4, board.pool("worked_bytes")) for board in boards[:2])
        CALLER.set("a")
        await here.take(4)
        waiting = asyncio.create_task(there.take(3))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        here.give_back(4)
        await waiting
        assert (here.taken, there.taken) == (0, 3)

    asyncio.run(run())


class Quiet:
    """A connection that does nothing."""

    def __init__(self) -> None:
        self.owner: str | None = None
        self.ended = False

    def look(self, now: float, passed_s: float) -> int:
        return 0

    def quiet_since(self) -> float | None:
        return -1e9

    def end(self) -> None:
        self.ended = True


def test_connections_are_bounded_for_all_workers_and_one_makes_room_for_another(boards: list[Board]) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        limits = Limits(connections_max=4, address_connections_max=3, token_connections_max=1, sweep_s=0.01)
        here, there = (Bounds(limits, board) for board in boards[:2])
        mine = [Quiet() for _ in range(3)]
        assert [here.enter(one, "1.1.1.1", loop) for one in mine] == [None, None, None]
        refused = Quiet()
        assert "1.1.1.1" in str(there.enter(refused, "1.1.1.1", loop))
        there.leave(refused)
        last, late = Quiet(), Quiet()
        assert there.enter(last, "2.2.2.2", loop) is None
        here.belong(mine[0], "token")
        with pytest.raises(Overloaded):
            there.belong(last, "token")
        there.leave(last)
        extra = Quiet()
        assert here.enter(extra, "3.3.3.3", loop) is None
        assert "too many connections" in str(there.enter(late, "2.2.2.2", loop))
        there.leave(late)
        while not any(one.ended for one in (*mine, extra)):
            await asyncio.sleep(0.01)
        assert there.enter(Quiet(), "2.2.2.2", loop) is None

    asyncio.run(run())


def crews(boards: list[Board]) -> list[Crew]:
    boxes = [letters.open_box() for _ in boards]
    made = []
    for board, box in zip(boards, boxes, strict=True):
        sends = [letters.socket_of(os.dup(other.send)) for other in boxes]
        made.append(Crew(board.index, board, letters.socket_of(box.read), sends))
    for box in boxes:
        os.close(box.send)
    return made


def closed(made: list[Crew]) -> None:
    for crew in made:
        crew.box.close()
        for box in crew._boxes:
            box.close()


@pytest.mark.parametrize("size", [0, 1_000, letters.INLINE_BYTES_MAX + 1, 500_000])
def test_a_letter_brings_a_connection_and_what_was_read_of_it(boards: list[Board], size: int) -> None:
    made = crews(boards)
    ours, theirs = socket.socketpair()
    identity, data = Identity("1.2.3.4", 5, "https", ("DNS:a",), 7.0), os.urandom(size)
    with ours, theirs:
        assert made[0].give(1, theirs.fileno(), data, identity)
        given = letters.receive(made[1].box)
        assert given is not None
        with given.connection:
            assert (given.data, given.identity) == (data, identity)
            given.connection.send(b"here")
            assert ours.recv(10) == b"here"
        assert letters.receive(made[1].box) is None
    closed(made)


def test_an_answer_that_comes_before_the_body_is_passed_on(boards: list[Board]) -> None:
    """The body cannot be sent any more, and that was answered with 500."""
    made = crews(boards)
    scope = {"method": "PUT", "raw_path": b"/v1/shards/us", "query_string": b"", "headers": [(b"content-length", b"4")]}
    answers: list[Any] = []
    bodies = [{"type": "http.request", "body": b"body", "more_body": False}]

    async def receive() -> Any:
        if not bodies:
            await asyncio.Event().wait()
        given = letters.receive(made[1].box)
        assert given is not None
        with given.connection as other:
            assert other.recv(1024).startswith(b"PUT /v1/shards/us HTTP/1.1")
            other.sendall(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 2\r\n\r\nno")
        return bodies.pop()

    async def send(message: Any) -> None:
        answers.append(message)

    assert asyncio.run(forward(made[0], 1, Identity("h", 1, "https"), scope, receive, send))
    assert [answers[0]["status"], answers[1]["body"]] == [403, b"no"]
    closed(made)


def test_a_full_letter_box_takes_nothing_and_waits_for_nobody(boards: list[Board]) -> None:
    made = crews(boards)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sent = 0
        while made[0].give(1, theirs.fileno(), b"x" * 10_000):
            sent += 1
        assert sent > 4
        for _ in range(sent):
            given = letters.receive(made[1].box)
            assert given is not None
            given.connection.close()
        assert letters.receive(made[1].box) is None
    closed(made)


def test_all_workers_send_a_shard_to_the_same_one_and_only_where_that_is_alive(boards: list[Board]) -> None:
    made = crews(boards)
    names = [f"eu/orders-{n}" for n in range(300)]
    owners = [made[0].owner(name) for name in names]
    assert owners == [made[2].owner(name) for name in names]
    assert min(owners.count(worker) for worker in range(3)) > 60
    name = names[owners.index(1)]
    assert made[0].elsewhere(name) is None
    boards[1].begins()
    assert (made[0].elsewhere(name), made[1].elsewhere(name)) == (1, None)
    told = f"/v1/shards/{name.replace('/', '%2F')}/snapshot?as_of=1".encode()
    assert made[0].elsewhere_by(told) == 1
    assert made[0].elsewhere_by(b"/v1/shards?prefix=eu/") is None
    assert made[0].elsewhere_by(b"/metrics") is None
    assert made[0].elsewhere("x" * 10_000) is None
    boards[1].ends()
    assert made[0].elsewhere(name) is None
    closed(made)


@pytest.mark.parametrize("told", ["", "{}", '{"index":0,"listener":0,"board":-1,"read":0,"send":[0],"parent":1}'])
def test_nobody_is_a_worker_whom_no_server_has_started(told: str) -> None:
    with pytest.raises(InvalidUsage, match="PERSIST_WORKER"):
        join(told)


def test_figures_of_workers_are_summed_and_those_of_the_same_thing_are_not() -> None:
    def told(count: int) -> list[Family]:
        spread = Spread((1.0,), (count, 1), 2.0)
        return [
            Family("persist_requests_total", COUNTER, "r", ("verb",), [((f"v{count}",), 1), (("all",), count)]),
            Family("persist_request_seconds", HISTOGRAM, "s", (), [((), spread)]),
            Family("persist_pool_size", GAUGE, "p", ("pool",), [(("snapshots",), 8), (("commands",), 5)]),
            Family("persist_build_info", GAUGE, "b", ("version",), [(("1",), 1)]),
            Family("persist_region_link_up", GAUGE, "l", (), [((), count - 2)]),
        ]

    sent = [summing.decoded(summing.encoded(told(count))) for count in (2, 3)]
    assert sent[0] == told(2)
    lines = exposition(summing.summed(sent)).decode().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        'persist_requests_total{verb="v2"} 1.0',
        'persist_requests_total{verb="all"} 5.0',
        'persist_requests_total{verb="v3"} 1.0',
        'persist_request_seconds_bucket{le="1.0"} 5.0',
        'persist_request_seconds_bucket{le="+Inf"} 7.0',
        "persist_request_seconds_sum 4.0",
        "persist_request_seconds_count 7.0",
        'persist_pool_size{pool="snapshots"} 8.0',
        'persist_pool_size{pool="commands"} 10.0',
        'persist_build_info{version="1"} 1.0',
        "persist_region_link_up 0.0",
    ]


@pytest.mark.parametrize("is_full", [False, True])
def test_a_connection_counts_once_while_it_is_handed_over_and_stays_where_nobody_takes_it(
    boards: list[Board], is_full: bool
) -> None:
    made = crews(boards)
    boards[1].begins()
    name = next(name for name in (f"n{n}" for n in range(100)) if made[0].owner(name) == 1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        while is_full and made[0].give(1, theirs.fileno(), b"x" * 10_000):
            pass
        bounds = Bounds(Limits(address_connections_max=1), boards[0])
        answered: list[bytes] = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            answered.append(scope["raw_path"])
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

        async def run() -> None:
            loop = asyncio.get_running_loop()
            config = uvicorn.Config(app, log_config=None)
            config.load()

            def protocol() -> JoiningProtocol:
                return JoiningProtocol(config, ServerState(), {}, bounds=bounds, crew=made[0])

            listening = await loop.create_server(protocol, "127.0.0.1", 0)
            reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
            writer.write(f"GET /v1/shards/{name} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            if is_full:
                assert (await reader.readline()).startswith(b"HTTP/1.1 204")
                assert (made[0].handed, made[0].stayed, bounds.connections) == (0, 1, 1)
            else:
                while made[0].handed == 0:
                    await asyncio.sleep(0.01)
                assert bounds.connections == 0
                letter = letters.receive(made[1].box)
                assert letter is not None
                assert letter.data.endswith(b"\r\n\r\n")
                letter.connection.close()
            writer.close()
            listening.close()

        asyncio.run(run())
        assert len(answered) == is_full
        while (left := letters.receive(made[1].box)) is not None:
            left.connection.close()
    closed(made)
