"""Whatever a request takes of the server it gives back, however it ends: slots, bytes of bodies, leases."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from compactor.on_demand import maintain
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.commit.location import Location
from rpc import command_endpoint
from rpc.app import create_app
from rpc.settings import Limits, ServerSettings
from tests.support.location import memory_location
from tests.support.waiting import WAIT_S

LIMITS = Limits(snapshots_max=1, listeners_max=1, bodies_bytes_max=130, rows_bytes_max=90)
SCHEMA = pa.schema([("id", pa.string())])
POOLS = ("commands", "body_bytes", "listeners", "snapshots", "waits")
TIMES = 4  # more often than there are slots


class Asked:
    """One request to the app, as a server would make it, and how its client behaves.

    `leave`: the client goes away before it reads. `refuse`: every send fails. `stall`: no send returns.
    """

    def __init__(
        self, method: str, target: str, body: bytes = b"", *, leave: bool = False, refuse: bool = False,
        stall: bool = False, more_body: bool = False, headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:  # fmt: skip
        path, _, query = target.partition("?")
        self.scope: dict[str, Any] = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4" if refuse else "2.3"},
            "http_version": "1.1", "method": method, "scheme": "http", "path": path, "raw_path": path.encode(),
            "query_string": query.encode(), "root_path": "", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
            "headers": [(b"host", b"127.0.0.1"), *headers],
        }  # fmt: skip
        self.status = 0
        self.data = b""
        self.stalled = asyncio.Event()
        self._messages = [{"type": "http.request", "body": body, "more_body": more_body}]
        if leave:
            self._messages.append({"type": "http.disconnect"})
        self._refuse = refuse
        self._stall = stall

    async def receive(self) -> dict[str, Any]:
        if not self._messages:
            await asyncio.Event().wait()
        return self._messages.pop(0)

    async def send(self, message: dict[str, Any]) -> None:
        if self._refuse:
            raise OSError("the connection is gone")
        if self._stall and message["type"] == "http.response.body":
            self.stalled.set()
            await asyncio.Event().wait()
        self.status = message.get("status", self.status)
        self.data += message.get("body", b"")


class Scene:
    """The app of one location, driven on one event loop."""

    def __init__(self, location: Location) -> None:
        self.app = create_app(location, ServerSettings(limits=LIMITS))

    async def ask(self, method: str, target: str, body: bytes = b"", **how: Any) -> Asked:
        """Ask, and wait until the app is done with it; a client that stalls is cancelled."""
        asked = Asked(method, target, body, **how)
        running = asyncio.ensure_future(self.app(asked.scope, asked.receive, asked.send))
        if how.get("stall"):
            await asyncio.wait_for(asked.stalled.wait(), WAIT_S)
            running.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await asyncio.wait_for(running, WAIT_S)
        return asked

    async def taken(self) -> dict[str, float]:
        """What is in use now, of that which is not nothing."""
        lines = (await self.ask("GET", "/metrics")).data.decode().splitlines()
        names = {f'persist_pool_used{{pool="{pool}"}}': pool for pool in POOLS}
        found = {names[name]: float(value) for name, value in (line.rsplit(" ", 1) for line in lines) if name in names}
        assert len(found) == len(names)
        return {pool: count for pool, count in found.items() if count}


@pytest.fixture
def location() -> Iterator[Location]:
    opened = memory_location()
    with Client(EmbeddedTransport(opened, maintain)) as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        shard.insert([{"id": "a"}])
        shard.insert([{"id": "b"}])
        shard.compare_and_append([], 2, None)
        yield opened


def play(location: Location, act: Callable[[Scene], Awaitable[None]]) -> None:
    async def scene() -> None:
        stage = Scene(location)
        try:
            await act(stage)
            assert await stage.taken() == {}
        finally:
            stage.app.state.service.close()

    asyncio.run(scene())


SNAPSHOT = "/v1/shards/orders/snapshot?format=ndjson"
LISTEN = "/v1/shards/orders/listen"


@pytest.mark.parametrize(
    ("target", "how", "status"),
    [
        (SNAPSHOT, {}, 200),
        (LISTEN, {}, 200),
        (SNAPSHOT, {"leave": True}, None),
        (LISTEN, {"leave": True}, None),
        (SNAPSHOT, {"refuse": True}, 0),
        (LISTEN, {"refuse": True}, 0),
        (SNAPSHOT, {"stall": True}, 200),
        (LISTEN, {"stall": True}, 200),
        (f"{SNAPSHOT}&columns=colour", {}, 400),
        (f"{SNAPSHOT}&as_of=x", {}, 422),
        ("/v1/shards/nobody/snapshot", {}, 404),
        ("/v1/shards/nobody/listen", {}, 404),
        (f"{LISTEN}?until=x", {}, 400),
    ],
)
def test_a_stream_gives_its_slot_back(location: Location, target: str, how: dict[str, Any], status: int | None) -> None:
    async def act(stage: Scene) -> None:
        for _ in range(TIMES):
            asked = await stage.ask("GET", target, **how)
            assert status in (None, asked.status)
            assert await stage.taken() == {}
        assert (await stage.ask("GET", SNAPSHOT)).status == 200
        assert (await stage.ask("GET", LISTEN)).status == 200

    play(location, act)
    assert location.machine("orders").refresh().leased_readers == {}


def test_the_slot_of_a_stream_is_taken_while_it_is_sent(location: Location) -> None:
    async def act(stage: Scene) -> None:
        slow = Asked("GET", SNAPSHOT, stall=True)
        running = asyncio.ensure_future(stage.app(slow.scope, slow.receive, slow.send))
        await asyncio.wait_for(slow.stalled.wait(), WAIT_S)
        assert await stage.taken() == {"snapshots": 1}
        assert (await stage.ask("GET", SNAPSHOT)).status == 429
        running.cancel()
        await asyncio.wait([running])

    play(location, act)


INSERT = "/v1/shards/orders/insert?format=csv"
BODY = b"id\n" + b"c\n" * 30
COMMAND = b'{"command": "advance_upper", "upper": [1]}                    '


@pytest.mark.parametrize(
    ("target", "body", "how", "status"),
    [
        ("/v1/shards/open/insert?format=csv", BODY, {}, 200),
        (INSERT, BODY, {}, 409),
        (INSERT, b"colour\n" + BODY, {}, 400),
        (INSERT, BODY * 2, {}, 413),
        (INSERT, BODY, {"more_body": True, "leave": True}, 0),  # nobody is there to hear an answer
        (INSERT, BODY, {"refuse": True}, 0),
        ("/v1/shards/nobody/insert?format=csv", BODY, {}, 404),
        ("/v1/shards/orders/commands", COMMAND, {}, None),
        ("/v1/shards/orders/commands", b"x" * 60, {}, 400),
        ("/v1/shards/orders/commands", b"x" * 95, {}, 413),
        ("/v1/shards/orders/commands", COMMAND, {"more_body": True, "leave": True}, 0),
    ],
)
def test_a_body_gives_its_bytes_back(
    location: Location,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    body: bytes,
    how: dict[str, Any],
    status: int | None,
) -> None:
    monkeypatch.setattr(command_endpoint, "COMMAND_BYTES_MAX", 90)
    Client(EmbeddedTransport(location, maintain)).create_shard("open", SCHEMA, ["id"])

    async def act(stage: Scene) -> None:
        for _ in range(TIMES):
            asked = await stage.ask("POST", target, body, **how)
            assert asked.status != 429
            assert status in (None, asked.status), asked.data
            assert await stage.taken() == {}

    play(location, act)
